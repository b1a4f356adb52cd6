"""The steps of one attention call that was caught in a model: from q, k and v to what it returned.

Every line of code reads `call`, a `Caught`, whose numbers are the call's own.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .caught import Caught, hold, rounding
from .steps import (
    CONTEXT,
    FUTURE,
    JOINED,
    OUTPUT,
    PAIRS,
    PER_TOKEN,
    SCORES,
    TOKENS,
    Recorder,
    Step,
    Steps,
)

QUERIES = (
    "Queries",
    (
        "What each word looks for, one row a word, as the call got it: split into heads, and "
        "turned by its position where the model does so."
    ),
)
KEYS = "Keys", "What each word can be found by."
VALUES = "Values", "What each word hands over to those who find it."


def heads_at_work(q: Tensor, k: Tensor, v: Tensor, tokens: Sequence[str]) -> list[Step]:
    """The steps from given queries, keys and values (H, L, D) to context, causally.

    >>> [step.name for step in heads_at_work(*torch.randn(3, 2, 5, 4), "abcde")]
    ['q', 'k', 'v', 'scores', 'masked', 'weights', 'context']
    """
    H, L, D = q.shape
    future = torch.ones(H, L, L, dtype=torch.bool, device=q.device).triu(1)
    call = Caught("", "", list(range(H)), H, q.dtype, query=q, key=k, value=v)
    call.allowed, call.scale = ~future if L > 1 else None, 1 / math.sqrt(D)
    recorder = Recorder(tokens, call=call, head_dim=D)
    _attend(recorder, call)
    return recorder.steps


def steps_of(call: Caught, tokens: Sequence[str] | None) -> Steps:
    """All steps of a call, held to its own context, weights and output.

    Raises:
        ValueError: tokens are not as many as its keys. NotImplementedError: a number is not what
        the call made of it.
    """
    L, S = call.sizes
    words = [str(j + 1) for j in range(max(L, S))] if tokens is None else list(tokens)
    if tokens is not None and len(words) != S:
        raise ValueError(
            f"trace: got {len(words)} tokens for {S} keys of layer {call.layer}; give one a key"
        )
    recorder = Recorder(words, call=call)
    if call.query is not None:
        recorder.names["head_dim"] = call.query.shape[-1]
    with torch.no_grad():
        size = 1 + _attend(recorder, call)
        made = {step.name: step.values for step in recorder.steps}
        if call.weights is not None:
            hold(call, "weights", made["weights"], _seen(call, call.weights), size)
        if call.value is not None and call.context is not None:
            largest = float(call.value.abs().max())
            hold(call, "context", made["context"], _seen(call, call.context), size * largest)
            if call.every_head:
                _end(recorder, call, size * largest)
    learned = {} if call.out_weight is None else {"out_proj": call.out_weight.T}
    return Steps(recorder.steps, learned, call)


def _attend(recorder: Recorder, call: Caught) -> float:
    """Record q, k, v to context; gives the largest number that enters the softmax."""
    step, L, S = recorder.step, *call.sizes
    share = f".repeat_interleave({call.G}, dim=0)" if call.G > 1 else ""
    shared = f" {call.G} heads each read the same ones." if share else ""
    held, divided = "", False
    if call.query is not None and call.key is not None:
        step(PER_TOKEN, "q = call.query", *QUERIES)
        step(PER_TOKEN, f"k = call.key{share}", KEYS[0], KEYS[1] + shared)
    if call.value is not None:
        step(PER_TOKEN, f"v = call.value{share}", VALUES[0], VALUES[1] + shared)
    if call.query is not None:
        step(PAIRS, *SCORES)
        held = "scores"
    if call.entered is not None:
        step(
            PAIRS,
            "masked = call.entered",
            "What enters the softmax",
            "The model's own code made this of the scores: it scales them, adds to them or masks "
            "some. Minus infinity is what no word may look at.",
        )
        held = "masked"
    else:
        assert call.query is not None
        divided = _is_default(call, call.query.shape[-1])
        if not divided or call.softcap or call.added is not None:
            step(PAIRS, *_scaled(call, divided))
            held, divided = "scaled", False
        if call.allowed is not None:
            step(PAIRS, *_masked(call, held, L, S))
            held = "masked"
    shares = f"{held} / math.sqrt(head_dim)" if divided else held
    code = f"weights = torch.softmax({shares}, dim=-1)"
    reason = "The scores go through softmax: each row sums to 1, and what is masked gets 0."
    if divided:
        D = recorder.names["head_dim"]
        reason = (
            f"Divided by the square root of {D}, so that they do not grow with the head, the "
            "scores go through softmax: each row sums to 1, and what is masked gets 0."
        )
    if call.sinks is not None:
        code = (
            f"sink = call.sinks[:, None, None].expand(-1, {L}, 1)\n"
            f"weights = torch.softmax(torch.cat([{shares}, sink], dim=-1), dim=-1)[..., :-1]"
        )
        reason += " Each head has a sink besides, which takes a share and gives nothing."
    elif _sees(call) is not None:
        code = code.replace(", dim=-1)", ", dim=-1).nan_to_num(0)")
        reason += " A row that sees nothing gets 0 everywhere."
    step(PAIRS, code, "Weights", reason)
    if call.value is not None:
        step(PER_TOKEN, *CONTEXT)
    entering = recorder.names[held]
    if divided:
        entering = entering / math.sqrt(recorder.names["head_dim"])
    entering = entering[recorder.names["weights"] > 0]  # a huge negative number has none
    return float(entering.abs().max()) if len(entering) else 0.0


def _is_default(call: Caught, D: int) -> bool:
    """Whether scores are divided by the square root of D."""
    return call.scale is None or math.isclose(call.scale * math.sqrt(D), 1, rel_tol=1e-6)


def _scaled(call: Caught, default: bool) -> tuple[str, str, str]:
    """What comes between scores and mask where it is not the textbook's division alone."""
    line = "scores / math.sqrt(head_dim)" if default else "scores * call.scale"
    reason = "The scores are scaled, so that they do not grow with the head."
    if call.scale == 1:
        reason = "The model scales nothing here: its queries or keys may be scaled before."
    if call.softcap:
        line = f"call.softcap * torch.tanh({line} / call.softcap)"
        reason = f"Scaled, and bent so that none exceeds {call.softcap:g}."
    if call.added is not None:
        line += " + call.added"
        reason += " A number for each pair is added: a bias, or what a mask adds."
    return f"scaled = {line}", "Scaled scores", reason


def _masked(call: Caught, held: str, L: int, S: int) -> tuple[str, str, str]:
    assert call.allowed is not None
    future = torch.ones_like(call.allowed).triu(diagonal=S - L + 1)
    if torch.equal(call.allowed, ~future):
        code = f"future = torch.ones_like(scores, dtype=torch.bool).triu(diagonal={S - L + 1})\n"
        return f"{code}masked = {held}.masked_fill(future, -math.inf)", *FUTURE
    return (
        f"masked = {held}.masked_fill(~call.allowed, -math.inf)",
        "What is out of sight is masked",
        "The call's own mask says who may look at whom: where it forbids, the score becomes minus "
        "infinity.",
    )


def _sees(call: Caught) -> Tensor | None:
    """The rows that see a key, (H, L, 1), or None where all do."""
    allowed = call.allowed if call.entered is None else call.entered != -math.inf
    rows = None if allowed is None else allowed.any(-1, keepdim=True)
    return None if rows is None or bool(rows.all()) else rows


def _seen(call: Caught, own: Tensor) -> Tensor:
    """The call's own numbers, 0 in rows that see no key: some codes have NaN there."""
    rows = _sees(call)
    return own if rows is None else own.masked_fill(~rows, 0)


def _end(recorder: Recorder, call: Caught, size: float) -> None:
    """Record what becomes of the context in its module, as far as that can be told."""
    recorder.step(
        TOKENS,
        "recombined = context.transpose(0, 1).flatten(start_dim=1)",
        *JOINED,
        heads=len(call.heads),
    )
    joined, output = recorder.names["recombined"], call.output
    if output is None or output.shape[0] != joined.shape[0]:
        return
    if output.shape == joined.shape and _near(call, joined, output, size):
        return  # the module hands over the heads side by side, and another one mixes them
    if call.out_weight is None and call.module is not None:
        for layer in call.module.children():
            if isinstance(layer, nn.Linear) and layer.in_features == joined.shape[1]:
                W, b = (
                    None if t is None else t.detach().to(joined) for t in (layer.weight, layer.bias)
                )
                made = nn.functional.linear(joined, W, b)
                if made.shape == output.shape and _near(call, made, output, _largest(output)):
                    call.out_weight, call.out_bias = W, b
                    break
    if call.out_weight is None:
        recorder.step(
            TOKENS,
            "output = call.output",
            OUTPUT[0],
            "What the layer returned: it made this of its heads, in code of its own.",
        )
        return
    bias = "" if call.out_bias is None else " + call.out_bias"
    recorder.step(TOKENS, f"output = recombined @ call.out_weight.T{bias}", *OUTPUT)
    hold(call, "output", recorder.names["output"], output, size + _largest(output))


def _largest(tensor: Tensor) -> float:
    return max(1.0, float(tensor.abs().max()))


def _near(call: Caught, made: Tensor, own: Tensor, size: float) -> bool:
    return bool(((made - own).abs() <= rounding(call.dtype) * size).all())
