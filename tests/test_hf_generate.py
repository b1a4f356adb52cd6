"""Whole models with clearhead: caches, generation, packing, training, compiling, as with eager."""

import copy

import pytest
import torch
from test_hf_families import GROUPED, HALVES
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DataCollatorWithFlattening,
    StaticCache,
)

from clearhead import hf
from clearhead.hf import interface

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": None,  # so that all sequences get to the same length
}
WINDOW = {**GROUPED, "sliding_window": 4}
FAMILIES = {
    "llama": GROUPED,
    "qwen3": GROUPED,
    "mistral": WINDOW,
    "gemma2": {**WINDOW, "query_pre_attn_scalar": 6, "attn_logit_softcapping": 2.0},
    "gemma3_text": WINDOW,
    "gpt2": {},
    "gpt_neox": {},
    "gpt_oss": {
        **WINDOW,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 99.0},
    },
    "phi": {},
    "llama4_text": {
        **GROUPED,
        "num_local_experts": 2,
        "intermediate_size_mlp": 40,
        "attention_chunk_size": 8,
    },
    "cohere2": WINDOW,
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4},
    "bart": HALVES,
}
DECODERS = [name for name in FAMILIES if name not in ("t5", "bart")]
# Logits of small models in float32: two runs differ by rounding alone, some 3e-6 of their size.
CLOSE = {"rtol": 1e-4, "atol": 3e-5}


@pytest.fixture(autouse=True)
def registered():
    hf.register()


def pair(name, **more):
    """The same small model with clearhead and with eager attention."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(name, **{**SIZES, **copy.deepcopy(FAMILIES[name]), **more})
    kind = AutoModelForCausalLM if name in DECODERS else AutoModelForSeq2SeqLM
    if name not in DECODERS:
        config.decoder_start_token_id = 2
        config.forced_eos_token_id = None
    models = [
        kind.from_config(copy.deepcopy(config), attn_implementation=attention).eval()
        for attention in ("clearhead", "eager")
    ]
    for parameter in models[1].parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.3)
    models[0].load_state_dict(models[1].state_dict())
    return models


def prompt(side="left"):
    """Two sequences, the first of them padded by four."""
    torch.manual_seed(2)
    numbers, mask = torch.randint(5, 48, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[0, slice(4) if side == "left" else slice(-4, None)] = 0
    return {"input_ids": numbers.masked_fill(mask == 0, 1), "attention_mask": mask}


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"num_beams": 3}],
                         ids=["dynamic", "static", "beams"])  # fmt: skip
@pytest.mark.parametrize("name", FAMILIES)
def test_generation_from_a_padded_batch_equals_eager(name, options):
    given = prompt("left" if name in DECODERS else "right")
    answers = [
        model.generate(**given, max_new_tokens=8, do_sample=False, disable_compile=True, **options)
        for model in pair(name)
    ]
    assert torch.equal(*answers) and answers[0].shape[1] >= 8


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_prompt_in_pieces_equals_the_prompt_at_once(name, cache):
    torch.manual_seed(3)
    numbers = torch.randint(5, 48, (2, 14))
    ours, theirs = pair(name)
    with torch.no_grad():
        whole = theirs(numbers, use_cache=False).logits
        kept = StaticCache(config=ours.config, max_cache_len=20) if cache == "static" else None
        parts = []
        for piece in numbers.split([6, 1, 4, 1, 2], dim=1):
            result = ours(piece, cache=kept, use_cache=True)
            kept = result.cache if kept is None else kept
            parts.append(result.logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, **CLOSE)


def test_the_fast_rules_reach_clearhead(monkeypatch):
    """No dense mask for prompts, padded or not, windows, packed sequences and decoding."""
    asked = []

    def noted(*arguments, **options):
        asked.append({k: v for k, v in options.items() if v is not None and v is not False})
        return real(*arguments, **options)

    real = interface.attention
    monkeypatch.setattr(interface, "attention", noted)
    for name in ("llama", "gemma3_text"):
        ours, _ = pair(name)
        for static in ({}, {"cache_implementation": "static"}):
            ours.generate(**prompt(), max_new_tokens=3, disable_compile=True, **static)
        places = torch.tensor([[0, 1, 0, 1]])
        ours(torch.tensor([[5, 6, 7, 8]]), position_ids=places, use_cache=False)
        ours(torch.tensor([[5, 6, 7, 8]]))
    assert len(asked) > 30
    assert not any("attn_mask" in options for options in asked)
    assert not any("return_aux" in options for options in asked)  # kinds of calls are repeated
    for rule in ("is_causal", "window", "key_mask", "documents"):
        assert any(rule in options for options in asked), rule


@pytest.mark.parametrize("name", DECODERS)
def test_packed_sequences_equal_each_alone(name):
    torch.manual_seed(4)
    sequences = [torch.randint(5, 48, (n,)) for n in (5, 1, 7)]
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_position_ids=True)
    packed = collate([{"input_ids": s.tolist()} for s in sequences])
    packed.pop("labels")
    ours, theirs = pair(name)
    with torch.no_grad():
        alone = torch.cat([theirs(s[None]).logits for s in sequences], 1)
        torch.testing.assert_close(ours(**packed, use_cache=False).logits, alone, **CLOSE)
        bare = {k: packed[k] for k in ("input_ids", "position_ids")}
        if name == "gpt_oss":  # does not tell its mask the positions: eager mixes the sequences
            assert not torch.allclose(theirs(**bare, use_cache=False).logits, alone, **CLOSE)
        else:
            torch.testing.assert_close(ours(**bare, use_cache=False).logits, alone, **CLOSE)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "gpt2", "t5", "bart"])
def test_weights_while_generating_equal_eager(name):
    given = prompt("left" if name in DECODERS else "right")
    results = [
        model.generate(
            **given, max_new_tokens=3, do_sample=False, output_attentions=True,
            return_dict_in_generate=True,
        )
        for model in pair(name)
    ]  # fmt: skip
    seen = given["attention_mask"].bool()
    for part in ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions"):
        mine, theirs = (result.get(part) for result in results)
        if theirs is None:
            continue
        flat = [
            [w for step in ws for w in (step if isinstance(step, tuple) else (step,))]
            for ws in (mine, theirs)
        ]
        assert len(flat[0]) == len(flat[1]) > 0
        for a, b in zip(*flat, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            if a.shape[2] == seen.shape[1]:  # rows of padding see nothing here, all keys in eager
                a, b = a.transpose(1, 2)[seen], b.transpose(1, 2)[seen]
            torch.testing.assert_close(a, b, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "gpt2", "t5", "bart"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_through_checkpoints_equal_eager(name, reentrant):
    given = prompt("left" if name in DECODERS else "right")
    labels = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
    labels[0, 4] = -100  # a decoder would predict it from padding
    grads = []
    for model in pair(name):
        for part in model.modules():  # checkpoints work in train mode only; drop nothing
            for option in ("p", "dropout", "attention_dropout", "dropout_rate"):
                if isinstance(getattr(part, option, None), float):
                    setattr(part, option, 0.0)
        model.train().activation_checkpointing_enable({"use_reentrant": reentrant})
        model(**given, labels=labels, use_cache=False).loss.backward()
        grads.append({k: p.grad for k, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys() and len(grads[0]) > 10
    for key, grad in grads[1].items():
        torch.testing.assert_close(grads[0][key], grad, rtol=1e-3, atol=1e-5, msg=key)


def test_dropout_drops_while_training_only():
    ours, _ = pair("llama", attention_dropout=0.5)
    given = prompt()
    assert torch.equal(ours(**given).logits, ours(**given).logits)
    ours.train()
    assert not torch.allclose(ours(**given).logits, ours(**given).logits)
    loss = ours(**given, labels=given["input_ids"]).loss
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in ours.parameters())


def test_compiled_in_one_graph_it_equals_eager():
    ours, theirs = pair("llama")
    given = prompt()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    seen = given["attention_mask"].bool()
    with torch.no_grad():
        mine = compiled(**given, use_cache=False).logits
        torch.testing.assert_close(mine[seen], theirs(**given).logits[seen], **CLOSE)


def test_a_compiled_layer_takes_the_mask_of_a_model_that_is_not():
    ours, theirs = pair("mistral")
    for layer in ours.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    given = prompt()
    seen = given["attention_mask"].bool()
    with torch.no_grad():
        mine = ours(**given, use_cache=False).logits
        torch.testing.assert_close(mine[seen], theirs(**given).logits[seen], **CLOSE)
