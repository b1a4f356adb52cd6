"""Reports O, memory: no call falls back to holding all L * S scores, and explain says what ran."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from clearhead import attention, explain

# Peak extra memory of forward and backward, in outputs. Measured with torch 2.13 on x86-64,
# 2026-11: 4 to 14, and 99 for all scores at once.
BOUND = 24
B, HEADS, T = 4, 4, 2048
CALLS = {
    "plain": ({}, HEADS, 64),
    "window": ({"window": (255, 0)}, HEADS, 64),
    "dropout": ({"dropout_p": 0.1, "is_causal": True}, HEADS, 64),
    "grouped heads": ({"is_causal": True}, 1, 64),
    "grouped heads, dropout": ({"dropout_p": 0.1, "is_causal": True}, 1, 64),
    "head size 257": ({"is_causal": True}, HEADS, 257),
}
# The peak of a process never falls, so each call is held to what stood before the first one.
SCRIPT = f"""
import json, resource, sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "src")!r})
import torch
from clearhead import attention
torch.set_num_threads(1)
unit = 1 if sys.platform == "darwin" else 1024

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

def leaves(B, key_heads, D, T):
    shapes = (B, {HEADS}, T, D), (B, key_heads, T, D), (B, key_heads, T, D)
    return [torch.randn(shape, requires_grad=True) for shape in shapes]

def extra(call, B, key_heads, D):
    call(*leaves(B, key_heads, D, 64)).sum().backward()  # what torch loads once
    tensors = leaves(B, key_heads, D, {T})
    before = peak()
    call(*tensors).sum().backward()
    return (peak() - before) / (B * {HEADS} * {T} * D * 4)

def all_scores(query, key, value):
    return torch.softmax(query @ key.mT / 8, -1) @ value

rules, key_heads, D = json.loads(sys.argv[1])
if rules is None:
    print(extra(all_scores, 1, key_heads, D))
else:
    print(extra(lambda *tensors: attention(*tensors, **rules), {B}, key_heads, D))
"""
# On Linux a program that is executed inherits the peak of the process that started it, so a small
# process stands between this one and the one that measures.
BETWEEN = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', *sys.argv[1:]]))"


def measured(rules, key_heads, D):
    """Peak extra memory in outputs, from a process of its own."""
    command = [sys.executable, "-c", BETWEEN, SCRIPT, json.dumps([rules, key_heads, D])]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return float(run.stdout)


@pytest.mark.parametrize("name", CALLS)
def test_peak_memory_is_a_small_multiple_of_the_output(name):
    """transformers PR#46960: T = 2048, 4 heads; dropout, grouped heads, head_dim 257."""
    assert 0 < measured(*CALLS[name]) < BOUND


def test_the_measurement_notices_all_scores_at_once():
    """transformers PR#46960: what the bound above is there to catch is three times over it."""
    assert measured(None, HEADS, 64) > 3 * BOUND


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_explain_names_the_path(name, gradients):
    """transformers PR#46960: which path runs can be asked, and is told with its memory."""
    rules, key_heads, D = CALLS[name]
    query = torch.randn(1, HEADS, 131, D, requires_grad=gradients)
    key = torch.randn(1, key_heads, 131, D)
    told = explain(query, key, key, **rules)
    if "dropout_p" in rules:
        assert told.backend == "chunked"
        assert "all L * S weights in memory" in told.reasons["sdpa"]
    else:
        assert told.backend == "native" and "CPU kernels" in told.how
    torch.manual_seed(0)
    out = attention(query, key, key, **rules)
    torch.manual_seed(0)
    assert torch.equal(out, attention(query, key, key, **rules, backend=told.backend))
