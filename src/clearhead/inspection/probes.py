"""Running a model on the texts with known answers: in batches, and with heads taken out.

A model is anything that takes input_ids and attention_mask (B, L), as the models of transformers
do, which are never imported here. `watch` sees its weights, and takes heads out.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..results import AuxRequest
from .links import Words, words_of
from .sentences import Pair, Sentence
from .watch import watch

BATCH = 1024  # tokens, padding included: 200 MB of logits with a vocabulary of 50,000
REPEATS, SHORTEST, LONGEST = 16, 20, 34  # texts of random tokens, and how many of them come twice

OnProgress = Callable[[str, int, int], None]  # (what, done, total)


class Probe(NamedTuple):
    """One text as the model reads it, L tokens: a sentence, or R random tokens twice."""

    ids: list[int]
    special: list[bool]
    half: int
    words: Words = Words([], [])
    offsets: list[tuple[int, int]] = []
    pairs: tuple[Pair, ...] = ()
    start: int = 0
    R: int = 0


def sentence_probe(tokenizer: Any, sentence: Sentence) -> Probe:
    """Tokenize one sentence."""
    encoded = tokenizer(sentence.text, return_offsets_mapping=True, return_special_tokens_mask=True)
    offsets = [(start, end) for start, end in encoded["offset_mapping"]]
    special = [bool(flag) for flag in encoded["special_tokens_mask"]]
    words = words_of(sentence.text, offsets, special)
    return Probe(encoded["input_ids"], special, sentence.half, words, offsets, sentence.pairs)


def repeat_probes(tokenizer: Any, longest: int) -> list[Probe]:
    """Random tokens that come twice, with what the tokenizer adds around a text.

    The tokens are whole words or pieces of at least two letters, all different within a text, and
    the texts differ in how many there are, so that no fixed distance is right in all. Where the
    tokenizer adds nothing in front, one more token stands there.

    Args:
        longest: how many tokens a text may have. Where that, or the vocabulary, is too small for
            four tokens twice, there are no texts.
    """
    draw = random.Random(0)
    sample = tokenizer("a", return_special_tokens_mask=True)
    flags = [bool(flag) for flag in sample["special_tokens_mask"]]
    inner = flags.index(False) if False in flags else 0
    front = sample["input_ids"][:inner]
    behind = [i for i, flag in zip(sample["input_ids"], flags, strict=True) if flag][inner:]
    numbers = list(range(len(tokenizer)))
    draw.shuffle(numbers)
    known = set(tokenizer.all_special_ids)
    ordinary: list[int] = []
    for number in numbers:
        text = "" if number in known else tokenizer.decode([number]).strip()
        if len(text) > 1 and text.isascii() and text.isalpha():
            ordinary.append(number)
        if len(ordinary) == 20 * LONGEST:
            break
    most = min((longest - len(front) - len(behind) - 1) // 2, len(ordinary) - 1)
    if most < 4:
        return []
    probes = []
    for number in range(REPEATS):
        # Both halves get texts of all sizes.
        R = SHORTEST + number // 2 * (LONGEST - SHORTEST) // (REPEATS // 2 - 1)
        R = max(4, min(R, most - number // 2 % 3))
        first, *drawn = draw.sample(ordinary, R + 1)
        head = front or [first]
        special = [bool(front)] * len(head) + [False] * (2 * R) + [True] * len(behind)
        probes.append(Probe(head + 2 * drawn + behind, special, number % 2, start=len(head), R=R))
    return probes


def batches(probes: Sequence[Probe]) -> Iterator[list[Probe]]:
    """Probes of about one length together, as many as BATCH tokens hold, at least one."""
    batch: list[Probe] = []
    for probe in sorted(probes, key=lambda probe: len(probe.ids)):
        if batch and len(probe.ids) * (len(batch) + 1) > BATCH:
            yield batch
            batch = []
        batch.append(probe)
    if batch:
        yield batch


def inputs_of(model: Any, batch: Sequence[Probe]) -> dict[str, Tensor]:
    """input_ids and attention_mask, (B, L), padded on the right: no position moves."""
    L = max(len(probe.ids) for probe in batch)
    ids = [probe.ids + [0] * (L - len(probe.ids)) for probe in batch]
    mask = [[1] * len(probe.ids) + [0] * (L - len(probe.ids)) for probe in batch]
    device = next(model.parameters()).device
    return {
        "input_ids": torch.tensor(ids, device=device),
        "attention_mask": torch.tensor(mask, device=device),
    }


def weights_of(model: Any, batch: Sequence[Probe]) -> Iterator[list[Tensor]]:
    """For each text of a batch the weights of every layer, each (H, L, L).

    Raises:
        ValueError: the model fails, or watch sees no attention of (B, H, L, L), or any other.
    """
    inputs = inputs_of(model, batch)
    L = inputs["input_ids"].shape[1]
    try:
        with torch.inference_mode(), watch(model, aux=AuxRequest(weights=True)) as seen:
            model(**inputs)
    except (RuntimeError, IndexError) as error:  # a broken model, or too little memory
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{type(model).__name__} failed on a sentence: {reason}") from error
    layers = [r.aux.weights for r in seen if r.aux.weights is not None]
    if not layers or any(layer.shape[-2:] != (L, L) for layer in layers):
        raise ValueError(
            f"{type(model).__name__} shows no attention weights of shape (B, H, {L}, {L}) in each "
            'layer; load it with attn_implementation="eager"'
        )
    for b, probe in enumerate(batch):
        size = len(probe.ids)
        yield [layer[b, :, :size, :size] for layer in layers]


def without(model: Any, heads: Iterable[tuple[int, int]]) -> AbstractContextManager:
    """While it lasts, the model with the output of some heads, (layer, head), set to 0 before the
    heads are mixed. Layers count from 0 as in `weights_of`."""
    layers: dict[int | str, list[int]] = {}
    for layer, head in heads:
        layers.setdefault(layer, []).append(head)
    return watch(model, aux=AuxRequest(), ablate=layers) if layers else nullcontext()


def losses(model: Any, probes: Sequence[Probe]) -> list[Tensor]:
    """For each text -log p of each token after its first, in nats: (L - 1,) float32."""
    of_probe: dict[int, Tensor] = {}
    for batch in batches(probes):
        inputs = inputs_of(model, batch)
        with torch.inference_mode():
            logits = model(**inputs).logits
            for b, probe in enumerate(batch):  # one by one: each makes a copy of its logits
                ahead = logits[b, : len(probe.ids) - 1].float()
                right = ahead.gather(-1, inputs["input_ids"][b, 1 : len(probe.ids), None])[:, 0]
                of_probe[id(probe)] = (ahead.logsumexp(-1) - right).cpu()
    return [of_probe[id(probe)] for probe in probes]


def preferences(model: Any, probes: Sequence[Probe], choices: Sequence[tuple[int, int]]) -> float:
    """Mean over texts of logit(right) - logit(wrong) for the token that follows each."""
    answer = dict(zip(map(id, probes), choices, strict=True))
    total = 0.0
    for batch in batches(probes):
        with torch.inference_mode():
            logits = model(**inputs_of(model, batch)).logits
        for b, probe in enumerate(batch):
            right, wrong = logits[b, len(probe.ids) - 1, list(answer[id(probe)])].tolist()
            total += right - wrong
    return total / len(probes) if probes else math.nan
