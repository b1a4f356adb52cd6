"""What each head looks at, summed over many texts whose answers are known.

A Tally takes in attention weights, text by text, as plain tensors from whatever model, and keeps
sums only: for each role and each head how well the head plays that role, and how well rules play it
that know nothing of language. N is the number of heads in all layers together.

    previous, sink, same     mean weight on the token before, on hidden tokens, on itself
    local                    mean distance of the weight beyond hidden tokens and itself
    duplicate, induction     mean weight on the token's last occurrence, on what followed it
    all others               the share of pairs in which the right word gets the most weight

Hidden tokens are the first one and those that the tokenizer added; many heads park their attention
there. For pairs a word's last token looks, a word's weight is the sum over its tokens, and a hit is
strict: the right word must get more than each other word, the own one and the hidden ones included.
"""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from .links import Words, is_causal
from .sentences import Pair

HABITS = ("previous", "sink", "same", "local")
LEAST_OFF_SINK = 0.1  # a head that leaves less than this beyond hidden tokens has no distance


class Count:
    """Sums of one role over one half of the texts.

    mean = total / per. total and per: (N,) each. weight: (N,), for pairs the weight on the right
    word. others: (N,), for pairs the share of the other words behind the right one that look at it
    most, summed over others_per pairs. n: rows or pairs. chance: what looking at any visible token
    or word alike would get, summed as total is, over chance_per. offsets: how often the right one
    stood so far back. rules: how often a rule that ignores the pronoun was right (the nearer, the
    farther person).
    """

    def __init__(self, N: int):
        self.total, self.per, self.weight, self.others = torch.zeros(4, N, dtype=torch.float64)
        self.others_per = 0
        self.n, self.chance, self.chance_per = 0, 0.0, 0.0
        self.offsets: Counter[int] = Counter()
        self.rules: Counter[str] = Counter()

    def add(self, total: Tensor, n: int, chance: float, offsets: Sequence[int] = ()) -> None:
        self.total += total
        self.per += n
        self.n += n
        self.chance += chance
        self.chance_per += n
        self.offsets.update(offsets)

    @property
    def mean(self) -> Tensor:
        """The score of each head, (N,); NaN where nothing was measured."""
        return self.total / self.per

    @property
    def by_others(self) -> Tensor | None:
        """How often words that are not the one in question do the same, (N,); None for no pairs."""
        return self.others / self.others_per if self.others_per else None

    @property
    def by_chance(self) -> float:
        return self.chance / self.chance_per if self.chance_per else float("nan")

    @property
    def by_rule(self) -> float | None:
        """What the best rule scores that only counts back, or picks a place; None without one."""
        best = max([*self.offsets.values(), *self.rules.values()], default=None)
        return None if best is None else best / self.n


def joined(counts: Sequence[Count]) -> Count:
    """The sums of several halves together."""
    whole = Count(len(counts[0].total))
    for count in counts:
        for name in ("total", "per", "weight", "others", "others_per", "n", "chance", "chance_per"):
            setattr(whole, name, getattr(whole, name) + getattr(count, name))
        whole.offsets.update(count.offsets)
        whole.rules.update(count.rules)
    return whole


class Tally:
    """Scores of every head for every role, over the texts that were added.

    heads: the (layer, head) of each of the N, both from 0. causal: whether no text was looked at
    ahead. Raises ValueError where weights do not
    have the shape (H, L, L) for each layer, or as many heads as those before.

    >>> weights = torch.eye(4).roll(-1, 1)[None, None]  # one layer, one head, L = 4 tokens
    >>> tally = Tally()
    >>> tally.add_text(weights, Words(["a", "b", "c", "d"], [0, 1, 2, 3]), [False] * 4)
    >>> tally.counts["previous"][0].mean.tolist()
    [1.0]
    """

    def __init__(self) -> None:
        self.heads: list[tuple[int, int]] = []
        self.counts: dict[str, list[Count]] = {}
        self.causal = True

    def count(self, role: str, half: int) -> Count:
        """The sums of a role over the half 0 or 1."""
        return self.counts.setdefault(role, [Count(len(self.heads)) for _ in range(2)])[half]

    def add_text(
        self,
        weights: Tensor | Sequence[Tensor],
        words: Words,
        special: Sequence[bool],
        pairs: Sequence[tuple[str, int, int, int | None]] = (),
        half: int = 0,
        habits: bool = True,
    ) -> None:
        """Take in the weights that a model gave to one text.

        Args:
            weights: (layers, H, L, L), or for each layer (H, L, L).
            words: which token is part of which word.
            special: for each token whether the tokenizer added it.
            pairs: (role, token that looks, word to look at, rival word or None).
            half: 0 for texts that choose the head of a role, 1 for those that judge it.
            habits: whether the rows count for previous, sink, same and local too.
        """
        flat = self._flat(weights, len(special))
        hidden = torch.tensor([extra or i == 0 for i, extra in enumerate(special)])
        causal = is_causal(flat)
        if habits:
            self._add_habits(flat, hidden, causal, half)
        if not pairs:
            return
        W = len(words.texts)
        column = torch.tensor([word if word >= 0 else W for word in words.word_of])
        on_word = flat.new_zeros(len(flat), len(special), W + 1).index_add_(2, column, flat)
        two, most = on_word.topk(min(2, W + 1), dim=2)
        most = most[..., 0].masked_fill(two[..., 0] == two[..., -1], -1)  # (N, L): no tie is a hit
        last = {word: i for i, word in enumerate(words.word_of)}  # the token that looks, by word
        for role, source, target, rival in pairs:
            own = words.word_of[source]
            count = self.count(role, half)
            hits = (most[:, source] == target).double()
            others = [i for word, i in last.items() if word > target and word != own]
            if others:
                count.others += (most[:, others] == target).double().mean(1)
                count.others_per += 1
            if rival is None:
                count.add(hits, 1, 1 / max(1, own if causal else W - 1), [own - target])
            else:
                count.add(hits, 1, 0.5)
                near = abs(own - target) < abs(own - rival)
                count.rules["the nearer" if near else "the farther"] += 1
            count.weight += on_word[:, source, target]

    def add_repeat(
        self, weights: Tensor | Sequence[Tensor], start: int, R: int, half: int = 0
    ) -> None:
        """Take in the weights of R random tokens, all different, that come twice.

        Args:
            weights: (layers, H, L, L), or for each layer (H, L, L); L is at least start + 2 R.
            start: where the first of them stands, at least 1.
            R: how many there are.
            half: as for add_text.
        """
        layers = list(weights)
        flat = self._flat(layers, layers[0].shape[-1] if layers else 0)
        L = flat.shape[-1]
        if start < 1 or R < 1 or start + 2 * R > L:
            raise ValueError(
                f"{R} tokens twice from token {start} on need a first token before them and "
                f"{start + 2 * R} in all; the weights are of {L}"
            )
        rows = torch.arange(start + R, start + 2 * R)
        seen = rows + 1 if is_causal(flat) else torch.full_like(rows, L)
        chance = float((1 / seen).sum())
        for role, back in (("duplicate", R), ("induction", R - 1)):
            on_target = flat[:, rows, rows - back].double().sum(1)
            self.count(role, half).add(on_target, R, chance, [back] * R)

    def _flat(self, weights: Tensor | Sequence[Tensor], L: int) -> Tensor:
        layers = list(weights)
        for number, layer in enumerate(layers):
            if layer.ndim != 3 or layer.shape[1:] != (L, L):
                raise ValueError(
                    f"the weights of layer {number} have shape {tuple(layer.shape)}; they must be "
                    f"(H, {L}, {L}) for {L} tokens"
                )
        heads = [(number, h) for number, layer in enumerate(layers) for h in range(len(layer))]
        if not heads or (self.heads and heads != self.heads):
            before = f"those before were of {len(self.heads)}" if self.heads else "one is needed"
            raise ValueError(
                f"the weights are of {len(heads)} heads in {len(layers)} layers; {before}"
            )
        self.heads = heads
        flat = torch.cat([layer.detach().float().cpu() for layer in layers])
        self.causal = self.causal and is_causal(flat)
        return flat

    def _add_habits(self, flat: Tensor, hidden: Tensor, causal: bool, half: int) -> None:
        L = flat.shape[-1]
        places = torch.arange(L)
        seen = places + 1 if causal else torch.full((L,), L)
        visible = torch.ones(L, L).tril() if causal else torch.ones(L, L)
        uniform = (visible / seen[:, None])[None]
        rows = places[~hidden]
        after = rows[~hidden[rows - 1]]
        hide = hidden.float()
        for role, some, gain in (
            ("previous", after, lambda w: w[:, after, after - 1]),
            ("sink", rows, lambda w: (w @ hide)[:, rows]),
            ("same", rows, lambda w: w[:, rows, rows]),
        ):
            chance = float(gain(uniform).sum())
            self.count(role, half).add(gain(flat).double().sum(1), len(some), chance)

        apart = (places[:, None] - places).abs()
        others = (apart > 0) & ~hidden  # [i, j]: another token that is not hidden
        count = self.count("local", half)
        far, mass = ((apart * others).float()[rows], others.float()[rows])
        count.total += (flat[:, rows] * far).double().sum((1, 2))
        count.per += (flat[:, rows] * mass).double().sum((1, 2))
        count.chance += float((uniform[:, rows] * far).sum())
        count.chance_per += float((uniform[:, rows] * mass).sum())
        count.n += len(rows)


def located(
    pairs: Sequence[Pair], offsets: Sequence[tuple[int, int]], words: Words
) -> list[tuple[str, int, int, int | None]]:
    """Places in a text -> what add_text takes: the last token of the word that looks, and words.

    A pair is left out where the tokenizer has dropped one of its words or joined two of them, or
    where the word to look at holds the first token.
    """

    def tokens(place: tuple[int, int] | None) -> list[int]:
        if place is None:
            return []
        return [
            i
            for i, (start, end) in enumerate(offsets)
            if start < place[1] and end > place[0] and words.word_of[i] >= 0
        ]

    found: list[tuple[str, int, int, int | None]] = []
    for pair in pairs:
        source, target, rival = map(tokens, (pair.source, pair.target, pair.rival))
        if not source or not target or (pair.rival and not rival) or 0 in target + rival:
            continue
        numbers = [words.word_of[source[-1]], words.word_of[target[-1]]]
        if rival:
            numbers.append(words.word_of[rival[-1]])
        if len(set(numbers)) == len(numbers):
            found.append((pair.role, source[-1], numbers[1], numbers[2] if rival else None))
    return found
