"""What the tests of statistics share."""

import dataclasses

import torch
from torch.testing import assert_close

from clearhead import Aux, attention
from clearhead.testing.statistics import ALL, measured

HEADS = dataclasses.replace(ALL, reduce="head")
ROWS = ("max_logit", "entropy", "first_mass", "previous_mass", "self_mass", "distance")


def ask(*tensors, request=ALL, **rules):
    return attention(*tensors, **rules, return_aux=request)[1]


def draw(B=2, H=4, Hkv=2, L=5, S=7, D=8):
    return torch.randn(B, H, L, D), torch.randn(B, Hkv, S, D), torch.randn(B, Hkv, S, D)


def same(found: Aux, other: Aux):
    """To the bit, NaN where NaN."""
    first, second = measured(found), measured(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert_close(tensor, second[name], atol=0, rtol=0, equal_nan=True)
