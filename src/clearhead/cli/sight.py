"""What one run of a model on a text shows, as plain lists and numbers: what `see` prints."""

from typing import Any

from torch import Tensor

from clearhead import hf
from clearhead.inspection.links import Look, by_word, statistic
from clearhead.inspection.report import Report
from clearhead.inspection.roles import SYNTAX, RoleRow, RoleTable
from clearhead.view.heads import explains

from .checks import within

OUTSTANDING, LEADING = 6, 4  # links that stand out, and links of a leading head
FAINT = 0.1  # a link of a leading head weaker than this is not shown


def report_of(network: Any, tokens: hf.Tokens, text: str, full: str | None) -> Report:
    """What gathers a run for a page or a picture."""
    config = network.config.get_text_config()
    shape = getattr(config, "num_hidden_layers", None) or 1, config.num_attention_heads
    return Report(text, tokens.offsets, tokens.special, tokens.texts, shape, full)


def look_at(
    network: Any,
    tokens: hf.Tokens,
    text: str,
    table: RoleTable | None,
    stat: str,
    top: int,
    layer: int | None,
    head: int | None,
    hide_sink: bool,
    report: Report | None = None,
) -> dict[str, Any]:
    """Run a model on a text and gather what its heads look at; a report gathers beside it.

    Returns:
        encoder: whether only the encoder was read. heads: how many in each layer. attention: what
        computed it. text, words, causal. tokens, and pieces: these as they stand in the text.
        hidden: the names of the tokens left out, and sink: the mean weight on them. layer, head:
        those asked for. leaders: heads that do different things, each with its links here. links:
        for each word the strongest. outstanding. map: the statistic of each head. picture: the
        weights (L, L) of the head asked for. hidden_tokens: the numbers of those left out.

    Raises:
        ValueError: no such layer or head, or the model cannot be read.
    """
    look = Look(text, tokens.offsets, tokens.special, stat, layer, head, hide_sink)
    leaders = table.leaders() if table is not None and layer is None else []
    between: dict[tuple[int, int], Tensor] = {}
    sinks: list[list[float]] = []
    picture: list[list[float]] | None = None

    def on_layer(number: int, weights: Tensor) -> None:
        nonlocal picture
        if report is not None:
            report.add(number, weights)
        look.add(number, weights)
        weights = weights.cpu()
        sinks.append(statistic("sink", weights, look.hidden.tolist()))
        for row in leaders:
            if row.layer == number:
                shown = weights[row.head : row.head + 1].masked_fill(look.hidden, 0)
                between[row.layer, row.head] = by_word(shown, look.words.word_of)[0]
        if head is not None and number == layer:
            picture = weights[head].tolist()

    ran = hf.attentions(network, tokens, on_layer, None if report is None else report.take)
    if layer is not None:
        within("--layer", layer, 0, len(look.heads) - 1)
    left_out = [
        name if added else "the first token"
        for i, (name, added) in enumerate(zip(tokens.texts, tokens.special, strict=True))
        if added or i == 0
    ]
    words = look.words.texts

    def link(i: int, found: Any) -> dict[str, Any]:
        known = None if table is None else table.heads.get((found.layer, found.head))
        role = None if known is None else known.role
        meaning = explains(role, i, found.target, words)
        return {"source": i, **found._asdict(), "role": role if meaning else None, "is": meaning}

    strongest = look.strongest(top) if words else []
    outstanding = look.outstanding(OUTSTANDING) if words else []
    flat = [value for row in sinks for value in row if value == value]
    return {
        "encoder": hf.reader(network) is not network.base_model,
        "heads": [len(row) for row in look.heads],
        "attention": ran,
        "text": text,
        "tokens": tokens.texts,
        "pieces": [
            text[start:end].strip() or name
            for name, (start, end) in zip(tokens.texts, tokens.offsets, strict=True)
        ],
        "words": words,
        "causal": look.causal,
        "hidden": list(dict.fromkeys(left_out)),
        "sink": sum(flat) / len(flat) if flat else None,
        "sink_hidden": hide_sink,
        "layer": layer,
        "head": head,
        "leaders": _one_of_each([_leader(row, between, sinks, words) for row in leaders]),
        "links": [[link(i, found) for found in row] for i, row in enumerate(strongest)],
        "outstanding": [link(i, found) for i, found in outstanding],
        "map": {"stat": stat, "values": look.heads},
        "picture": picture,
        "hidden_tokens": [i for i, hidden in enumerate(look.hidden.tolist()) if hidden],
    }


def _one_of_each(leaders: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the heads for syntax the one with the strongest link here past a neighbour."""

    def shows(leader: dict[str, Any]) -> float:
        far = [link for link in leader["links"] if link["source"] - link["target"] > 1]
        return max((link["weight"] for link in far if leader["fits"]), default=0.0)

    syntax = [leader for leader in leaders if leader["role"] in SYNTAX]
    verbs = [leader for leader in syntax if leader["role"] in ("verb_subject", "object_verb")]
    best = max(verbs or syntax, key=shows, default=None)
    return [leader for leader in leaders if leader not in syntax or leader is best]


def _leader(
    row: RoleRow,
    between: dict[tuple[int, int], Tensor],
    sinks: list[list[float]],
    words: list[str],
) -> dict[str, Any]:
    """A head with its strongest links in this text, those that fit its role first of all."""
    weights = between[row.layer, row.head].clone().fill_diagonal_(0)
    pairs = [
        (i, int(line.argmax()), float(line.max()))
        for i, line in enumerate(weights)
        if float(line.max()) >= FAINT
    ]
    fitting = [pair for pair in pairs if explains(row.role, pair[0], pair[1], words)]
    pairs = fitting or pairs
    pairs = sorted(sorted(pairs, key=lambda pair: -pair[2])[:LEADING])
    return {
        "role": row.role,
        "layer": row.layer,
        "head": row.head,
        "sink": sinks[row.layer][row.head],
        "fits": bool(fitting),
        "links": [{"source": i, "target": j, "weight": weight} for i, j, weight in pairs],
    }
