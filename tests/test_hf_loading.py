"""Loading models of transformers and turning text into tokens: what works, and why not."""

import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, LlamaForCausalLM, PreTrainedTokenizerFast

from clearhead import hf, smollm

TEXT = "the dog fetched the ball because she was fast"
WORDS = ["<unk>", "<pad>", "<s>", "</s>", *sorted(set(TEXT.split()))]
SIZES = {
    "vocab_size": len(WORDS),
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
}


def save(folder, family="llama", ends=False, **options):
    """A small random model of this family and its tokenizer, in a folder."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **{**SIZES, **options})
    make = LlamaForCausalLM if family == "llama" else AutoModel.from_config
    make(config).save_pretrained(folder)
    numbers = {word: number for number, word in enumerate(WORDS)}
    made = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inputs = ["input_ids", "attention_mask"]
    if ends:
        inputs.append("token_type_ids")
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)]
        )
    PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", model_input_names=inputs
    ).save_pretrained(folder)
    return str(folder)


# ---- tokens ----


def test_tokens_carry_what_the_model_takes(tmp_path):
    model, tokenizer = hf.load(save(tmp_path, "bert", ends=True))
    tokens = hf.tokenize(model, tokenizer, "the  dog")
    assert tokens.texts == ["<s>", "the", "dog", "</s>"]
    assert tokens.offsets == [(0, 0), (0, 3), (5, 8), (0, 0)]
    assert tokens.special == [True, False, False, True]
    assert {name: tuple(part.shape) for name, part in tokens.inputs.items()} == {
        "input_ids": (1, 4),
        "token_type_ids": (1, 4),
        "attention_mask": (1, 4),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the text is empty; give a sentence"),
        (" \n", "the text is empty; give a sentence"),
        ("a \udcff b", "the text is not Unicode: it holds halves of characters"),
        (
            "dog " * 17,
            "the text has 17 tokens and the model reads at most 16; shorten it",
        ),
    ],
)
def test_a_text_that_cannot_be_read(text, message, tmp_path):
    model, tokenizer = hf.load(save(tmp_path))
    with pytest.raises(ValueError) as caught:
        hf.tokenize(model, tokenizer, text)
    assert str(caught.value) == message
    assert len(hf.tokenize(model, tokenizer, "dog " * 16).texts) == 16


def test_the_longest_text_of_each_kind_of_positions(tmp_path):
    # RoBERTa counts positions from the padding token's number + 1: two of them are never used.
    model, tokenizer = hf.load(save(tmp_path / "roberta", "roberta"))
    longest = hf.tokenize(model, tokenizer, "dog " * 14)
    assert hf.attentions(model, longest, lambda *_: None) == "clearhead"
    with pytest.raises(ValueError, match="has 15 tokens and the model reads at most 14;"):
        hf.tokenize(model, tokenizer, "dog " * 15)
    # T5 has no positions but distances: only a tokenizer may set a limit.
    model, tokenizer = hf.load(save(tmp_path / "t5", "t5", d_kv=6, max_position_embeddings=None))
    assert len(hf.tokenize(model, tokenizer, "dog " * 99).texts) == 99
    tokenizer.model_max_length = 9
    with pytest.raises(ValueError, match="has 10 tokens and the model reads at most 9;"):
        hf.tokenize(model, tokenizer, "dog " * 10)


# ---- loading ----


def test_a_broken_copy_of_the_default_model_is_made_again(tmp_path, monkeypatch):
    made = []

    def converted(progress=None):
        folder = tmp_path / "copy"
        if not folder.is_dir():
            made.append(progress)
            save(folder)
        return folder

    monkeypatch.setattr(smollm, "converted", converted)
    hf.load(None, print)
    weights = tmp_path / "copy" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    model, _ = hf.load(None, print)
    assert made == [print, print]
    assert type(model).__name__ == "LlamaForCausalLM"
    hf.load(None, print)
    assert len(made) == 2


# ---- what cannot be served ----


def test_models_that_cannot_be_read(tmp_path):
    def refusal(family, **options):
        model, tokenizer = hf.load(save(tmp_path / family, family, **options))
        with pytest.raises(ValueError) as caught:
            hf.attentions(model, hf.tokenize(model, tokenizer, TEXT), lambda *_: None)
        return str(caught.value)

    assert refusal("vit") == "the model reads pixel_values, not text; give one that does"
    assert refusal("longformer", attention_window=4) == (
        "layer 0 of LongformerModel gives weights of shape (1, 4, 9, 5) for 9 tokens; only "
        "(1, H, 9, 9) can be read"
    )
    assert refusal("fnet") == (
        "FNetModel gives no attention weights; if it has attention, load it with "
        'attn_implementation="eager"'
    )


def test_a_model_that_fails_says_which(tmp_path):
    model, tokenizer = hf.load(save(tmp_path))
    tokens = hf.tokenize(model, tokenizer, TEXT)
    model.model.layers[1].self_attn.v_proj.weight = torch.nn.Parameter(torch.zeros(5, 7))
    with pytest.raises(ValueError, match=r"^LlamaModel failed on this text: .*shapes"):
        hf.attentions(model, tokens, lambda *_: None)


def load_error(name):
    with pytest.raises(ValueError) as caught:
        hf.load(str(name))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_names_that_lead_to_no_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    end = "give one written by save_pretrained()"
    assert load_error("/no/such") == f"there is no folder /no/such; {end}"
    assert load_error("./no") == f"there is no folder ./no; {end}"
    assert load_error("~/no/such") == f"there is no folder ~/no/such; {end}"
    assert load_error(tmp_path) == f"the folder {tmp_path} has no config.json; {end}"
    (tmp_path / "model.gguf").touch()
    assert load_error("model.gguf") == (
        "model.gguf is a file; give the folder that holds it and its config.json"
    )
    for name in ("someone/something", "something", "no such model"):
        assert load_error(name) == (
            f"the model {name} could not be loaded: no such folder, not in the local cache, and "
            "the model hub is out of reach; give the path of a folder written by save_pretrained()"
        )


def test_the_hub_is_asked_only_where_it_answers(monkeypatch):
    import huggingface_hub

    asked = []

    def connect(address, timeout):
        asked.append(address)
        raise OSError("no network")

    assert not hf.loading._hub_answers()  # the whole session is offline
    monkeypatch.setattr(hf.loading.socket, "create_connection", connect)
    monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda: False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://hub.example:81")
    monkeypatch.setattr(hf.loading.urllib.request, "getproxies", dict)
    assert not hf.loading._hub_answers()
    assert asked == [("hub.example", 81)]
    monkeypatch.setattr(hf.loading.urllib.request, "getproxies", lambda: {"https": "proxy"})
    assert hf.loading._hub_answers()


def test_folders_that_hold_no_whole_model(tmp_path):
    folder = Path(save(tmp_path / "whole"))
    start = f"the model in the folder {folder} could not be loaded: "
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:1000])
    assert load_error(folder).startswith(start)
    weights.unlink()
    assert load_error(folder).startswith(start)
    weights.write_bytes(whole)
    (folder / "config.json").write_text('{"model_type": "nonesuch"}')
    assert load_error(folder).startswith(start)

    folder = Path(save(tmp_path / "silent"))
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert load_error(folder).startswith(
        f"the tokenizer in the folder {folder} could not be loaded: "
    )


def test_missing_weights_are_not_made_up(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = Path(save(tmp_path))
    state = load_file(folder / "model.safetensors")
    del state["model.layers.1.self_attn.q_proj.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    assert load_error(folder) == (
        f"the model {folder} lacks 1 of its weights, model.layers.1.self_attn.q_proj.weight among "
        "them; save it again, or load it with the architecture that it was saved from"
    )


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    message = (
        "reading models needs transformers, which is not installed; "
        'pip install "clearhead[models]" brings it'
    )
    assert load_error("anything") == message
    with pytest.raises(ValueError) as caught:
        hf.register()
    assert str(caught.value) == message


def test_loading_is_silent_and_leaves_the_settings_alone(tmp_path, capfd):
    from transformers.utils import logging

    folder = save(tmp_path, "bert")
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    capfd.readouterr()
    model, tokenizer = hf.load(folder)
    hf.attentions(model, hf.tokenize(model, tokenizer, TEXT), lambda *_: None)
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
