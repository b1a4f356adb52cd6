"""Peak memory of attention at 4096 tokens, measured in a process of its own."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import clearhead
from clearhead import AuxRequest

LIMIT_MB = 300
PROGRAM = """
import resource, sys, torch
from clearhead import AuxRequest, attention

def all_scores(query, key, value, **rules):
    return torch.softmax(query @ key.mT / 8, -1) @ value

torch.manual_seed(0)
torch.set_num_threads(1)  # two that spin on busy cores would take minutes
name, rules = sys.argv[1], eval(sys.argv[2])
def only_out(*tensors, **rules):
    out = attention(*tensors, **rules, backend=name)
    return out[0] if isinstance(out, tuple) else out

attend = all_scores if name == "all scores" else only_out
B, H, L, D = 1, 12, 4096, 64
q, k, v = (torch.randn(B, H, L, D, requires_grad=True) for _ in range(3))
grad = torch.randn(B, H, L, D)
small = [t[:, :, :64].detach().clone().requires_grad_() for t in (q, k, v)]
attend(*small).sum().backward()  # what torch loads once
held = [torch.ones_like(t) for t in (q, k, v, q)]  # room for the gradients and the output
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
del held
attend(q, k, v, **rules).backward(grad)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
# On Linux a program that is executed inherits the peak of the process that started it, so a small
# process stands between this one and the one that measures.
BETWEEN = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', *sys.argv[1:]]))"


def extra_mb(backend, rules):
    """Peak memory of forward and backward over inputs, outputs and gradients, in MB."""
    source = os.pathsep.join([str(Path(clearhead.__file__).parents[1]), *sys.path])
    command = [sys.executable, "-c", BETWEEN, PROGRAM, backend, repr(rules)]
    run = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": source}
    )
    assert run.returncode == 0, run.stderr
    return float(run.stdout)


@pytest.mark.parametrize("rules", [{}, {"is_causal": True}, {"dropout_p": 0.1}], ids=str)
def test_forward_and_backward_of_4096_tokens_stay_under_300_mb(rules):
    assert extra_mb("chunked", rules) < LIMIT_MB


EVERY_STATISTIC = AuxRequest(
    lse=True, max_logit=True, entropy=True, top_k=8, key_mass=True, first_mass=True,
    previous_mass=True, self_mass=True, distance=True,
)  # fmt: skip


@pytest.mark.parametrize("request_", [EVERY_STATISTIC, replace(EVERY_STATISTIC, reduce="head")],
                         ids=["rows", "heads"])  # fmt: skip
def test_statistics_of_4096_tokens_stay_under_300_mb(request_):
    """Never a number per row and key, not even for key_mass and top_k."""
    assert extra_mb("chunked", {"is_causal": True, "return_aux": request_}) < LIMIT_MB


def test_the_measurement_notices_all_scores_at_once():
    """12 * 4096 * 4096 floats are 805 MB, and their gradients as much again."""
    assert extra_mb("all scores", {}) > 2 * LIMIT_MB
