"""One self-contained HTML file that shows attention: no network, no build step, no framework.

The files in page/ are ordinary modules and style sheets. `page` joins them into one script and one
style, writes facts as JSON into a block that nothing executes, and each head's map as deflated
bytes into a block of its own, which the page decodes when that head is first shown. The page's
Content Security Policy allows this script and this style, by their hashes, and nothing else: no
request, no other script, and no string that becomes markup (Trusted Types).
"""

import base64
import hashlib
import html
import json
import math
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .terminal import StepLike

FILES = Path(__file__).with_name("page")
STYLES = ("page.css", "heads.css", "steps.css")
START = "main.js"
LARGEST = 50 * 10**6  # bytes; browsers open more, but not while somebody waits

# A square in the colours of the first two heads, so that no browser asks for /favicon.ico.
ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 8 8'%3E%3Cpath "
    "fill='%232563eb' d='M0 0h4v8H0z'/%3E%3Cpath fill='%230d9488' d='M4 4h4v4H4z'/%3E%3C/svg%3E"
)
POLICY = (
    "default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; img-src data:; "
    "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
FRAME = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="{icon}">
<style>{style}</style>
</head>
<body>
<header id="masthead"></header>
<nav id="tabs" role="tablist" aria-label="Panels"></nav>
<main id="panels"><noscript>This page draws its numbers with a script of its own; allow it to run.
</noscript></main>
<footer id="keys">Keys: <kbd>1</kbd> to <kbd>6</kbd> panels, <kbd>←</kbd> <kbd>→</kbd> heads or
steps, <kbd>↑</kbd> <kbd>↓</kbd> layers; on the map arrows move and <kbd>+</kbd> <kbd>−</kbd>
<kbd>0</kbd> zoom. The address keeps panel and head. Written by clearhead; this file needs no
network.</footer>
<script type="application/json" id="facts">{facts}</script>
{first}
<script>{script}</script>
{later}
</body>
</html>
"""


def page(
    *,
    title: str,
    about: str = "",
    attention: Mapping[str, Any] | None = None,
    steps: Sequence[Mapping[str, Any]] = (),
    roles: Sequence[Mapping[str, Any]] = (),
    badges: Sequence[Mapping[str, Any]] = (),
    three: Sequence[Mapping[str, Any]] = (),
    start: str = "",
) -> str:
    """The whole file as text.

    Args:
        title: what is shown, such as the model's name.
        about: a line about it: layers, heads, tokens.
        attention: what Capture.data() in clearhead.inspection gives: tokens, statistics, maps.
        steps: tours through steps of attention, each as `steps_data` gives it.
        roles: one row for each head with a role, the best of a role first: role, layer, head,
            score, baseline, n, held_out, ablation (the last four may be None), as in
            `view.roles.rows`.
        badges: what to write on heads: role, layer, head, score, short, colour.
        three: the heads of the first panel, as `view.roles.three` makes them.
        start: the panel that is open first: three, overview, head, text, steps or roles.

    Raises:
        ValueError: there is neither attention nor steps, or the page would be over 50 MB.
    """
    if attention is None and not steps:
        raise ValueError("a page needs attention or steps to show; it was given neither")
    shown: dict[str, Any] | None = None
    first: list[str] = []
    later: list[str] = []
    if attention is not None:
        shown = {k: v for k, v in attention.items() if k not in ("thumbnails", "blobs", "keys")}
        shown["maps"] = dict(attention["maps"])
        first = [_block("thumbnails", b"".join(attention["thumbnails"]))]
        later = [_block(f"map{n}", blob) for n, blob in enumerate(attention["blobs"])]
        if attention["keys"]:
            numbers = {keys: n for n, keys in enumerate(dict.fromkeys(attention["keys"]))}
            shown["maps"]["keys"] = [numbers[keys] for keys in attention["keys"]]
            later += [_block(f"key{n}", keys) for keys, n in numbers.items()]
    facts = {
        "title": title,
        "about": about,
        "start": start or ("three" if three else "overview" if attention else "steps"),
        "attention": shown,
        "steps": list(steps),
        "roles": list(roles),
        "badges": list(badges) or list(roles),
        "three": list(three),
    }
    script = joined(START)
    style = "\n".join((FILES / name).read_text(encoding="utf-8") for name in STYLES)
    policy = POLICY.format(script=_hash(script), style=_hash(style))
    text = FRAME.format(
        policy=html.escape(policy),
        title="clearhead",  # the script sets the full one
        icon=ICON,
        style=style,
        facts=_json(facts),
        first="\n".join(first),
        script=script,
        later="\n".join(later),
    )
    if len(text) > LARGEST:
        raise ValueError(
            f"the page would have {len(text) / 1e6:.0f} MB, more than the {LARGEST // 10**6} that "
            "a browser opens well; shorten the text, or leave --full out, which keeps the 8 "
            "strongest links of each word"
        )
    return text


def write(path: str | Path, text: str) -> str:
    """Write a page and say so: "heads.html: 2.1 MB". Raises ValueError where that fails."""
    data = text.encode()
    try:
        Path(path).write_bytes(data)
    except OSError as error:
        raise ValueError(f"{path} could not be written: {error.strerror or error}") from error
    return f"{path}: {size(len(data))}"


def size(count: int) -> str:
    """So many bytes in words: 38 kB, 2.1 MB."""
    return f"{count / 1e6:.1f} MB" if count >= 10**6 else f"{max(1, round(count / 1e3))} kB"


def frame(text: str, height: int = 760) -> str:
    """A page inside a frame of its own, for a notebook: `_repr_html_` returns this."""
    return (
        f'<iframe srcdoc="{html.escape(text)}" sandbox="allow-scripts" title="clearhead" '
        f'width="100%" height="{height}" style="border: 0"></iframe>'
    )


def steps_data(
    steps: Iterable[StepLike],
    parameters: Mapping[str, Any] | None = None,
    about: str = "",
    name: str = "",
    heads: Sequence[str] = (),
) -> dict[str, Any]:
    """Steps of attention as the page takes them.

    Args:
        steps: of clearhead.inspection.trace, or others with the same attributes.
        parameters: the learned matrices by name, each (columns in, columns out), or one for each
            head: W_query, W_key, W_value, out_proj.
        about: a sentence on what is worked through.
        name: of this tour, where the page has several.
        heads: what its heads are called; "1", "2" ... where there are none.
    """
    rows = [
        {
            "name": getattr(step, "name", step.title),
            "title": step.title,
            "explanation": step.explanation,
            "code": step.code,
            "shape": list(step.shape),
            "axes": list(step.axes),
            "per_head": step.per_head,
            "heads": step.heads,
            "tokens": list(step.tokens),
            "values": _numbers(step.values),
        }
        for step in steps
    ]
    learned = {name: _numbers(values) for name, values in (parameters or {}).items()}
    return {
        "name": name,
        "about": about,
        "heads": list(heads),
        "steps": rows,
        "parameters": learned,
    }


def _numbers(values: Any) -> Any:
    """Nested lists with six digits a number; what JSON has no number for becomes a word."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, Sequence):
        return [_numbers(value) for value in values]
    if math.isfinite(values):
        return float(f"{values:.6g}")
    return "NaN" if math.isnan(values) else "Infinity" if values > 0 else "-Infinity"


def _json(facts: Any) -> str:
    """JSON that cannot end or open a tag, in ASCII, with null for what is no number."""
    text = json.dumps(_finite(facts), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def _block(name: str, data: bytes) -> str:
    letters = base64.b64encode(zlib.compress(data, 7)).decode()
    return f'<script type="text/plain" id="{name}">{letters}</script>'


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


IMPORT = re.compile(r'^import (\* as \w+|\{[^}]*\}) from "\./(\w+)\.js";\n', re.MULTILINE)
EXPORT = re.compile(r"^export ((?:async )?(?:function|class|const) (\w+))", re.MULTILINE)


def joined(start: str) -> str:
    """A module and all that it imports as one script, each in a function of its own.

    Understands the two forms of import and the one of export that the files in page/ use.
    """
    done: dict[str, str] = {}

    def take(name: str, above: tuple[str, ...]) -> None:
        if name in above:
            raise ValueError(f"page/{name}.js imports itself through {' and '.join(above)}")
        if name in done:
            return
        source = (FILES / f"{name}.js").read_text(encoding="utf-8")
        for _, other in IMPORT.findall(source):
            take(other, (*above, name))
        source = IMPORT.sub(_import, source)
        names = [found for _, found in EXPORT.findall(source)]
        source = EXPORT.sub(r"\1", source)
        done[name] = f"MODULES.{name} = (() => {{\n{source}return {{ {', '.join(names)} }};\n}})();"

    take(start.removesuffix(".js"), ())
    return "\n".join(['"use strict";', "const MODULES = {};", *done.values()])


def _import(found: re.Match[str]) -> str:
    what, module = found.groups()
    return f"const {what.removeprefix('* as ')} = MODULES.{module};\n"
