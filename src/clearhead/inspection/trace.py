"""The steps of one attention call, each with its numbers and the line of code that made them.

A step's code is not a caption: the string is what gets executed, and the value it assigns is what
the step holds, so that what is shown and what was computed cannot drift apart. A list of steps is
read from a module by `trace`; `worked_example` makes one for any sentence.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..module import MultiHeadAttention
from ..textbook import MultiHeadAttentionWrapper
from .steps import Steps, parameters_of


@dataclass(frozen=True, eq=False)
class Step:
    """One named step of an attention call.

    Attributes:
        name: the variable the code assigns, such as "scores".
        title: a few words for a heading.
        explanation: one or two sentences for a reader who is learning attention.
        code: the Python that was executed to make the values.
        values: the result, (rows, columns), or (H, rows, columns) where per_head.
        axes: what each axis of values counts: "heads", "features", or places in the text, which
            are "tokens", "queries" and "keys".
        per_head: whether the first axis counts heads.
        heads: into how many equal blocks of columns, one a head, a matrix that is not per_head
            falls; 1 where its columns belong to no single head.
        tokens: the words of the text, one for each token.
    """

    name: str
    title: str
    explanation: str
    code: str
    values: Tensor
    axes: tuple[str, ...]
    per_head: bool = False
    heads: int = 1
    tokens: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of values."""
        return tuple(self.values.shape)


class _Recorder:
    """Executes lines of code in one small namespace and keeps what they assign."""

    def __init__(self, tokens: Sequence[str], **names: Any) -> None:
        self.tokens, self.names = tuple(tokens), {"torch": torch, "nn": nn, "math": math, **names}
        self.steps: list[Step] = []

    def step(
        self, axes: tuple[str, ...], code: str, title: str, explanation: str, heads: int = 1
    ) -> None:
        """Execute code, and record the variable that its last line assigns as a Step."""
        exec(code, self.names)
        name = code.splitlines()[-1].split(" = ")[0]
        values = self.names[name].detach()
        per_head = axes[:1] == ("heads",)
        self.steps.append(
            Step(name, title, explanation, code, values, axes, per_head, heads, self.tokens)
        )


def trace(
    module: MultiHeadAttention | MultiHeadAttentionWrapper,
    x: Tensor,
    tokens: Sequence[str] | None = None,
) -> Steps:
    """Compute one attention call step by step, with the module's own weights.

        x -> queries, keys, values -> split into heads: q, k, v -> scores -> masked -> weights
          -> context -> recombined -> output

    A wrapper keeps its heads apart, so its steps begin with q, k, v; one without an out_proj ends
    with recombined.

    Args:
        module: an efficient MultiHeadAttention with the textbook's options, or a wrapper.
        x: one sequence (L, E), of the module's dtype and on its device.
        tokens: L words to label rows and columns with; "1", "2", ... where None.

    Returns:
        The steps in order, each computed from the one before it: a list, whose to_html() makes a
        page of them. The values of the last one are what module(x) returns, (L, H*D).

    Raises:
        ValueError: x is not (L, E) with L at least 1, or tokens are not L words.
        TypeError: module is of another class.
        NotImplementedError: module has an option that the textbook's steps do not show.

    >>> steps = trace(MultiHeadAttentionWrapper(6, 3, 2), torch.randn(5, 6))
    >>> [step.shape for step in steps if step.name in ("scores", "context", "output")]
    [(2, 5, 5), (2, 5, 3), (5, 6)]
    """
    _check(module, x, tokens)
    words = [str(i + 1) for i in range(len(x))] if tokens is None else tokens
    recorder = _Recorder(words, inputs=x)
    with torch.no_grad():
        recorder.step(TOKENS, "x = inputs", "The input", "One vector for each token.")
        if isinstance(module, MultiHeadAttention):
            recorder.names["module"] = module
            _efficient(recorder, module.num_heads, module.head_dim)
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
    recorder = _Recorder(words, words=words, **sizes, **classes)
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


def heads_at_work(q: Tensor, k: Tensor, v: Tensor, tokens: Sequence[str]) -> list[Step]:
    """The steps from given queries, keys and values (H, L, D) to context, causally.

    >>> [step.name for step in heads_at_work(*torch.randn(3, 2, 5, 4), "abcde")]
    ['q', 'k', 'v', 'scores', 'masked', 'weights', 'context']
    """
    recorder = _Recorder(tokens, of_model={"q": q, "k": k, "v": v}, head_dim=q.shape[-1])
    for name, (title, explanation) in {"q": QUERIES, "k": KEYS, "v": VALUES}.items():
        recorder.step(PER_TOKEN, f'{name} = of_model["{name}"]', title, explanation)
    _attend(recorder, q.shape[-1])
    return recorder.steps


TOKENS = ("tokens", "features")
PER_TOKEN, PAIRS = ("heads", *TOKENS), ("heads", "queries", "keys")

QUERIES = "Queries", "One learned matrix turns each word into a question: what is it looking for?"
KEYS = "Keys", "A second matrix turns each word into a label: what can it be found by?"
VALUES = "Values", "A third matrix gives what each word will hand over to those who find it."


def _efficient(recorder: _Recorder, H: int, D: int, setup: str = "") -> None:
    """Record the steps of `module`, which setup may make; its H heads share wide projections."""
    recorder.names.update(num_heads=H, head_dim=D)
    step = recorder.step

    step(TOKENS, setup + "queries = module.W_query(x)", *QUERIES, heads=H)
    step(TOKENS, "keys = module.W_key(x)", *KEYS, heads=H)
    step(TOKENS, "values = module.W_value(x)", *VALUES, heads=H)

    cut = "{} = {}.view(-1, num_heads, head_dim).transpose(0, 1)"
    step(
        PER_TOKEN,
        cut.format("q", "queries"),
        "Queries, split into heads",
        f"Each row is cut into pieces of {D}, one piece for each head. No number changes, only the "
        "grouping.",
    )
    step(PER_TOKEN, cut.format("k", "keys"), "Keys, split into heads", "The same cut.")
    step(PER_TOKEN, cut.format("v", "values"), "Values, split into heads", "And once more.")
    _attend(recorder, D)
    step(
        TOKENS,
        "recombined = context.transpose(0, 1).flatten(start_dim=1)",
        "Heads side by side again",
        "The split is undone: each word's pieces stand in one row. Again no number changes.",
        heads=H,
    )
    _mix(recorder, "output = module.out_proj(recombined)")


def _plain(recorder: _Recorder) -> None:
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


def _attend(recorder: _Recorder, D: int) -> None:
    """Record q, k, v -> context, which is the same arithmetic for both modules."""
    recorder.step(
        PAIRS,
        "scores = q @ k.transpose(-2, -1)",
        "Scores",
        "Row by row, a word's query meets every word's key in a dot product. The higher the score, "
        "the better they fit.",
    )
    recorder.step(
        PAIRS,
        "future = torch.ones_like(scores, dtype=torch.bool).triu(diagonal=1)\n"
        "masked = scores.masked_fill(future, -math.inf)",
        "The future is masked",
        "No word may look at one that comes after it: above the diagonal every score becomes "
        "minus infinity.",
    )
    recorder.step(
        PAIRS,
        "weights = torch.softmax(masked / math.sqrt(head_dim), dim=-1)",
        "Weights",
        f"Divided by the square root of {D}, so that they do not grow with the head, the scores go "
        "through softmax: each row sums to 1, and the future gets exactly 0.",
    )
    recorder.step(
        PER_TOKEN,
        "context = weights @ v",
        "Context",
        "Each word receives the average of the values it may see, mixed in the proportions of its "
        "weights. Every head has its own opinion.",
    )


def _mix(recorder: _Recorder, code: str) -> None:
    recorder.step(
        TOKENS,
        code,
        "Output",
        "Until here the heads knew nothing of each other. One last learned matrix combines what "
        "they found.",
    )


def _check(
    module: MultiHeadAttention | MultiHeadAttentionWrapper, x: Tensor, tokens: Sequence[str] | None
) -> None:
    """Raise for what `trace` cannot follow."""
    if isinstance(module, MultiHeadAttention):
        width: Any = module.input_dim
        options = [name for name, usual in _usual(module).items() if getattr(module, name) != usual]
        if module.training and module.dropout:
            options.append("dropout while training")
        if options:
            raise NotImplementedError(
                f"trace: the textbook's steps have no {', '.join(options)}; a module with the "
                "first three arguments alone can be traced"
            )
    elif isinstance(module, MultiHeadAttentionWrapper):
        if not len(module.heads):
            raise ValueError("trace: the wrapper has no heads; it needs one or more")
        width = module.heads[0].input_dim
    else:
        raise TypeError(
            f"trace: module is a {type(module).__name__}; it must be a MultiHeadAttention or a "
            "MultiHeadAttentionWrapper"
        )
    if x.dim() != 2 or len(x) == 0 or x.shape[1] != width:
        raise ValueError(
            f"trace: x has shape {tuple(x.shape)}; it needs one sequence (L, {width}) of at least "
            "one token. From a batch pass x[b]"
        )
    if tokens is not None and len(tokens) != len(x):
        raise ValueError(f"trace: got {len(tokens)} tokens for {len(x)} rows of x; give one a row")


def _usual(module: MultiHeadAttention) -> dict[str, Any]:
    """The options that would need steps of their own, each with the value that needs none."""
    return {
        "num_kv_heads": module.num_heads,
        "context_dim": module.input_dim,
        "value_head_dim": module.head_dim,
        "is_causal": True,
        "sliding_window": None,
        "scale": None,
        "qk_norm": None,
        "softcap": None,
        "sinks": None,
        "alibi": False,
        "W_gate": None,
    }
