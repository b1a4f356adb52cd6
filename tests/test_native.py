"""The native kernels: the definition, on every instruction set."""

import math
import os
import platform
import struct
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from clearhead import AuxRequest, attention, attention_by_definition, explain
from clearhead.backends import library, native
from clearhead.testing import CASES, Case, assert_within_budget, check, plain

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = {case.name: case for case in CASES}
HAVE = (
    ("generic", "avx2", "avx512", "avx512bf16", "amx")
    if platform.machine() in ("x86_64", "AMD64")
    else ("generic",)
)
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
    isa = library.find_library().isa[torch.float32]
    assert told.how.startswith(f"clearhead's CPU kernels, {isa}, ")
    assert "thread" in told.how


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
    monkeypatch.setattr(library, "_loaded", [])
    monkeypatch.setattr(library, "_find", lambda: None)
    told = explain(*draw())
    assert told.backend == "sdpa"
    assert "was not built" in told.reasons["native"]
    with pytest.raises(NotImplementedError, match="was not built"):
        native.attend(*draw(), 1.0, None, None, None)


def test_a_library_of_another_version_is_not_called(monkeypatch):
    monkeypatch.setattr(library, "_loaded", [])
    monkeypatch.setattr(library, "CALL", struct.Struct("@8q"))
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


@pytest.mark.parametrize("S", [31, 33, 95, 129])
def test_a_mask_of_half_size_is_that_mask_in_float32(S):
    query, key, value = draw(H=2, L=50, S=S)
    for dtype in (torch.bfloat16, torch.float16):
        mask = torch.randn(2, 1, 50, S + 1).to(dtype)[..., 1:]
        same_bits(attend(query, key, value, mask), attend(query, key, value, mask.float()))


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


def test_weights_from_1_down_to_0():
    """Scores of 0 and -t, by powers of 2, and values of 0 and 1: out is 2^-t / (1 + 2^-t), for t up
    to where it is no number of float32. Below the normal numbers it may be less."""
    t = torch.arange(0, 140, 1 / 64)
    query, key, value = t[:, None], torch.tensor([[0.0], [-1.0]]), torch.tensor([[0.0], [1.0]])
    scale = math.log(2)
    out = attend(query[None, None], key[None, None], value[None, None], scale=scale)[0, 0, :, 0]
    p = torch.exp2(-t.double())
    error = (out - p / (1 + p)) / p
    assert (error.abs() <= 2.5e-7)[t <= 126].all() and (error <= 2.5e-7).all() and (out >= 0).all()
    assert out[0] == 0.5 and (out[t >= 127] == 0).all()


# -- instruction sets -----------------------------------------------------------------------------

HELD = """
import torch
from test_native import test_weights_from_1_down_to_0
from clearhead.backends import library
from clearhead.testing import CASES, Case, check
print(library.find_library().isa[torch.bfloat16])
test_weights_from_1_down_to_0()
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
    told = run_with(isa, "from clearhead.backends import library; library.find_library()")
    return "which this processor does not have" in told.stderr


@pytest.mark.parametrize("isa", HAVE)
def test_every_instruction_set_is_held_to_the_definition(isa):
    if lacks(isa):
        pytest.skip("the processor lacks this instruction set")
    told = run_with(isa, HELD.format(lengths=LENGTHS[2::2]))
    assert (told.stdout, told.stderr) == (f"{isa}\n", "")


@pytest.mark.parametrize("isa", ["avx512bf16", "amx"])
def test_kernels_of_bfloat16_alone_leave_the_rest_to_avx512(isa):
    if lacks(isa):
        pytest.skip("the processor lacks this instruction set")
    told = run_with(isa, "import torch, clearhead; x = torch.ones(1, 2, 9, 4)\n"
                         "for t in (x, x.half(), x.bfloat16()):\n"
                         "    print(clearhead.explain(t, t, t).how.split(', ')[1])")  # fmt: skip
    assert (told.stdout, told.stderr) == (f"avx512\navx512\n{isa}\n", "")


@pytest.mark.parametrize("isa", ["avx1024", "AVX2", "generic "])
def test_an_unknown_instruction_set_is_an_error(isa):
    told = run_with(isa, "import torch, clearhead; x = torch.ones(1, 2, 9, 4); "
                         "clearhead.attention(x, x, x)")  # fmt: skip
    assert f'ValueError: CLEARHEAD_ISA is "{isa}"; it must be "generic"' in told.stderr


def test_no_symbol_is_shared_between_instruction_sets():
    """The linker keeps one copy of a weak symbol, which might be the one for AVX-512."""
    path = library._find()
    told = subprocess.run(["nm", "-C", str(path)], capture_output=True, text=True, check=True)
    found = [
        line for line in told.stdout.splitlines() if line.split()[-2:-1] in (["W"], ["V"], ["u"])
    ]
    assert told.stdout.count("clearhead_forward") and not found
