"""Reports G and I: axes of size zero, and incoming gradients of any layout."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from clearhead import (
    AuxRequest,
    MultiHeadAttention,
    attention,
    attention_by_definition,
    explain,
    varlen_attention,
)

SIZES = {"B": 2, "H": 4, "Hkv": 2, "L": 3, "S": 5, "D": 7, "Dv": 7}
EVERYTHING = AuxRequest(lse=True, weights=True)
NO_AXIS = {
    "batch 0": {"B": 0},
    "heads 0": {"H": 0, "Hkv": 0},
    "q_len 0": {"L": 0},
    "kv_len 0": {"S": 0},
    "both lengths 0": {"L": 0, "S": 0},
    "head_dim 0": {"D": 0},
    "value head_dim 0": {"Dv": 0},
    "both head_dims 0": {"D": 0, "Dv": 0},
    "nothing at all": dict.fromkeys(SIZES, 0),
}
OPTIONS = {
    "plain": lambda n: {},
    "causal": lambda n: {"is_causal": True},
    "window": lambda n: {"window": (1, 1)},
    "key mask": lambda n: {"key_mask": torch.ones(n["B"], n["S"]).bool()},
    "bool mask": lambda n: {"attn_mask": torch.ones(n["L"], n["S"]).bool()},
    "float mask": lambda n: {"attn_mask": torch.zeros(n["B"], 1, n["L"], n["S"])},
    "documents": lambda n: {
        "documents": (
            torch.zeros(n["B"], n["L"], dtype=torch.long),
            torch.zeros(n["B"], n["S"], dtype=torch.long),
        )
    },
    "dropout": lambda n: {"dropout_p": 0.5},
    "softcap, sinks, slopes": lambda n: {
        "softcap": 2.0,
        "sinks": torch.zeros(n["H"]),
        "alibi_slopes": torch.zeros(n["H"]),
    },
    "deterministic": lambda n: {"deterministic": True, "is_causal": True},
}


@pytest.fixture(autouse=True)
def one_thread():
    """Two threads wait for each other longer than such small calls take."""
    torch.set_num_threads(1)


def tensors(sizes, dtype=torch.float32):
    """Query, key and value of ones, twos ... so that means can be told by hand."""
    n = {**SIZES, **sizes}
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (n["B"], n["H"], n["L"], n["D"]),
        (n["B"], n["Hkv"], n["S"], n["D"]),
        (n["B"], n["Hkv"], n["S"], n["Dv"]),
    )
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return n, [t.requires_grad_() for t in drawn]


def backends_of(leaves, rules):
    names = ("auto", "sdpa", "chunked")
    return [b for b in names if explain(*leaves, **rules, backend=b).backend is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", NO_AXIS)
def test_shapes_and_zeros_of_an_axis_of_size_zero(name, dtype):
    """pytorch#141219: outputs have the right shape; gradients are shaped, and zero or a mean."""
    n, leaves = tensors(NO_AXIS[name], dtype)
    for make in OPTIONS.values():
        rules = {k: t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t
                 for k, t in make(n).items()}  # fmt: skip
        for backend in backends_of(leaves, rules):
            out = attention(*leaves, **rules, backend=backend)
            assert out.shape == (n["B"], n["H"], n["L"], n["Dv"]) and out.dtype == dtype
            assert bool(out.isfinite().all())
            dq, dk, dv = torch.autograd.grad(out.sum(), leaves)
            assert [g.shape for g in (dq, dk, dv)] == [t.shape for t in leaves]
            if n["S"] == 0:
                assert not bool(out.any()) and not bool(dq.any())
            if n["L"] == 0:
                assert not bool(dk.any()) and not bool(dv.any())


@pytest.mark.parametrize("groups", [1, 2])
def test_head_size_zero_gives_means(groups):
    """pytorch#141219: all scores are 0, so the output is the mean of the values, or running."""
    n, leaves = tensors({"D": 0, "H": 2 * groups, "L": 5})
    value = leaves[2].detach().repeat_interleave(groups, 1)
    mean = value.mean(2, keepdim=True).expand(2, 2 * groups, 5, 7)
    running = value.cumsum(2) / torch.arange(1, 6)[:, None]
    for rules, expected in (({}, mean), ({"is_causal": True}, running)):
        for backend in backends_of(leaves, rules):
            assert_close(attention(*leaves, **rules, backend=backend), expected)
        assert_close(attention(*leaves, **rules, deterministic=True), expected)
        out, aux = attention(*leaves, **rules, return_aux=EVERYTHING)
        assert_close(aux.weights @ value, expected)
        (dv,) = torch.autograd.grad(out.sum(), leaves[2])
        truth = [t.detach().double().requires_grad_() for t in leaves]
        gold = attention_by_definition(*truth, **rules)
        assert_close(dv.double(), torch.autograd.grad(gold.sum(), truth[2])[0])


def test_no_keys_gives_zeros_with_statistics():
    """pytorch#141219: kv_len 0; lse is -inf, weights have no columns, a sink changes nothing."""
    n, leaves = tensors({"S": 0})
    for rules in ({}, {"sinks": torch.randn(4)}, {"is_causal": True}):
        out, aux = attention(*leaves, **rules, return_aux=EVERYTHING)
        assert not bool(out.any()) and out.shape == (2, 4, 3, 7)
        assert bool((aux.lse == -torch.inf).all()) and aux.lse.shape == (2, 4, 3)
        assert aux.weights.shape == (2, 4, 3, 0)


SCRIPT = f"""
import itertools, sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "src")!r})
import torch
from clearhead import AuxRequest, MultiHeadAttention, attention, explain, varlen_attention

AXES = ["B", "H", "L", "S", "D", "Dv"]
ran = 0
for zeros in itertools.product((False, True), repeat=len(AXES)):
    n = dict({SIZES!r})
    n.update({{axis: 0 for axis, zero in zip(AXES, zeros) if zero}})
    n["Hkv"] = 0 if n["H"] == 0 else 2
    for causal, groups, dropout in itertools.product((False, True), (1, 2), (0.0, 0.5)):
        H = n["Hkv"] * groups
        q = torch.randn(n["B"], H, n["L"], n["D"], requires_grad=True)
        k = torch.randn(n["B"], n["Hkv"], n["S"], n["D"], requires_grad=True)
        v = torch.randn(n["B"], n["Hkv"], n["S"], n["Dv"], requires_grad=True)
        for backend in ("auto", "sdpa", "chunked", "flex"):
            rules = dict(dropout_p=dropout, is_causal=causal, backend=backend)
            chosen = explain(q, k, v, **rules).backend
            if chosen is None or chosen == "flex":
                continue
            out = attention(q, k, v, **rules)
            assert out.shape == (n["B"], H, n["L"], n["Dv"]), out.shape
            out.sum().backward()
            assert q.grad.shape == q.shape and k.grad.shape == k.shape and v.grad.shape == v.shape
            ran += 1
    offsets = [torch.tensor([0, 0, n[axis]]) for axis in ("L", "S")]
    rows = [torch.randn(n[a], heads, n[d]) for a, heads, d in
            (("L", H, "D"), ("S", n["Hkv"], "D"), ("S", n["Hkv"], "Dv"))]
    assert varlen_attention(*rows, *offsets, is_causal=True).shape == (n["L"], H, n["Dv"])
    ran += 1
for shape in ((0, 6), (0, 5, 6), (5, 0, 6), (2, 0, 3, 6)):
    out = MultiHeadAttention(6, 3, 2)(torch.randn(shape))
    assert out.shape == shape
    out.sum().backward()
    ran += 1
print("ran", ran)
"""


def test_no_combination_of_zero_sizes_kills_the_process():
    """pytorch#141219: a division by zero cannot be caught, so another process has to risk it."""
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    word, count = run.stdout.split()
    assert word == "ran" and int(count) > 64 * 16


def test_a_module_without_tokens():
    """pytorch#141219: gradients of parameters that no token used are zeros."""
    mha = MultiHeadAttention(6, 3, 2, out_bias=True)
    mha(torch.randn(2, 0, 6)).sum().backward()
    assert not any(bool(p.grad.any()) for p in mha.parameters())
    cross = MultiHeadAttention(6, 3, 2, is_causal=False, out_bias=True)
    out = cross(torch.randn(2, 5, 6), torch.randn(2, 0, 6))
    assert torch.equal(out, cross.out_proj.bias.expand(2, 5, 6))


# -- 41: layouts of the incoming gradient ---------------------------------------------------------


def layouts(out):
    """Gradients with out's shape in every layout autograd produces, and how each comes about."""
    B, H, L, Dv = out.shape

    def draw(*shape):
        return torch.randn(shape, dtype=out.dtype)

    yield "transposed", draw(B, L, H, Dv).transpose(1, 2)
    yield "last axis strided", draw(B, H, Dv, L).transpose(2, 3)
    yield "expanded from a scalar", draw().expand(B, H, L, Dv)
    yield "expanded over rows", draw(B, H, 1, Dv).expand(B, H, L, Dv)
    yield "expanded over the batch", draw(1, H, L, Dv).expand(B, H, L, Dv)
    yield "sliced from a concat", torch.cat([draw(B, H, L, Dv)] * 2, -1)[..., Dv:]
    yield "every other row", draw(B, H, 2 * L, Dv)[:, :, ::2]
    yield "offset in storage", draw(B * H * L * Dv + 3)[3:].view(B, H, L, Dv)


RULES = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": torch.tensor([[1, 0, 1, 1, 1, 0, 1]] * 5).bool()},
    "softcap and sinks": {"softcap": 2.0, "sinks": torch.tensor([0.0, 1.0, -1.0, 0.5])},
    "deterministic": {"deterministic": True, "is_causal": True},
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_layout_of_an_incoming_gradient_does_not_matter(name, dtype):
    """flash-attention#355: transposed, expanded, sliced: as contiguous, and as the definition."""
    leaves = [
        torch.randn(2, n, L, 6).to(dtype).requires_grad_() for n, L in ((4, 5), (2, 7), (2, 7))
    ]
    rules = {k: t.to(dtype) if k == "sinks" else t for k, t in RULES[name].items()}
    wide = [t.detach().double().requires_grad_() for t in leaves]
    spread = {k: t.expand(2, 4, 5, 7) if k == "attn_mask" else t for k, t in rules.items()
              if k != "deterministic"}  # fmt: skip
    gold = attention_by_definition(*wide, **spread)
    small = 5e-7 if dtype == torch.float32 else 1e-15
    for backend in backends_of(leaves, rules):
        out = attention(*leaves, **rules, backend=backend)
        for layout, d_out in layouts(out):
            assert not d_out.is_contiguous() or layout == "offset in storage"
            grads, same = (
                torch.autograd.grad(out, leaves, d, retain_graph=True)
                for d in (d_out, d_out.contiguous().clone())
            )
            truth = torch.autograd.grad(gold, wide, d_out.double(), retain_graph=True)
            for grad, contiguous, right in zip(grads, same, truth, strict=True):
                assert_close(grad, contiguous, atol=2 * small, rtol=2 * small)
                assert_close(grad.double(), right, atol=20 * small, rtol=20 * small)


def test_layouts_as_autograd_itself_makes_them():
    """flash-attention#355: .sum(), a slice of a concat, and a transposed use of the output."""
    leaves = [torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    uses = (
        lambda out: out.sum(),
        lambda out: torch.cat([out, 2 * out], -1)[..., 3:6].square().sum(),
        lambda out: (out.transpose(1, 2).reshape(2, 5, 12) @ torch.ones(12, 1).double()).sum(),
        lambda out: out[:, 1, ::2, 1:3].sum(),
    )
    for use, rules in itertools.product(uses, ({}, {"is_causal": True})):
        grads = torch.autograd.grad(use(attention(*leaves, **rules)), leaves)
        truth = torch.autograd.grad(use(attention_by_definition(*leaves, **rules)), leaves)
        for grad, right in zip(grads, truth, strict=True):
            assert_close(grad, right, atol=1e-12, rtol=1e-10)


def test_a_packed_gradient_of_any_layout():
    """flash-attention#355, for varlen_attention: rows that are columns of another tensor."""
    offsets = torch.tensor([0, 2, 7])
    leaves = [torch.randn(7, 4, 6, requires_grad=True) for _ in range(3)]
    for d_out in (torch.randn(4, 7, 6).transpose(0, 1), torch.ones(()).expand(7, 4, 6)):
        grads = torch.autograd.grad(varlen_attention(*leaves, offsets, offsets), leaves, d_out)
        out = varlen_attention(*leaves, offsets, offsets)
        expected = torch.autograd.grad(out, leaves, d_out.contiguous())
        assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
