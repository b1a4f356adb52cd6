"""Layers by number or by path: how `watch` lets them be named."""

import fnmatch
from collections.abc import Iterable

Layers = int | str | Iterable[int | str]


def as_list(name: str, layers: Layers) -> list[int | str]:
    """One layer or several as a list; raises TypeError for what is neither number nor path."""
    found = [layers] if isinstance(layers, int | str) else list(layers)
    for wanted in found:
        if isinstance(wanted, bool) or not isinstance(wanted, int | str):
            raise TypeError(f"watch: {name} has {wanted!r} in it; each must be a number or a path")
    return found


def matches(wanted: str, path: str) -> bool:
    """Whether a module's path is the wanted one, or within it; wildcards are allowed.

    >>> matches("layers.*.attn", "layers.3.attn"), matches("layers.1", "layers.10.attn")
    (True, False)
    """
    return fnmatch.fnmatchcase(path, wanted) or fnmatch.fnmatchcase(path, f"{wanted}.*")


def is_layer(wanted: int | str, name: str, number: int) -> bool:
    """Whether a layer is the wanted one: by its number, its name, or the path of its module."""
    if isinstance(wanted, int):
        return wanted == number
    return name == wanted or matches(wanted, name.partition("#")[0])


def example(names: Iterable[str]) -> str:
    """A few names for an error to show."""
    names = [name for name in names if name]
    shown = ", ".join(repr(name) for name in names[:3])
    return f"{shown} ... {names[-1]!r}" if len(names) > 3 else shown or "nothing"
