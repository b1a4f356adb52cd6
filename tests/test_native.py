"""The native kernels: the definition on every instruction set, equality to the bit, inert keys."""

import ctypes
import math
import os
import platform
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

from clearhead import AuxRequest, attention, attention_by_definition, explain
from clearhead.backends import native
from clearhead.testing import CASES, Case, assert_within_budget, check, plain

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = {case.name: case for case in CASES}
HAVE = ("generic", "avx2", "avx512") if platform.machine() in ("x86_64", "AMD64") else ("generic",)
CLAIMED = [
    case.name
    for case in CASES
    if all(vars(case)[axis] > 0 for axis in ("B", "H", "L", "S", "D", "Dv"))
]


def attend(*tensors, **rules):
    return attention(*tensors, **rules, backend="native")


def draw(B=2, H=4, Hkv=2, L=70, S=70, D=16, Dv=16, dtype=torch.float32):
    return torch.randn(B, H, L, D, dtype=dtype), *(
        torch.randn(B, Hkv, S, size, dtype=dtype) for size in (D, Dv)
    )


def same_bits(one, other):
    """To the bit, NaN at the same places included."""
    assert_close(one, other, rtol=0, atol=0, equal_nan=True)


# -- it is there ----------------------------------------------------------------------------------


def test_the_library_was_built_and_is_first():
    """A package without its library works, so only this test notices that it is missing."""
    told = explain(*draw(), is_causal=True)
    assert told.backend == "native"
    assert told.how.startswith(f"clearhead's CPU kernels, {native._library().isa}, ")
    assert "thread" in told.how


def test_few_rows_go_elsewhere_until_there_are_kernels_for_them():
    few, many = draw(L=1), draw(L=3)
    assert explain(*few).backend != "native" and explain(*many).backend == "native"
    assert explain(*few).reasons["native"].startswith("would serve, but ")
    assert explain(*few, deterministic=True).backend == "native"


REFUSED = {
    "float64": (lambda: draw(dtype=torch.float64), {}, "query is float64"),
    "dropout": (draw, {"dropout_p": 0.5}, "no dropout"),
    "no rows": (lambda: draw(L=0), {}, "an axis of size 0"),
    "head size": (lambda: draw(D=513), {}, "head size 513 is over 512"),
    "value head size": (lambda: draw(Dv=513), {}, "value head size 513 is over 512"),
    "device": (lambda: [t.to("meta") for t in draw()], {}, "query is on meta"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_refuses(name):
    make, rules, reason = REFUSED[name]
    with pytest.raises(NotImplementedError, match=reason):
        attend(*make(), **rules)


def test_without_a_library_others_serve_and_say_so(monkeypatch):
    monkeypatch.setattr(native, "_loaded", {})
    monkeypatch.setattr(native, "_find", lambda: None)
    told = explain(*draw())
    assert told.backend == "sdpa"
    assert "was not built" in told.reasons["native"]
    with pytest.raises(NotImplementedError, match="was not built"):
        native.attend(*draw(), *[None] * 8, None, None, 1.0, None)


def test_a_library_of_another_version_is_not_called(monkeypatch):
    monkeypatch.setattr(native, "_loaded", {})
    monkeypatch.setattr(native, "_CALL", native.struct.Struct("@8q"))
    assert "another version" in explain(*draw()).reasons["native"]


# -- the definition -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CLAIMED)
def test_cases(name, dtype):
    case = NAMES[name]
    query, key, value, rules = case.make(dtype)
    assert explain(query, key, value, **rules, backend="native").backend == "native"
    check(case, dtype=dtype, backend="native", aux=False)


@pytest.mark.parametrize("name", CLAIMED)
def test_lse(name):
    case = NAMES[name]
    query, key, value, rules = case.make()
    _, aux = attend(query, key, value, **rules, return_aux=AuxRequest(lse=True))
    _, gold, _ = attention_by_definition(query, key, value, **rules, return_aux=True)
    assert_within_budget(aux.lse, gold, plain(query, key, value, **rules)[1], "lse", name=name)


ALL_RULES = {
    "nothing": lambda d: {},
    "causal": lambda d: {"is_causal": True},
    "window": lambda d: {"window": (37, 5)},
    "key mask": lambda d: {"key_mask": d.chosen(0.8, d.case.B, d.case.S)},
    "documents": lambda d: {
        "documents": (
            d.numbers(3, d.case.B, d.case.L) - 2**33,
            d.numbers(3, d.case.B, d.case.S) - 2**33,
        )
    },
    "masks": lambda d: {
        "attn_mask": d.chosen(0.8, 1, d.case.H, d.case.L, d.case.S),
        "bias": d.holes(d.normal(d.case.B, 1, d.case.L, d.case.S), 0.1),
        "is_causal": True,
    },
    "numbers": lambda d: {
        "scale": -0.3,
        "softcap": 2.0,
        "sinks": d.normal(d.case.H),
        "alibi_slopes": d.normal(d.case.B, d.case.H).abs() / 8,
    },
}
# Around a vector, a panel and a block of keys; fewer rows than keys and more.
LENGTHS = [
    (1, 200),
    (15, 16),
    (16, 95),
    (17, 96),
    (47, 97),
    (48, 48),
    (49, 191),
    (97, 193),
    (130, 40),
]


@pytest.mark.parametrize(("L", "S"), LENGTHS)
@pytest.mark.parametrize("rules", ALL_RULES.values(), ids=ALL_RULES)
def test_lengths(rules, L, S):
    case = Case("lengths", B=4, H=6, Hkv=2, L=L, S=S, D=20, Dv=12, rules=rules)
    check(case, backend="native", aux=False, gradients=False)


SIZES = [(1, 17), (3, 512), (15, 1), (16, 33), (17, 3), (31, 64), (33, 16), (63, 65), (64, 64),
         (65, 15), (100, 257), (128, 128), (257, 100), (512, 31)]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("D", "Dv"), SIZES)
def test_head_sizes(D, Dv, dtype):
    case = Case("sizes", B=1, H=2, Hkv=1, L=50, S=101, D=D, Dv=Dv, rules=ALL_RULES["causal"])
    check(case, dtype=dtype, backend="native", aux=False, gradients=False)


@st.composite
def cases(draw):
    """Sizes around the tiles with any rules at once."""
    chosen = draw(st.sets(st.sampled_from(sorted(ALL_RULES))))
    Hkv = draw(st.integers(1, 2))
    return Case(
        f"drawn: {', '.join(sorted(chosen))}",
        B=draw(st.integers(1, 2)),
        H=Hkv * draw(st.integers(1, 3)),
        Hkv=Hkv,
        L=draw(st.integers(1, 120)),
        S=draw(st.integers(1, 210)),
        D=draw(st.integers(1, 40)),
        Dv=draw(st.integers(1, 40)),
        rules=lambda d: {k: v for name in sorted(chosen) for k, v in ALL_RULES[name](d).items()},
        inputs=draw(st.sampled_from(["normal", "large", "huge row", "constant row", "ties"])),
    )


@given(case=cases(), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**20))
def test_under_all_rules(case, dtype, seed):
    check(case, dtype=dtype, backend="native", aux=False, gradients=False, seed=seed)


def test_masks_are_read_in_place_whatever_their_strides():
    query, key, value = draw(H=6, L=50, S=120)
    full = torch.randn(2, 6, 50, 120)
    wide = torch.randn(2, 6, 50, 240)[..., ::2]
    seen = full > 0
    masks = (
        *(full, wide, full[:1], full[:, :1], full[..., :1, :], full[..., :1]),
        full.mT.contiguous().mT,
        *(full.double(), full.half(), full.bfloat16()),
        *(seen, seen[..., :1, :], (wide > 0).transpose(0, 1).contiguous().transpose(0, 1)),
    )
    for mask in masks:
        gold = attention_by_definition(query, key, value, mask)
        peer = plain(query, key, value, mask)[0]
        assert_within_budget(attend(query, key, value, mask), gold, peer)
        same_bits(
            attend(query, key, value, mask), attend(query, key, value, mask.expand(2, 6, 50, 120))
        )


def _layouts(x):
    yield x.transpose(1, 2).contiguous().transpose(1, 2)
    yield x.transpose(-1, -2).contiguous().transpose(-1, -2)
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), math.nan, dtype=x.dtype)
    wide[..., ::2] = x
    yield wide[..., ::2]
    padded = torch.full((*x.shape[:-1], x.shape[-1] + 3), math.nan, dtype=x.dtype)
    padded[..., 1:-2] = x
    yield padded[..., 1:-2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_layout_in_memory_does_not_change_a_bit(dtype):
    query, key, value = draw(D=19, Dv=16, dtype=dtype)
    expected = attend(query, key, value, is_causal=True)
    for layouts in zip(_layouts(query), _layouts(key), _layouts(value), strict=True):
        same_bits(attend(*layouts, is_causal=True), expected)
    shared = key[:1, :1].expand_as(key), value[:1, :1].expand_as(value)
    copies = (t.contiguous() for t in shared)
    same_bits(attend(query, *shared), attend(query, *copies))


# -- instruction sets -----------------------------------------------------------------------------

HELD = """
import torch
from clearhead.backends import native
from clearhead.testing import CASES, Case, check
print(native._library().isa)
for case in CASES:
    if min(case.B, case.H, case.L, case.S, case.D, case.Dv) == 0:
        continue
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        check(case, dtype=dtype, backend="native", aux=False, gradients=False)
for L, S in {lengths}:
    case = Case("lengths", H=4, Hkv=2, L=L, S=S, D=33, Dv=18, rules=lambda d: dict(is_causal=True))
    check(case, backend="native", aux=False, gradients=False)
"""


def run_with(isa, code):
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "CLEARHEAD_ISA": isa, "PYTHONPATH": paths}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )


def lacks(isa):
    """Whether the library itself says that the processor has not got it."""
    told = run_with(isa, "from clearhead.backends import native; native._library()")
    return "which this processor does not have" in told.stderr


@pytest.mark.parametrize("isa", HAVE)
def test_every_instruction_set_is_held_to_the_definition(isa):
    if lacks(isa):
        pytest.skip("the processor lacks this instruction set")
    told = run_with(isa, HELD.format(lengths=LENGTHS[2::2]))
    assert (told.stdout, told.stderr) == (f"{isa}\n", "")


@pytest.mark.parametrize("isa", ["avx1024", "AVX2", "generic "])
def test_an_unknown_instruction_set_is_an_error(isa):
    told = run_with(isa, "import torch, clearhead; x = torch.ones(1, 2, 9, 4); "
                         "clearhead.attention(x, x, x)")  # fmt: skip
    assert f'ValueError: CLEARHEAD_ISA is "{isa}"; it must be "generic"' in told.stderr


def test_no_symbol_is_shared_between_instruction_sets():
    """The linker keeps one copy of a weak symbol, which might be the one for AVX-512."""
    path = native._find()
    told = subprocess.run(["nm", "-C", str(path)], capture_output=True, text=True, check=True)
    found = [
        line for line in told.stdout.splitlines() if line.split()[-2:-1] in (["W"], ["V"], ["u"])
    ]
    assert told.stdout.count("clearhead_forward") and not found


# -- to the bit -----------------------------------------------------------------------------------

RULES = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"window": (33, 11)},
    "softcap, alibi, sinks": {
        "softcap": 3.0,
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625]),
        "sinks": torch.tensor([0.5, -0.25, 1.0, 0.0]),
    },
}
every_rule = pytest.mark.parametrize("rules", RULES.values(), ids=RULES)


@every_rule
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_know_the_batch(rules, dtype):
    query, key, value = draw(B=5, L=130, S=130, dtype=dtype)
    together = attend(query, key, value, **rules)
    for b in range(5):
        same_bits(attend(query[b], key[b], value[b], **rules), together[b])


@every_rule
@pytest.mark.parametrize("L", [20, 130])
def test_a_row_does_not_know_its_padding(rules, L):
    """Neither rows nor keys that are added to the right, whatever stands in them."""
    query, key, value = draw(L=L, S=L)
    alone = attend(query, key, value, **rules)
    for more in (1, 7, 96, 200):
        longer = [torch.cat([t, torch.full_like(t[..., :1, :], math.nan).expand(
            *t.shape[:2], more, t.shape[3])], 2) for t in (query, key, value)]  # fmt: skip
        key_mask = torch.arange(L + more)[None] < L
        same_bits(attend(*longer, **rules, key_mask=key_mask)[:, :, :L], alone)


@every_rule
def test_a_row_does_not_know_the_threads(rules):
    query, key, value = draw(L=300, S=300)
    results = []
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        results += [attend(query, key, value, **rules) for _ in range(3)]
    for result in results[1:]:
        same_bits(result, results[0])


@every_rule
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_know_how_its_prompt_was_cut(rules, dtype):
    """At once, in pieces and row by row: what deterministic=True promises, and what this backend
    does without it."""
    query, key, value = draw(L=203, S=203, dtype=dtype)
    rules = {**rules, "is_causal": True}
    at_once = attend(query, key, value, **rules)
    for cuts in ([203, 202, 190, 100, 3, 1], [203, 150], list(range(203, 0, -3))):
        for start, end in zip([*cuts[1:], 0], cuts, strict=True):
            part = attention(query[:, :, start:end], key[:, :, :end], value[:, :, :end], **rules,
                             deterministic=True)  # fmt: skip
            same_bits(part, at_once[:, :, start:end])
    assert explain(query[:, :, :1], key, value, **rules, deterministic=True).backend == "native"


def test_threads_of_python_do_not_meet():
    inputs = [draw(L=90 + n, S=150 + n) for n in range(4)]
    expected = [attend(*each, is_causal=True) for each in inputs]
    found = [None] * 4

    def work(n):
        for _ in range(20):
            found[n] = attend(*inputs[n], is_causal=True)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result, right in zip(found, expected, strict=True):
        same_bits(result, right)


# -- what may not be seen -------------------------------------------------------------------------

POISON = (math.nan, math.inf, -math.inf, 1e30)


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("how", ["key mask", "causal", "window", "bool mask", "float mask",
                                 "documents", "softcap, alibi"])  # fmt: skip
def test_blocked_keys_are_inert(how, poison):
    L = 101
    query, key, value = draw(L=L, S=L, dtype=torch.float32)
    blocked = torch.zeros(L, dtype=torch.bool)
    blocked[[3, 60, 97, 99]] = True
    rows = slice(None)
    rules = {
        "key mask": lambda: {"key_mask": ~blocked[None]},
        "causal": lambda: {"is_causal": True},
        "window": lambda: {"window": (5, 4)},
        "bool mask": lambda: {"attn_mask": (~blocked).expand(L, L)},
        "float mask": lambda: {
            "attn_mask": torch.randn(L, L).masked_fill(blocked.expand(L, L), -math.inf)
        },
        "documents": lambda: {"documents": (torch.zeros(1, L).long(), blocked[None].long())},
        "softcap, alibi": lambda: {
            "softcap": 2.0,
            "alibi_slopes": torch.rand(4),
            "key_mask": ~blocked[None],
        },
    }[how]()
    if how == "causal":
        blocked, rows = torch.arange(L) >= 60, slice(0, 60)
    elif how == "window":
        blocked, rows = torch.arange(L) >= 60, slice(0, 56)
    spoiled = [t.masked_fill(blocked[:, None], poison) for t in (key, value)]
    clean = [t.masked_fill(blocked[:, None], 0) for t in (key, value)]
    out = attend(query, *spoiled, **rules)[:, :, rows]
    same_bits(out, attend(query, *clean, **rules)[:, :, rows])
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("poison", POISON)
def test_a_blocked_bias_is_inert(poison):
    query, key, value = draw()
    bias = torch.randn(70, 70)
    blocked = torch.ones(70, 70).triu(1).bool()
    out = attend(query, key, value, bias=bias.masked_fill(blocked, poison), is_causal=True)
    same_bits(out, attend(query, key, value, bias=bias, is_causal=True))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["key", "value"])
def test_what_is_seen_and_not_finite_arrives(where, poison):
    query, key, value = draw(L=101, S=101)
    query = query.abs()
    (key if where == "key" else value)[:, :, 50] = poison
    out = attend(query, key, value, is_causal=True)
    assert bool(out[:, :, :50].isfinite().all())
    assert not bool(out[:, :, 50:].isfinite().any())
    gold = attention_by_definition(query, key, value, is_causal=True)
    assert_close(out.isnan(), gold.isnan())


def test_a_query_that_is_not_finite_spoils_its_row_only():
    query, key, value = draw()
    expected = attend(query, key, value)
    query[:, :, 33] = math.nan
    out = attend(query, key, value)
    assert bool(out[:, :, 33].isnan().all())
    out[:, :, 33] = expected[:, :, 33]
    same_bits(out, expected)


def test_empty_rows():
    query, key, value = draw(L=101, S=40)
    query.requires_grad_()
    out, aux = attend(query, key, value, is_causal=True, return_aux=AuxRequest(lse=True),
                      sinks=torch.randn(4))  # fmt: skip
    empty = 101 - 40
    same_bits(out[:, :, :empty], torch.zeros(2, 4, empty, 16))
    same_bits(aux.lse[:, :, :empty], torch.full((2, 4, empty), -math.inf))
    (grad,) = torch.autograd.grad(out.square().sum(), query)
    same_bits(grad[:, :, :empty], torch.zeros(2, 4, empty, 16))


# -- accuracy -------------------------------------------------------------------------------------


@pytest.mark.parametrize("S", [128, 512, 2048, 8192, 16384])
def test_the_error_does_not_grow_with_the_length(S):
    """At most that of torch's kernel on the same numbers, which is flat over S."""
    errors = []
    for seed in range(3):
        torch.manual_seed(seed)
        query, key, value = draw(B=1, H=2, Hkv=2, L=96, S=S, D=64, Dv=64)
        s = query.double() @ key.double().mT / 8
        gold = torch.softmax(s, -1) @ value.double()
        rival = scaled_dot_product_attention(query, key, value)
        errors.append(torch.stack([attend(query, key, value) - gold, rival - gold]))
    ours, theirs = torch.stack(errors, 1)
    assert float(ours.square().mean()) <= 1.05 * float(theirs.square().mean())
    assert float(ours.abs().max()) <= 1.25 * float(theirs.abs().max())


def test_softcap_is_exact_near_and_far():
    """tanh by its own polynomial: from tiny scores to scores far beyond the cap."""
    query = torch.logspace(-6, 3, 4000).view(1, 1, -1, 1) * torch.tensor([1.0, -1.0]).view(
        2, 1, 1, 1
    )
    key = value = torch.ones(2, 1, 1, 1)
    _, aux = attend(query, key, value, scale=1.0, softcap=1.0, return_aux=AuxRequest(lse=True))
    gold = query.double().tanh()[..., 0]
    assert float(((aux.lse - gold) / gold).abs().max()) < 4 * torch.finfo(torch.float32).eps


# -- torch ----------------------------------------------------------------------------------------


def _op_arguments(name):
    query, key, value, rules = NAMES[name].make()
    query, key, value = (t.requires_grad_() for t in (query, key, value))
    mask = rules.get("attn_mask")
    is_float = mask is not None and mask.is_floating_point()
    bias = None if "bias" not in rules else rules["bias"].expand(2, 6, 5, 7)
    return (query, key, value, mask.expand(2, 6, 5, 7) if is_float else None, bias,
            rules.get("sinks"), None, None if is_float else mask, rules.get("key_mask"), None, None,
            None, 0 if "is_causal" in rules else None, 0.3, rules.get("softcap"))  # fmt: skip


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", ["plain", "causal with a past", "bias and float mask", "softcap",
                                  "sinks", "bool mask"])  # fmt: skip
def test_opcheck(name):
    torch.library.opcheck(native.attend, _op_arguments(name))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_compiled():
    """One graph, the same bits, and gradients."""
    query, key, value = draw()
    query.requires_grad_()

    def function(query, key, value):
        return attention(query, key, value, is_causal=True, softcap=5.0) * 2

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    out, expected = compiled(query, key, value), function(query, key, value)
    same_bits(out, expected)
    same_bits(*(torch.autograd.grad(t.square().sum(), query)[0] for t in (out, expected)))


@pytest.mark.parametrize("name", ["causal square", "everything", "documents"])
def test_asking_for_more_does_not_change_a_bit(name):
    query, key, value, rules = NAMES[name].make()
    alone = attend(query, key, value, **rules)
    same_bits(attend(query, key, value, **rules, return_aux=AuxRequest(lse=True))[0], alone)
    query.requires_grad_()
    same_bits(attend(query, key, value, **rules).detach(), alone)


def test_second_derivatives():
    query, key, value = (t.requires_grad_() for t in draw(L=5, S=7, D=4, Dv=4))

    def second(backend):
        out = attention(query, key, value, is_causal=True, backend=backend)
        (first,) = torch.autograd.grad(out.square().sum(), key, create_graph=True)
        return torch.autograd.grad(first.square().sum(), (query, value))

    for ours, theirs in zip(second("native"), second("chunked"), strict=True):
        assert_close(ours, theirs)


def test_the_c_interface_refuses_what_does_not_fit():
    library = ctypes.CDLL(str(native._find()))
    call = ctypes.create_string_buffer(native._CALL.size)
    sizes = native.struct.Struct("@8q")
    bad_size, bad_head_size, bad_dtype, bad_pointer = 1, 2, 3, 4
    for fields, status in (
        ((1, 4, 3, 5, 5, 8, 8, 0), bad_size),
        ((1, 4, 2, 0, 5, 8, 8, 0), bad_size),
        ((1, 4, 2, 2**31, 5, 8, 8, 0), bad_size),
        ((1, 4, 2, 5, 5, 513, 8, 0), bad_head_size),
        ((1, 4, 2, 5, 5, 8, 8, 3), bad_dtype),
        ((1, 4, 2, 5, 5, 8, 8, 0), bad_pointer),
    ):
        sizes.pack_into(call, 0, *fields)
        assert library.clearhead_forward(call) == status


def test_offsets_beyond_two_to_the_31():
    """A view over address space that is never touched between its rows."""
    step = 2**31 // 3 + 5
    whole = torch.empty(8 * step, dtype=torch.bfloat16)
    rows = whole.as_strided((1, 1, 8, 4), (0, 0, step, 1))
    rows.copy_(torch.randn(1, 1, 8, 4))
    same_bits(attend(rows, rows, rows), attend(*[rows.contiguous()] * 3))


def test_the_header_and_the_fields_agree():
    text = (Path(__file__).parents[1] / "csrc" / "clearhead.h").read_text()
    assert "CLEARHEAD_MAX_HEAD_SIZE 512" in text and native.MAX_HEAD_SIZE == 512
    assert text.index("CLEARHEAD_UNKNOWN_ISA") < text.index("CLEARHEAD_UNSUPPORTED_ISA")
