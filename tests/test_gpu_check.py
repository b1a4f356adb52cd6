"""scripts/gpu_check.py: what it says without a device, and that it judges CPU-made cases right."""

import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import torch

import clearhead
from clearhead.testing import CASES

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu_check.py"


def load():
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_says_plainly_that_there_is_no_device():
    source = str(Path(clearhead.__file__).parents[1])
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": source}
    run = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 3
    assert run.stdout.strip() == "gpu_check: there is no CUDA device here, so nothing was checked"


def on_cpu(judge, *arguments, **options):
    return judge(*arguments, **{**options, "device": "cpu"})


def test_it_reports_a_share_a_refusal_and_a_failure(monkeypatch):
    """Its judgement of one case and backend, with the moves to the device left out."""
    script = load()
    monkeypatch.setattr(script, "to_cuda", lambda value, gradients: value)
    for name in ("check", "check_statistics"):
        real = functools.partial(on_cpu, getattr(script, name))
        monkeypatch.setattr(script, name, real)
    plain = CASES[0]
    assert 0 <= float(script.entry(plain, "chunked", torch.float32)) <= 1
    softcap = next(case for case in CASES if case.name == "softcap")
    assert script.entry(softcap, "sdpa", torch.float32) == "-"

    def broken(*arguments, **options):
        raise AssertionError("plain: error 1 is over the budget")

    monkeypatch.setattr(script, "check", broken)
    entry = script.entry(plain, "chunked", torch.float32)
    assert entry == "FAIL AssertionError: plain: error 1 is over the budget"
