"""Packed sequences in one call of the native kernels: each has the bits that it has alone."""

import struct

import pytest
import torch
from native_call import ROWS, STATISTICS, run
from torch.testing import assert_close

from clearhead.backends import fields, library

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS_Q = (5, 0, 130, 1, 60, 48, 7)
LENGTHS_K = (5, 9, 190, 1, 0, 97, 1700)


def same_bits(one, other):
    assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


RULES = {
    "nothing": lambda L, S: {},
    "causal, sinks": lambda L, S: {"is_causal": True, "sinks": torch.randn(4)},
    "everything": lambda L, S: {
        "attn_mask": torch.rand(1, 4, L, S) < 0.8,
        "bias": torch.randn(1, 1, L, S),
        "key_mask": torch.rand(1, S) < 0.8,
        "documents": (torch.randint(2, (1, L)), torch.randint(2, (1, S))),
        "window": (80, 30),
        "softcap": 3.0,
        "alibi_slopes": torch.rand(4),
        "head_mask": torch.rand(1, 4),
        "first_key": torch.randint(3, (1, L)),
    },
}


def part(rules, rows, keys):
    """The rules of one sequence."""
    cut = {
        "attn_mask": lambda t: t[:, :, rows, keys],
        "bias": lambda t: t[:, :, rows, keys],
        "key_mask": lambda t: t[:, keys],
        "documents": lambda t: (t[0][:, rows].contiguous(), t[1][:, keys].contiguous()),
        "first_key": lambda t: t[:, rows],
    }
    return {name: cut.get(name, lambda t: t)(rule) for name, rule in rules.items()}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_a_sequence_does_not_know_the_others(rules, dtype, threads):
    cu_q, cu_k = offsets(LENGTHS_Q), offsets(LENGTHS_K)
    L, S = int(cu_q[-1]), int(cu_k[-1])
    query = torch.randn(1, L, 4, 24).to(dtype).transpose(1, 2)
    key, value = torch.randn(2, 1, S, 2, 24).to(dtype).transpose(2, 3)
    rules = rules(L, S)
    wanted = {"wanted": STATISTICS, "top_k": 3, "threads": threads}
    together = run(query, key, value, **rules, **wanted, cu_q=cu_q, cu_k=cu_k,
                   max_lengths=(max(LENGTHS_Q), max(LENGTHS_K)))  # fmt: skip
    for b, (more_q, more_k) in enumerate(zip(LENGTHS_Q, LENGTHS_K, strict=True)):
        rows = slice(int(cu_q[b]), int(cu_q[b]) + more_q)
        keys = slice(int(cu_k[b]), int(cu_k[b]) + more_k)
        if more_q == 0:
            same_bits(together.key_mass[:, :, keys], torch.zeros(1, 4, more_k))
            continue
        if more_k == 0:
            assert bool((together.out[:, :, rows] == 0).all() & (together.z[:, :, rows] == 0).all())
            assert bool((together.top_keys[:, :, rows] == -1).all())
            continue
        alone = run(query[:, :, rows], key[:, :, keys], value[:, :, keys],
                    **part(rules, rows, keys), **wanted)  # fmt: skip
        for name in ("out", "m", "z", *ROWS, "top_weights", "top_keys"):
            same_bits(getattr(together, name)[:, :, rows], getattr(alone, name))
        same_bits(together.key_mass[:, :, keys], alone.key_mass)


@pytest.mark.parametrize(
    ("cu_q", "cu_k"),
    [([0, 3, 2, 9], [0, 3, 6, 9]), ([0, 3, 6, 9], [-1, 3, 6, 9]), ([0, 7, 8, 9], [0, 3, 6, 9])],
)
def test_offsets_that_do_not_fit_are_refused(cu_q, cu_k):
    x = torch.ones(1, 2, 9, 4)
    with pytest.raises(RuntimeError, match="with code 1"):
        run(x, x, x, cu_q=torch.tensor(cu_q), cu_k=torch.tensor(cu_k), max_lengths=(4, 4))


def test_a_small_workspace_is_refused():
    """The last of the addresses of a call that is otherwise whole."""
    x = torch.ones(1, 2, 9, 4)
    lib, told = library.find_library(), []

    class Cramped:
        parallel_for, workspace = lib.parallel_for, lib.workspace

        @staticmethod
        def forward(call):
            place = fields.ADDRESSES.size - 8
            (room,) = struct.unpack_from("@q", call, place)
            struct.pack_into("@q", call, place, room - 1)
            told.append(lib.forward(call))
            struct.pack_into("@q", call, place, room)
            return lib.forward(call)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "find_library", lambda: Cramped)
        run(x, x, x)
    small_workspace = 6
    assert told == [small_workspace]
