"""The masks of transformers' models as rules: causal, window, padding and packing, not a matrix.

make()  the mask function: what transformers calls once per forward pass and kind of layer.
read()  the rules of one call of attention, from whatever mask reaches a layer.

A model may cut, join or overwrite a mask on its way from one to the other. So `make` returns a
plain boolean tensor, as transformers' own function for "sdpa" does, and notes the rules on that
very object: every operation gives a new tensor, without them, and writing into it raises its
version. A compact tensor subclass was tried; it breaks the graph of a compiled layer.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..visibility import Window

NOTE = "clearhead_rules"  # the attribute of a mask: (Rules, its version when they were noted)


@dataclass(frozen=True)
class Rules:
    """Who may look at whom in one call: arguments of clearhead.attention.

    attn_mask: what no rule could say. end: only the first `end` keys are visible to any row, and
    the other fields are about these; None for all S.
    """

    is_causal: bool = False
    window: Window | None = None
    key_mask: Tensor | None = None
    documents: tuple[Tensor, Tensor] | None = None
    attn_mask: Tensor | None = None
    end: int | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """All but `end`, by the names that clearhead.attention has for them."""
        return {name: value for name, value in vars(self).items() if name != "end"}


EVERY_KEY = Rules()


def read(mask: Tensor | None, causal: bool, L: int, S: int) -> Rules:
    """The rules of a call with L queries and S keys.

    Args:
        mask: what reached the layer: broadcasts to (B, H, L, S), bool or floating; or None.
        causal: whether no mask means the upper left triangle, row i sees key j where j <= i.
    """
    if mask is None:
        if not causal or L == 1:
            return EVERY_KEY
        # Keys past the last row are empty slots of a static cache.
        return Rules(is_causal=True, end=L) if S >= L else Rules(window=(None, L - S))
    if torch.compiler.is_compiling():
        return Rules(attn_mask=mask)
    noted = getattr(mask, NOTE, None)
    if noted is not None and noted[1] == mask._version:
        return noted[0]
    shared = mask.ndim == 4 and all(mask.shape[n] == 1 or mask.stride(n) == 0 for n in (1, 2))
    if shared and mask.dtype == torch.bool and mask.shape[3] == S:
        return Rules(key_mask=mask[:, 0, 0])
    return Rules(attn_mask=mask)


def make(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **options: Any,
) -> Tensor:
    """The mask of a forward pass: (B, 1, L, S) bool, True = attend, with a note of its rules.

    Args:
        mask_function: transformers' rule, a function of batch, head, query and key positions.
        q_offset, kv_offset: the positions of the first query and of the first key.
        attention_mask: (B, all positions) bool, False = padding.

    Returns:
        The mask, even where it says what a causal layer does without one: some families call their
        layers causal that are not, or the reverse, since eager attention never asks.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    rule = mask_function or causal_mask_function
    options.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)

    def build() -> Any:
        start: Any = q_offset
        return sdpa_mask(
            batch_size, q_length, kv_length, start, kv_offset, rule, attention_mask,
            use_vmap=use_vmap, **options,
        )  # fmt: skip

    if torch.compiler.is_compiling() or torch._C._get_tracing_state() or use_vmap:
        return build()
    with torch.inference_mode(False):  # tensors of inference mode have no version
        mask = build()
        if isinstance(q_offset, Tensor):
            mask = mask.contiguous()  # a static cache: generate() would copy it, and lose the note
        pattern = _pattern(rule)
        offsets = int(q_offset), kv_offset
        rules = pattern and _rules(pattern, q_length, kv_length, *offsets, attention_mask)
    if rules and not mask.is_inference():
        setattr(mask, NOTE, (rules, mask._version))
    return mask


# -- reading transformers' rules -------------------------------------------------------------------


@dataclass
class _Pattern:
    """The row at position q sees the key at position k where q - left <= k <= q + right, and both
    are in one document and in one chunk."""

    left: int | None = None
    right: int | None = None
    documents: Tensor | None = None  # (B, L); L = S
    chunks: tuple[int, Tensor] | None = None  # their size, padding (B,)
    remapped: bool = False  # counts positions from the start of each document


def _rules(
    pattern: _Pattern, L: int, S: int, q_offset: int, kv_offset: int, padding: Tensor | None
) -> Rules | None:
    """A pattern in clearhead's words, where row i stands at key i + (S - L); None if there are none
    for it."""
    shift = q_offset - kv_offset
    end = S
    if pattern.right == 0 and 0 < shift + L < S:
        end = shift + L  # the rest are empty slots of a static cache
    shift -= end - L  # how far a row stands beyond the place that clearhead would give it
    left = None if pattern.left is None else pattern.left - shift
    right = None if pattern.right is None else pattern.right + shift
    if (left or 0) < 0 or (right or 0) < 0:
        return None
    key_mask = None
    if padding is not None:
        key_mask = padding[:, kv_offset : kv_offset + end].to(torch.bool)
        key_mask = torch.nn.functional.pad(key_mask, (0, end - key_mask.shape[1]))
        key_mask = None if bool(key_mask.all()) else key_mask
    documents = None
    if pattern.documents is not None:
        if pattern.chunks is not None or not L == S == pattern.documents.shape[-1]:
            return None
        documents = pattern.documents, pattern.documents
    elif pattern.chunks is not None:
        size, start = pattern.chunks
        q, k = torch.arange(L) + q_offset, torch.arange(end) + kv_offset
        q, k = ((p.to(start.device) - start[:, None]) // size for p in (q, k))
        documents = q, k
    causal = right == 0
    window = None if left is None and (causal or right is None) else (left, right)
    return Rules(causal, window, key_mask, documents, None, None if end == S else end)


def _pattern(function: Callable[..., Any]) -> _Pattern | None:
    found = _Pattern()
    known = _collect(function, found) and not (found.remapped and found.documents is None)
    return found if known else None


def _collect(function: Callable[..., Any], found: _Pattern) -> bool:
    """Note what a rule says; False if some of it is not known."""
    name = _factories().get(getattr(function, "__code__", None))
    inner = inspect.getclosurevars(function).nonlocals if name else {}
    match name:
        case "causal_mask_function":
            found.right = 0
        case "bidirectional_mask_function":
            pass
        case "sliding_window_overlay":
            found.left = inner["sliding_window"] - 1
        case "sliding_window_bidirectional_overlay":
            found.left = found.right = inner["sliding_window"]
        case "packed_sequence_mask_function":
            found.documents = inner["packed_sequence_mask"]
        case "chunked_overlay":
            found.chunks = inner["chunk_size"], inner["left_padding"]
        case "and_masks":
            return all(_collect(part, found) for part in inner["mask_functions"])
        case "remap_positions_for_packed_sequence":
            # Within a document positions rise by one, so that differences stay what they are.
            found.remapped = True
            return _collect(inner["mask_function"], found)
        case _:
            return False
    return True


@functools.cache
def _factories() -> dict[Any, str]:
    """The code of each of transformers' rules that does here what _collect says, by its name.

    A version of transformers in which one means something else, or is not there, loses that entry,
    and its masks stay dense.
    """
    from transformers import masking_utils

    n = torch.arange(7)
    q, k = n[:, None], n[None]
    ids, lengths = torch.tensor([[0, 0, 0, 1, 1, 2, 2]]), torch.tensor([[0, 1, 2, 0, 1, 0, 1]])
    padding = torch.tensor([2])

    def causal(b: Any, h: Any, q: Tensor, k: Tensor) -> Tensor:
        return k <= q

    def even(b: Any, h: Any, q: Tensor, k: Tensor) -> Tensor:
        return (q + k) % 2 == 0

    meanings = {
        "causal_mask_function": (None, k <= q),
        "bidirectional_mask_function": (None, q >= 0),
        "sliding_window_overlay": ((3,), k > q - 3),
        "sliding_window_bidirectional_overlay": ((3,), (k - q).abs() <= 3),
        "packed_sequence_mask_function": ((ids,), ids[0, q] == ids[0, k]),
        "chunked_overlay": ((3, padding), (q - 2) // 3 == (k - 2) // 3),
        "and_masks": ((causal, even), (k <= q) & ((q + k) % 2 == 0)),
        "remap_positions_for_packed_sequence": (
            (causal, lengths), lengths[0, k] <= lengths[0, q]
        ),
    }  # fmt: skip
    found = {}
    for name, (arguments, meaning) in meanings.items():
        factory: Any = getattr(masking_utils, name, None)
        try:
            function = factory if arguments is None else factory(*arguments)
            if torch.equal(function(n[:1], n[:1], q, k).expand(7, 7), meaning.expand(7, 7)):
                found[function.__code__] = name
        except (TypeError, AttributeError):
            continue
    return found
