"""The page as a file: what it holds, what it can never hold, how large it is."""

import base64
import hashlib
import json
import math
import re
import zlib

import pytest
import torch

from clearhead.inspection.capture import Capture
from clearhead.inspection.trace import worked_example
from clearhead.view import page as pages


def attention_of(tokens, heads=(2, 3), full=None, shape=None):
    torch.manual_seed(0)
    L = len(tokens)
    capture = Capture(tokens, [n == 0 for n in range(L)], full, shape or (2, 3))
    for count in heads:
        scores = torch.randn(count, L, L).masked_fill(torch.ones(L, L).triu(1).bool(), -math.inf)
        capture.add(scores.softmax(-1))
    return capture


def facts_of(text):
    return json.loads(re.search(r'id="facts">(.*?)</script>', text, re.DOTALL)[1])


def block(text, name):
    letters = re.search(rf'<script type="text/plain" id="{name}">([\w+/=]*)</script>', text)[1]
    return zlib.decompress(base64.b64decode(letters))


def test_facts_and_maps_come_out_as_they_went_in():
    capture = attention_of(["A", " dog", "!"])
    data = capture.data()
    text = pages.page(title="m & <n>", about='"', attention=data)
    facts = facts_of(text)
    assert (facts["title"], facts["about"], facts["start"]) == ("m & <n>", '"', "overview")
    assert facts["attention"]["tokens"] == ["A", " dog", "!"]
    assert facts["attention"]["heads"] == [2, 3]
    for name, values in data["statistics"].items():
        assert facts["attention"]["statistics"][name] == pytest.approx(values, rel=1e-5)
    for n in range(5):
        assert block(text, f"map{n}") == data["blobs"][n]
    assert block(text, "thumbnails") == b"".join(data["thumbnails"])
    assert "map5" not in text and "key0" not in text


def test_shared_keys_are_written_once():
    data = attention_of(["a", "b"]).data()
    data["keys"] = [b"one", b"one", b"two", b"two", b"one"]
    text = pages.page(title="m", attention=data)
    assert facts_of(text)["attention"]["maps"]["keys"] == [0, 0, 1, 1, 0]
    assert (block(text, "key0"), block(text, "key1")) == (b"one", b"two")
    assert "key2" not in text


@pytest.mark.parametrize(
    "token", ["</script>", "<!--", "<script>", "&lt;", "\u2028", "\ud800", "é"]
)
def test_no_token_stands_in_the_file_as_it_is(token):
    tame = pages.page(title="m", attention=attention_of(["a", "b"]).data())
    text = pages.page(title=token, attention=attention_of(["a", token]).data())
    assert facts_of(text)["attention"]["tokens"] == ["a", token]
    for sign in "<>&":
        assert text.count(sign) == tame.count(sign)
    text.encode()  # also half a character can be written


def test_the_policy_names_the_hashes_of_script_and_style():
    text = pages.page(title="m", attention=attention_of(["a", "b"]).data())
    for tag in ("script", "style"):
        inside = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src &#x27;sha256-{digest}&#x27;" in text
        assert f"<{tag}>" not in inside


def test_numbers_json_has_no_word_for():
    steps = worked_example(["a", "b"])
    text = pages.page(title="m", steps=[pages.steps_data(steps, steps.parameters, "about")])
    (tour,) = facts_of(text)["steps"]
    masked = next(step for step in tour["steps"] if step["name"] == "masked")
    assert masked["values"][0][0][1] == "-Infinity"
    data = attention_of(["a"]).data()  # no row but the hidden one: nothing to average
    assert all(math.isnan(v) for v in data["statistics"]["sink"])
    text = pages.page(title="m", attention=data)
    assert facts_of(text)["attention"]["statistics"]["sink"] == [None] * 5


def test_steps_keep_six_digits():
    steps = worked_example(["a", "b", "c"], 2, 4)
    data = pages.steps_data(steps, steps.parameters)
    for step, row in zip(steps, data["steps"], strict=True):
        values = torch.tensor(pages_to_floats(row["values"]), dtype=torch.float64)
        torch.testing.assert_close(values, step.values.double(), rtol=1e-5, atol=1e-12)
        assert (row["name"], row["code"], row["shape"]) == (step.name, step.code, [*step.shape])
    weight = torch.tensor(data["parameters"]["W_query"], dtype=torch.float64)
    x, queries = (next(s.values for s in steps if s.name == n) for n in ("x", "queries"))
    torch.testing.assert_close(x.double() @ weight, queries.double(), rtol=1e-4, atol=1e-5)


def pages_to_floats(values):
    return [pages_to_floats(v) for v in values] if isinstance(values, list) else float(values)


def test_a_page_without_anything_is_an_error():
    with pytest.raises(ValueError, match="needs attention or steps to show; it was given neither"):
        pages.page(title="m")


def test_a_page_over_the_limit_is_refused_with_the_remedy(monkeypatch):
    data = attention_of(["a", "b"]).data()
    length = len(pages.page(title="m", attention=data))
    monkeypatch.setattr(pages, "LARGEST", length)
    assert pages.page(title="m", attention=data)
    monkeypatch.setattr(pages, "LARGEST", length - 1)
    with pytest.raises(ValueError, match="shorten the text, or leave --full out") as error:
        pages.page(title="m", attention=data)
    assert "the page would have" in str(error.value)


def test_the_limit_is_fifty_megabytes():
    assert pages.LARGEST == 50_000_000


@pytest.mark.parametrize(
    ("count", "text"),
    [(1, "1 kB"), (38_400, "38 kB"), (999_000, "999 kB"), (2_140_000, "2.1 MB")],
)
def test_sizes_are_told_in_words(count, text):
    assert pages.size(count) == text


def test_write_tells_the_size(tmp_path):
    file = tmp_path / "page.html"
    assert pages.write(file, "ü" * 6000) == f"{file}: 12 kB"
    assert file.read_text(encoding="utf-8") == "ü" * 6000


def test_a_frame_holds_the_whole_page():
    text = pages.page(title='"<&', attention=attention_of(["a", '"']).data())
    frame = pages.frame(text, 400)
    inside = re.search(r'srcdoc="([^"]*)"', frame)[1]
    import html

    assert html.unescape(inside) == text
    assert 'height="400"' in frame and 'sandbox="allow-scripts"' in frame


def test_modules_are_joined_each_after_what_it_imports():
    script = pages.joined("main.js")
    order = re.findall(r"^MODULES\.(\w+) = ", script, re.MULTILINE)
    assert sorted(order) == sorted(file.stem for file in pages.FILES.glob("*.js"))
    assert order[-1] == "main"
    for name in order:
        source = (pages.FILES / f"{name}.js").read_text(encoding="utf-8")
        for _, other in pages.IMPORT.findall(source):
            assert order.index(other) < order.index(name)
    assert not re.search(r"^(import|export) ", script, re.MULTILINE)


def test_every_import_is_exported_and_used():
    sources = {file.stem: file.read_text(encoding="utf-8") for file in pages.FILES.glob("*.js")}
    for name, source in sources.items():
        for what, other in pages.IMPORT.findall(source):
            exported = {found for _, found in pages.EXPORT.findall(sources[other])}
            if what.startswith("{"):
                names = {part.strip() for part in what.strip("{}").split(",") if part.strip()}
                assert names <= exported, (name, other, names - exported)
                for imported in names:
                    assert len(re.findall(rf"\b{imported}\b", source)) > 1, (name, imported)


def test_modules_that_import_each_other_are_refused(tmp_path, monkeypatch):
    (tmp_path / "one.js").write_text('import { b } from "./two.js";\nexport const a = 1;\n')
    (tmp_path / "two.js").write_text('import { a } from "./one.js";\nexport const b = 1;\n')
    monkeypatch.setattr(pages, "FILES", tmp_path)
    with pytest.raises(ValueError, match=r"page/one\.js imports itself through one and two"):
        pages.joined("one.js")


def test_the_script_makes_no_markup_and_asks_for_nothing():
    script = pages.joined("main.js")
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(",
                 "new Function", "fetch(", "XMLHttpRequest", "WebSocket", "</script", "<!--",
                 "http:", "localStorage", "document.cookie"):  # fmt: skip
        assert word not in script.replace("http://www.w3.org/2000/svg", ""), word


def test_the_styles_ask_for_nothing():
    for name in pages.STYLES:
        style = (pages.FILES / name).read_text(encoding="utf-8")
        assert "url(" not in style and "@import" not in style and "</style" not in style
    assert {file.name for file in pages.FILES.glob("*.css")} == set(pages.STYLES)
