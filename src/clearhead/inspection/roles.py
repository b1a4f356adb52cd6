"""Which head does what: every head of a model scored for eleven roles, with what speaks against it.

roles() runs a model on the texts of sentences.py and on repeated random tokens, and answers with a
RoleTable. The head of a role is chosen on one half of the texts and judged on the other. Beside its
score stand what chance and the best rule of fixed distance would get, and what happens to the model
when the head is taken out, next to the same with heads drawn at random.

A score says what a head looks at in these texts. That the model needs the head for anything is a
second question, which only the effect speaks to; and a head may do other things in other texts.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from . import sentences
from .effects import measure_effects, unmeasured
from .probes import (
    OnProgress,
    Probe,
    batches,
    repeat_probes,
    sentence_probe,
    weights_of,
)
from .role_table import ROLES, SYNTAX, VERSION, Effect, HeadRole, Role, RoleRow, RoleTable, tabulate
from .tally import Tally, located

__all__ = [
    "ROLES",
    "SYNTAX",
    "VERSION",
    "Effect",
    "HeadRole",
    "OnProgress",
    "Role",
    "RoleRow",
    "RoleTable",
    "Tally",
    "roles",
    "tabulate",
]


def roles(
    model: Any, tokenizer: Any, *, ablate: bool = True, progress: OnProgress | None = None
) -> RoleTable:
    """Score every head of a model for every role of ROLES.

    Args:
        model: of transformers, or one that is called alike, with its language-model head, if it
            has one; an encoder-decoder's encoder is read. Its attention may be fused.
        tokenizer: a fast one, which tells where in the text its tokens are.
        ablate: whether to take heads out, too, to see what that does; twice the time or more.
        progress: called as progress(what, done, total) before and after each batch.

    Returns:
        The table. A role whose texts the model cannot read (too long, words unknown) has no row.

    Raises:
        ValueError: no attention of the model can be seen.
    """
    told: OnProgress = progress or (lambda what, done, total: None)
    whole, model = model, _reader(model)
    limit = getattr(model.config, "max_position_embeddings", None) or 512
    texts = [sentence_probe(tokenizer, s) for s in [*sentences.syntax(), *sentences.pronouns()]]
    texts = [probe for probe in texts if len(probe.ids) <= limit - 2]
    repeats = repeat_probes(tokenizer, limit - 2)
    tally = Tally()
    body = getattr(model, "base_model", model)
    todo = [*batches(texts), *batches(repeats)]
    for done, batch in enumerate(todo):
        told("reading sentences", done, len(todo))
        for probe, weights in zip(batch, weights_of(body, batch), strict=True):
            take_in(tally, probe, weights)
    told("reading sentences", len(todo), len(todo))
    table = tabulate(tally)
    if not ablate:
        return unmeasured(table, "not asked for")
    if whole is not model or not tally.causal:
        return unmeasured(table, "the model reads both ways, so it predicts no next token")
    return measure_effects(whole, tokenizer, table, texts, repeats, told)


def _reader(model: Any) -> Any:
    if getattr(model.config, "is_encoder_decoder", False):
        return model.get_encoder()
    return model


def take_in(tally: Tally, probe: Probe, weights: Sequence[Tensor]) -> None:
    """Add the weights (H, L, L) of each layer on one text."""
    if probe.R:
        tally.add_repeat(weights, probe.start, probe.R, probe.half)
    else:
        pairs = located(probe.pairs, probe.offsets, probe.words)
        # Eight sentences that differ in a word only would count a habit eight times.
        habits = not any(pair.rival for pair in probe.pairs)
        tally.add_text(weights, probe.words, probe.special, pairs, probe.half, habits)
