"""Who may look at whom: every rule of docs/spec.md section 3 in one object, read in three ways.

Row i of L queries stands at its own key, own(i) = i + (S - L). All rules are combined by AND
before any arithmetic. The same rules can be read as a dense mask of any tile (`tile`), as one range
of keys per row outside of which nothing is visible (`key_ranges`), and as a FlexAttention
`mask_mod`.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Window = tuple[int | None, int | None]


@dataclass
class Visibility:
    """The rules of one call.

    Attributes:
        L, S: number of query rows and of keys.
        left, right: neighbours visible beside the own key, None for no limit on that side.
            Causal is right = 0.
        key_mask: (B or 1, S) bool, or None. doc_q, doc_k: (B or 1, L) and (B or 1, S) whole
            numbers, or None. mask: bool, four axes that broadcast to (B, H, L, S), or None.
    """

    L: int
    S: int
    left: int | None = None
    right: int | None = None
    key_mask: Tensor | None = None
    doc_q: Tensor | None = None
    doc_k: Tensor | None = None
    mask: Tensor | None = None

    @property
    def limits(self) -> Window:
        """(left, right) without the limits that no row of this call can feel."""
        if torch.compiler.is_compiling():  # comparing lengths would fix them in the traced graph
            return self.left, self.right
        left = None if self.left is None or self.left >= self.S - 1 else self.left
        right = None if self.right is None or self.right >= self.L - 1 else self.right
        return left, right

    @property
    def by_data(self) -> bool:
        """Whether a tensor decides anything, beside the arithmetic of positions."""
        return not (self.key_mask is None and self.doc_q is None and self.mask is None)

    @property
    def full(self) -> bool:
        """Whether every row sees every key because no rule says otherwise."""
        return not self.by_data and self.limits == (None, None)

    def tile(self, i0: int, i1: int, j0: int, j1: int, device: torch.device) -> Tensor | None:
        """The rules for rows [i0, i1) and keys [j0, j1): bool, four axes that broadcast to
        (B, H, i1 - i0, j1 - j0), True = may attend; None where everything is visible."""
        shift = self.S - self.L
        left, right = self.limits
        if right is not None and i0 + shift + right >= j1 - 1:
            right = None
        if left is not None and i1 - 1 + shift - left <= j0:
            left = None

        parts: list[Tensor] = []
        if left is not None or right is not None:
            own = torch.arange(i0 + shift, i1 + shift, device=device)[:, None]
            j = torch.arange(j0, j1, device=device)[None, :]
            if right is not None:
                parts.append((j <= own + right)[None, None])
            if left is not None:
                parts.append((j >= own - left)[None, None])
        if self.key_mask is not None:
            parts.append(self.key_mask[:, None, None, j0:j1])
        if self.doc_q is not None and self.doc_k is not None:
            same = self.doc_q[:, i0:i1, None] == self.doc_k[:, None, j0:j1]
            parts.append(same[:, None])
        if self.mask is not None:
            parts.append(cut(self.mask, i0, i1, j0, j1))

        return functools.reduce(torch.logical_and, parts) if parts else None

    def dense(self, device: torch.device) -> Tensor | None:
        """The whole mask, as `tile` gives it."""
        return self.tile(0, self.L, 0, self.S, device)

    def key_ranges(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(first, end), each (B or 1, L): row i sees no key outside [first, end).

        Counts causal, window, key mask and documents, not the dense mask: O(L + S) work and memory.
        A row with first >= end is empty; a row inside its range may still be.
        """
        own = torch.arange(self.L, device=device)[None] + (self.S - self.L)
        left, right = self.limits
        first = torch.zeros_like(own) if left is None else (own - left).clamp(0, self.S)
        end = torch.full_like(own, self.S) if right is None else (own + right + 1).clamp(0, self.S)
        if self.S == 0:
            return first, end
        j = torch.arange(self.S, device=device)[None]
        if self.key_mask is not None:
            first = first.maximum(torch.where(self.key_mask, j, self.S).amin(1, keepdim=True))
            end = end.minimum(torch.where(self.key_mask, j + 1, 0).amax(1, keepdim=True))
        if self.doc_q is not None and self.doc_k is not None:
            doc_first, doc_end = _document_extents(self.doc_q, self.doc_k)
            first, end = first.maximum(doc_first), end.minimum(doc_end)
        return first, end

    def first_key(self) -> Tensor | None:
        """The first key that key_mask allows and that is of the row's document, (B or 1, L or 1);
        None for key 0 everywhere, and 0 where there is no such key."""
        if self.S == 0 or (self.key_mask is None and self.doc_q is None):
            return None
        if self.doc_q is None or self.doc_k is None:
            assert self.key_mask is not None
            return self.key_mask.to(torch.int8).argmax(1, keepdim=True)
        first, _ = _document_extents(self.doc_q, self.doc_k, self.key_mask)
        return torch.where(first < self.S, first, 0)

    def mask_mod(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None:
        """The same rules as FlexAttention asks for them, or None if everything is visible."""
        if self.full:
            return None
        left, right = self.limits
        shift = self.S - self.L
        key_mask, doc_q, doc_k, mask = self.key_mask, self.doc_q, self.doc_k, self.mask

        def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            allowed = j >= 0
            if right is not None:
                allowed = allowed & (j <= i + shift + right)
            if left is not None:
                allowed = allowed & (j >= i + shift - left)
            if key_mask is not None:
                allowed = allowed & key_mask[at(b, key_mask, 0), j]
            if doc_q is not None and doc_k is not None:
                allowed = allowed & (doc_q[at(b, doc_q, 0), i] == doc_k[at(b, doc_k, 0), j])
            if mask is not None:
                allowed = (
                    allowed & mask[at(b, mask, 0), at(h, mask, 1), at(i, mask, 2), at(j, mask, 3)]
                )
            return allowed

        return mask_mod


def window_of(window: object) -> Window:
    """(left, right) of the argument `window`, checked."""
    if window is None:
        return None, None
    if not isinstance(window, Sequence) or len(window) != 2:
        raise TypeError(
            f"attention: window is {window!r}; it must be a pair (left, right) of neighbours "
            "beside the own key, None for no limit. W keys with the own one are (W - 1, 0)"
        )
    for side in window:
        if side is not None and (
            isinstance(side, bool) or not isinstance(side, int | torch.SymInt)
        ):
            raise TypeError(f"attention: window is {window!r}; each side must be an int or None")
        if side is not None and side < 0:
            raise ValueError(
                f"attention: window is {window!r}; a side must be 0 or more, or None for no limit"
            )
    # An op takes no larger number, and no axis is as long.
    left, right = (None if type(n) is int and n >= 2**63 else n for n in window)
    return left, right


def cut(tensor: Tensor, i0: int, i1: int, j0: int, j1: int) -> Tensor:
    """Rows [i0, i1) and keys [j0, j1) of a tensor whose last two axes broadcast to (L, S)."""
    rows = slice(None) if tensor.shape[-2] == 1 else slice(i0, i1)
    keys = slice(None) if tensor.shape[-1] == 1 else slice(j0, j1)
    return tensor[..., rows, keys]


def at(index: Tensor, tensor: Tensor, axis: int) -> Tensor:
    """The index to use on an axis that may be broadcast: 0 where it has size 1."""
    return index * 0 if tensor.shape[axis] == 1 else index


def _document_extents(
    doc_q: Tensor, doc_k: Tensor, key_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """First key and end of keys of each row's document, (B, L) each; (S, 0) where it has none.

    With key_mask, of the keys that it allows.
    """
    masked = 1 if key_mask is None else key_mask.shape[0]
    B, S = max(doc_q.shape[0], doc_k.shape[0], masked), doc_k.shape[1]
    doc_q, doc_k = doc_q.expand(B, -1).contiguous(), doc_k.expand(B, -1)
    names, number = torch.unique(doc_k, return_inverse=True)
    j = torch.arange(S, device=doc_k.device).expand(B, S)
    begins, ends = j, j + 1
    if key_mask is not None:
        begins, ends = torch.where(key_mask, j, S), torch.where(key_mask, j + 1, 0)
    first = j.new_full((B, len(names)), S).scatter_reduce(1, number, begins, "amin")
    end = j.new_zeros(B, len(names)).scatter_reduce(1, number, ends, "amax")
    place = torch.searchsorted(names, doc_q).clamp(max=len(names) - 1)
    known = names[place] == doc_q
    return (
        torch.where(known, first.gather(1, place), S),
        torch.where(known, end.gather(1, place), 0),
    )
