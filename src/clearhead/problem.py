"""One call of attention as an object: what backends are asked about and what they compute.

A `Problem` always has four axes, (B, H, L, D); any other leading axes of the call are folded into B
(by `arguments.make_problem`, which also checks everything) and restored by `unfold`.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .results import AuxRequest
from .visibility import Visibility, cut


@dataclass
class Problem:
    """One checked call. All tensors have their leading axes folded into B.

    Attributes:
        query (B, H, L, D), key (B, Hkv, S, D), value (B, Hkv, S, Dv): same dtype and device.
        mask: bool, True = may attend. float_mask, bias: added to the scores; -inf blocks. Each has
            four axes that broadcast to (B, H, L, S). sinks (H,), alibi_slopes (B or 1, H).
        key_mask (B or 1, S), doc_q (B or 1, L), doc_k (B or 1, S), left, right: see Visibility.
        lead: the leading axes that B stands for.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    float_mask: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    mask: Tensor | None = None
    key_mask: Tensor | None = None
    doc_q: Tensor | None = None
    doc_k: Tensor | None = None
    left: int | None = None
    right: int | None = None
    scale: float = 1.0
    softcap: float | None = None
    dropout_p: float = 0.0
    deterministic: bool = False
    aux: AuxRequest = field(default_factory=AuxRequest)
    head_mask: Tensor | None = None
    lead: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.B, self.H, self.L, self.D = self.query.shape
        self.Hkv, self.S, self.Dv = self.value.shape[1:]
        self.G = self.H // max(self.Hkv, 1)
        self.device = self.query.device
        self.dtype = self.query.dtype
        self.compute_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.visibility = Visibility(
            self.L, self.S, self.left, self.right, self.key_mask, self.doc_q, self.doc_k, self.mask
        )

    @property
    def first_key(self) -> Tensor | None:
        """The first key of each row's sequence, (B, L) int64: the first that key_mask allows and
        that is of the row's own document. None where it is key 0 for all."""
        first = self.visibility.first_key()
        return None if first is None else first.expand(self.B, self.L)

    @property
    def padded_rows(self) -> Tensor | None:
        """The rows whose own key key_mask forbids, (B or 1, L) bool, or None: in self-attention,
        L == S, and in causal calls, where keys may be cached. (A row of any other call has its own
        key by position only.)"""
        if self.key_mask is None or self.S == 0 or not (self.L == self.S or self.right == 0):
            return None
        own = torch.arange(self.L, device=self.device) + (self.S - self.L)
        return ~self.key_mask[:, own.clamp(min=0)] & (own >= 0)

    def rows_that_count(self, lse: Tensor) -> Tensor:
        """The rows (B, H, L) that see a key, and are not padded."""
        counts = lse != -math.inf
        return counts if self.padded_rows is None else counts & ~self.padded_rows[:, None]

    def without_padded_rows(self) -> "Problem":
        """The same call, in which the padded rows see no key: they are of a document of none."""
        padded = self.padded_rows
        if padded is None:
            return self
        doc_q, doc_k = self.doc_q, self.doc_k
        if doc_q is None or doc_k is None:
            doc_q, doc_k = (torch.zeros(1, n, device=self.device).long() for n in (self.L, self.S))
        # Of as many numbers and one more, some is no key's.
        numbers = torch.arange(doc_k.numel() + 1, device=self.device)
        unused = torch.isin(numbers, doc_k.long()).int().argmin()
        doc_q = torch.where(padded, unused, doc_q.long())
        return dataclasses.replace(self, doc_q=doc_q, doc_k=doc_k.long())

    @property
    def added(self) -> list[Tensor]:
        """What is added to the scores as it stands, without ALiBi."""
        return [t for t in (self.float_mask, self.bias) if t is not None]

    @property
    def differentiable(self) -> list[Tensor | None]:
        """The seven tensors that gradients may flow to, in the order of the fields."""
        return [self.query, self.key, self.value, self.float_mask, self.bias, self.sinks,
                self.alibi_slopes]  # fmt: skip

    @property
    def needs_grad(self) -> bool:
        """Whether autograd will want a backward pass of this call."""
        return torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in self.differentiable
        )

    def allowed_tile(self, i0: int, i1: int, j0: int, j1: int) -> Tensor | None:
        """Who may look at whom in a tile, the -inf entries of float masks among the rules: bool,
        broadcasts to (B, H, i1 - i0, j1 - j0); None where everything is visible."""
        allowed = self.visibility.tile(i0, i1, j0, j1, self.device)
        for tensor in self.added:
            not_blocked = cut(tensor, i0, i1, j0, j1) != -math.inf
            allowed = not_blocked if allowed is None else allowed & not_blocked
        return allowed

    @functools.cached_property
    def allowed(self) -> Tensor | None:
        """The whole of `allowed_tile`, once: memory for what the rules do not broadcast."""
        return self.allowed_tile(0, self.L, 0, self.S)

    @functools.cached_property
    def wild(self) -> bool:
        """Whether query, key or value hold a number that is not tame (see `all_tame`)."""
        return not all_tame(self.query, self.key, self.value)

    @functools.cached_property
    def touched(self) -> Tensor:
        """The rows (B, H, L) whose query is wild, or that may attend to a wild key or value."""
        query, key, value = (~_tame(t).all(-1) for t in (self.query, self.key, self.value))
        keys = (key | value).repeat_interleave(self.G, dim=1)[:, :, None]
        # A block of rows at a time: only a call with wild numbers gets here, but it may be long.
        step = max(1, (1 << 24) // max(1, self.B * self.H * self.S))
        sees = [query.new_zeros(self.B, self.H, 0)]
        for i in range(0, self.L, step):
            rows = min(self.L, i + step) - i
            allowed = self.allowed_tile(i, i + rows, 0, self.S)
            part = keys if allowed is None else keys & allowed
            sees.append(part.any(-1).expand(self.B, self.H, rows))
        return query | torch.cat(sees, -1)

    def detached(self) -> "Problem":
        """The same call, through which no gradient flows."""
        names = ("query", "key", "value", "float_mask", "bias", "sinks", "alibi_slopes")
        tensors = {name: getattr(self, name) for name in names}
        cut_off = {name: t.detach() for name, t in tensors.items() if t is not None}
        return dataclasses.replace(self, **cut_off)

    def tamed(self) -> "Problem":
        """The same call with 0 in place of every wild number."""
        query, key, value = (
            torch.where(_tame(t), t, 0) for t in (self.query, self.key, self.value)
        )
        return dataclasses.replace(self, query=query, key=key, value=value)

    def bias_tile(self, i0: int, i1: int, j0: int, j1: int) -> Tensor | None:
        """All that is added to the scores of a tile, ALiBi included, in the compute dtype."""
        parts = [cut(t, i0, i1, j0, j1).to(self.compute_dtype) for t in self.added]
        if self.alibi_slopes is not None:
            slopes = self.alibi_slopes.to(self.compute_dtype)[..., None, None]
            parts.append(-slopes * self.distance(i0, i1, j0, j1))
        if not parts:
            return None
        return parts[0] if len(parts) == 1 else functools.reduce(torch.add, parts)

    def distance(self, i0: int, i1: int, j0: int, j1: int) -> Tensor:
        """|own key - j| of a tile, (i1 - i0, j1 - j0), in the compute dtype."""
        own = torch.arange(i0, i1, device=self.device) + (self.S - self.L)
        j = torch.arange(j0, j1, device=self.device)
        return (own[:, None] - j).abs().to(self.compute_dtype)

    def unfold(self, tensor: Tensor) -> Tensor:
        """Give a result (B, ...) the leading axes that the call came with."""
        if len(self.lead) == 1:
            return tensor
        return tensor.reshape(*self.lead, *tensor.shape[1:])


def all_tame(*tensors: Tensor | None) -> bool:
    """Whether no entry is NaN, Inf, or so large that a product of two could overflow: then 0 times
    any of their products is 0, and not NaN."""
    for tensor in tensors:
        if tensor is not None and tensor.numel():
            low, high = torch.aminmax(tensor.detach())
            if not max(-float(low), float(high)) < _limit(tensor.dtype):
                return False
    return True


def _tame(tensor: Tensor) -> Tensor:
    wide = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
    return wide.abs() < _limit(tensor.dtype)


def _limit(dtype: torch.dtype) -> float:
    # Its square leaves room for a sum over 2^20 entries and a scale of as much.
    return 2.0**400 if dtype == torch.float64 else 2.0**44


def in_transform() -> bool:
    """Whether torch.func (vmap, grad, jvp, ...) or forward-mode AD is at work around this call."""
    return not torch.compiler.is_compiling() and (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )
