"""The rules of the session are worth something only if a session that breaks them fails."""

import subprocess
import sys
from pathlib import Path

import pytest

PASSES = "def test_passes():\n    assert True\n"
SKIPS = (
    "import pytest\n\n@pytest.mark.{mark}(reason={reason!r})\ndef test_skips():\n    assert False\n"
)


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        (PASSES + SKIPS.format(mark="skip", reason="needs a CUDA device"), None),
        (PASSES + SKIPS.format(mark="skip", reason="no time"), "'no time'"),
        (PASSES + SKIPS.format(mark="xfail", reason="known"), "'known'"),
        (
            PASSES + "import pytest\npytest.importorskip('nonesuch')\n",
            "could not import 'nonesuch'",
        ),
        (SKIPS.format(mark="skip", reason="needs a CUDA device"), "no test ran"),
        (PASSES + "import warnings\nwarnings.warn('careless')\n", "careless"),
    ],
    ids=["allowed skip", "bare skip", "expected failure", "skipped module", "none ran", "warning"],
)
def test_a_session_fails_for(source, fault, tmp_path):
    root = Path(__file__).parents[1]
    for name in ("pyproject.toml", "tests/conftest.py"):
        (tmp_path / Path(name).name).write_text((root / name).read_text())
    (tmp_path / "test_planted.py").write_text(source)
    session = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_planted.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (session.returncode == 0) == (fault is None), session.stdout
    assert fault is None or fault in session.stdout
