"""Reading a text with a model: tokens with their places, and each layer's weights as it runs."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .families import NAME
from .interface import listening, register
from .loading import quiet, reader

OnLayer = Callable[[int, Tensor], None]  # (layer from 0, weights (H, L, S))
OnInputs = Callable[[int, Tensor, Tensor, Tensor, float | None], None] | None


@dataclass(frozen=True)
class Tokens:
    """A text as a model reads it: L tokens.

    texts: what each is called in the vocabulary. offsets: its (start, end) in the text.
    special: True for what the tokenizer added ([CLS], <s>). inputs: what the model takes, (1, L).
    """

    texts: list[str]
    offsets: list[tuple[int, int]]
    special: list[bool]
    inputs: dict[str, Tensor]


def tokenize(model: Any, tokenizer: Any, text: str) -> Tokens:
    """Turn a text into the tokens that this model reads.

    Raises:
        ValueError: the text is empty or longer than the model's context, or the tokenizer does
            not know where in the text its tokens are.
    """
    if not text.strip():
        raise ValueError("the text is empty; give a sentence")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the text is not Unicode: it holds halves of characters") from None
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"the tokenizer {type(tokenizer).__name__} does not tell where in the text its tokens "
            "are; a fast one (tokenizer.json) does"
        )
    with quiet():
        encoded = tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True)
    offsets, special = encoded.pop("offset_mapping"), encoded.pop("special_tokens_mask")
    numbers = encoded["input_ids"]
    if all(special):
        raise ValueError("the model's tokenizer finds no token in the text; give a sentence")
    limit = _context(model, tokenizer)
    if limit is not None and len(numbers) > limit:
        raise ValueError(
            f"the text has {len(numbers)} tokens and the model reads at most {limit}; shorten it"
        )
    takes = inspect.signature(reader(model).forward).parameters
    return Tokens(
        texts=tokenizer.convert_ids_to_tokens(numbers),
        offsets=[(start, end) for start, end in offsets],
        special=[bool(flag) for flag in special],
        inputs={
            k: torch.tensor([v], device=model.device) for k, v in encoded.items() if k in takes
        },
    )


def _context(model: Any, tokenizer: Any) -> int | None:
    """How many tokens the model can read; None where nothing says so."""
    for name, module in reader(model).named_modules():
        # RoBERTa and its kin number positions from the padding token's number + 1.
        padding = getattr(module, "padding_idx", None)
        if name.endswith("position_embeddings") and padding is not None:
            return module.num_embeddings - padding - 1
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    limit = limit or tokenizer.model_max_length
    return limit if limit and limit < 10**9 else None  # a huge number stands for none


def attentions(model: Any, tokens: Tokens, on_layer: OnLayer, on_inputs: OnInputs = None) -> str:
    """Run a model once on a text and hand over each layer's attention weights.

    Args:
        model: as load() returns it, or any other transformers model.
        tokens: of this model's tokenizer.
        on_layer: called as on_layer(layer, weights) with layer = 0, 1, ... in the order in which
            the model computes them, weights (H, L, L) float32, each row a query. Nothing keeps
            them afterwards.
        on_inputs: called before it as on_inputs(layer, query (H, L, D), key (Hkv, L, D), value
            (Hkv, L, Dv), scale), positions applied; by the attention interface only.

    Returns:
        What computed the attention: "clearhead", through transformers' attention interface, or
        "eager", the model's own code with output_attentions=True, where a family does not use it.

    Raises:
        ValueError: the model does not read text, or gives no weights, or none of shape (H, L, L).
    """
    body = reader(model)
    if body.main_input_name != "input_ids":
        raise ValueError(f"the model reads {body.main_input_name}, not text; give one that does")
    L, layers = len(tokens.texts), 0

    def hand_over(weights: Tensor, *inputs: Any) -> None:
        nonlocal layers
        if weights.shape[-2:] != (L, L):
            raise ValueError(
                f"layer {layers} of {type(body).__name__} gives weights of shape "
                f"{tuple(weights.shape)} for {L} tokens; only (1, H, {L}, {L}) can be read"
            )
        if inputs and on_inputs is not None:
            on_inputs(layers, *inputs)
        on_layer(layers, weights[0].float())
        layers += 1

    with torch.inference_mode(), quiet():
        if body._can_set_attn_implementation():
            register()
            before = body.config._attn_implementation
            body.set_attn_implementation(NAME)
            try:
                with listening(hand_over):
                    _run(body, tokens)
            finally:
                body.set_attn_implementation(before)
        if layers:
            return NAME
        kind = getattr(body.config, "_attn_implementation", None) or "eager"
        if kind != "eager" and not body._can_set_attn_implementation():
            raise ValueError(  # falcon would give weights that are not its own
                f"{type(body).__name__} runs attn_implementation={kind!r}, which gives no weights, "
                'and cannot change it; load it with attn_implementation="eager"'
            )
        for weights in _run(body, tokens, output_attentions=True).get("attentions") or ():
            if weights is not None:
                hand_over(weights)
    if not layers:
        raise ValueError(
            f"{type(body).__name__} gives no attention weights; if it has attention, load it with "
            'attn_implementation="eager"'
        )
    return "eager"


def _run(body: Any, tokens: Tokens, **options: bool) -> Any:
    try:
        return body(**tokens.inputs, **options)
    except (RuntimeError, IndexError) as error:  # a broken model, or too little memory
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{type(body).__name__} failed on this text: {reason}") from error
