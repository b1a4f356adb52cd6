"""The layout of a call: what is kept of it, and that nothing is confused with anything."""

import pytest
import torch

from clearhead.backends import fields, native


def draw(B=2, H=4, Hkv=2, L=5, S=7, D=8, Dv=6, dtype=torch.float32):
    shapes = (B, H, L, D), (B, Hkv, S, D), (B, Hkv, S, Dv)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def attend(query, key, value):
    return native.attend(query, key, value, 0.5, None, None, None)


def views(tensors):
    """The same numbers by other strides."""
    yield "dense", tensors
    yield "heads in rows", [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
    yield "d outermost", [t.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0) for t in tensors]
    yield "every other d", [t.repeat_interleave(2, -1)[..., ::2] for t in tensors]
    yield "query alone", [tensors[0].mT.contiguous().mT, *tensors[1:]]
    yield "value alone", [*tensors[:2], tensors[2].mT.contiguous().mT]
    wide = [torch.stack([t, t], -1)[..., 0] for t in tensors]  # with D = 1, too, a stride of 2
    yield "with gaps", wide


def test_a_layout_is_made_once():
    tensors = draw()
    first = fields.layout_of(*tensors)
    assert fields.layout_of(*[t.clone() for t in tensors]) is first
    for change in ({"B": 3}, {"H": 6}, {"L": 4}, {"S": 8}, {"D": 7}, {"Dv": 5}, {"Hkv": 4}):
        assert fields.layout_of(*draw(**change)).packed != first.packed
    assert fields.layout_of(*draw(dtype=torch.bfloat16)).packed != first.packed
    assert fields.layout_of(*tensors, (1, 2, 3)).packed != first.packed


@pytest.mark.parametrize("D", [1, 8])
def test_every_layout_gives_the_same_bits(D):
    """One after the other and once more, so that each is also met when the others are kept."""
    tensors = draw(D=D, Dv=D)
    expected = attend(*tensors)
    for _ in range(2):
        for name, same in views(tensors):
            assert torch.equal(attend(*same), expected), name


@pytest.mark.parametrize("view", ["dense", "heads in rows", "d outermost"])
def test_out_lies_as_its_fake_says(view):
    query, key, value = dict(views(draw()))[view]
    real = attend(query, key, value)
    fake = native._fake(query, key, value, 0.5, None, None, None)
    assert real.shape == fake.shape and real.stride() == fake.stride()


def test_what_does_not_fit_is_not_kept():
    query, key, value = draw()
    for _ in range(2):
        with pytest.raises(ValueError, match="they need"):
            attend(query, key[:, :, :3], value)
        with pytest.raises(TypeError, match="must be alike"):
            attend(query, key.double(), value)
