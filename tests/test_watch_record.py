"""What a watch gives afterwards: tables, maps, logging, files."""

import dataclasses
import math
import sys

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

import clearhead
from clearhead import AuxRequest, Seen
from clearhead.backends import native
from clearhead.inspection import watch
from clearhead.testing.statistics import measured

ALL = AuxRequest(lse=True, entropy=True, first_mass=True, key_mass=True, top_k=2, weights=True)


def watched(aux, steps=2, **options):
    q = torch.randn(2, 3, 5, 4)
    padded = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])[:, None, None]
    with clearhead.watch(aux=aux, **options) as seen:
        for _ in range(steps):
            F.scaled_dot_product_attention(q, q, q, attn_mask=padded)
    return seen


def test_columns_hold_means_over_the_rows_that_count():
    rows, heads = watched(ALL, 1), watched(AuxRequest(entropy=True, reduce="head"), 1)
    table = rows.head_stats()
    assert list(table) == ["layer", "number", "head", "step", "lse", "entropy", "first_mass"]
    assert {len(column) for column in table.values()} == {3}
    assert (table["layer"], table["head"], table["step"]) == (["call 0"] * 3, [0, 1, 2], [0] * 3)
    weights = rows.maps(0)
    entropy = torch.special.entr(weights).sum(-1)
    expected = (entropy[0].mean(-1) + entropy[1, :, :3].mean(-1)) / 2
    assert_close(torch.tensor(table["entropy"]), expected)
    assert len(heads.head_stats()["entropy"]) == 3


def test_maps_are_chosen_by_layer_head_and_step():
    seen = watched(ALL, heads=[2, 0])
    assert seen.layers == ["call 0", "call 1"]
    assert seen.maps("call 1", [0]).shape == (2, 1, 5, 5)
    assert torch.equal(seen.maps(1, 2), seen.maps(1)[:, :1])
    top = watched(AuxRequest(top_k=2)).maps(0)
    assert top.weights.shape == top.indices.shape == (2, 3, 5, 2)
    for arguments, message in (
        ((9,), "there is no layer 9; recorded are"),
        ((0, 1), r"head 1 was not recorded; recorded are \[2, 0\]"),
        ((0, None, 7), "layer 0 has 0 records for step 7"),
    ):
        with pytest.raises(ValueError, match=f"^maps: {message}"):
            seen.maps(*arguments)
    with pytest.raises(ValueError, match="^maps: no weights were recorded; watch with aux="):
        watched(AuxRequest(lse=True)).maps(0)


@pytest.mark.parametrize("aux", [ALL, AuxRequest(entropy=True, top_k=2, reduce="head")])
def test_saved_and_loaded_is_the_same(aux, tmp_path):
    seen = watched(aux)
    seen.miss("here", "a kernel", "cannot be read")
    seen.save(tmp_path / "seen.safetensors")
    loaded = Seen.load(tmp_path / "seen.safetensors")
    assert repr(loaded) == repr(seen)
    assert loaded.unseen == seen.unseen
    for a, b in zip(seen, loaded, strict=True):
        assert (a.layer, a.number, a.step, a.kind, a.heads, a.L, a.S) == (
            b.layer, b.number, b.step, b.kind, b.heads, b.L, b.S)  # fmt: skip
        assert_close(vars(a.aux), vars(b.aux), rtol=0, atol=0, equal_nan=True)
    assert loaded.head_stats() == seen.head_stats()


def test_files_of_others_and_a_missing_package_are_named(tmp_path, monkeypatch):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(
        ValueError, match="^load: .* has the format None; it must be 'clearhead wat"
    ):
        Seen.load(tmp_path / "other.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match="^saving what watch saw needs safetensors, which is not"):
        watched(ALL).save(tmp_path / "seen.safetensors")


def test_values_go_to_a_logger_once():
    class Writer:
        def __init__(self):
            self.values = {}

        def add_scalar(self, name, value, step):
            self.values[name, step] = value

    seen, writer = watched(AuxRequest(entropy=True, reduce="head")), Writer()
    assert seen.log_to(writer) == 6
    assert seen.log_to(writer) == 0
    assert set(writer.values) == {(f"entropy/call {n}/{h}", 0) for n in range(2) for h in range(3)}
    assert all(math.isfinite(value) for value in writer.values.values())
    seen.clear()
    assert len(seen) == 0
    calls = []
    assert (
        watched(AuxRequest(lse=True)).log_to(lambda *value: calls.append(value)) == len(calls) == 6
    )
    with pytest.raises(TypeError, match="^log_to: writer is a int; it needs add_scalar"):
        seen.log_to(3)


def test_the_table_shows_layers_and_what_was_not_seen():
    seen = watched(AuxRequest(entropy=True), steps=20)
    seen.miss("there", "flex", "is a kernel of its own")
    text = str(seen)
    assert text.startswith("Seen(20 layers, 20 records, 1 kinds of calls unseen)\nlayer")
    assert "entropy" in text
    assert "..." in text
    assert text.endswith("unseen: there: flex is a kernel of its own (1 x)")


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"model": 3}, TypeError, "^watch: model is a int"),
        ({"every": 0}, ValueError, "^watch: every is 0"),
        ({"layers": [1.5]}, TypeError, "^watch: layers has 1.5 in it"),
        ({"aux": AuxRequest()}, ValueError, "^watch: aux asks for nothing"),
        ({"mode": "half"}, ValueError, "^watch: mode is 'half'"),
    ],
)
def test_wrong_arguments_are_named(arguments, kind, message):
    with pytest.raises(kind, match=message):
        clearhead.watch(**arguments)


def test_a_call_of_torch_gets_the_statistics_of_the_kernels_without_values(monkeypatch):
    """Where they can serve: to the bit those that clearhead.attention has beside its output."""
    q, k = torch.randn(2, 4, 70, 8), torch.randn(2, 2, 70, 8)
    served = []
    real = native.forward
    monkeypatch.setattr(native, "forward", lambda p: served.append(p.value.shape) or real(p))
    for aux in (watch.DEFAULT, dataclasses.replace(watch.DEFAULT, reduce=None)):
        with clearhead.watch(aux=aux) as seen:
            F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
        assert served.pop() == (2, 2, 70, 0) and not served
        found, (record,) = clearhead.attention(q, k, k, is_causal=True, return_aux=aux)[1], seen
        served.clear()
        for name, tensor in measured(record.aux).items():
            assert torch.equal(tensor, measured(found)[name])
