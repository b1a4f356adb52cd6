"""Roles of small random models, end to end: what runs, what is refused, what is kept."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from clearhead.cli import known_roles as kept
from clearhead.cli.known_roles import key, known_roles
from clearhead.inspection import probes, sentences
from clearhead.inspection.probes import Probe, batches, losses, without
from clearhead.inspection.roles import ROLES, RoleTable, roles

ALL_TEXTS = [
    *(s.text for s in sentences.syntax()),
    *(s.text for s in sentences.pronouns()),
    *(f"{text} {right}" for text, right, _ in sentences.continued()),
]


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    split = pre_tokenizers.Whitespace()
    words = {w for text in ALL_TEXTS for w, _ in split.pre_tokenize_str(text)}
    numbers = {w: i for i, w in enumerate(["<unk>", "a", *sorted(words - {"a"})])}
    made = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    made.pre_tokenizer = split
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


def llama(tokenizer, **changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    options = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3}
    options |= {"num_attention_heads": 4, "num_key_value_heads": 2} | changes
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **options)).eval()


@pytest.fixture(scope="module")
def model(tokenizer):
    return llama(tokenizer)


@pytest.fixture(scope="module")
def table(model, tokenizer):
    return roles(model, tokenizer)


def test_a_random_model_plays_no_role_and_none_of_its_heads_is_needed(table):
    assert [row.role for row in table.rows] == list(ROLES)
    assert [row.role for row in table.rows if row.found] == []
    assert table.leaders() == []
    for row in table.rows:
        assert row.effect is not None and len(row.effect.controls) == 5
        assert math.isfinite(row.effect.before) and math.isfinite(row.effect.after)
        assert row.effect.texts in (8, 30, 32)
    assert all(len(layers) == 3 and len(layers[0]) == 4 for layers in table.scores.values())
    # An untrained model guesses: its loss is about that of all words alike.
    of_prose = table.row("previous").effect.before
    assert of_prose == pytest.approx(math.log(len(ALL_TEXTS)), rel=0.5)


def test_progress_and_what_is_put_back(model, tokenizer):
    before = model.config._attn_implementation
    assert before == "sdpa"
    told = []
    table = roles(model, tokenizer, ablate=False, progress=lambda *what: told.append(what))
    assert model.config._attn_implementation == before
    assert told[0][:2] == ("reading sentences", 0) and told[-1][1] == told[-1][2]
    assert {row.not_measured for row in table.rows} == {"not asked for"}


def test_padding_changes_nothing(model, tokenizer):
    texts = [probes.sentence_probe(tokenizer, s) for s in list(sentences.syntax())[:7]]
    assert len({len(probe.ids) for probe in texts}) > 3
    model.set_attn_implementation("eager")
    together = list(probes.weights_of(model.model, texts))
    for probe, weights in zip(texts, together, strict=True):
        [alone] = probes.weights_of(model.model, [probe])
        torch.testing.assert_close(weights, alone)
    for probe, loss in zip(texts, losses(model, texts), strict=True):
        ids = torch.tensor([probe.ids])
        with torch.inference_mode():
            expected = model(input_ids=ids, labels=ids).loss
        torch.testing.assert_close(loss.mean(), expected)
    model.set_attn_implementation("sdpa")


def test_batches_hold_every_text_once():
    texts = [Probe([1] * n, [False] * n, 0) for n in (3, 2000, 5, 4, 500, 600)]
    made = list(batches(texts))
    assert sorted(len(p.ids) for batch in made for p in batch) == [3, 4, 5, 500, 600, 2000]
    assert all(
        len(batch) == 1 or len(batch) * max(len(p.ids) for p in batch) <= probes.BATCH
        for batch in made
    )
    assert list(batches([])) == []


def test_a_head_that_is_taken_out_adds_nothing(model):
    ids = torch.arange(7)[None]
    seen = {}
    mixer = model.model.layers[1].self_attn.o_proj
    hook = mixer.register_forward_hook(lambda module, args, out: seen.update(x=args[0], y=out))
    with torch.inference_mode():
        whole = model(input_ids=ids).logits
        full = seen["x"].clone()
        with without(model, [(1, 2), (1, 0)]):
            model(input_ids=ids)
            kept = full.clone()
            kept[..., :6] = kept[..., 12:18] = 0  # heads 0 and 2, six numbers each
            torch.testing.assert_close(seen["x"], kept)
            torch.testing.assert_close(seen["y"], kept @ mixer.weight.T)
        assert torch.equal(model(input_ids=ids).logits, whole)
    hook.remove()
    assert not mixer._forward_pre_hooks
    with without(model, []):
        assert not any(module._forward_pre_hooks for module in model.modules())


def test_repeats_are_random_tokens_twice(tokenizer):
    texts = probes.repeat_probes(tokenizer, 200)
    assert len(texts) == probes.REPEATS and {p.half for p in texts} == {0, 1}
    for half in (0, 1):
        lengths = [p.R for p in texts if p.half == half]
        assert len(set(lengths)) >= 7
    for probe in texts:
        again = probe.ids[probe.start :]
        assert probe.start == 1 and again == again[: probe.R] * 2
        assert len(set(probe.ids)) == probe.R + 1 and tokenizer.unk_token_id not in probe.ids
    short = probes.repeat_probes(tokenizer, 25)
    assert all(len(p.ids) <= 25 for p in short) and len({p.R for p in short}) > 1
    assert probes.repeat_probes(tokenizer, 8) == []


def test_models_that_cannot_be_measured_in_full(tokenizer):
    from transformers import BertConfig, BertModel, BloomConfig, BloomForCausalLM, T5Config, T5Model

    size = {"vocab_size": len(tokenizer), "hidden_size": 24}
    bert = BertModel(
        BertConfig(**size, num_hidden_layers=2, num_attention_heads=3, intermediate_size=32)
    ).eval()
    t5 = T5Model(
        T5Config(vocab_size=len(tokenizer), d_model=24, d_kv=6, d_ff=32, num_layers=2, num_heads=4)
    ).eval()
    for both_ways in (bert, t5):
        told = roles(both_ways, tokenizer)
        assert len(told.rows) == len(ROLES)
        assert {row.not_measured for row in told.rows} == {
            "the model reads both ways, so it predicts no next token"
        }
    bloom = BloomForCausalLM(BloomConfig(**size, n_layer=2, n_head=4)).eval()
    assert all(row.effect is not None for row in roles(bloom, tokenizer).rows)
    base = roles(llama(tokenizer).model, tokenizer)
    assert {row.not_measured for row in base.rows} == {"the model has no language-model head"}
    short = roles(llama(tokenizer, max_position_embeddings=12), tokenizer, ablate=False)
    assert short.row("induction").n == (32, 32) and short.row("pronoun_noun") is not None


def test_a_model_that_does_not_know_its_tokens(tokenizer):
    small = llama(tokenizer)
    small.resize_token_embeddings(50)
    with pytest.raises(ValueError, match="LlamaModel failed on a sentence: index out of range"):
        roles(small, tokenizer)


class Plain(torch.nn.Module):
    """A causal language model of torch's own module; with heads or without attention."""

    config = SimpleNamespace(is_encoder_decoder=False)

    def __init__(self, words, heads):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(words, 12), torch.nn.Linear(12, words)
        self.mixer = torch.nn.MultiheadAttention(12, heads, batch_first=True) if heads else None

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, attention_mask):
        x = self.embed(input_ids)
        if self.mixer is not None:
            later = torch.ones(*x.shape[1:2] * 2, dtype=torch.bool).triu(1)
            x = x + self.mixer(x, x, x, attn_mask=later, need_weights=False)[0]
        return SimpleNamespace(logits=self.head(x))


def test_torch_s_own_module_is_read_and_its_heads_stay(tokenizer):
    table = roles(Plain(len(tokenizer), 3).eval(), tokenizer)
    assert [len(layer) for layer in table.scores["sink"]] == [3]
    for row in table.rows:
        assert row.effect is None
        assert row.not_measured.startswith("watch: mixer is an nn.MultiheadAttention, which mixes")


def test_a_model_without_attention(tokenizer):
    with pytest.raises(ValueError, match="^Plain shows no attention weights of shape .B, H, "):
        roles(Plain(len(tokenizer), 0).eval(), tokenizer)


# ---- what is kept ----


def quiet(*what):
    pass


@pytest.fixture
def counted(table, tmp_path, monkeypatch):
    """The cache in an empty folder, and how often the roles were measured."""
    calls = []
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))

    def measure(*args, **options):
        calls.append(args)
        return table

    monkeypatch.setattr(kept, "roles", measure)
    return calls


def test_roles_are_measured_once_for_each_model(counted, model, tokenizer, table):
    for _ in range(2):
        assert known_roles(model, tokenizer, False, quiet) == table
    assert len(counted) == 1
    [file] = kept.folder().iterdir()
    assert file.name == f"{key(model, tokenizer)}.json"
    assert known_roles(model, tokenizer, True, quiet) == table and len(counted) == 2
    for broken in ("", "{", "[]", "null", file.read_text()[:500], '{"version": "0"}'):
        file.write_text(broken)
        assert known_roles(model, tokenizer, False, quiet) == table
        assert RoleTable.from_dict(json.loads(file.read_text())) == table
    assert len(counted) == 8
    assert [f.name for f in kept.folder().iterdir()] == [file.name]


def test_a_folder_that_cannot_be_written_keeps_nothing(
    counted, model, tokenizer, table, monkeypatch, tmp_path
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "file"))
    assert known_roles(model, tokenizer, False, quiet) == table
    assert len(counted) == 1


def test_another_model_has_another_key(model, tokenizer):
    first = key(model, tokenizer)
    assert first == key(model, tokenizer)
    other = llama(tokenizer)
    assert key(other, tokenizer) == first
    with torch.no_grad():
        other.model.norm.weight[3] += 1e-3
    assert key(other, tokenizer) != first
