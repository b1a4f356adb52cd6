"""Who may import whom: the rules that keep each file readable without the others.

The rules are one table, RULES. They are read from the syntax trees, so imports inside functions and
under TYPE_CHECKING count as well. Each kind of rule is also broken on purpose, in a copy of the
tree that exists in memory only, to see that its breach is found.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

import clearhead

ROOT = Path(__file__).parents[1]
MAX_LINES = 400
ANYTHING = "anything"


class Rule(NamedTuple):
    """What a module may import, besides the standard library."""

    ours: tuple[str, ...] = ()  # of clearhead; a package stands for all that is in it
    theirs: tuple[str, ...] = ("torch",)  # of others
    late: tuple[str, ...] = ()  # of clearhead, inside a function or for types only


CALL = ("problem", "visibility", "results")  # what one call is
GROUND = ("textbook", *CALL, "positions", "cache")
MODELS = ("torch", "transformers", "huggingface_hub", "gguf", "safetensors", "platformdirs")

# "backends.*" is any module of backends that has no line of its own.
RULES = {
    "__init__": Rule(
        ours=(*GROUND, "backends", "functional", "module", "convert", "compat", "inspection")
    ),
    "__main__": Rule(ours=("cli",), theirs=()),
    "textbook": Rule(),
    "visibility": Rule(),
    "results": Rule(),
    "problem": Rule(ours=("visibility", "results")),
    "positions": Rule(),
    "cache": Rule(),
    "arguments": Rule(ours=CALL),
    "backends": Rule(ours=("backends", *CALL)),
    "backends.*": Rule(ours=CALL),
    # blocks, dense and statistics are parts of chunked, no backends.
    "backends.dense": Rule(ours=("backends.blocks", *CALL)),
    "backends.statistics": Rule(ours=("backends.blocks", "backends.dense", *CALL)),
    "backends.chunked": Rule(
        ours=("backends.blocks", "backends.dense", "backends.statistics", "textbook", *CALL)
    ),
    # fields, library and autograd are parts of native, no backends.
    "backends.native": Rule(
        ours=("backends.library", "backends.fields", "backends.autograd", *CALL)
    ),
    "backends.library": Rule(ours=("backends.fields",)),
    "backends.fields": Rule(),
    "backends.autograd": Rule(),
    "kinds": Rule(ours=("backends", *CALL)),
    "explanation": Rule(ours=("backends", "arguments", *CALL)),
    "functional": Rule(ours=("backends", "arguments", "kinds", "explanation", *CALL)),
    # from_heads, to_heads and from_torch are doors to convert, which itself knows the module.
    "module": Rule(
        ours=("functional", "results", "positions", "cache"),
        late=("convert", "surgery", "textbook"),
    ),
    "convert": Rule(ours=("module", "functional", *GROUND)),
    "surgery": Rule(ours=("module", *GROUND)),
    "compat": Rule(ours=("module", "functional", *GROUND)),
    "parallel": Rule(ours=("module", "functional", *GROUND)),
    "hf": Rule(ours=("hf",), theirs=()),
    "hf.*": Rule(ours=("hf", "smollm", "module", "functional", *GROUND), theirs=MODELS),
    "smollm": Rule(theirs=MODELS),
    "inspection": Rule(ours=("inspection", "module", "functional", *GROUND)),
    "inspection.*": Rule(ours=("inspection", "module", "functional", *GROUND)),
    "inspection.trace": Rule(ours=("inspection", "convert", "module", "functional", *GROUND)),
    "inspection.caught": Rule(ours=("inspection", "arguments", "functional", *GROUND)),
    # What can be shown has a door to the page that shows it.
    "inspection.steps": Rule(ours=("inspection", "module", *GROUND), late=("view.page",)),
    "inspection.record": Rule(
        ours=("inspection", *GROUND), theirs=("torch", "safetensors"), late=("view.page",)
    ),
    "inspection.watch_page": Rule(ours=("inspection", *GROUND), late=("view",)),
    "inspection.report": Rule(ours=("inspection", "module", *GROUND), late=("view",)),
    "view": Rule(ours=("view",), theirs=("rich",)),
    "view.*": Rule(ours=("view",), theirs=("rich",)),
    "view.figure": Rule(theirs=("matplotlib",)),
    "testing": Rule(ours=("testing", "functional", *GROUND)),
    "testing.statistics": Rule(ours=("testing", *GROUND)),
    "testing.*": Rule(ours=("functional", *GROUND)),
    "benchmarks": Rule(),
    "benchmarks.*": Rule(
        ours=("benchmarks", "testing", "module", "explanation", "functional", *GROUND),
        theirs=("torch", "x_transformers", "matplotlib"),
    ),
    "cli": Rule(ours=(ANYTHING,), theirs=(ANYTHING,)),
    "cli.*": Rule(ours=(ANYTHING,), theirs=(ANYTHING,)),
}
# A name that is made while running can be read by nobody; only the chooser of backends may use one.
MAY_IMPORT_BY_NAME = ("backends", "cli")


def tree() -> dict[str, str]:
    """Every text file of src/clearhead and csrc, by its path from the root of the repository."""
    files = [*ROOT.glob("src/clearhead/**/*"), *ROOT.glob("csrc/**/*")]
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(files)
        if path.is_file() and "__pycache__" not in path.parts
    }


def module_of(path: str) -> str:
    """src/clearhead/backends/sdpa.py -> backends.sdpa; a package is named without __init__."""
    name = path.removeprefix("src/clearhead/").removesuffix(".py").replace("/", ".")
    return name.removesuffix(".__init__")


def rule_of(module: str) -> Rule | None:
    return RULES.get(module) or RULES.get(module.rpartition(".")[0] + ".*")


class Import(NamedTuple):
    line: int
    name: str  # absolute; of `from p import x` p.x where that is a module; "?" if nobody can tell
    late: bool


def imports(path: str, source: str, modules: set[str]) -> Iterator[Import]:
    """Every import of a file, wherever it stands."""
    package = ["clearhead", *path.removeprefix("src/clearhead/").split("/")[:-1]]
    nodes = list(ast.walk(ast.parse(source)))
    late = {
        inner
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    for node in nodes:
        for name in imported(node, package, modules):
            yield Import(node.lineno, name, node in late)


def imported(node: ast.AST, package: list[str], modules: set[str]) -> Iterator[str]:
    """The names that one node of a file in package imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = package[: len(package) - node.level + 1] if node.level else []
        base = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            whole = f"{base}.{alias.name}"
            yield whole if whole in modules else base
    elif isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        if called in ("__import__", "import_module", "importlib.import_module"):
            name = node.args[0] if node.args else None
            literal = isinstance(name, ast.Constant) and isinstance(name.value, str)
            yield name.value if literal and not name.value.startswith(".") else "?"


def breach(module: str, rule: Rule, line: Import) -> str | None:
    """Why module may not import this, or None where it may."""
    name = line.name
    if name == "?":
        return None if module in MAY_IMPORT_BY_NAME else "imports by a name that cannot be read"
    first, _, inner = name.partition(".")
    if first == "clearhead":
        allowed = rule.ours + (rule.late if line.late else ())
        fits = any(inner == other or inner.startswith(other + ".") for other in allowed)
    else:
        allowed = (*sys.stdlib_module_names, *rule.theirs)
        fits = first in allowed
    return None if fits or ANYTHING in allowed else f"may not import {name}"


def violations(files: dict[str, str]) -> list[str]:
    """Every breach of the rules in a tree of files, one sentence each; [] for a clean one."""
    sources = {path: text for path, text in files.items() if path.endswith(".py")}
    modules = {f"clearhead.{name}" for name in (*map(module_of, sources), *RULES)}
    found = [] if sources else ["src/clearhead: no source file"]
    for path, text in files.items():
        if (lines := len(text.splitlines())) > MAX_LINES:
            found.append(f"{path}: has {lines} lines, over {MAX_LINES}")
        if path.startswith("csrc/"):
            for header in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)', text, re.MULTILINE):
                if re.match(r"Python\.h$|(torch|ATen|c10|pybind11|nanobind)/", header):
                    found.append(f"{path}: may not include {header}")
    for path, text in sources.items():
        module = module_of(path)
        rule = rule_of(module)
        if rule is None:
            found.append(f"{path}: has no line in RULES")
            continue
        for line in imports(path, text, modules):
            if why := breach(module, rule, line):
                found.append(f"{path}:{line.line}: {why}")
    return found


def test_the_source_keeps_every_rule():
    assert violations(tree()) == []


PLANTS = {
    "ground knows torch only": ("textbook", "import numpy"),
    "ground knows nothing of clearhead": ("visibility", "from clearhead import functional"),
    "a backend knows no other backend": ("backends.flex", "from .chunked import forward"),
    "a backend knows no other backend, by its package": (
        "backends.native",
        "from clearhead.backends import sdpa",
    ),
    "a backend knows not its chooser": ("backends.sdpa", "from . import choose"),
    "only chunked may use the textbook": ("backends.sdpa", "from ..textbook import SelfAttention"),
    "a backend knows no module": ("backends.chunked", "import clearhead.module"),
    "the chooser knows no textbook": ("backends", "from ..textbook import SelfAttention"),
    "arguments know no backend": ("arguments", "from . import backends"),
    "functional knows no module": ("functional", "from .module import MultiHeadAttention"),
    "functional knows no textbook": ("functional", "from clearhead.textbook import SelfAttention"),
    "module knows no backend": ("module", "from .backends import chunked"),
    "module meets convert in functions only": ("module", "from .convert import from_heads"),
    "inspection knows no view": ("inspection.trace", "from ..view import terminal"),
    "convert knows no inspection": ("convert", "from .inspection import trace"),
    "compat knows no convert": ("compat", "from .convert import from_torch"),
    "inspection meets view in functions only": ("inspection.steps", "from ..view import page"),
    "matplotlib belongs to the figure": ("view.page", "import matplotlib.figure"),
    "view knows no torch": ("view.terminal", "import torch.nn"),
    "view knows nothing of clearhead": ("view.page", "from clearhead.inspection import trace"),
    "nobody imports cli": ("__init__", "from .cli import main"),
    "nobody imports testing": ("convert", "from clearhead.testing import CASES"),
    "nobody but testing plants bugs": ("functional", "from . import planted"),
    "nobody imports hf": ("inspection.watch", "import clearhead.hf as hf"),
    "nobody but hf knows a certain model": ("inspection.watch", "from .. import smollm"),
    "nobody but cli imports benchmarks": ("functional", "from .benchmarks import run"),
    "benchmarks know no backend": ("benchmarks.run", "from ..backends import native"),
    "nobody imports parallel": ("module", "from . import parallel"),
    "nobody imports the public names": ("hf", "from clearhead import attention"),
    "transformers belongs to hf": ("inspection.watch", "import transformers"),
    "rich belongs to view and cli": ("module", "from rich.console import Console"),
    "an import in a function counts": ("module", "def f():\n    from clearhead import hf"),
    "an import for types counts": ("problem", "if TYPE_CHECKING:\n    from .module import X"),
    "a written name counts": ("module", "importlib.import_module('clearhead.testing')"),
    "a made name is refused": ("module", "importlib.import_module('.' + name, __package__)"),
    "a relative name is refused": ("module", "import_module('.testing', __package__)"),
    "every module has its rule": ("helpers", "import math"),
    "every module of a package has its rule": ("positions.deep", "import math"),
}


def path_of(module: str) -> str:
    inner = f"{module}/__init__" if f"{module}.*" in RULES else module.replace(".", "/")
    return f"src/clearhead/{inner}.py"


def planted(path: str, text: str) -> list[str]:
    """The breaches that appear when path holds text instead."""
    files = tree()
    before = violations(files)
    return [found for found in violations({**files, path: text}) if found not in before]


@pytest.mark.parametrize(("module", "line"), PLANTS.values(), ids=PLANTS)
def test_a_planted_import_is_found(module, line):
    found = planted(path_of(module), line)
    assert len(found) == 1 and found[0].startswith(path_of(module))


def test_other_planted_breaches_are_found():
    page = "src/clearhead/view/page.js"
    assert planted(page, "x\n" * MAX_LINES) == []
    assert planted(page, "x\n" * MAX_LINES + "x") == [f"{page}: has 401 lines, over 400"]
    kernel = "csrc/dispatch.cpp"
    assert planted(kernel, "#include <Python.h>\n") == [f"{kernel}: may not include Python.h"]
    assert planted(kernel, '# include "ATen/ATen.h"') == [f"{kernel}: may not include ATen/ATen.h"]


def test_what_is_allowed_is_not_found():
    files = {
        "src/clearhead/module.py": "import math\nimport torch.nn\nfrom . import functional\n"
        "if TYPE_CHECKING:\n    from .textbook import SelfAttention\n"
        "class M:\n    def to_heads(self):\n        from .convert import to_heads\n",
        "src/clearhead/backends/__init__.py": "import_module(f'clearhead.backends.{name}')\n",
        "src/clearhead/backends/chunked.py": "from ..textbook import SelfAttention\n",
        "src/clearhead/inspection/links.py": "from clearhead.inspection.trace import Step\n",
        "src/clearhead/view/links.py": "from .terminal import colours\nimport rich.table\n",
        "src/clearhead/cli.py": "import typer\nfrom clearhead import hf, testing\n",
        "csrc/dispatch.cpp": "#include <cstdint>\n#include <pthread.h>\n",
    }
    assert violations(files) == []


def test_an_empty_tree_is_a_breach():
    assert violations({}) == ["src/clearhead: no source file"]


# What torch itself has loaded is torch's affair.
LOOK = """
import sys
import torch
before = set(sys.modules)
import clearhead
print(*sorted(set(sys.modules) - before))
print(torch.cuda.is_initialized())
try:
    maps = open("/proc/self/maps").read()
except OSError:
    maps = ""
print([line for line in maps.splitlines() if "clearhead" in line.rpartition("/")[2]])
"""
HEAVY = {"rich", "typer", "accelerate", *MODELS} - {"torch"}


def test_import_loads_and_does_nothing_heavy():
    source = str(ROOT / "src")
    told = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {source!r})\n{LOOK}"],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded, initialised, libraries = told.stdout.splitlines()
    names = loaded.split()
    assert "clearhead" in names
    assert {name.partition(".")[0] for name in names} & HEAVY == set()
    assert "torch.nn.attention.flex_attention" not in names
    assert "torch._dynamo" not in names
    assert (initialised, libraries) == ("False", "[]")
    assert told.stderr == ""


def documented(thing: object) -> bool:
    # Its own words: not those of a base class, and not the signature a dataclass makes up.
    text = vars(thing).get("__doc__") if isinstance(thing, type) else thing.__doc__
    return bool(text) and not text.startswith(f"{thing.__name__}(")


def test_every_public_name_has_a_docstring():
    public = {name: getattr(clearhead, name) for name in clearhead.__all__}
    assert public
    assert [
        name for name, thing in public.items() if callable(thing) and not documented(thing)
    ] == []


def test_a_missing_docstring_is_found():
    class Child(dict):
        pass

    @dataclass
    class Record:
        size: int

    assert not any(map(documented, (Child, Record, lambda: None)))
    assert all(map(documented, (Rule, violations)))
