"""What `watch` saw: one record for each attention call, and tables of them."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..results import Aux, Summary, TopK
from .names import Layers, as_list, is_layer

STATISTICS = ("lse", "max_logit", "entropy", "first_mass", "previous_mass", "self_mass", "distance")
FORMAT = "clearhead watch 1"


@dataclass(frozen=True)
class Record:
    """One attention call.

    Attributes:
        layer: the name of its layer; number: the place of that layer in the order of first calls.
        step: which forward of the model it was part of, from 0.
        kind: the function that was called.
        heads: the numbers of the H heads that were recorded. L, S: rows and keys of the call.
        aux: the statistics, (B, H, L) or a Summary of (B, H) each; weights (B, H, L, S).
        rows: (B, L) bool, the rows that count: not those that see no key, nor padded ones; None for
            all.
    """

    layer: str
    number: int
    step: int
    kind: str
    heads: list[int]
    L: int
    S: int
    aux: Aux
    rows: Tensor | None = None

    def of_heads(self, statistic: str) -> list[float]:
        """One number per head: the mean of a statistic over the rows that count, in each sequence,
        and over the sequences of the batch; NaN where no row counts."""
        values = getattr(self.aux, statistic)
        if isinstance(values, Summary):
            means = values.mean
        elif self.rows is None:
            means = values.mean(-1)
        else:
            rows = self.rows[:, None]
            means = torch.where(rows, values, 0).sum(-1) / rows.sum(-1)
        return means.nanmean(0).tolist()


class Unseen(NamedTuple):
    """What watch did not record: where, what it was, why, and how often."""

    where: str
    what: str
    why: str
    times: int


class Seen:
    """What a watch has seen so far: its records in the order of the calls.

    Attributes:
        records: a list of `Record`; iterating over a Seen gives them, len() counts them.
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.records: list[Record] = list(records)
        self._unseen: Counter[tuple[str, str, str]] = Counter()
        self._passed: Counter[tuple[str, str, str]] = Counter()
        self._logged = 0

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def __repr__(self) -> str:
        steps = len({(record.layer, record.step) for record in self})
        lines = [
            f"Seen({len(self.layers)} layers, {len(self)} records"
            + (f", {steps} forwards of layers" if steps != len(self) else "")
            + (f", {len(self.unseen)} kinds of calls unseen)" if self.unseen else ")")
        ]
        if self.layers and self.statistics:
            lines.append(_table(self))
        lines += [f"unseen: {u.where}: {u.what} {u.why} ({u.times} x)" for u in self.unseen]
        return "\n".join(lines)

    @property
    def layers(self) -> list[str]:
        """The names of the layers that were recorded, in the order of their numbers."""
        return [name for _, name in sorted({(r.number, r.layer) for r in self})]

    @property
    def statistics(self) -> list[str]:
        """The names of the statistics with one number per row that the records hold."""
        return [name for name in STATISTICS if any(getattr(r.aux, name) is not None for r in self)]

    @property
    def unseen(self) -> list[Unseen]:
        """What ran, or was asked for, and could not be recorded, with the reason."""
        return [Unseen(*key, times) for key, times in self._unseen.items()]

    @property
    def passed_over(self) -> list[Unseen]:
        """Every softmax that was not taken for attention, with the reason."""
        return [Unseen(*key, times) for key, times in self._passed.items()]

    def miss(self, where: str, what: str, why: str) -> None:
        """Note something that could not be seen."""
        self._unseen[where, what, why] += 1

    def pass_over(self, where: str, shape: tuple[int, ...], why: str) -> None:
        """Note a softmax that is no attention."""
        self._passed[where, f"softmax of {len(shape)} axes, {shape[-1:]} classes", why] += 1

    def clear(self) -> None:
        """Drop all records, as a long training run does after logging them."""
        self.records.clear()
        self._logged = 0

    def head_stats(self) -> dict[str, list[Any]]:
        """Columns of a table with one row for each record and head, as pandas.DataFrame takes them.

        layer, number, head, step, and one column for each statistic: the mean over the rows that
        count, as in `Record.of_heads`.
        """
        columns: dict[str, list[Any]] = {
            name: [] for name in ("layer", "number", "head", "step", *self.statistics)
        }
        for record in self:
            for name, value in (("layer", record.layer), ("number", record.number),
                                ("step", record.step)):  # fmt: skip
                columns[name] += [value] * len(record.heads)
            columns["head"] += record.heads
            for name in self.statistics:
                missing = getattr(record.aux, name) is None
                columns[name] += (
                    [math.nan] * len(record.heads) if missing else record.of_heads(name)
                )
        return columns

    def maps(
        self, layer: int | str, heads: int | Iterable[int] | None = None, step: int | None = None
    ) -> Tensor | TopK:
        """The attention weights of one layer's call, or the largest of each row.

        Args:
            layer: its number or its name. heads: which heads, all that were recorded where None.
            step: which forward; needed where the layer was recorded more than once.

        Returns:
            (B, H, L, S) where aux asked for weights, else a TopK of (B, H, L, k).
        Raises:
            ValueError: there is no such record, or more than one, or it holds neither.
        """
        of_layer = [r for r in self if is_layer(layer, r.layer, r.number)]
        if not of_layer:
            raise ValueError(f"maps: there is no layer {layer!r}; recorded are {self.layers}")
        found = [r for r in of_layer if step in (None, r.step)]
        if len(found) != 1:
            raise ValueError(
                f"maps: layer {layer!r} has {len(found)} records for step {step}; recorded are "
                f"{[(r.layer, r.step) for r in of_layer[:8]]}, name one layer and one step of them"
            )
        (record,) = found
        index = _places(record, heads)
        if record.aux.weights is not None:
            return record.aux.weights[:, index]
        if isinstance(record.aux.top_k, TopK):
            return TopK(*(t[:, index] for t in record.aux.top_k))
        raise ValueError(
            "maps: no weights were recorded; watch with aux=AuxRequest(weights=True), or with "
            "AuxRequest(top_k=8) for the largest of each row"
        )

    def to_html(
        self,
        tokens: Sequence[str] | None = None,
        *,
        title: str = "What watch saw",
        layers: Layers | None = None,
        step: int | None = None,
        sequence: int = 0,
        full: str | None = None,
    ) -> str:
        """One self-contained page of all heads of one forward, as text: see docs/page.md.

        Args:
            tokens: L pieces of the text with the spaces before them; 1, 2, ... where None.
            title: what stands at its top.
            layers: which ones, as for `watch`; all where None. Their rows and keys must be the same
                L tokens. The page numbers those it shows from 0.
            step: which forward; needed where more than one was recorded.
            sequence: which of the batch.
            full: "maps" to keep all weights of a long text, of which the page else keeps the 8
                largest in each row.

        Raises:
            ValueError: no weights were recorded, or the arguments do not name one square map for
            each layer; each says what to do.
        """
        from .watch_page import page_of

        return page_of(self, tokens, title, layers, step, sequence, full)

    def write_html(
        self, path: str | Path, tokens: Sequence[str] | None = None, **options: Any
    ) -> str:
        """Write the page of `to_html`, and say so: "heads.html: 95 kB"."""
        from ..view import page

        return page.write(path, self.to_html(tokens, **options))

    def _repr_html_(self) -> str | None:
        """The page in a notebook; the table of `repr` where there is no such page."""
        from ..view import page

        if any(record.aux.weights is None for record in self):
            return None
        try:
            return page.frame(self.to_html())
        except ValueError:
            return None

    def log_to(self, writer: Any) -> int:
        """Hand every statistic of the records since the last call of this to a logger.

        Args:
            writer: an object with add_scalar(name, value, step), as TensorBoard's SummaryWriter,
                or a function of the same three. Names are "statistic/layer/head".

        Returns:
            How many values were handed over.
        """
        add: Callable[[str, float, int], Any] = getattr(writer, "add_scalar", writer)
        if not callable(add):
            raise TypeError(
                f"log_to: writer is a {type(writer).__name__}; it needs add_scalar(name, value, "
                "step), or to be such a function"
            )
        count = 0
        for record in self.records[self._logged :]:
            for name in STATISTICS:
                if getattr(record.aux, name) is None:
                    continue
                for head, value in zip(record.heads, record.of_heads(name), strict=True):
                    add(f"{name}/{record.layer}/{head}", value, record.step)
                    count += 1
        self._logged = len(self.records)
        return count

    def save(self, path: str | Path) -> None:
        """Write all records to one safetensors file, to be read by `Seen.load`.

        Raises:
            ImportError: safetensors is not installed.
        """
        save_file = _safetensors().save_file
        tensors: dict[str, Tensor] = {}
        rows = []
        for n, record in enumerate(self):
            for name, tensor in _tensors(record):
                tensors[f"{n}.{name}"] = tensor.cpu().contiguous()
            rows.append(
                {f.name: getattr(record, f.name) for f in fields(record)
                 if f.name not in ("aux", "rows")}
            )  # fmt: skip
        notes = {"records": rows, "unseen": self.unseen, "passed_over": self.passed_over}
        save_file(tensors, path, {"format": FORMAT, "clearhead": json.dumps(notes)})

    @classmethod
    def load(cls, path: str | Path) -> "Seen":
        """Read what `save` wrote.

        Raises:
            ImportError: safetensors is not installed. ValueError: the file is not one of these.
        """
        with _safetensors().safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(
                    f"load: {path} has the format {metadata.get('format')!r}; it must be "
                    f"{FORMAT!r}, as Seen.save writes it"
                )
            held: dict[str, dict[str, Tensor]] = {}
            for key in file.keys():  # noqa: SIM118, a safetensors file is no dict
                n, _, name = key.partition(".")
                held.setdefault(n, {})[name] = file.get_tensor(key)
        notes = json.loads(metadata["clearhead"])
        seen = cls()
        for n, row in enumerate(notes["records"]):
            parts = held.get(str(n), {})
            seen.records.append(Record(**row, aux=_aux(parts), rows=parts.get("rows")))
        for counter, kept in ((seen._unseen, "unseen"), (seen._passed, "passed_over")):
            for *key, times in notes[kept]:
                counter[tuple(key)] = times
        return seen


def _places(record: Record, heads: int | Iterable[int] | None) -> list[int]:
    """Where the wanted heads stand among the recorded ones."""
    wanted = record.heads if heads is None else as_list("heads", heads)
    for head in wanted:
        if head not in record.heads:
            raise ValueError(f"maps: head {head} was not recorded; recorded are {record.heads}")
    return [record.heads.index(head) for head in wanted]  # type: ignore[arg-type]


def _tensors(record: Record) -> Iterator[tuple[str, Tensor]]:
    """A record's tensors with their names, those of a Summary or TopK as "entropy.mean"."""
    if record.rows is not None:
        yield "rows", record.rows
    for f in fields(record.aux):
        value = getattr(record.aux, f.name)
        if isinstance(value, Tensor):
            yield f.name, value
        elif value is not None:
            yield from ((f"{f.name}.{part}", getattr(value, part)) for part in value._fields)


def _aux(tensors: dict[str, Tensor]) -> Aux:
    """What `_tensors` took apart."""
    parts: dict[str, dict[str, Tensor]] = {}
    aux = Aux()
    for key, tensor in tensors.items():
        name, _, part = key.partition(".")
        if part:
            parts.setdefault(name, {})[part] = tensor
        elif name != "rows":
            setattr(aux, name, tensor)
    for name, values in parts.items():
        setattr(aux, name, (TopK if "indices" in values else Summary)(**values))
    return aux


def _table(seen: Seen) -> str:
    """The statistics of each layer, the mean over its heads and steps, as text."""
    shown = seen.layers if len(seen.layers) <= 12 else [*seen.layers[:6], *seen.layers[-6:]]
    rows = [["layer", "heads", "L", "S", *seen.statistics]]
    for name in shown:
        records = [r for r in seen if r.layer == name]
        last = records[-1]
        means = []
        for statistic in seen.statistics:
            held = [r for r in records if getattr(r.aux, statistic) is not None]
            values = [v for r in held for v in r.of_heads(statistic) if not math.isnan(v)]
            means.append(f"{sum(values) / len(values):.3f}" if values else "-")
        rows.append([name, str(len(last.heads)), str(last.L), str(last.S), *means])
    if len(shown) < len(seen.layers):
        rows.insert(7, ["..."] + [""] * (len(rows[0]) - 1))
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if c == 0 else cell.rjust(width)
            for c, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "saving what watch saw needs safetensors, which is not installed; pip install "
            '"clearhead[models]" brings it'
        ) from error

    class Both:
        save_file = staticmethod(safetensors.torch.save_file)
        safe_open = staticmethod(safetensors.safe_open)

    return Both


__all__ = ["Record", "Seen", "Unseen"]
