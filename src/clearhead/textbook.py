"""Multi-head attention as the textbook has it, and the definition that judges every faster path.

Read from top to bottom: one head, several heads side by side, and then the same mechanism with
every option this package knows, written as a loop that picks the keys a row may see and forgets the
rest. Nothing here is fast, and nothing here is clever.
"""

import itertools
import math

import torch
from torch import Tensor, nn


class SelfAttention(nn.Module):
    """One causal head: every token asks a question, and earlier tokens answer it.

        scores  = queries @ keys^T
        weights = softmax(scores / sqrt(head_dim)), with -inf where j > i
        context = weights @ values

    Args:
        input_dim: width E of each token's vector.
        head_dim: size D of the head's queries, keys and values.

    Shape: (L, E) or (B, L, E) -> (L, D) or (B, L, D). Row i never depends on a token behind i.
    Source: Vaswani et al. 2017, equation 1, with the causal mask of its section 3.2.3.

    >>> head = SelfAttention(input_dim=6, head_dim=3)
    >>> head(torch.randn(5, 6)).shape
    torch.Size([5, 3])
    """

    def __init__(self, input_dim: int, head_dim: int) -> None:
        super().__init__()
        self.input_dim, self.head_dim = input_dim, head_dim
        self.W_query = nn.Linear(input_dim, head_dim, bias=False)
        self.W_key = nn.Linear(input_dim, head_dim, bias=False)
        self.W_value = nn.Linear(input_dim, head_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Attend within x, (L, E) or (B, L, E), and return each token's context."""
        queries = self.W_query(x)
        keys = self.W_key(x)
        values = self.W_value(x)

        scores = queries @ keys.transpose(-2, -1)
        length = x.shape[-2]
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(diagonal=1)
        scores = scores.masked_fill(future, -math.inf)
        weights = torch.softmax(scores / math.sqrt(self.head_dim), dim=-1)
        return weights @ values


class MultiHeadAttentionWrapper(nn.Module):
    """Several heads, one after another, their findings joined side by side and then mixed.

    Each head learns its own kind of attention and knows nothing of the others; `out_proj` is the
    only place where what they found is combined.

    Args:
        input_dim: width E of each token's vector.
        head_dim: size D of each head.
        num_heads: number H of heads.
        out_proj: False leaves the mixing layer out and returns the plain concatenation.

    Shape: (L, E) or (B, L, E) -> (L, H*D) or (B, L, H*D).
    Source: Vaswani et al. 2017, section 3.2.2.

    >>> heads = MultiHeadAttentionWrapper(input_dim=6, head_dim=3, num_heads=2)
    >>> heads(torch.randn(5, 6)).shape
    torch.Size([5, 6])
    """

    def __init__(
        self, input_dim: int, head_dim: int, num_heads: int, out_proj: bool = True
    ) -> None:
        super().__init__()
        self.heads = nn.ModuleList(SelfAttention(input_dim, head_dim) for _ in range(num_heads))
        width = num_heads * head_dim
        self.out_proj = nn.Linear(width, width, bias=False) if out_proj else None

    def forward(self, x: Tensor) -> Tensor:
        """Run every head on x, (L, E) or (B, L, E), and combine them."""
        context = torch.cat([head(x) for head in self.heads], dim=-1)
        return context if self.out_proj is None else self.out_proj(context)


def attention_by_definition(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    key_mask: Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
    documents: Tensor | tuple[Tensor, Tensor] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    head_mask: Tensor | None = None,
    keep: Tensor | None = None,
    return_aux: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Attention by a loop over b, h, i in float64: gather the keys J a row may see, then softmax.

        s_j   = softcap * tanh(scale * q_i . k_j / softcap) + bias_ij      for j in J
        w_j   = exp(s_j - m) / (sum over J of exp(s_j - m) + exp(sink_h - m))
        out_i = sum over J of dropout(w_j) v_j                             0 where J is empty

    Args:
        query: (B, H, L, D), any floating dtype; key: (B, Hkv, S, D); value: (B, Hkv, S, Dv).
        keep: the weights that survive dropout, bool, broadcast to (B, H, L, S). They are divided
            by 1 - dropout_p; which ones survive is the caller's choice here, not chance.
        return_aux: also return lse and weights.
        All others: as in `clearhead.attention`, whose meaning this function is.

    Returns:
        out (B, H, L, Dv), float64, differentiable. With return_aux: (out, lse (B, H, L), weights
        (B, H, L, S)). An empty row has out 0, lse -inf, weights 0, and passes no gradient.
    Source: docs/spec.md sections 2 and 3, term by term.

    >>> x = torch.randn(1, 2, 5, 3)
    >>> attention_by_definition(x, x, x, is_causal=True).shape
    torch.Size([1, 2, 5, 3])
    """
    B, H, L, D = query.shape
    Hkv, S, Dv = value.shape[1:]
    query, key, value = query.double(), key.double(), value.double()
    scale = 1 / math.sqrt(max(D, 1)) if scale is None else scale
    survivors_scale = 1 / (1 - dropout_p) if dropout_p < 1 else 0.0
    left, right = (None, None) if window is None else window
    doc_q, doc_k = documents if isinstance(documents, tuple) else (documents, documents)
    masks = [t.expand(B, H, L, S) for t in (attn_mask, bias) if t is not None]
    added = [t.double() for t in masks if t.is_floating_point()]
    closed = [~t for t in masks if not t.is_floating_point()] + [t == -math.inf for t in added]

    # As nested lists, because the loop below asks about one place at a time.
    closed_at = [t.tolist() for t in closed]
    open_key = None if key_mask is None else key_mask.expand(B, S).tolist()
    number_q = [] if doc_q is None else doc_q.expand(B, L).tolist()
    number_k = [] if doc_k is None else doc_k.expand(B, S).tolist()

    def may_attend(b: int, h: int, i: int, j: int) -> bool:
        own = i + (S - L)
        return bool(
            (not is_causal or j <= own)
            and (left is None or own - left <= j)
            and (right is None or j <= own + right)
            and (open_key is None or open_key[b][j])
            and (doc_q is None or number_q[b][i] == number_k[b][j])
            and not any(rule[b][h][i][j] for rule in closed_at)
        )

    out, lse, weights = [], [], []
    for b, h, i in itertools.product(range(B), range(H), range(L)):
        J = [j for j in range(S) if may_attend(b, h, i, j)]
        if not J:
            out.append(query.new_zeros(Dv))
            lse.append(query.new_tensor(-math.inf))
            weights.append(query.new_zeros(S))
            continue

        g = h // (H // Hkv)
        s = scale * (key[b, g, J] @ query[b, h, i])
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        for t in added:
            s = s + t[b, h, i, J]
        if alibi_slopes is not None:
            distance = (i + (S - L) - torch.tensor(J, device=s.device)).abs()
            s = s - alibi_slopes.double().expand(B, H)[b, h] * distance
        logits = s if sinks is None else torch.cat([s, sinks[h].double().view(1)])
        m = logits.detach().max()  # a constant: it cancels, so it has no derivative
        e = torch.exp(logits - m)
        w = e[: len(J)] / e.sum()

        kept = w if keep is None else w * keep.expand(B, H, L, S)[b, h, i, J] * survivors_scale
        out.append(kept @ value[b, g, J])
        lse.append(m + torch.log(e.sum()))
        weights.append(query.new_zeros(S).index_put((torch.tensor(J, device=w.device),), w))

    result = _stack(out, query, (B, H, L, Dv))
    if head_mask is not None:
        result = result * head_mask.double().expand(B, H)[..., None, None]
    if not return_aux:
        return result
    return result, _stack(lse, query, (B, H, L)), _stack(weights, query, (B, H, L, S))


def statistics_by_definition(
    weights: Tensor,
    lse: Tensor,
    visible: Tensor,
    *,
    key_mask: Tensor | None = None,
    documents: Tensor | tuple[Tensor, Tensor] | None = None,
    top_k: int = 0,
) -> dict[str, Tensor]:
    """What `clearhead.AuxRequest` means, by a loop over b, h, i: sums over the visible keys J.

        max_logit_i = max over J of s_j = lse_i + log(max over J of w_j)
        entropy_i   = -sum over J of w_j log w_j                   0 log 0 = 0
        distance_i  = sum over J of w_j |own(i) - j|               own(i) = i + (S - L)
        self_mass_i, previous_mass_i, first_mass_i = w of key own(i), own(i) - 1, and of the first
                      key that key_mask allows and that is of the row's own document
        key_mass_j  = sum over i of w_ij

    Args:
        weights, lse: (B, H, L, S) and (B, H, L), of `attention_by_definition`.
        visible: who may look at whom, (B, H, L, S) bool.
        key_mask, documents: as they were given to it.
        top_k: how many of the largest weights to list, at least 1 if any.

    Returns:
        By the names above (B, H, L), key_mass (B, H, S), and top_weights and top_keys (B, H, L,
        top_k), of equal weights the lower key first; float64, the keys int64. A row without J
        gives max_logit -inf, top_keys -1, and 0 elsewhere.

    >>> weights = torch.tensor([[[[1.0, 0.0], [0.25, 0.75]]]])
    >>> visible = torch.tensor([[[[True, False], [True, True]]]])
    >>> statistics_by_definition(weights, torch.zeros(1, 1, 2), visible)["distance"]
    tensor([[[0.0000, 0.2500]]], dtype=torch.float64)
    """
    B, H, L, S = weights.shape
    doc_q, doc_k = documents if isinstance(documents, tuple) else (documents, documents)
    open_key = None if key_mask is None else key_mask.expand(B, S).tolist()
    number_q = [] if doc_q is None else doc_q.expand(B, L).tolist()
    number_k = [] if doc_k is None else doc_k.expand(B, S).tolist()

    def of_sequence(b: int, i: int, j: int) -> bool:
        return bool(
            (open_key is None or open_key[b][j])
            and (doc_q is None or number_q[b][i] == number_k[b][j])
        )

    w, see = weights.double().tolist(), visible.tolist()
    rows: dict[str, list[float]] = {}
    ranks: list[tuple[list[float], list[int]]] = []
    for b, h, i in itertools.product(range(B), range(H), range(L)):
        w_i, own = w[b][h][i], i + (S - L)
        J = [j for j in range(S) if see[b][h][i][j]]
        largest = max((w_i[j] for j in J), default=0.0)
        first = next((j for j in range(S) if of_sequence(b, i, j)), None)
        found = {
            "max_logit": float(lse[b, h, i]) + math.log(largest) if largest else -math.inf,
            "entropy": -sum(w_i[j] * math.log(w_i[j]) for j in J if w_i[j]),
            "first_mass": w_i[first] if first in J else 0.0,
            "previous_mass": w_i[own - 1] if own - 1 in J else 0.0,
            "self_mass": w_i[own] if own in J else 0.0,
            "distance": sum(w_i[j] * abs(own - j) for j in J),
        }
        for name, value in found.items():
            rows.setdefault(name, []).append(value)
        best = sorted(J, key=lambda j: (-w_i[j], j))[:top_k]
        short = top_k - len(best)
        ranks.append(([w_i[j] for j in best] + [0.0] * short, best + [-1] * short))

    names = ("max_logit", "entropy", "first_mass", "previous_mass", "self_mass", "distance")
    result = {n: weights.new_tensor(rows.get(n, []), dtype=torch.float64) for n in names}
    result = {name: value.view(B, H, L) for name, value in result.items()}
    result["key_mass"] = weights.double().sum(-2)
    top_weights, top_keys = ([rank[n] for rank in ranks] for n in (0, 1))
    result["top_weights"] = weights.new_tensor(top_weights, dtype=torch.float64)
    result["top_keys"] = weights.new_tensor(top_keys, dtype=torch.int64)
    return result | {n: result[n].view(B, H, L, top_k) for n in ("top_weights", "top_keys")}


def _stack(rows: list[Tensor], like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.stack(rows).reshape(shape) if rows else like.new_zeros(shape)
