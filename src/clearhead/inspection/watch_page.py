"""The page of what `watch` saw: all heads of one forward, from the weights that it kept."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ..results import Summary
from .capture import Capture
from .links import is_causal
from .names import Layers, as_list, is_layer

if TYPE_CHECKING:
    from .record import Record, Seen


def page_of(
    seen: "Seen",
    tokens: Sequence[str] | None,
    title: str,
    layers: Layers | None,
    step: int | None,
    sequence: int,
    full: str | None,
) -> str:
    """The page as text; see `Seen.to_html`."""
    from ..view import page, roles

    records = _chosen(seen, layers, step)
    L = records[0].L
    words = [" " * (i > 0) + str(i + 1) for i in range(L)] if tokens is None else list(tokens)
    weights = [_weights(record, sequence) for record in records]
    if len(words) != L:
        raise ValueError(
            f"to_html: got {len(words)} tokens, and the layers were called with {L}; give one each"
        )
    if full == "qk":
        raise ValueError(
            'to_html: full is "qk", but a watch keeps no queries and keys; full="maps" keeps all '
            "weights"
        )
    hidden = [i == 0 for i in range(L)]
    rows = records[0].rows
    if rows is not None:
        hidden = [first or not counts for first, counts in zip(hidden, rows[sequence].tolist(),
                                                               strict=True)]  # fmt: skip
    capture = Capture(words, hidden, full, (len(records), max(map(len, weights))))
    capture.causal = all(map(is_causal, weights))
    for record, of_layer in zip(records, weights, strict=True):
        capture.add(of_layer, extra=_largest_score(record, sequence))
    data = capture.data()
    return page.page(
        title=title,
        about=_about(records, L),
        attention=data,
        three=roles.measured(data["statistics"], data["heads"]),
    )


def _chosen(seen: "Seen", layers: Layers | None, step: int | None) -> "list[Record]":
    """One record with weights for each wanted layer, all of one forward and of the same tokens."""
    wanted = None if layers is None else as_list("layers", layers)
    for one in wanted or ():
        if not any(is_layer(one, r.layer, r.number) for r in seen):
            raise ValueError(f"to_html: there is no layer {one!r}; recorded are {seen.layers}")
    found = [
        r for r in seen
        if wanted is None or any(is_layer(one, r.layer, r.number) for one in wanted)
    ]  # fmt: skip
    steps = sorted({r.step for r in found})
    if step is not None:
        found = [r for r in found if r.step == step]
    if not found:
        raise ValueError(f"to_html: nothing was recorded in step {step}; recorded are {steps}")
    if len({r.step for r in found}) > 1:
        raise ValueError(
            f"to_html: a page shows one forward, and {len(steps)} were recorded; name one, as in "
            f"step={steps[0]}"
        )
    if any(r.aux.weights is None for r in found):
        raise ValueError(
            "to_html: no weights were recorded; watch with aux=AuxRequest(weights=True)"
        )
    if len({(r.L, r.S) for r in found}) > 1 or found[0].L != found[0].S or not found[0].L:
        sizes = ", ".join(f"{r.layer} ({r.L}, {r.S})" for r in found[:6])
        raise ValueError(
            "to_html: a page shows layers whose rows and keys are the same tokens; recorded, with "
            f"their rows and keys, are {sizes}{' ...' * (len(found) > 6)}. Name those to show, as "
            'in layers="encoder"'
        )
    return sorted(found, key=lambda r: r.number)


def _weights(record: "Record", sequence: int) -> Tensor:
    """(H, L, L) of one sequence; rows that see nothing are 0."""
    weights = record.aux.weights
    assert weights is not None
    if not 0 <= sequence < len(weights):
        raise ValueError(
            f"to_html: sequence is {sequence}, but layer {record.layer} was called with "
            f"{len(weights)}, from 0 to {len(weights) - 1}"
        )
    return weights[sequence].cpu().float().nan_to_num(0)


def _largest_score(record: "Record", sequence: int) -> dict[str, list[float]]:
    held = record.aux.max_logit
    if held is None:
        return {}
    largest = held.max if isinstance(held, Summary) else held.amax(-1)
    return {"max_logit": largest[sequence].tolist()}


def _about(records: "list[Record]", L: int) -> str:
    """Which layers and heads the page's numbers stand for."""
    first, n = records[0], len(records)
    names = first.layer if n == 1 else f"{first.layer} to {records[-1].layer}"
    heads = len(first.heads)
    about = f"{n} layer{'s' * (n != 1)} ({names}), {heads} head{'s' * (heads != 1)}"
    if any(r.heads != list(range(len(r.heads))) for r in records):
        about += f" (the model's {', '.join(map(str, first.heads))})"
    return f"{about}, {L} token{'s' * (L != 1)}"
