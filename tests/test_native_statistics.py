"""Statistics of the native kernels, against the weights of the definition."""

import math

import pytest
import torch
from native_call import ROWS, STATISTICS, run
from torch.testing import assert_close

from clearhead import AuxRequest, attention, attention_by_definition, explain, varlen_attention
from clearhead.backends import library
from clearhead.testing import CASES, Case
from clearhead.testing.statistics import ALL, measured

K = 5
CLAIMED = {c.name: c for c in CASES if all(vars(c)[n] > 0 for n in ("B", "H", "L", "S", "D", "Dv"))}


def same_bits(one, other):
    assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def gold_statistics(query, key, value, first_key=None, **rules):
    """What csrc/clearhead.h defines, from weights (B, H, L, S) in float64."""
    _, lse, w = attention_by_definition(query, key, value, **rules, return_aux=True)
    L, S = w.shape[-2:]
    own = torch.arange(L)[:, None] + S - L

    def at(j):
        j = j.expand(*w.shape[:3]) if j.dim() == 1 else j[:, None].expand(*w.shape[:3])
        inside = (j >= 0) & (j < S)
        return w.gather(3, j.clamp(0, S - 1)[..., None])[..., 0] * inside

    first = torch.zeros(L, dtype=torch.int64) if first_key is None else first_key
    return {
        "max_logit": lse + w.amax(3).log(),
        "entropy": torch.special.entr(w).sum(3),
        "first_mass": at(first),
        "previous_mass": at(own[:, 0] - 1),
        "self_mass": at(own[:, 0]),
        "distance": (w * (own - torch.arange(S)).abs()).sum(3),
        "key_mass": w.sum(2),
        "weights": w,
    }, w


def check(case, dtype=torch.float32, first_key=None, seed=0):
    query, key, value, rules = case.make(dtype, seed)
    rules.pop("head_mask", None)
    wide = {n: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t
            for n, t in rules.items()}  # fmt: skip
    gold, w = gold_statistics(query, key, value, first_key, **wide)
    every = (*STATISTICS, "weights")
    found = run(query, key, value, **rules, wanted=every, top_k=K, first_key=first_key)
    assert bool((found.weights[w == 0] == 0).all())
    for name, expected in gold.items():
        # The score of a row has an error that grows with it, and so have all weights.
        score = float(gold["max_logit"][gold["max_logit"].isfinite()].abs().amax()) \
            if bool(gold["max_logit"].isfinite().any()) else 0.0  # fmt: skip
        size = float(expected[expected.isfinite()].abs().max()) if expected.numel() else 0.0
        allowed = (3e-6 + 4e-7 * score) * max(size, 1)
        assert_close(getattr(found, name).double(), expected, rtol=0, atol=allowed,
                     msg=lambda text, name=name: f"{case.name}: {name}: {text}")  # fmt: skip
    check_top(found, w, case)
    return found, w


def check_top(found, w, case):
    assert bool((found.top_weights.diff(dim=3) <= 0).all())
    keys, S = found.top_keys, w.shape[3]
    assert bool(((keys >= -1) & (keys < S)).all())
    ours = w.gather(3, keys.clamp(min=0)) * (keys >= 0)
    assert_close(found.top_weights.double(), ours, rtol=2e-5, atol=2e-6)
    best = w.topk(min(K, S), dim=3).values
    assert_close(found.top_weights[..., : best.shape[3]].double(), best, rtol=2e-5, atol=2e-6)
    for j in range(K):  # no key twice
        assert not bool(((keys[..., j : j + 1] == keys) & (keys >= 0)).sum(3).gt(1).any())


@pytest.mark.parametrize("name", CLAIMED)
def test_cases(name):
    check(CLAIMED[name])


LENGTHS = [(1, 200), (15, 17), (48, 48), (50, 191), (97, 193), (130, 40)]
RULES = {
    "nothing": lambda d: {},
    "causal": lambda d: {"is_causal": True},
    "window": lambda d: {"window": (37, 5)},
    "sinks": lambda d: {"is_causal": True, "sinks": d.normal(d.case.H) * 4},
    "masks": lambda d: {
        "attn_mask": d.chosen(0.8, 1, d.case.H, d.case.L, d.case.S),
        "bias": d.holes(d.normal(d.case.B, 1, d.case.L, d.case.S), 0.1),
        "key_mask": d.chosen(0.8, d.case.B, d.case.S),
        "softcap": 2.0,
    },
}


@pytest.mark.parametrize("G", [1, 3])
@pytest.mark.parametrize(("L", "S"), LENGTHS)
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_lengths(rules, L, S, G):
    check(Case("lengths", B=2, H=2 * G, Hkv=2, L=L, S=S, D=20, Dv=12, rules=rules))


@pytest.mark.parametrize("inputs", ["large", "huge row", "constant row", "ties"])
def test_inputs(inputs):
    check(Case(inputs, L=60, S=130, D=16, Dv=8, rules=RULES["causal"], inputs=inputs))


def test_the_first_key_can_stand_anywhere():
    first = torch.randint(-3, 130, (2, 60))
    check(Case("first", B=2, L=60, S=120, D=16, Dv=8, rules=RULES["causal"]), first_key=first)


def test_peaked_rows_keep_their_entropy():
    torch.manual_seed(1)
    query, key, value = 6 * torch.randn(1, 2, 90, 32), torch.randn(1, 2, 300, 32), None
    value = torch.randn(1, 2, 300, 16)
    gold, _ = gold_statistics(query, key, value)
    found = run(query, key, value, wanted=("entropy",))
    assert float((found.entropy - gold["entropy"]).abs().max()) < 3e-5


def test_of_equal_weights_the_lower_key_comes_first():
    query, key, value = (
        torch.zeros(1, 2, 60, 8),
        torch.randn(1, 2, 250, 8),
        torch.ones(1, 2, 250, 3),
    )
    found = run(query, key, value, wanted=("top_k",), top_k=16)
    same_bits(found.top_keys, torch.arange(16).expand(1, 2, 60, 16))
    found = run(query, key, value, wanted=("top_k",), top_k=2, is_causal=True, window=(0, 0))
    assert bool((found.top_keys[..., 1] == -1).all() & (found.top_weights[..., 1] == 0).all())
    same_bits(found.top_keys[0, 0, :, 0], torch.arange(190, 250))


def test_empty_rows():
    query, key, value = torch.randn(1, 2, 60, 8), *torch.randn(2, 1, 2, 20, 8)
    found = run(query, key, value, is_causal=True, wanted=STATISTICS, top_k=3,
                sinks=torch.tensor([0.5, -0.5]))  # fmt: skip
    for name in (*ROWS, "top_weights", "top_keys", "out"):
        value = {"m": -math.inf, "lse": -math.inf, "max_logit": -math.inf, "top_keys": -1}.get(
            name, 0
        )
        assert bool((getattr(found, name)[:, :, :40] == value).all()), name
    assert bool(found.max_logit[:, :, 40:].isfinite().all())


def test_blocked_keys_are_inert_and_nan_stays_in_its_row():
    query, key, value = torch.randn(1, 2, 60, 8), *torch.randn(2, 1, 2, 200, 8)
    key_mask = torch.rand(1, 200) < 0.7
    expected = run(query, key, value, key_mask=key_mask, wanted=STATISTICS, top_k=3)
    for poison in (math.nan, math.inf):
        spoiled = [t.masked_fill(~key_mask[:, None, :, None], poison) for t in (key, value)]
        found = run(query, *spoiled, key_mask=key_mask, wanted=STATISTICS, top_k=3)
        for name, tensor in vars(expected).items():
            same_bits(getattr(found, name), tensor)
    query[:, :, 7] = math.nan
    found = run(query, key, value, key_mask=key_mask, wanted=STATISTICS, top_k=3)
    for name in ROWS:
        there, other = getattr(found, name), getattr(expected, name)
        assert bool(there[:, :, 7].isnan().all()), name
        there[:, :, 7] = other[:, :, 7]
        same_bits(there, other)


def test_weights_are_0_where_a_row_may_not_look_even_beside_nan():
    query, key = torch.randn(2, 4, 60, 8), torch.randn(2, 2, 200, 8)
    allowed = torch.rand(2, 1, 60, 200) < 0.6
    allowed[0, 0, 5] = False
    expected = run(query, key, key, allowed, window=(90, 9), wanted=("weights",)).weights
    seen = expected != 0
    query[:, :, 7], key[:, :, 40] = math.nan, math.nan
    found = run(query, key, key, allowed, window=(90, 9), wanted=("weights",)).weights
    blocked = ~seen
    assert bool((found[blocked] == 0).all()) and not bool(seen[0, :, 5].any())
    assert bool(found[:, :, 7][seen[:, :, 7]].isnan().all())
    spoiled = seen[..., 40] | (torch.arange(60) == 7)
    same_bits(found[~spoiled], expected[~spoiled])


@pytest.mark.parametrize("wanted", STATISTICS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_asking_changes_nothing_else(wanted, dtype):
    query, key, value = (
        torch.randn(1, H, L, 24).to(dtype) for H, L in ((4, 90), (2, 300), (2, 300))
    )
    rules = {"window": (140, 9), "sinks": torch.randn(4)}
    alone = run(query, key, value, **rules)
    with_all = run(query, key, value, **rules, wanted=STATISTICS, top_k=3)
    found = run(query, key, value, **rules, wanted=(wanted,), top_k=3)
    for name, tensor in vars(found).items():
        same_bits(tensor, getattr(with_all, name))
        if hasattr(alone, name):
            same_bits(tensor, getattr(alone, name))


def test_statistics_do_not_know_batch_threads_or_cuts():
    query, key, value = torch.randn(3, 4, 200, 16), *torch.randn(2, 3, 2, 200, 16)
    rules = {"is_causal": True, "wanted": (*STATISTICS, "weights"), "top_k": 4}
    together = run(query, key, value, **rules, threads=2)
    one_thread = run(query, key, value, **rules, threads=1)
    for name, tensor in vars(together).items():
        same_bits(tensor, getattr(one_thread, name))
        alone = run(query[1:2], key[1:2], value[1:2], **rules)
        same_bits(getattr(alone, name), tensor[1:2])
    part = run(query[:, :, 150:171], key[:, :, :171], value[:, :, :171], **rules)
    for name in (*ROWS, "top_weights", "top_keys"):
        same_bits(getattr(part, name), getattr(together, name)[:, :, 150:171])
    same_bits(part.weights, together.weights[:, :, 150:171, :171])
    assert not bool(together.weights[:, :, 150:171, 171:].any())


# -- without values -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("L", "S"), [(1, 5000), (3, 190), (60, 60), (130, 3100)])
@pytest.mark.parametrize("rules", RULES)
def test_without_values_each_has_the_bits_that_it_has_beside_an_output(rules, L, S, dtype):
    case = Case(rules, B=1, H=4, Hkv=2, L=L, S=S, D=20, Dv=12, rules=RULES[rules])
    query, key, value, given = case.make(dtype)
    given |= {"head_mask": torch.rand(4), "backend": "native", "return_aux": ALL}
    _, beside = attention(query, key, value, **given)
    out, alone = attention(query, key, value[..., :0], **given)
    assert out.shape == (1, 4, L, 0) and out.dtype == dtype
    for name, tensor in measured(alone).items():
        same_bits(tensor, measured(beside)[name])


def test_without_values_packed_sequences_share_one_call(monkeypatch):
    lengths = torch.tensor([0, 5, 5, 75, 80])
    query, key = torch.randn(80, 4, 16), torch.randn(80, 2, 16)
    rules = {"is_causal": True, "alibi_slopes": torch.rand(4, 4), "return_aux": ALL}
    _, beside = varlen_attention(query, key, key, lengths, lengths, **rules)
    lib, calls = library.find_library(), []
    counted = lib._replace(forward=lambda call: calls.append(call) or lib.forward(call))
    monkeypatch.setattr(library, "_loaded", [counted])
    out, alone = varlen_attention(query, key, key[..., :0], lengths, lengths, **rules)
    assert out.shape == (80, 4, 0) and len(calls) == 1
    for name, tensor in measured(alone).items():
        same_bits(tensor, measured(beside)[name])


@pytest.mark.parametrize("sinks", [None, torch.tensor([1.0, -1.0])], ids=["", "sinks"])
def test_without_values_the_gradient_of_lse_is_that_beside_an_output(sinks):
    query, key, value = (torch.randn(2, 2, L, 8, requires_grad=True) for L in (7, 30, 30))
    given = {"sinks": sinks, "window": (9, 2), "backend": "native"}
    factor, grads = torch.randn(2, 2, 7), []
    for values in (value, value[..., :0]):
        _, aux = attention(query, key, values, **given, return_aux=AuxRequest(lse=True))
        grads.append(torch.autograd.grad((aux.lse * factor).sum(), (query, key)))
    assert bool(grads[0][0].any())
    for beside, alone in zip(*grads, strict=True):
        same_bits(alone, beside)


def test_who_serves_a_call_without_values():
    query, key = torch.randn(1, 2, 60, 8), torch.randn(1, 2, 70, 8)
    none = key[..., :0]
    said = explain(query, key, none, return_aux=AuxRequest(entropy=True))
    assert said.backend == "native" and said.how.endswith("statistics alone, without values")
    assert "without values" not in explain(query, key, key, return_aux=ALL).how
    # Where nothing is asked for that these kernels give, they have nothing to do.
    for request in (None, AuxRequest(top_k=17)):
        said = explain(query, key, none, return_aux=request)
        assert said.backend == "chunked" and "axis of size 0" in said.reasons["native"]
    said = explain(query, key, none, return_aux=AuxRequest(entropy=True, top_k=17))
    assert said.backend == "native" and "top_k will come from a pass of chunked" in said.notes[0]
