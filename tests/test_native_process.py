"""The native kernels in threads, forked processes and at the end of one; rows far apart in memory;
ten thousand small calls under rules drawn at random."""

import os
import subprocess
import sys
import threading

import pytest
import torch
from torch.testing import assert_close

from clearhead import attention, attention_by_definition
from clearhead.testing import assert_within_budget, plain


def draw(B=2, H=4, Hkv=2, L=70, S=70, D=16, Dv=16, dtype=torch.float32):
    return torch.randn(B, H, L, D, dtype=dtype), *(
        torch.randn(B, Hkv, S, size, dtype=dtype) for size in (D, Dv)
    )


def same_bits(one, other):
    assert_close(one, other, rtol=0, atol=0)


# -- threads and processes ------------------------------------------------------------------------


def test_threads_of_python_with_calls_of_different_kinds():
    """Small and large by turns, each with rules of its own; nobody sees another's workspace."""
    kinds = [
        (draw(B=1, L=1, S=9), {}),
        (draw(L=300, S=300, D=64), {"is_causal": True}),
        (draw(L=33, S=95, dtype=torch.bfloat16), {"window": (9, 3)}),
        (draw(B=1, L=150, S=60, Dv=40), {"key_mask": torch.arange(60)[None] < 41}),
    ]
    expected = [attention(*tensors, **rules, backend="native") for tensors, rules in kinds]
    found = [[] for _ in kinds]
    start = threading.Barrier(len(kinds))

    def work(n):
        start.wait()
        for turn in range(40):
            tensors, rules = kinds[(n + turn) % len(kinds)]
            found[n].append(attention(*tensors, **rules, backend="native"))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(kinds))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n, results in enumerate(found):
        assert len(results) == 40
        for turn, result in enumerate(results):
            same_bits(result, expected[(n + turn) % len(kinds)])


def run_python(code):
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
    )


FORK = """
import os, signal, torch
from clearhead import attention, explain
torch.set_num_threads(2)
query = key = value = torch.randn(2, 4, 300, 64)
expected = attention(query, key, value, is_causal=True, backend="native")
assert "2 threads" in explain(query, key, value, backend="native").how
child = os.fork()
if child == 0:
    signal.alarm(60)
    out = attention(query, key, value, is_causal=True, backend="native")
    same = out.flatten().tolist() == expected.flatten().tolist()
    os._exit(0 if same and "1 thread" in explain(query, key, value, backend="native").how else 1)
_, status = os.waitpid(child, 0)
assert "2 threads" in explain(query, key, value, backend="native").how
print("child", os.waitstatus_to_exitcode(status))
"""


FORK_LSE = """
import os, signal, torch
from clearhead import AuxRequest, attention
torch.set_num_threads(2)
query = key = value = torch.randn(2, 4, 300, 64)
asked = AuxRequest(lse=True)
_, expected = attention(query, key, value, backend="native", return_aux=asked)
expected.lse.exp().log()  # here torch's logarithm starts threads
child = os.fork()
if child == 0:
    signal.alarm(60)
    _, aux = attention(query, key, value, backend="native", return_aux=asked)
    os._exit(0 if aux.lse.flatten().tolist() == expected.lse.flatten().tolist() else 1)
_, status = os.waitpid(child, 0)
print("child", os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize("program", [FORK, FORK_LSE], ids=["out", "lse"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_computes(program):
    """On the calling thread alone, the same bits.

    OpenMP's threads are gone there: measured 2026-11 with torch 2.13, a matrix product of torch's
    own on two threads never returns in such a child.
    """
    told = run_python(program)
    assert (told.stdout, told.stderr) == ("child 0\n", "")


EXIT = """
import threading, time, torch
from clearhead import attention
query, key, value = torch.randn(3, 1, 8, 2048, 64)
started = threading.Event()

def work():
    while True:
        attention(query, key, value, backend="native")
        started.set()

threading.Thread(target=work, daemon=True).start()
assert started.wait(60)
time.sleep({pause})
"""


@pytest.mark.parametrize("pause", [0.0, 0.003, 0.02])
def test_a_process_may_end_while_kernels_run(pause):
    """A daemon thread is in the midst of a call when the interpreter goes, or begins the next."""
    told = run_python(EXIT.format(pause=pause))
    assert (told.returncode, told.stdout, told.stderr) == (0, "", "")


LATE = """
import atexit, torch

def at_the_end():
    print(attention(query, key, value, backend="native").shape)

atexit.register(at_the_end)  # runs after whatever is registered by an import that follows
from clearhead import attention
query, key, value = torch.randn(3, 1, 2, 30, 16)
at_the_end()
"""


def test_what_ends_the_interpreter_may_still_call():
    told = run_python(LATE)
    assert (told.returncode, told.stdout, told.stderr) == (
        0,
        "torch.Size([1, 2, 30, 16])\n" * 2,
        "",
    )


# -- far apart ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "head", "row"])
def test_strides_beyond_two_to_the_31(axis, dtype):
    """Views over 5 GB of address space, of which only the rows that are used get memory."""
    far = 2**31 + 8
    sizes = [1, 1, 20, 16]
    sizes[axis] = 2
    strides = [16 * 20 * 2, 16 * 20, 16, 1]
    strides[axis] = far
    views = []
    for _ in range(3):
        whole = torch.empty(far + 16 * 20 * 4, dtype=dtype)
        views.append(whole.as_strided(sizes, strides).copy_(torch.randn(sizes)))
    near = [view.contiguous() for view in views]
    same_bits(attention(*views, backend="native"), attention(*near, backend="native"))
    mask = torch.empty(far + 20, dtype=torch.bool).as_strided((2, 20), (far, 1))
    mask.copy_(torch.rand(2, 20) < 0.5)
    rows, keys, values = torch.randn(3, 2, 2, 20, 16)
    same_bits(
        attention(rows, keys, values, mask[:, None, None], backend="native"),
        attention(rows, keys, values, mask.clone()[:, None, None], backend="native"),
    )
    same_bits(
        attention(rows, keys, values, key_mask=mask, backend="native"),
        attention(rows, keys, values, key_mask=mask.clone(), backend="native"),
    )


# -- many -----------------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CALLS, TOGETHER = 10_000, 40


def drawn(n, generator):
    """Sizes and rules of N calls at once, which are alike in all but their numbers."""

    def whole(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    def chosen(share, *shape):
        return torch.rand(shape, generator=generator) < share

    Hkv, L, S = whole(1, 2), whole(1, 4), whole(1, 20)
    H = Hkv * whole(1, 2)
    N, heads, rows = TOGETHER, (1, H)[whole(0, 1)], (1, L)[whole(0, 1)]
    dtype = DTYPES[n % 3]
    sizes = (N, H, L, whole(1, 20)), (N, Hkv, S, 0), (N, Hkv, S, whole(1, 20))
    query, value = (normal(*shape).to(dtype) for shape in sizes[::2])
    key = normal(*sizes[1][:3], query.shape[3]).to(dtype)
    bias = normal(N, heads, rows, S)
    rules = {
        "is_causal": True,
        "window": ((None, whole(0, 5))[whole(0, 1)], (None, whole(0, 5))[whole(0, 1)]),
        "key_mask": chosen(0.8, N, S),
        "documents": tuple(torch.randint(0, 3, (N, size), generator=generator) for size in (L, S)),
        "attn_mask": (chosen(0.8, N, heads, rows, S), bias.masked_fill(bias > 1, -torch.inf))[
            whole(0, 1)
        ],
        "bias": normal(N, 1, L, S).to(dtype),
        "scale": (0.0, -0.5, 2.0)[whole(0, 2)],
        "softcap": 1.5,
        "sinks": normal(H).to(dtype),
        "alibi_slopes": (normal(N, H).abs() / 4).to(dtype),
        "head_mask": normal(N, H).to(dtype),
    }
    taken = [name for name in rules if whole(0, 3) == 0]
    return (query, key, value), {name: rules[name] for name in taken}


def of_one(rules, n):
    """The rules of the n-th of the calls."""

    def cut(name, value):
        if isinstance(value, tuple) and name == "documents":
            return tuple(t[n : n + 1] for t in value)
        return value[n : n + 1] if isinstance(value, torch.Tensor) and name != "sinks" else value

    return {name: cut(name, value) for name, value in rules.items()}


def test_ten_thousand_small_calls():
    """One by one, each with a batch of one, against the definition of forty together."""
    generator = torch.Generator().manual_seed(11)
    calls, seen = 0, set()
    for group in range(CALLS // TOGETHER):
        tensors, rules = drawn(group, generator)
        each = [
            attention(*(t[n : n + 1] for t in tensors), **of_one(rules, n), backend="native")
            for n in range(TOGETHER)
        ]
        gold = attention_by_definition(*tensors, **rules)
        peer = plain(*tensors, **rules)[0]
        name = f"group {group}: {', '.join(rules) or 'no rules'}"
        assert_within_budget(torch.cat(each), gold, peer, name=name)
        calls += len(each)
        seen |= set(rules)
    assert calls == CALLS and len(seen) == 11
