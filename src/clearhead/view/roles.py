"""Roles of heads in words: what a page says about each, and the three heads that it begins with.

A row comes in as (role, layer, head, score, baseline, n, held_out, ablation), the last four None
where they were not measured; ablation is a sentence or a number.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

Row = Sequence[Any]

FIELDS = ("role", "layer", "head", "score", "baseline", "n", "held_out", "ablation")


class About(NamedTuple):
    """What is said about a role: a short name for a cell, a heading, what such a head does, where
    it fails, and whether it is about one kind of word (pronouns) whose links are shown first."""

    short: str
    title: str
    does: str
    fails: str
    group: str = ""
    words: tuple[str, ...] = ()


PRONOUNS = ("he", "she", "him", "her", "his", "hers", "it", "they", "them")

ABOUT = {
    "pronoun to noun": About(
        "pron",
        "Which noun a pronoun means",
        "From “he” or “she” it looks back at a person of that gender. It is how the model can know "
        "whom a sentence goes on about.",
        "It goes by gender, not by sense: with two queens, or where only knowledge of the world "
        "would tell, it is no better than a guess. A model that reads from left to right cannot "
        "use what follows the pronoun either.",
        "pronoun",
        PRONOUNS,
    ),
    "object to verb": About(
        "obj",
        "Which verb a word belongs to",
        "From an object, and often from the article before it, it looks back at the verb: from "
        "“bread” to “sold”.",
        "It looks at a verb after words that are no objects as well, and where several verbs stand "
        "near it spreads out. It knows order and likely phrases, not grammar.",
        "syntax",
    ),
    "verb to subject": About(
        "subj",
        "Who does it",
        "From a verb it looks back at its subject, also past words between them.",
        "Where another noun stands nearer, it often takes that one.",
        "syntax",
    ),
    "noun to determiner": About(
        "det",
        "Which article a noun has",
        "From a noun it looks back at “the”, “a” or “my”.",
        "A noun's article is usually near, so that a fixed distance finds it often too: see the "
        "baseline.",
        "syntax",
    ),
    "noun to adjective": About(
        "adj",
        "Which adjective a noun has",
        "From a noun it looks back at an adjective that does not stand right before it.",
        "Adjacent pairs are left out of the score: a head that looks at the word before finds them "
        "without knowing of adjectives.",
        "syntax",
    ),
    "previous token": About(
        "prev",
        "What stands right before",
        "From each word it looks at the one before, whatever that is. Other heads build on it.",
        "It knows place, not meaning: it takes the word before a full stop or a quotation mark "
        "just as well.",
        "local",
    ),
    "local": About(
        "near",
        "What stands nearby",
        "From each word it looks at its near neighbours.",
        "It knows places, not meanings.",
        "local",
    ),
    "same token": About(
        "self",
        "The word itself",
        "Each word looks at itself.",
        "It brings in nothing from elsewhere.",
    ),
    "first token": About(
        "sink",
        "At rest on the first word",
        "It leaves its attention on the first word, which is how a head does nothing.",
        "A head at rest on one text may be busy on another.",
    ),
    "duplicate token": About(
        "dupl",
        "The same word before",
        "From a word that came before it looks at the earlier one.",
        "It knows the spelling, not whether the same thing is meant.",
    ),
    "induction": About(
        "ind",
        "What came next last time",
        "Where something repeats, it looks at what followed the first time, so that the model can "
        "go on.",
        "Without a repetition it rests.",
    ),
}
OTHER = About("role", "", "", "")
FOUND = 0.2  # of the way from the baseline to a perfect score; less is no role
THREE = ("pronoun", "syntax", "local")


def rows(table: Iterable[Row]) -> list[dict[str, Any]]:
    """Rows as the page takes them: with a short name and a colour for each role.

    Roles keep the order in which they come first; in each the best head comes first.
    """
    found = [dict(zip(FIELDS, row, strict=True)) for row in table]
    roles = list(dict.fromkeys(row["role"] for row in found))
    found.sort(key=lambda row: (roles.index(row["role"]), -row["score"]))
    for row in found:
        row["short"] = ABOUT.get(row["role"], OTHER).short
        row["colour"] = roles.index(row["role"]) % 7
        if isinstance(row["ablation"], float):
            row["ablation"] = f"{row['ablation']:+.2f}"
    return found


def badges(found: Iterable[Row], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What to write on heads, (role, layer, head, score) each, in the colours of rows."""
    colours = {row["role"]: row["colour"] for row in rows}
    return [
        {
            "role": role,
            "layer": layer,
            "head": head,
            "score": score,
            "short": ABOUT.get(role, OTHER).short,
            "colour": colours.setdefault(role, len(colours) % 7),
        }
        for role, layer, head, score in found
    ]


def three(
    rows: Sequence[dict[str, Any]],
    tokens: Sequence[str],
    preferred: Sequence[tuple[int, int]] = (),
) -> list[dict[str, Any]]:
    """The best head for pronouns, for syntax and for what is near, as far as there are such.

    Args:
        rows: as the function of that name gives them.
        tokens: of the text, to begin with a word that the head is made for.
        preferred: (layer, head) of those to take where their group has them.
    """
    found = []
    for group in THREE:
        of_group = [row for row in rows if ABOUT.get(row["role"], OTHER).group == group]
        wanted = [row for row in of_group if (row["layer"], row["head"]) in preferred]
        best = max(wanted or of_group, key=_lift, default=None)
        if best is None or _lift(best) < FOUND:
            continue
        about = ABOUT[best["role"]]
        bars = [{"name": f"head {best['layer']}.{best['head']}", "value": best["score"]}]
        if best["held_out"] is not None:
            bars.append({"name": "on cases held out", "value": best["held_out"]})
        if best["baseline"] is not None:
            bars.append({"name": "best simple rule", "value": best["baseline"]})
        found.append(
            {
                "layer": best["layer"],
                "head": best["head"],
                "title": about.title,
                "does": about.does,
                "evidence": evidence(best),
                "fails": about.fails,
                "bars": bars,
                "focus": [
                    i for i, token in enumerate(tokens) if token.strip().lower() in about.words
                ],
            }
        )
    return found


def evidence(row: dict[str, Any]) -> str:
    """What was measured, in a sentence or two."""
    on = f" in {row['n']} test cases" if row["n"] else ""
    parts = [f"It reaches {_share(row['score'])}{on}."]
    if row["baseline"] is not None:
        parts.append(f"The best simple rule reaches {_share(row['baseline'])}.")
    if row["ablation"]:
        parts.append(f"Switched off: {str(row['ablation']).rstrip('.')}.")
    return " ".join(parts)


def measured(statistics: dict[str, Sequence[float]], heads: Sequence[int]) -> list[dict[str, Any]]:
    """Three heads where no roles were tested: those that stand out on this text alone.

    Args:
        statistics: one number for each head, in one list.
        heads: how many there are in each layer.
    """
    kinds = (
        ("previous", "What stands right before", "Of all heads it gives the word before most.", 1),
        ("distance", "What is far away", "Of all busy heads it looks farthest back.", 1),
        ("entropy", "A little of everything", "Of all heads it spreads its attention widest.", 1),
    )
    places = [(layer, head) for layer, count in enumerate(heads) for head in range(count)]
    sink = statistics["sink"]
    busy = [n for n in range(len(places)) if sink[n] < 0.5] or list(range(len(places)))
    found: list[dict[str, Any]] = []
    for name, title, does, sign in kinds:
        left = [n for n in busy if places[n] not in [(t["layer"], t["head"]) for t in found]]
        if not left:
            break
        best = max(left, key=lambda n: sign * statistics[name][n])
        found.append(
            {
                "layer": places[best][0],
                "head": places[best][1],
                "title": title,
                "does": does,
                "evidence": "This text alone: no roles were tested for this model.",
                "fails": "What a head does with one text says little about what it does with "
                "others.",
                "bars": [],
                "focus": [],
            }
        )
    return found


def _lift(row: dict[str, Any]) -> float:
    """How far a score, on cases held out if there are such, is past its baseline: 1 is perfect."""
    score = row["score"] if row["held_out"] is None else row["held_out"]
    base = row["baseline"] or 0.0
    return (score - base) / (1 - base) if base < 1 else 0.0


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"
