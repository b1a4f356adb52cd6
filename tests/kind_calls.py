"""What tests of known kinds share: small calls, rules of every sort, and a count of quick calls."""

import torch
from torch.testing import assert_close

from clearhead import kinds
from clearhead.backends import native

B, H, HKV, L, S, D = 2, 4, 2, 5, 7, 8


def draw(L=L, S=S, dtype=torch.float32):
    return torch.randn(B, H, L, D, dtype=dtype), *torch.randn(2, B, HKV, S, D).to(dtype)


def same_bits(one, other):
    assert_close(one, other, rtol=0, atol=0)


def quick_calls(monkeypatch):
    """A list that gets one entry for each call that goes straight to the kernels; none is known."""
    calls, again = [], native.again

    def counted(*arguments):
        calls.append(arguments)
        return again(*arguments)

    monkeypatch.setattr(kinds, "_known", {})
    monkeypatch.setattr(native, "again", counted)
    return calls


MASK = torch.arange(L * S).view(L, S) % 3 != 0
RULES = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window": (2, 1)},
    "numbers": {"scale": 0.3, "softcap": 2.0},
    "bool mask": {"attn_mask": MASK},
    "float mask": {"attn_mask": torch.linspace(-1, 1, S)},
    "float64 mask and bias": {
        "attn_mask": torch.linspace(-1, 1, L * S).view(L, S).double(),
        "bias": torch.linspace(-1, 1, B * H).view(B, H, 1, 1),
    },
    "key mask": {"key_mask": torch.arange(B * S).view(B, S) % 5 != 0},
    "one row of a key mask": {"key_mask": torch.arange(S) != 3, "is_causal": True},
    "sinks": {"sinks": torch.linspace(-1, 1, H)},
    "alibi": {"alibi_slopes": torch.linspace(0.1, 0.4, H)},
    "deterministic": {"deterministic": True, "is_causal": True},
}
