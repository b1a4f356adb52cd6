"""Peak memory of long calls, measured in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import clearhead

PROGRAM = """
import resource, sys, torch
from clearhead import attention
torch.manual_seed(0)
torch.set_num_threads(1)  # two that spin on busy cores would take minutes
B, H, L, D = 1, 12, 4096, 64
rules = eval(sys.argv[1])
q, k, v = (torch.randn(B, H, L, D, requires_grad=True) for _ in range(3))
grad = torch.randn(B, H, L, D)
small = [t[:, :, :64].detach().clone().requires_grad_() for t in (q, k, v)]
attention(*small, backend="chunked", is_causal=True).sum().backward()  # what torch loads once
# Inputs, gradients and output, all touched.
held = [torch.ones_like(t) for t in (q, k, v, q)]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
del held
attention(q, k, v, backend="chunked", **rules).backward(grad)
print(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.parametrize("rules", [{}, {"is_causal": True}, {"dropout_p": 0.1}])
def test_forward_and_backward_of_4096_tokens_stay_under_300_mb(rules):
    """All scores at once would take 805 MB, and their gradients as much again."""
    command = [sys.executable, "-c", PROGRAM, repr(rules)]
    source = os.pathsep.join([str(Path(clearhead.__file__).parents[1]), *sys.path])
    environment = os.environ | {"PYTHONPATH": source}
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    before, after = map(int, run.stdout.split())
    assert after - before < 300 * 1024
