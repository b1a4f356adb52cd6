"""The table that says which head plays which role, and what a number in it is worth.

tabulate() makes it from a Tally: the head of each role is chosen on one half of the texts and
judged on the other, beside what chance, the best fixed distance and the median head get.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from . import sentences
from .tally import LEAST_OFF_SINK, Count, Tally, joined

VERSION = f"1.{sentences.VERSION}"  # of the scores; raise the first part when they change

FOUND = 0.2  # of the way from the best baseline to a perfect score: from here on a role is found
PLAYS = 0.3  # and from here on a single head is said to play it
BEST = 4  # heads of a role that are named
RESTS = 0.5  # a head with so much of its weight on hidden tokens rests, if it does nothing else


class Role(NamedTuple):
    """What a role is called, and what its score counts."""

    title: str
    meaning: str


ROLES = {
    "previous": Role("previous token", "mean weight on the token before"),
    "sink": Role("first token", "mean weight on the first token and on added ones"),
    "same": Role("same token", "mean weight on the token itself"),
    "local": Role("local", "mean distance in tokens, without the sink and the token itself"),
    "duplicate": Role(
        "duplicate token", "mean weight on the last occurrence of the same random token"
    ),
    "induction": Role(
        "induction", "mean weight on what followed the last occurrence of the same random token"
    ),
    "verb_subject": Role("verb to subject", "share of verbs that look at their subject most"),
    "object_verb": Role("object to verb", "share of objects that look at their verb most"),
    "noun_determiner": Role(
        "noun to determiner", "share of nouns that look at their determiner most"
    ),
    "noun_adjective": Role(
        "noun to adjective", "share of nouns that look most at an adjective of theirs, not adjacent"
    ),
    "pronoun_noun": Role(
        "pronoun to noun", "share of pronouns that look most at the noun of their gender"
    ),
}
SYNTAX = ("verb_subject", "object_verb", "noun_determiner", "noun_adjective")
PAIRS = (*SYNTAX, "pronoun_noun")


@dataclass(frozen=True)
class Effect:
    """What taking heads out does to a number that should depend on them.

    measure: what the number is, in words. is_loss: whether it should be low, not high. heads: those
    taken out, (layer, head). before, after: the number with and without them. controls: the number
    without as many random heads, for each of several draws. texts: over how many texts. elsewhere:
    where measured, the loss on ordinary sentences before and after.
    """

    measure: str
    is_loss: bool
    heads: tuple[tuple[int, int], ...]
    before: float
    after: float
    controls: tuple[float, ...]
    texts: int
    elsewhere: tuple[float, float] | None = None

    @property
    def needed(self) -> bool:
        """Whether the model does worse without the heads than without any control set."""
        sign = 1 if self.is_loss else -1
        worst = max([0.0, *(sign * (control - self.before) for control in self.controls)])
        return bool(self.controls) and sign * (self.after - self.before) > worst

    def __str__(self) -> str:
        text = f"{self.measure} {self.before:.2f} -> {self.after:.2f}"
        if len(self.heads) > 1:
            text += " without " + ", ".join(f"{layer}.{head}" for layer, head in self.heads)
        if self.controls:
            text += f"; with random heads out {min(self.controls):.2f} to {max(self.controls):.2f}"
        return text


@dataclass(frozen=True)
class RoleRow:
    """The head that plays one role best, and how much that says.

    layer, head: chosen on one half of the texts, from 0. best: the few best there, this one first.
    score: there. held_out: on the other half. n: how many rows or pairs each half has. weight: mean
    weight on the right word, for pairs. chance: what looking at everything alike would score on the
    held-out half. rule: what the best fixed distance scores there, chosen in hindsight; for
    pronouns, the nearer or farther person; None where there is no such rule. median: what the
    median head scores there. others: for pairs, how often the same head looks from the other words
    behind the right one at it; near the score, the head cares for the target alone. found: whether
    held_out is past chance, rule and others by FOUND of what is left. effect: of taking the head
    out, or None, and then not_measured says why.
    """

    role: str
    layer: int
    head: int
    best: tuple[tuple[int, int], ...]
    score: float
    held_out: float
    n: tuple[int, int]
    weight: float | None
    chance: float
    rule: float | None
    median: float
    others: float | None
    found: bool
    effect: Effect | None = None
    not_measured: str | None = None

    @property
    def lift(self) -> float:
        """How far held_out is past the best baseline, as a share of what is left to 1."""
        return lift(self.role, self.held_out, self.chance, self.rule, self.others)


@dataclass(frozen=True)
class HeadRole:
    """What one head does best: a role, its score over all texts, and how far that is past chance
    rule and others, from 0 to 1 (perfect)."""

    role: str
    score: float
    lift: float


@dataclass(frozen=True)
class RoleTable:
    """Roles of a model's heads.

    rows: one for each role that could be measured, in the order of ROLES. scores: for each role
    scores[role][layer][head] over all texts, None where a head has none. heads: (layer, head) ->
    what it does best; heads that do nothing of it well enough are missing.
    """

    rows: tuple[RoleRow, ...]
    scores: dict[str, list[list[float | None]]]
    heads: dict[tuple[int, int], HeadRole]

    def row(self, role: str) -> RoleRow | None:
        """The row of a role, a key of ROLES; None where it could not be measured."""
        return next((row for row in self.rows if row.role == role), None)

    def leaders(self) -> list[RoleRow]:
        """Heads that do different things: for pronouns, then for syntax, then for what is near.

        Those for syntax come by how far they are past their baselines. Roles that were not found
        are left out.
        """
        syntax = [row for row in map(self.row, SYNTAX) if row is not None]
        syntax.sort(key=lambda row: -row.lift)
        chosen = [self.row("pronoun_noun"), *syntax, self.row("local")]
        return [row for row in chosen if row is not None and row.found]

    def summary(self) -> list[tuple[Any, ...]]:
        """(role, layer, head, score, baseline, n, held_out, ablation) for each row, in words.

        baseline: the best of chance, rule and others. n: of both halves. ablation: a sentence, or
        None. Left out is "local", whose score is a distance.
        """
        return [
            (
                ROLES[row.role].title,
                row.layer,
                row.head,
                row.score,
                max(row.chance, row.rule or 0.0, row.others or 0.0),
                sum(row.n),
                row.held_out,
                row.effect and str(row.effect),
            )
            for row in self.rows
            if row.role != "local"
        ]

    def badges(self) -> list[tuple[str, int, int, float]]:
        """(role, layer, head, score) of each head that has a role, in words."""
        return [
            (ROLES[row.role].title, layer, head, row.score)
            for (layer, head), row in self.heads.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        """The table in plain lists and numbers, ready for JSON."""
        return {
            "version": VERSION,
            "rows": [_told(row) for row in self.rows],
            "scores": self.scores,
            "heads": [
                {"layer": layer, "head": head, **dataclasses.asdict(role)}
                for (layer, head), role in self.heads.items()
            ],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "RoleTable":
        """What to_dict() gave. Raises ValueError for anything else, another version included."""
        try:
            if data["version"] != VERSION:
                raise ValueError(f"the roles are of version {data['version']}, not {VERSION}")
            return cls(
                rows=tuple(map(_row, data["rows"])),
                scores={role: data["scores"][role] for role in data["scores"] if role in ROLES},
                heads={
                    (entry.pop("layer"), entry.pop("head")): HeadRole(**entry)
                    for entry in map(dict, data["heads"])
                },
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this is no table of roles: {error}") from error


def _told(row: RoleRow) -> dict[str, Any]:
    """A row in plain values, with what follows from them in words."""
    data = {"title": ROLES[row.role].title, **dataclasses.asdict(row)}
    if row.effect is not None:
        data["effect"] |= {"needed": row.effect.needed, "said": str(row.effect)}
    return data


def _row(data: dict[str, Any]) -> RoleRow:
    data = {name: value for name, value in data.items() if name != "title"}
    effect = data["effect"]
    if effect is not None:
        effect = {k: value for k, value in effect.items() if k not in ("needed", "said")}
        other = effect["elsewhere"]
        effect = Effect(
            **effect
            | {
                "heads": tuple(map(tuple, effect["heads"])),
                "controls": tuple(effect["controls"]),
                "elsewhere": None if other is None else tuple(other),
            }
        )
    best = tuple((layer, head) for layer, head in data["best"])
    return RoleRow(**data | {"n": tuple(data["n"]), "best": best, "effect": effect})


def lift(role: str, score: float, *bases: float | None) -> float:
    """How far a score is past the best baseline: 0 at it, 1 where perfect, -1 at worst."""
    base = max(base for base in bases if base is not None)
    perfect = 1.0
    if role == "local":  # a distance: the nearest other token is 1 away
        score, base, perfect = -score, -base, -1.0
    if not math.isfinite(score) or base >= perfect:
        return -1.0
    return max(-1.0, (score - base) / (perfect - base))


def tabulate(tally: Tally) -> RoleTable:
    """The table of what was added to a tally, without effects."""
    rows: list[RoleRow] = []
    scores: dict[str, list[list[float | None]]] = {}
    best: dict[int, HeadRole] = {}
    for role in ROLES:
        halves = tally.counts.get(role)
        if halves is None or not all(count.n for count in halves):
            continue
        chosen_by, held_out = (_scores(role, count) for count in halves)
        everything = joined(halves)
        overall = _scores(role, everything)
        sign = 1 if role == "local" else -1
        order = sorted(range(len(tally.heads)), key=lambda k: sign * chosen_by[k])
        k = order[0]
        judge = halves[1]
        row = RoleRow(
            role,
            *tally.heads[k],
            best=tuple(tally.heads[k] for k in order[:BEST]),
            score=chosen_by[k],
            held_out=held_out[k],
            n=(halves[0].n, judge.n),
            weight=float(judge.weight[k] / judge.n) if role in PAIRS else None,
            chance=judge.by_chance,
            rule=judge.by_rule,
            median=sorted(held_out)[len(held_out) // 2],
            others=None if judge.by_others is None else float(judge.by_others[k]),
            found=False,
        )
        rows.append(dataclasses.replace(row, found=row.lift >= FOUND))
        table: list[list[float | None]] = [[] for _ in range(tally.heads[-1][0] + 1)]
        for k, (layer, _) in enumerate(tally.heads):
            score = overall[k]
            table[layer].append(round(score, 4) if math.isfinite(score) else None)
            elsewhere = None if everything.by_others is None else float(everything.by_others[k])
            bases = everything.by_chance, everything.by_rule, elsewhere
            found = HeadRole(role, score, lift(role, score, *bases))
            if _better(found, best.get(k)):
                best[k] = found
        scores[role] = table
    return RoleTable(tuple(rows), scores, {tally.heads[k]: best[k] for k in sorted(best)})


def _scores(role: str, count: Count) -> list[float]:
    scores: list[float] = count.mean.tolist()
    if role != "local":
        return scores
    off = (count.per / count.n).tolist()
    return [s if o >= LEAST_OFF_SINK else math.inf for s, o in zip(scores, off, strict=True)]


def _better(found: HeadRole, known: HeadRole | None) -> bool:
    """Whether a head is better described by a role than by what is known of it."""
    rank = {"sink": 1, "local": 0}  # what is left to heads that do nothing more telling

    def key(entry: HeadRole) -> tuple[int, float]:
        return rank.get(entry.role, 2), entry.lift

    enough = found.score >= RESTS if found.role == "sink" else found.lift >= PLAYS
    return enough and (known is None or key(found) > key(known))
