"""The page of what watch saw: its numbers are the recorded weights."""

import base64
import json
import re
import zlib

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import clearhead
from clearhead import AuxRequest
from clearhead.inspection.capture import COARSE, FINE, to_weights
from clearhead.inspection.links import STATISTICS, statistic

WEIGHTS = AuxRequest(weights=True)


def facts_of(text):
    return json.loads(re.search(r'id="facts">(.*?)</script>', text, re.DOTALL)[1])


def levels(text, name):
    letters = re.search(rf'<script type="text/plain" id="{name}">([\w+/=]*)</script>', text)[1]
    return torch.tensor(list(zlib.decompress(base64.b64decode(letters))), dtype=torch.int32)


def map_of(text, n, L, causal):
    """The weights of head n, read as the page reads a short text's."""
    found = levels(text, f"map{n}")
    found = to_weights(found[: len(found) // 2] + 256 * found[len(found) // 2 :], FINE)
    if not causal:
        return found.view(L, L)
    whole = torch.zeros(L, L)
    whole[tuple(torch.tril_indices(L, L))] = found
    return whole


def encoder():
    layer = nn.TransformerEncoderLayer(12, 3, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(clearhead.MultiHeadAttention(12, 4, 3) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def seen_of(model, times=1, aux=WEIGHTS, L=6, **options):
    with torch.no_grad(), clearhead.watch(model, aux=aux, **options) as seen:
        for _ in range(times):
            model(torch.randn(2, L, 12))
    return seen


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sequence", [0, 1])
def test_maps_overview_and_statistics_are_the_recorded_weights(causal, sequence):
    seen = seen_of(Decoder() if causal else encoder())
    tokens = ["The", " dog", " fetched", " the", " ball", "<"]
    text = seen.to_html(tokens, title="mine", sequence=sequence)
    facts = facts_of(text)
    shown = facts["attention"]
    assert (facts["title"], facts["start"], shown["causal"]) == ("mine", "three", causal)
    assert len(facts["three"]) == 3
    assert shown["tokens"] == tokens and shown["heads"] == [3, 3]
    assert shown["hidden"] == [True] + [False] * 5
    small = to_weights(levels(text, "thumbnails"), COARSE).view(6, 6, 6)
    for n in range(6):
        weights = seen.maps(n // 3)[sequence, n % 3].float()
        assert_close(map_of(text, n, 6, causal), weights, rtol=2e-4, atol=1e-7)
        assert_close(small[n], weights, rtol=0.1, atol=2**-9)
    for name in STATISTICS:
        expected = [
            value for layer in range(2)
            for value in statistic(name, seen.maps(layer)[sequence].float(), shown["hidden"])
        ]  # fmt: skip
        assert shown["statistics"][name] == pytest.approx(expected, rel=1e-5)
    assert "map6" not in text


def test_layers_steps_and_heads_are_chosen():
    model = Decoder()
    seen = seen_of(model, times=2, heads=[2, 0])
    text = seen.to_html(layers="layers.1", step=1)
    facts = facts_of(text)
    assert facts["attention"]["heads"] == [2]
    assert facts["about"] == "1 layer (layers.1), 2 heads (the model's 2, 0), 6 tokens"
    assert facts["attention"]["tokens"] == ["1", " 2", " 3", " 4", " 5", " 6"]
    expected = seen.maps(1, 2, step=1)[0, 0]
    assert_close(map_of(text, 0, 6, True), expected, rtol=2e-4, atol=1e-7)
    both = facts_of(seen.to_html(step=0))
    assert both["about"].startswith("2 layers (layers.0 to layers.1), 2 heads")


def test_the_largest_score_is_shown_where_it_was_asked_for():
    seen = seen_of(Decoder(), aux=AuxRequest(weights=True, max_logit=True))
    expected = [v for record in seen for v in record.aux.max_logit[1].amax(-1).tolist()]
    found = facts_of(seen.to_html(sequence=1))["attention"]["statistics"]["max_logit"]
    assert found == pytest.approx(expected, rel=1e-5)
    assert "max_logit" not in facts_of(seen_of(Decoder()).to_html())["attention"]["statistics"]


def test_padding_is_hidden_and_weighs_nothing():
    model, x = encoder(), torch.randn(2, 6, 12)
    pad = torch.zeros(2, 6, dtype=torch.bool)
    pad[1, 4:] = True
    with torch.no_grad(), clearhead.watch(model, aux=WEIGHTS) as seen:
        model(x, src_key_padding_mask=pad)
    text = seen.to_html(sequence=1)
    assert facts_of(text)["attention"]["hidden"] == [True, False, False, False, True, True]
    assert (map_of(text, 0, 6, False)[:, 4:] == 0).all()


def test_kinds_of_layers_may_stand_on_one_page():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Decoder(), encoder()

        def forward(self, x):
            return self.second(self.first(x))

    seen = seen_of(Both())
    text = seen.to_html()
    assert facts_of(text)["attention"]["causal"] is False
    for n in range(12):
        weights = seen.maps(n // 3)[0, n % 3]
        assert_close(map_of(text, n, 6, False), weights, rtol=2e-4, atol=1e-7)


def test_a_long_text_keeps_the_strongest_or_all():
    seen = seen_of(Decoder(), L=700)
    assert facts_of(seen.to_html())["attention"]["maps"]["kind"] == "top"
    assert facts_of(seen.to_html(full="maps"))["attention"]["maps"]["kind"] == "all"


def test_it_is_written_and_stands_in_a_notebook(tmp_path):
    seen = seen_of(Decoder())
    told = seen.write_html(tmp_path / "heads.html", list("abcdef"), title="t")
    assert re.fullmatch(r".*heads\.html: \d+ kB", told)
    text = (tmp_path / "heads.html").read_text(encoding="utf-8")
    assert text == seen.to_html(list("abcdef"), title="t")
    assert seen._repr_html_().startswith("<iframe srcdoc=")
    assert seen_of(Decoder(), times=2)._repr_html_() is None
    assert seen_of(Decoder(), aux=AuxRequest(entropy=True))._repr_html_() is None
    assert clearhead.Seen()._repr_html_() is None


def test_saved_and_loaded_it_makes_the_same_page(tmp_path):
    seen = seen_of(encoder())
    seen.save(tmp_path / "seen.safetensors")
    assert clearhead.Seen.load(tmp_path / "seen.safetensors").to_html() == seen.to_html()


def test_errors_say_what_to_do():
    seen = seen_of(Decoder(), times=2)

    def refused(message, seen=seen, **options):
        with pytest.raises(ValueError, match=message):
            seen.to_html(**options)

    refused(r"^to_html: a page shows one forward, and 2 were recorded; .* step=0$")
    refused(r"^to_html: nothing was recorded in step 5; recorded are \[0, 1\]$", step=5)
    refused(r"^to_html: there is no layer 'x'; recorded are \['layers.0'", layers="x")
    refused("^to_html: sequence is 2, but layer layers.0 was called with 2,", step=0, sequence=2)
    refused("^to_html: got 1 tokens, and the layers were called with 6", step=0, tokens=["a"])
    refused('^to_html: full is "qk", but a watch keeps no queries', step=0, full="qk")
    refused("^to_html: nothing was recorded in step None; recorded are", clearhead.Seen())
    without = seen_of(Decoder(), aux=AuxRequest(entropy=True))
    refused(r"^to_html: no weights were recorded; .*AuxRequest\(weights=True\)$", without)
    module = nn.MultiheadAttention(12, 3, batch_first=True)
    with clearhead.watch(module, aux=WEIGHTS) as crossed:
        module(torch.randn(1, 4, 12), *torch.randn(2, 1, 6, 12))
    refused(r"rows and keys are the same tokens; .* MultiheadAttention \(4, 6\)\. Name", crossed)
