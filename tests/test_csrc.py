"""The kernels under sanitizers: a program of their own that calls them at random (tests/csrc)."""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ISAS = ("generic", "avx2", "avx512", "avx512bf16", "amx")
CALLS = 400


@pytest.fixture(scope="session")
def program():
    """kernels_test, built once and again when a source changed. It needs a compiler and CMake."""
    folder = ROOT / "build" / "kernels_test"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the workers of one session share it
        build_into(folder)
    return folder / "kernels_test"


def build_into(folder):
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    cmake = shutil.which("cmake", path=paths)
    assert cmake, "no cmake: pip install cmake"
    configure = [cmake, "-S", str(ROOT), "-B", str(folder), "-DCLEARHEAD_KERNELS_TEST=ON"]
    build = [cmake, "--build", str(folder), "--target", "kernels_test", "--parallel", "2"]
    for command in (configure, build):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def run(program, *words, isa="generic"):
    environment = {**os.environ, "CLEARHEAD_ISA": isa, "ASAN_OPTIONS": "detect_leaks=0"}
    return subprocess.run(
        [str(program), *words], capture_output=True, text=True, env=environment, timeout=600
    )


@pytest.mark.parametrize("isa", ISAS)
def test_random_calls_between_guard_pages(program, isa):
    done = run(program, "1", str(CALLS), isa=isa)
    if done.returncode == 3 and "status 8" in done.stderr:
        pytest.skip("the processor lacks this instruction set")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == f"{isa}: {CALLS} calls\n"


def test_reading_behind_a_buffer_is_caught(program):
    done = run(program, "beyond")
    assert done.returncode != 0 and "AddressSanitizer" in done.stderr


def test_a_wrong_scale_is_caught(program):
    done = run(program, "wrong")
    assert done.returncode == 1 and "call with seed" in done.stderr
