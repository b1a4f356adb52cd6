"""What taking a head out does to the model, next to taking out heads drawn at random.

Each role has a number that should depend on its head, measured on the half of the texts that did
not choose the head:

    previous, sink, same, local   the loss on all tokens of the sentences
    verb_subject ... adjective    the loss on the token after the word that looks
    duplicate, induction          the loss on the second time of the repeated tokens; the four best
                                  heads at once, because models have several
    pronoun_noun                  logit(right noun) - logit(wrong noun) where a text goes on in a
                                  way that turns on whom the pronoun meant

Losses are means of -log p in nats.
"""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import torch

from . import sentences
from .probes import OnProgress, Probe, losses, preferences, without
from .role_table import PAIRS, Effect, RoleTable
from .tally import located

SENTENCES = 30  # for which heads are taken out; all 48 would take a third longer
CONTROLS = 5  # sets of random heads, because one set may hold a head that matters by chance

Heads = tuple[tuple[int, int], ...]
REPEATED = ("duplicate", "induction")


def unmeasured(table: RoleTable, reason: str) -> RoleTable:
    """The table with the same reason everywhere why no head was taken out."""
    rows = (dataclasses.replace(row, effect=None, not_measured=reason) for row in table.rows)
    return dataclasses.replace(table, rows=tuple(rows))


def measure_effects(
    model: Any,
    tokenizer: Any,
    table: RoleTable,
    texts: Sequence[Probe],
    repeats: Sequence[Probe],
    told: OnProgress,
) -> RoleTable:
    """The table with an effect in each row, or with the reason why there is none.

    Args:
        model: causal, with its language-model head.
        texts, repeats: of both halves; the half 1 is used.
        told: called as told(what, done, total).
    """
    sizes = [len(layer) for layer in next(iter(table.scores.values()), [])]
    if getattr(model, "get_output_embeddings", lambda: None)() is None:
        return unmeasured(table, "the model has no language-model head")

    prose = [p for p in texts if p.half and not any(pair.rival for pair in p.pairs)]
    prose, again = prose[:SENTENCES], [p for p in repeats if p.half]
    asked, choices = _questions(tokenizer)
    numbers_of = {
        "prose": lambda: _prose(model, prose),
        "repeats": lambda: {"": _mean(_again(model, again))},
        "questions": lambda: {"": preferences(model, asked, choices)},
    }
    texts_of = {"prose": prose, "repeats": again, "questions": asked}
    single = {row.role: row.best[:1] for row in table.rows}
    single |= {row.role: row.best for row in table.rows if row.role in REPEATED}
    place_of = {row.role: _place(row.role) for row in table.rows}
    if not asked:
        place_of.pop("pronoun_noun", None)

    wanted: list[tuple[str, Heads]] = [(place, ()) for place in dict.fromkeys(place_of.values())]
    controls: dict[tuple[str, int], list[Heads]] = {}
    used = {head for row in table.rows for head in row.best}
    for role, place in place_of.items():
        wanted.append((place, single[role]))
        if role == "induction" and prose:
            wanted.append(("prose", single[role]))
        key = place, len(single[role])
        if key not in controls:
            controls[key] = _controls(sizes, used, single[role])
            wanted += [(place, heads) for heads in controls[key]]
    wanted = list(dict.fromkeys(wanted))
    measured: dict[tuple[str, Heads], dict[str, float]] = {}
    for done, (place, heads) in enumerate(wanted):
        told("taking heads out", done, len(wanted))
        try:
            with without(model, heads):
                measured[place, heads] = numbers_of[place]()
        except NotImplementedError as error:  # heads that are mixed out of sight
            return unmeasured(table, str(error))
    told("taking heads out", len(wanted), len(wanted))

    rows = []
    for row in table.rows:
        if row.role not in place_of:
            reason = "the tokenizer does not tell the nouns of the question apart"
            rows.append(dataclasses.replace(row, not_measured=reason))
            continue
        place, heads = place_of[row.role], single[row.role]
        name = row.role if row.role in PAIRS and place == "prose" else ""
        induced = row.role == "induction" and prose
        effect = Effect(
            measure=MEASURES[place, bool(name)],
            is_loss=place != "questions",
            heads=heads,
            before=measured[place, ()][name],
            after=measured[place, heads][name],
            controls=tuple(measured[place, other][name] for other in controls[place, len(heads)]),
            texts=len(texts_of[place]),
            elsewhere=(measured["prose", ()][""], measured["prose", heads][""])
            if induced
            else None,
        )
        rows.append(dataclasses.replace(row, effect=effect))
    return dataclasses.replace(table, rows=tuple(rows))


MEASURES = {
    ("prose", False): "loss on the sentences",
    ("prose", True): "loss on the token after the word that looks",
    ("repeats", False): "loss on the second time of the repeated tokens",
    ("questions", False): "logit of the noun that the pronoun meant, less that of the other noun",
}


def _place(role: str) -> str:
    if role in REPEATED:
        return "repeats"
    return "questions" if role == "pronoun_noun" else "prose"


def _controls(sizes: Sequence[int], used: set[tuple[int, int]], heads: Heads) -> list[Heads]:
    """Sets of as many random heads: of those that play no role, where there are enough."""
    everyone = [(layer, head) for layer, H in enumerate(sizes) for head in range(H)]
    pool = [head for head in everyone if head not in used]
    if len(pool) < len(heads):
        pool = [head for head in everyone if head not in heads]
    if len(pool) < len(heads):
        return []
    draw = random.Random(len(heads))
    return [tuple(sorted(draw.sample(pool, len(heads)))) for _ in range(CONTROLS)]


def _mean(values: Sequence[torch.Tensor]) -> float:
    return float(torch.cat(list(values)).double().mean()) if values else float("nan")


def _prose(model: Any, probes: Sequence[Probe]) -> dict[str, float]:
    """Mean loss over all tokens, under "", and for each role over what follows its words."""
    lost = losses(model, probes)
    after: dict[str, list[torch.Tensor]] = {"": lost}
    for probe, loss in zip(probes, lost, strict=True):
        for role, source, _, _ in located(probe.pairs, probe.offsets, probe.words):
            after.setdefault(role, []).append(loss[source : source + 1])
    return {role: _mean(values) for role, values in after.items()}


def _again(model: Any, probes: Sequence[Probe]) -> list[torch.Tensor]:
    """Losses on the repeated tokens but the first of them, which nothing foretells."""
    return [
        loss[probe.start + probe.R : probe.start + 2 * probe.R - 1]
        for probe, loss in zip(probes, losses(model, probes), strict=True)
    ]


def _questions(tokenizer: Any) -> tuple[list[Probe], list[tuple[int, int]]]:
    """The texts of sentences.continued(), and the token numbers of the right and wrong noun."""
    probes, choices = [], []
    for text, right, wrong in sentences.continued():
        encoded = tokenizer(text, return_special_tokens_mask=True)
        ids, special = encoded["input_ids"], encoded["special_tokens_mask"]
        while special and special[-1]:  # a text that is to go on has no end
            ids, special = ids[:-1], special[:-1]
        pair = [_next(tokenizer, text, noun) for noun in (right, wrong)]
        if pair[0] != pair[1]:
            probes.append(Probe(ids, [False] * len(ids), 1))
            choices.append((pair[0], pair[1]))
    return probes, choices


def _next(tokenizer: Any, text: str, noun: str) -> int:
    """The first token of a noun that follows a text."""
    bare = tokenizer(text, add_special_tokens=False)["input_ids"]
    return int(tokenizer(f"{text} {noun}", add_special_tokens=False)["input_ids"][len(bare)])
