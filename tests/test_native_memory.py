"""Memory around the native kernels: what is copied, in which order out lies, and what stays."""

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from clearhead import MultiHeadAttention, attention
from clearhead.backends import library, native


def in_rows(B, H, L, D):
    """(B, H, L, D) as a module splits it: in memory (B, L, H, D)."""
    return torch.randn(B, L, H, D).transpose(1, 2)


@pytest.mark.parametrize("Dv", [8, 12])
def test_out_lies_in_memory_as_query_does(Dv):
    """Also with keys and values in another order, and for one row and one head."""
    for B, H, L in ((2, 4, 70), (1, 1, 20), (2, 4, 1), (3, 1, 1)):
        key, value = torch.randn(B, H, 30, 8), torch.randn(B, H, 30, Dv)
        out = attention(in_rows(B, H, L, 8), key, value, backend="native")
        joined = out.transpose(1, 2).reshape(B, L, H * Dv)
        assert joined.data_ptr() == out.data_ptr() and joined.is_contiguous()
        out = attention(torch.randn(B, H, L, 8), key, value, backend="native")
        assert out.is_contiguous()


class Copies(TorchDispatchMode):
    """Counts the ops that copy."""

    def __init__(self):
        super().__init__()
        self.copies, self.ops = [], set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.ops.add(name)
        if name in ("clone", "copy_", "_to_copy", "contiguous", "cat", "repeat", "index"):
            self.copies.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(2, 40, 32), (40, 32), (2, 3, 40, 32)])
@pytest.mark.parametrize("more", [{}, {"num_kv_heads": 2}, {"value_head_dim": 5}])
def test_the_module_copies_nothing(shape, more):
    """Grouped heads are not repeated, heads are split and joined as views."""
    mha, x = MultiHeadAttention(32, 8, 4, **more, backend="native"), torch.randn(shape)
    with torch.no_grad(), Copies() as mode:
        mha(x)
    assert "native" in mode.ops and mode.copies == []


def test_the_counting_of_copies_can_fail():
    with Copies() as mode:
        torch.randn(2, 3).T.contiguous()
    assert mode.copies == ["clone"]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("Dv", [8, 12])
def test_the_order_is_the_same_for_a_compiler(Dv):
    """The op's fake implementation has the strides of the real one, and opcheck compares them."""
    query = in_rows(2, 4, 5, 8).requires_grad_()
    key, value = in_rows(2, 2, 7, 8), torch.randn(2, 2, 7, Dv)
    torch.library.opcheck(native.attend, (query, key, value, 1.0, None, None, None))
    fake = torch._subclasses.FakeTensorMode()
    with fake:
        unreal = native.attend(*map(fake.from_tensor, (query, key, value)), 1.0, None, None, None)
    real = native.attend(query, key, value, 1.0, None, None, None)
    assert unreal.stride() == real.stride() and unreal.shape == real.shape
    assert_close(
        real, native.attend(query.contiguous(), key, value, 1.0, None, None, None), rtol=0, atol=0
    )


def test_a_large_workspace_is_not_kept(monkeypatch):
    query, key, value = torch.randn(3, 1, 2, 300, 8)
    expected = attention(query, key, value, backend="native")
    assert 0 < library._kept.workspace[2] <= library.KEPT_BYTES
    monkeypatch.setattr(library, "_kept", library._Kept())
    monkeypatch.setattr(library, "KEPT_BYTES", 1000)
    out = attention(query, key, value, backend="native")
    assert library._kept.workspace[2] == 1
    assert_close(out, expected, rtol=0, atol=0)
