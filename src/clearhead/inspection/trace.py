"""The steps of one attention call, each with its numbers and the line of code that made them.

A step's code is not a caption: the string is what gets executed, and the value it assigns is what
the step holds, so that what is shown and what was computed cannot drift apart. A list of steps is
read from a module by `trace`; `worked_example` makes one for any sentence.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..convert import from_torch
from ..module import MultiHeadAttention
from ..textbook import MultiHeadAttentionWrapper
from .call_steps import steps_of
from .caught import catch
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
    Steps,
    parameters_of,
)


def trace(
    module: Any,
    x: Any = None,
    tokens: Sequence[str] | None = None,
    *,
    layer: int | str | None = None,
    heads: Iterable[int] | None = None,
    sequence: int = 0,
) -> Steps:
    """Compute one attention call step by step, with the module's own weights.

        x -> queries, keys, values -> split into heads: q, k, v -> scores -> masked -> weights
          -> context -> recombined -> output

    A wrapper keeps its heads apart, so its steps begin with q, k, v; one without an out_proj ends
    with recombined. Of any other model, and wherever a layer is named, the steps are those of one
    call inside: the model runs once, as under `watch`, and the steps begin with q, k and v as the
    call got them. They are held to what the call itself returned.

    Args:
        module: an efficient MultiHeadAttention, a wrapper, or torch's nn.MultiheadAttention, which
            looks both ways. Each option that is in use shows in the line that it changes, or has a
            step of its own (scaled, gated). Or any model, or any function, that calls attention.
        x: one sequence (L, E), of the module's dtype and on its device. For a call inside a model,
            what the model takes: one argument, a list or tuple of arguments, a mapping of named
            ones, or None for none.
        tokens: words to label rows and columns with, L of them (S where those differ); "1", "2",
            ... where None.
        layer: the number or the path of a layer, as for `watch`; its first call is taken. None for
            the first of all, where module is none of the three.
        heads: of a call inside a model, which query heads, from 0; all where None.
        sequence: of a call inside a model, which of its batch.

    Returns:
        The steps in order, each computed from the one before it: a list, whose to_html() makes a
        page of them. The values of the last one are what module(x) returns, (L, H*D). Of a call
        inside a model the last is what its layer made of the context, where that could be had, and
        `call` holds what the code of the steps calls so. Its numbers are in float32 or float64.

    Raises:
        ValueError: x is not (L, E) with L at least 1, or tokens are not L words; no such layer was
        called; or the call has more than 2^20 weights, which nobody can look at.
        TypeError: module cannot be called.
        NotImplementedError: module attends to a context, drops weights, or is one that from_torch
        refuses; or a call inside a model is not what the steps make of it.

    >>> steps = trace(MultiHeadAttentionWrapper(6, 3, 2), torch.randn(5, 6))
    >>> [step.shape for step in steps if step.name in ("scores", "context", "output")]
    [(2, 5, 5), (2, 5, 3), (5, 6)]
    >>> layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True).eval()
    >>> [step.name for step in trace(layer, torch.randn(1, 5, 6), layer="self_attn")]
    ['q', 'k', 'v', 'scores', 'weights', 'context', 'recombined', 'output']
    """
    known = isinstance(
        module, MultiHeadAttention | MultiHeadAttentionWrapper | nn.MultiheadAttention
    )
    if layer is not None or not known:
        if not callable(module):
            raise TypeError(
                f"trace: module is a {type(module).__name__}; it must be a module, or a function "
                "that calls attention"
            )
        return steps_of(catch(module, x, 0 if layer is None else layer, heads, sequence), tokens)
    if heads is not None or sequence:
        raise ValueError(
            "trace: heads and sequence are of a call inside a model; name its layer too, as in "
            "layer=0"
        )
    if isinstance(module, nn.MultiheadAttention):
        dropout = module.dropout if module.training else 0.0
        module = from_torch(module)
        module.dropout = dropout
    _check(module, x, tokens)
    words = [str(i + 1) for i in range(len(x))] if tokens is None else tokens
    recorder = Recorder(words, inputs=x)
    with torch.no_grad():
        recorder.step(TOKENS, "x = inputs", "The input", "One vector for each token.")
        if isinstance(module, MultiHeadAttention):
            recorder.names["module"] = module
            _efficient(recorder, module.num_heads, module.head_dim, module=module)
        else:
            recorder.names["wrapper"] = module
            _plain(recorder)
    return Steps(recorder.steps, parameters_of(module))


def worked_example(
    words: Sequence[str],
    num_heads: int = 2,
    head_dim: int = 3,
    input_dim: int | None = None,
    seed: int = 0,
) -> Steps:
    """Run the plain and the efficient module, holding the same random weights, on some words.

    Equal words get equal vectors. The global random state is left as it was.

    Args:
        words: L words, at least one.
        num_heads: number H of heads.
        head_dim: size D of each head.
        input_dim: width E of each word's vector; H*D where None.
        seed: what the vectors and the weights are drawn from.

    Returns:
        The steps of the efficient module as in `trace`, then "wrapper_output" (L, H*D), the
        wrapper's answer, and "difference" (), the largest distance between the two answers.

    Raises:
        ValueError: there is no word, or a size is below 1.

    >>> steps = worked_example("the dog fetched the ball".split())
    >>> [step.shape for step in steps if step.name in ("x", "weights", "output")]
    [(5, 6), (2, 5, 5), (5, 6)]
    """
    if not words:
        raise ValueError("worked_example: there are no words; it needs at least one")
    sizes = {
        "num_heads": num_heads,
        "head_dim": head_dim,
        "input_dim": num_heads * head_dim if input_dim is None else input_dim,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"worked_example: {name} is {size}; it must be 1 or more")

    classes = {c.__name__: c for c in (MultiHeadAttention, MultiHeadAttentionWrapper)}
    recorder = Recorder(words, words=words, **sizes, **classes)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        recorder.step(
            TOKENS,
            "vocabulary = list(dict.fromkeys(words))\n"
            "embedding = nn.Embedding(len(vocabulary), input_dim)\n"
            "x = embedding(torch.tensor([vocabulary.index(word) for word in words]))",
            "Words become vectors",
            "Each different word has a vector of its own: drawn at random here, learned in a real "
            "model. A word that comes twice has the same vector twice.",
        )
        _efficient(
            recorder,
            num_heads,
            head_dim,
            "wrapper = MultiHeadAttentionWrapper(input_dim, head_dim, num_heads)\n"
            "module = MultiHeadAttention.from_heads(wrapper)\n",
        )
        recorder.step(
            TOKENS,
            "wrapper_output = wrapper(x)",
            "The same, one head after another",
            "The plain module runs its heads in turn and joins what they found. The efficient one "
            "holds the same weights stitched together, and must give the same answer.",
        )
        recorder.step(
            (),
            "difference = (output - wrapper_output).abs().max()",
            "Largest difference",
            "Sums taken in another order round differently; nothing else may differ.",
        )
    return Steps(recorder.steps, parameters_of(recorder.names["module"]))


QUERIES = "Queries", "One learned matrix turns each word into a question: what is it looking for?"
KEYS = "Keys", "A second matrix turns each word into a label: what can it be found by?"
VALUES = "Values", "A third matrix gives what each word will hand over to those who find it."


def _efficient(
    recorder: Recorder, H: int, D: int, setup: str = "", module: MultiHeadAttention | None = None
) -> None:
    """Record the steps of `module`, which setup may make; its H heads share wide projections."""
    recorder.names.update(num_heads=H, head_dim=D)
    step = recorder.step
    Hkv = module.num_kv_heads if module is not None else H

    step(TOKENS, setup + "queries = module.W_query(x)", *QUERIES, heads=H)
    step(TOKENS, "keys = module.W_key(x)", *KEYS, heads=Hkv)
    step(TOKENS, "values = module.W_value(x)", *VALUES, heads=Hkv)

    cut = "{} = {}.view(-1, num_heads, head_dim).transpose(0, 1)"
    q, k, v = (cut.format(*names) for names in (("q", "queries"), ("k", "keys"), ("v", "values")))
    same, again = "The same cut.", "And once more."
    if module is not None:
        if module.qk_norm is not None:
            q, k = (
                line.replace(f"{wide}.view(-1, num_heads, head_dim)",
                             f"module.norm_{one}({wide}.view(-1, num_heads, head_dim))")
                for line, wide, one in ((q, "queries", "query"), (k, "keys", "key"))
            )  # fmt: skip
            same = "The same cut; both are brought to one length for each head."
        if module.value_head_dim != D:
            v = v.replace("head_dim", "module.value_head_dim")
        if Hkv != H:
            share = f".repeat_interleave({H // Hkv}, dim=0)"
            k, v = (line.replace("num_heads", "module.num_kv_heads") + share for line in (k, v))
            again = f"And once more; {H // Hkv} heads each read the same keys and values."
    step(
        PER_TOKEN,
        q,
        "Queries, split into heads",
        f"Each row is cut into pieces of {D}, one piece for each head. No number changes, only the "
        "grouping.",
    )
    step(PER_TOKEN, k, "Keys, split into heads", same)
    step(PER_TOKEN, v, "Values, split into heads", again)
    _attend(recorder, D, module)
    step(
        TOKENS,
        "recombined = context.transpose(0, 1).flatten(start_dim=1)",
        *JOINED,
        heads=H,
    )
    if module is not None and module.W_gate is not None:
        step(
            TOKENS,
            "gated = recombined * torch.sigmoid(module.W_gate(x))",
            "A gate for every number",
            "Each word decides by itself how much of what its heads found passes: between 0 and 1.",
            heads=H,
        )
        _mix(recorder, "output = module.out_proj(gated)")
        return
    _mix(recorder, "output = module.out_proj(recombined)")


def _plain(recorder: Recorder) -> None:
    """Record the steps of `wrapper`, whose heads are modules of their own."""
    wrapper = recorder.names["wrapper"]
    recorder.names.update(heads=wrapper.heads, head_dim=wrapper.heads[0].head_dim)
    step = recorder.step

    step(PER_TOKEN, "q = torch.stack([head.W_query(x) for head in heads])", *QUERIES)
    step(PER_TOKEN, "k = torch.stack([head.W_key(x) for head in heads])", *KEYS)
    step(PER_TOKEN, "v = torch.stack([head.W_value(x) for head in heads])", *VALUES)
    _attend(recorder, wrapper.heads[0].head_dim)
    step(
        TOKENS,
        "recombined = torch.cat(list(context), dim=-1)",
        "Heads side by side",
        "What the heads found for a word is joined into one row.",
        heads=len(wrapper.heads),
    )
    if wrapper.out_proj is not None:
        _mix(recorder, "output = wrapper.out_proj(recombined)")


def _attend(recorder: Recorder, D: int, module: MultiHeadAttention | None = None) -> None:
    """Record q, k, v -> context, which is the same arithmetic for both modules."""
    recorder.step(PAIRS, *SCORES)
    held = "scores"
    early = module is not None and (module.scale is not None or module.softcap or module.alibi)
    if module is not None and early:
        held = "scaled"
        recorder.step(PAIRS, *_scaling(recorder, module))
    W = module.sliding_window if module is not None else None
    if module is None or module.is_causal or W is not None:
        masks = ["future"] if module is None or module.is_causal else []
        code, one = "", "torch.ones_like(scores, dtype=torch.bool)"
        if masks:
            code = f"future = {one}.triu(diagonal=1)\n"
        if W is not None:
            beyond = f"{one}.tril(diagonal=-{W})"
            beyond += "" if masks else f" | {one}.triu(diagonal={W})"
            code, masks = code + f"far = {beyond}\n", [*masks, "far"]
        recorder.step(
            PAIRS,
            f"{code}masked = {held}.masked_fill({' | '.join(masks)}, -math.inf)",
            FUTURE[0] if masks == ["future"] else "What is out of sight is masked",
            FUTURE[1]
            if masks == ["future"]
            else f"A word sees {W} words, itself counted"
            + (", and none that comes after it." if "future" in masks else " to each side."),
        )
        held = "masked"
    shares = held if early else f"{held} / math.sqrt(head_dim)"
    reason = (
        f"Divided by the square root of {D}, so that they do not grow with the head, the scores go "
        "through softmax: each row sums to 1, and the future gets exactly 0."
    )
    if early:
        reason = "The scores go through softmax: each row sums to 1, and what is masked gets 0."
    code = f"weights = torch.softmax({shares}, dim=-1)"
    if module is not None and module.sinks is not None:
        code = (
            "sink = module.sinks[:, None, None].expand(-1, len(x), 1)\n"
            f"weights = torch.softmax(torch.cat([{shares}, sink], dim=-1), dim=-1)[..., :-1]"
        )
        reason += " Each head has a sink besides, which takes a share and gives nothing."
    recorder.step(PAIRS, code, "Weights", reason)
    recorder.step(PER_TOKEN, *CONTEXT)


def _scaling(recorder: Recorder, module: MultiHeadAttention) -> tuple[str, str, str]:
    """What comes between scores and mask where it is not the textbook's division alone."""
    line = "scores / math.sqrt(head_dim)" if module.scale is None else "scores * module.scale"
    reason = "The scores are scaled, so that they do not grow with the head."
    if module.softcap:
        line = f"module.softcap * torch.tanh({line} / module.softcap)"
        reason = f"Scaled, and bent so that none exceeds {module.softcap:g}."
    if module.alibi:
        recorder.names["slopes"] = module._slopes(recorder.names["x"].device)
        line += " - slopes[:, None, None] * apart"
        line = (
            "places = torch.arange(len(x))\napart = (places[:, None] - places).abs()\n"
            f"scaled = {line}"
        )
        return (
            line,
            "Scaled scores",
            reason + " Each head takes off its slope for every step apart.",
        )
    return f"scaled = {line}", "Scaled scores", reason


def _mix(recorder: Recorder, code: str) -> None:
    recorder.step(TOKENS, code, *OUTPUT)


def _check(
    module: MultiHeadAttention | MultiHeadAttentionWrapper, x: Any, tokens: Sequence[str] | None
) -> None:
    """Raise for what `trace` cannot follow."""
    if isinstance(module, MultiHeadAttention):
        width: Any = module.input_dim
        options = ["context_dim"] if module.context_dim != module.input_dim else []
        if module.training and module.dropout:
            options.append("dropout while training")
        if options:
            raise NotImplementedError(
                f"trace: the steps have no {', '.join(options)}; trace a module without, and in "
                "eval mode"
            )
    else:
        if not len(module.heads):
            raise ValueError("trace: the wrapper has no heads; it needs one or more")
        width = module.heads[0].input_dim
    if not isinstance(x, Tensor):
        raise TypeError(
            f"trace: x is a {type(x).__name__}; it must be a tensor, one sequence (L, {width})"
        )
    if x.dim() != 2 or len(x) == 0 or x.shape[1] != width:
        raise ValueError(
            f"trace: x has shape {tuple(x.shape)}; it needs one sequence (L, {width}) of at least "
            "one token. From a batch pass x[b]"
        )
    if tokens is not None and len(tokens) != len(x):
        raise ValueError(f"trace: got {len(tokens)} tokens for {len(x)} rows of x; give one a row")
