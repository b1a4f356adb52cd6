"""Rules that hold for the whole test session: fixed seeds, and no test that quietly did not run."""

import os
import random
import sys

import hypothesis
import pytest
import torch

# The reasons for which a test may be skipped, word for word, and why each is acceptable. A skip
# for any other reason fails the session. An expected failure counts as a skip.
ALLOWED_SKIPS = {
    "the processor lacks this instruction set": "the others are held to the definition there",
    "needs a CUDA device": "scripts/gpu_check.py runs the same CASES where there is one",
}

# No test may wait for a network.
os.environ["HF_HUB_OFFLINE"] = "1"

hypothesis.settings.register_profile(
    "ci",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=60,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
# HYPOTHESIS_PROFILE=dev looks for new failures: other examples in each run, and more of them.
hypothesis.settings.register_profile(
    "dev", parent=hypothesis.settings.get_profile("ci"), derandomize=False, max_examples=500
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


class _TorchRandom:
    """torch's generator in the form in which hypothesis seeds one before each example."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


# hypothesis keeps a weak reference only.
_torch_random = _TorchRandom()
hypothesis.register_random(_torch_random)


class SessionRules:
    """Seeds each test, counts what ran, and fails a session that proved less than it seems to.

    A plugin object and not hooks of this file: those would miss the docstrings under src.
    """

    def __init__(self, threads: int, watches: bool):
        self.threads, self.watches = threads, watches
        self.ran, self.bad_skips = 0, {}
        self.in_browser = 0  # tests of the page that passed; .ci/run asks for some

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        random.seed(0)
        torch.manual_seed(0)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)

    def pytest_runtest_logreport(self, report):
        if report.skipped:
            self._judge_skip(report)
        elif report.when == "call":
            self.ran += 1
            self.in_browser += report.passed and report.nodeid.startswith("tests/browser/")

    def pytest_collectreport(self, report):
        if report.skipped:
            self._judge_skip(report)

    def _judge_skip(self, report):
        if hasattr(report, "wasxfail"):
            reason = report.wasxfail
        else:
            reason = report.longrepr[2].removeprefix("Skipped: ")
        if reason not in ALLOWED_SKIPS:
            self.bad_skips[report.nodeid] = reason

    def faults(self):
        """What is wrong with the session as a whole, one sentence each."""
        for nodeid, reason in self.bad_skips.items():
            yield f"{nodeid} was skipped, and its reason is not in ALLOWED_SKIPS: {reason!r}"
        if not self.ran:
            yield "no test ran"

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session, exitstatus):
        if self.watches and exitstatus == pytest.ExitCode.OK and any(self.faults()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        if self.watches:
            if self.in_browser:
                terminalreporter.write_line(f"{self.in_browser} tests passed in a browser")
            for fault in self.faults():
                terminalreporter.write_line(f"SESSION FAILED: {fault}", red=True)


def pytest_configure(config):
    # A worker of pytest-xdist shares the cores, and sees only its part of the session.
    worker = hasattr(config, "workerinput")
    only_lists = config.getoption("collectonly", default=False)
    rules = SessionRules(threads=1 if worker else 2, watches=not worker and not only_lists)
    config.pluginmanager.register(rules, "clearhead-session-rules")
