"""What the heads of a model do, in a terminal: three of them at work, and the table of all roles.

A role comes in as a dict, with the fields of a row of clearhead.roles() and `title`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from .links import Link, depth_colour, fit, hundredths, is_ascii
from .terminal import INDENT, print_wrapped

# What a link is by the role of its head, if that is what the head does here.
EXPLAINS = {
    "previous": "previous",
    "duplicate": "same again",
    "induction": "what followed",
    "verb_subject": "its subject",
    "object_verb": "its verb",
    "noun_determiner": "its determiner",
    "noun_adjective": "its adjective",
    "pronoun_noun": "its noun",
}
KINDS = {"pronoun_noun": "for pronouns", "local": "for what is near"}
# English words by their kind, each between spaces.
DETERMINERS = (
    " the a an this that these those my your his her its our their some any no every each two "
    "three many "
)
PRONOUNS = " he she him her his hers it its they them their theirs "
OTHERS = (
    " and or but because if when while that who which of in on at to from with for by as so since "
    "until before after not very "
)


def explains(role: str | None, i: int, j: int, words: Sequence[str]) -> str:
    """What the link from word i to word j is by the role of its head, "" where it cannot be.

    Places, repetitions and small English words are checked in the text; of the rest of grammar
    nothing is known but the head.

    >>> explains("induction", 3, 1, ["so", "it", "goes", "so"])
    'what followed'
    """
    if role is None or role not in EXPLAINS:
        return ""
    like = [word.casefold() for word in words]
    source, target = (f" {like[k]} " for k in (i, j))
    # Small words are no verbs, nouns or adjectives.
    full, named = (
        word.strip().isalpha() and not any(word in kind for kind in (DETERMINERS, PRONOUNS, OTHERS))
        for word in (source, target)
    )
    fits = {
        "previous": j == i - 1,
        "duplicate": source == target,
        "induction": j > 0 and like[j - 1] == like[i],
        "noun_determiner": full and target in DETERMINERS,
        "pronoun_noun": source in PRONOUNS and named,
        "verb_subject": full and (named or target in PRONOUNS),
    }
    fits[role] = fits.get(role, full and named)
    return EXPLAINS[role] if j < i and fits[role] else ""


def show_leaders(
    console: Console,
    words: Sequence[str],
    leaders: Sequence[tuple[Mapping[str, Any], Sequence[tuple[int, Link]], float]],
    *,
    layers: int,
) -> None:
    """Print heads that do different things at once: which, how well in tests, and what here.

    Args:
        console: where to print.
        words: of the text.
        leaders: for each head its role, its links (word, link) in this text, and its weight on
            hidden tokens.
        layers: of the model; the colour of a head is the depth of its layer.
    """
    console.print(Text("Why several heads: each looks for something else", "bold"))
    arrow = "->" if is_ascii(console) else "→"
    for role, links, sink in leaders:
        colour = depth_colour(role["layer"], layers)
        kind = KINDS.get(role["role"], "for syntax")
        title = f"{role['layer']}.{role['head']} {kind}: {role['title']}, {_reached(role)}"
        print_wrapped(console, title, f"bold {colour}", indent=0, hanging=INDENT)
        pairs = [
            f"{fit(console, words[i])} {arrow} {fit(console, words[j])} {hundredths(weight)}"
            for i, (j, weight, _, _) in links
        ]
        text = "   ".join(pairs) or "nothing here that it looks at"
        print_wrapped(console, f"{text}   (sink {hundredths(sink)})", colour, width=console.width)
    if not leaders:
        print_wrapped(console, "No such head was found in this model.", "dim", indent=0)


def _reached(role: Mapping[str, Any]) -> str:
    if role["role"] == "local":
        return f"{role['held_out']:.1f} tokens away in tests (by chance {role['chance']:.1f})"
    base = max(role[name] or 0.0 for name in ("chance", "rule", "others"))
    return f"{hundredths(role['held_out'])} in tests (best simple rule {hundredths(base)})"


COLUMNS = ("head", "score", "held", "chance", "rule", "others", "median", "n", "needed")
LAST = ("score", "median", "chance", "n", "others", "rule", "needed")  # left out first if narrow


def show_roles(console: Console, rows: Sequence[Mapping[str, Any]], *, layers: int) -> None:
    """Print the table of roles: the best head of each, its scores and what they are held against.

    Args:
        console: where to print.
        rows: of the table.
        layers: of the model.
    """
    print_wrapped(console, "Which head does what, on texts made to tell", style="bold", indent=0)
    if not rows:
        print_wrapped(console, "No role could be measured in this model.", "dim", indent=0)
        return
    table = [["", *COLUMNS], *([row["title"], *_figures(row)] for row in rows)]
    wide = [max(len(line[c]) for line in table) for c in range(len(COLUMNS) + 1)]
    shown = list(range(len(wide)))
    for name in LAST:
        if sum(wide[c] + 2 for c in shown) - 2 > console.width:
            shown.remove(COLUMNS.index(name) + 1)
    for number, line in enumerate(table):
        row = rows[number - 1] if number else None
        text = Text()
        for c in shown:
            style = "dim" if row is None or not row["found"] else ""
            if row is not None and row["found"] and c < 2:
                style = depth_colour(row["layer"], layers)
            text.append(line[c].rjust(wide[c] + 2) if c else line[c].ljust(wide[c]), style)
        console.print(text, no_wrap=True, overflow="crop")
    notes = (
        "score: on the texts that chose the head; held: on others. Shares in hundredths, for local "
        "the mean distance in tokens. rule: the best fixed distance, or the nearer or farther "
        "person. others: how often other words look at the same one. n: held out. needed: whether "
        "the model does worse without the head than without random ones; ? not measured."
    )
    none = [row["title"] for row in rows if not row["found"]]
    if none:
        notes += f" No head was found for {' and '.join(none)}: the baselines do as well."
    print_wrapped(console, notes, "dim", indent=0)


def _figures(row: Mapping[str, Any]) -> tuple[str, ...]:
    def figure(value: float | None) -> str:
        if value is None:
            return "-"
        if not math.isfinite(value):
            return "?"
        return f"{value:.1f}" if row["role"] == "local" else hundredths(value)

    effect = row["effect"]
    needed = "?" if effect is None else "yes" if effect["needed"] else "no"
    shares = (row[name] for name in ("score", "held_out", "chance", "rule", "others", "median"))
    return (f"{row['layer']}.{row['head']}", *map(figure, shares), str(row["n"][1]), needed)


def show_effects(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print for each role what taking its head out did, and random heads instead."""
    print_wrapped(console, "What the model does without these heads", style="bold", indent=0)
    deep = max((len(row["title"]) for row in rows), default=0) + 2
    for row in rows:
        effect = row["effect"]
        said = f"not measured: {row['not_measured']}" if effect is None else effect["said"]
        print_wrapped(console, row["title"].ljust(deep) + said, indent=0, hanging=deep)
