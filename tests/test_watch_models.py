"""watch on models of transformers: the weights that their eager mode returns, whatever runs."""

import pytest
import torch
import transformers
from torch.testing import assert_close

import clearhead
from clearhead import AuxRequest, hf

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 48, "vocab_size": 61, "max_position_embeddings": 64}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
ENCODER_DECODER = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 61,
                   "encoder_attention_heads": 4, "decoder_attention_heads": 2,
                   "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, **TOKENS}  # fmt: skip
PLAIN = ("sdpa", "eager", "clearhead")
TEXT, PAIR = ("attentions",), ("encoder_attentions", "decoder_attentions", "cross_attentions")

# name: (class, config, implementations to run under)
TEXT_MODELS = {
    "llama": ("LlamaModel", GROUPED, PLAIN),
    "qwen3": ("Qwen3Model", {**GROUPED, "head_dim": 8}, PLAIN),
    "mistral": ("MistralModel", {**GROUPED, "sliding_window": 5}, PLAIN),
    "mixtral": ("MixtralModel", {**GROUPED, "num_local_experts": 4}, PLAIN),
    "gemma2": (
        "Gemma2Model", {**GROUPED, "head_dim": 8, "sliding_window": 5}, ("eager", "clearhead")),
    "gemma3": ("Gemma3TextModel", {**GROUPED, "head_dim": 8, "sliding_window": 5}, PLAIN),
    "gpt2": ("GPT2Model", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61, **TOKENS},
             PLAIN),
    "gpt_neox": ("GPTNeoXModel", SMALL, PLAIN),
    "gpt_oss": ("GptOssModel", {**GROUPED, "head_dim": 8, "num_local_experts": 4,
                                "num_experts_per_tok": 2, "sliding_window": 5},
                ("eager", "clearhead")),
    "phi": ("PhiModel", SMALL, PLAIN),
    "bert": ("BertModel", SMALL, PLAIN),
    "modernbert": ("ModernBertModel", {**SMALL, **TOKENS, "cls_token_id": 1, "sep_token_id": 2,
                                       "local_attention": 6}, PLAIN),
    # These write matmul and softmax themselves, by einsum, baddbmm and matmul.
    "xlnet": ("XLNetModel", {"d_model": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61,
                             "d_inner": 48}, ("eager",)),
    "bloom": ("BloomModel", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61},
              ("eager",)),
    "deberta": ("DebertaV2Model", {**SMALL, "relative_attention": True,
                                   "pos_att_type": ["c2p", "p2c"]}, ("eager",)),
}  # fmt: skip
WEIGHTS = AuxRequest(weights=True)


def built(class_name, options):
    kind = getattr(transformers, class_name)
    return kind(kind.config_class(**options)).eval()


def watched(model, implementation, inputs, fields):
    """What watch sees under an implementation, and eager's own weights."""
    if implementation == "clearhead":
        hf.register()
    if model.config._attn_implementation != implementation:
        model.set_attn_implementation(implementation)
    assert model.config._attn_implementation == implementation
    with torch.no_grad():
        plain = model(**inputs)[0]
        with clearhead.watch(model, aux=WEIGHTS) as seen:
            out = model(**inputs)[0]
        assert torch.equal(out, plain)
        if implementation != "eager":
            model.set_attn_implementation("eager")
        outputs = model(**inputs, output_attentions=True)
    return seen, [weights for field in fields for weights in outputs[field]]


def draw(padded):
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[0, :padded] = 0
    return {"input_ids": torch.randint(3, 61, (2, 13)), "attention_mask": mask}


@pytest.mark.parametrize(
    ("name", "implementation"),
    [(name, way) for name, (_, _, ways) in TEXT_MODELS.items() for way in ways],
)
def test_weights_are_eager_s_and_outputs_keep_their_bits(name, implementation):
    class_name, options, _ = TEXT_MODELS[name]
    model = built(class_name, options)
    seen, expected = watched(model, implementation, draw(padded=4), TEXT)
    assert seen.unseen == []
    assert len(seen) == len(expected) == 2
    for record, weights in zip(seen, expected, strict=True):
        assert record.L == record.S == 13
        # A row of padding attends to what an implementation likes.
        assert_close(record.aux.weights[1], weights[1], atol=2e-6, rtol=0)
        assert_close(record.aux.weights[0, :, 4:], weights[0, :, 4:], atol=2e-6, rtol=0)


def t5():
    return built("T5Model", {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
                             "vocab_size": 61, "decoder_start_token_id": 0})  # fmt: skip


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_encoder_and_decoder_and_what_is_between(name, implementation):
    if name == "t5":
        model = t5()
    elif name == "bart":
        model = built("BartModel", {**ENCODER_DECODER, "max_position_embeddings": 64})
    else:
        model = built("WhisperModel", {**ENCODER_DECODER, "decoder_start_token_id": 1,
                                       "num_mel_bins": 6, "max_source_positions": 11,
                                       "max_target_positions": 16})  # fmt: skip
    if implementation not in ("eager", model.config._attn_implementation):
        implementation = "eager"
    inputs = draw(padded=0) if name != "whisper" else {"input_features": torch.randn(2, 6, 22)}
    inputs["decoder_input_ids"] = torch.randint(3, 61, (2, 7))
    seen, expected = watched(model, implementation, inputs, PAIR)
    assert seen.unseen == []
    encoder, decoder, cross = expected[:2], expected[2:4], expected[4:]
    in_order = [*encoder, decoder[0], cross[0], decoder[1], cross[1]]
    for record, weights in zip(seen, in_order, strict=True):
        assert_close(record.aux.weights, weights, atol=2e-6, rtol=0)
    assert len(set(seen.layers)) == 6


def test_pictures():
    model = built("ViTModel", {**SMALL, "image_size": 12, "patch_size": 4})
    inputs = {"pixel_values": torch.randn(2, 3, 12, 12)}
    seen, expected = watched(model, "sdpa", inputs, TEXT)
    assert seen.unseen == []
    for record, weights in zip(seen, expected, strict=True):
        assert_close(record.aux.weights, weights, atol=2e-6, rtol=0)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_a_router_s_softmax_is_passed_over_and_listed(name):
    class_name, options, _ = TEXT_MODELS[name]
    seen, _ = watched(built(class_name, options), "eager", draw(padded=0), TEXT)
    assert len(seen) == 2
    assert {skipped.where.split(".")[2] for skipped in seen.passed_over} == {"mlp"}
    assert all("no product of two activations" in skipped.why for skipped in seen.passed_over)


def test_scores_of_blocks_that_are_joined_are_passed_over_and_listed():
    sizes = {**ENCODER_DECODER, "num_global_tokens": 3, "block_size": 4}
    model = built("PegasusXModel", {**sizes, "max_position_embeddings": 64})
    inputs = {**draw(padded=0), "decoder_input_ids": torch.randint(3, 61, (2, 7))}
    with clearhead.watch(model) as seen:
        model(**inputs)
    assert len(seen) == 6 and seen.unseen == []  # of the encoder, the few rows that see everything
    assert [skipped.where for skipped in seen.passed_over] == [
        "encoder.layers.0.self_attn", "encoder.layers.1.self_attn"]  # fmt: skip
    assert {skipped.why for skipped in seen.passed_over} == {
        "the scores of 2 products are joined in what it runs over"
    }


def causal_model(**options):
    return built("LlamaForCausalLM", {**GROUPED, **TOKENS, **options})


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "clearhead"])
@pytest.mark.parametrize("padded", [0, 3])
def test_generate_is_seen_step_by_step_in_the_model_s_heads(implementation, padded):
    hf.register()
    model = causal_model()
    model.set_attn_implementation(implementation)
    inputs = draw(padded)
    choose = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    plain = model.generate(**inputs, **choose)
    with clearhead.watch(model, aux=AuxRequest(weights=True, entropy=True)) as seen:
        tokens = model.generate(**inputs, **choose)
    assert torch.equal(tokens, plain)
    assert [(r.number, r.step, r.L, r.S) for r in seen] == [
        (layer, step, *((13, 13) if step == 0 else (1, 13 + step)))
        for step in range(4)
        for layer in range(2)
    ]
    # The last row of a whole pass over the tokens is what the last step attended to.
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 3, dtype=torch.long)], 1)
    model.set_attn_implementation("eager")
    whole = model(tokens[:, :-1], attention_mask=mask, output_attentions=True).attentions
    for layer in range(2):
        last = seen.maps(layer, step=3)
        assert last.shape == (2, 4, 1, 16)
        assert_close(last, whole[layer][:, :, -1:], atol=2e-6, rtol=0)


def test_a_static_cache_s_unused_slots_weigh_nothing_and_rows_stand_at_their_own_key():
    model = causal_model()
    inputs = draw(padded=0)
    aux = AuxRequest(weights=True, self_mass=True, previous_mass=True)
    with clearhead.watch(model, aux=aux) as seen:
        model.generate(**inputs, max_new_tokens=3, min_new_tokens=3, do_sample=False,
                       cache_implementation="static", disable_compile=True)  # fmt: skip
    for record in seen:
        used = 13 + record.step
        weights = record.aux.weights
        assert weights.shape[-1] == record.S >= used
        assert not weights[..., used:].any()
        own = torch.arange(used - record.L, used)
        rows = torch.arange(record.L)
        assert_close(record.aux.self_mass, weights[:, :, rows, own])
        before = torch.where(own > 0, weights[:, :, rows, own - 1], 0)
        assert_close(record.aux.previous_mass, before)


def test_every_records_each_nth_forward():
    model = causal_model()
    with clearhead.watch(model, every=3) as seen:
        model.generate(**draw(0), max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert sorted({record.step for record in seen}) == [0, 3, 6]


def test_statistics_leave_padding_out():
    """A sentence that is padded has the statistics that it has alone."""
    model = built("LlamaModel", GROUPED)
    inputs = draw(padded=4)
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        with clearhead.watch(model) as padded:
            model(**inputs, position_ids=(inputs["attention_mask"].cumsum(1) - 1).clamp(min=0))
        with clearhead.watch(model) as alone:
            model(input_ids=inputs["input_ids"][:1, 4:])
        for a, b in zip(padded, alone, strict=True):
            for name in ("entropy", "max_logit", "first_mass", "previous_mass", "self_mass",
                         "distance"):  # fmt: skip
                mean, expected = (getattr(r.aux, name).mean[0] for r in (a, b))
                assert_close(mean, expected, atol=2e-5, rtol=2e-5)


def test_training_is_seen_and_gradients_keep_their_bits():
    model = causal_model(attention_dropout=0.0).train()
    inputs = draw(padded=2)

    def gradients():
        model.zero_grad()
        loss = model(**inputs, labels=inputs["input_ids"]).loss
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    plain = gradients()
    with clearhead.watch(model, aux=WEIGHTS) as seen:
        under = gradients()
    assert all(torch.equal(a, b) for a, b in zip(plain, under, strict=True))
    assert len(seen) == 2
    assert not any(record.aux.weights.requires_grad for record in seen)


def generated():
    """The arguments of a greedy run of five tokens from a padded batch."""
    return {**draw(padded=3), "max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}


@pytest.mark.parametrize(
    ("class_name", "options"),
    [
        ("LlamaForCausalLM", {**GROUPED, **TOKENS}),  # packs its heads when it decodes
        ("GPTBigCodeForCausalLM", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61,
                                   "multi_query": True}),
        ("BloomForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61}),
    ],
)  # fmt: skip
def test_without_a_model_heads_are_the_model_s_too(class_name, options):
    """The module that calls says how many there are, whether hooks follow it or not."""
    model = built(class_name, options)
    with clearhead.watch(aux=WEIGHTS) as seen, clearhead.watch(model, aux=WEIGHTS) as named:
        model.generate(**generated())
    assert len(seen) == len(named) == 10
    assert len(seen.layers) == 10 and len(named.layers) == 2
    for record, expected in zip(seen, named, strict=True):
        assert record.aux.weights.shape[:3] == (2, 4, 13 if expected.step == 0 else 1)
        assert torch.equal(record.aux.weights, expected.aux.weights)


def test_where_no_module_calls_heads_and_rows_are_the_call_s():
    query, key = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 7, 8)  # 3 heads, 4 rows; or 12 heads
    mask = torch.ones(2, 1, 1, 7, dtype=torch.bool)
    with clearhead.watch(aux=WEIGHTS) as seen:
        torch.nn.functional.scaled_dot_product_attention(query, key, key, attn_mask=mask)
    assert seen.maps(0).shape == (2, 3, 4, 7)


def falcon(implementation, state=None, **options):
    kind = transformers.FalconModel
    config = kind.config_class(**SMALL, **options)
    model = kind._from_config(config, attn_implementation=implementation).eval()
    if state is not None:
        model.load_state_dict(state)
    else:
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0, 0.3)
    return model


FALCONS = {
    "one key head": {"multi_query": True},
    "a key head each": {"multi_query": False},
    "grouped": {"new_decoder_architecture": True, "num_kv_heads": 2},
}


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("heads", FALCONS)
@pytest.mark.parametrize("padded", [0, 4])
def test_falcon(heads, alibi, padded, monkeypatch):
    """Its own weights are not always those that it attends with.

    Eager adds the ALiBi to the mask, and then to the scores too. And a model built for sdpa goes
    the eager way when it is asked for weights, and adds the boolean mask made for sdpa.
    """
    eager = falcon("eager", alibi=alibi, **FALCONS[heads])
    fused = falcon("sdpa", eager.state_dict(), alibi=alibi, **FALCONS[heads])
    inputs = draw(padded)

    def close(seen, expected):
        for record, weights in zip(seen, expected, strict=True):
            assert_close(record.aux.weights[1], weights[1], atol=2e-6, rtol=0)
            assert_close(record.aux.weights[0, :, padded:], weights[0, :, padded:], atol=2e-6,
                         rtol=0)  # fmt: skip

    with torch.no_grad():
        plain = eager(**inputs)[0]
        with clearhead.watch(eager, aux=WEIGHTS) as seen:
            assert torch.equal(eager(**inputs)[0], plain)
        close(seen, eager(**inputs, output_attentions=True).attentions)
        plain = fused(**inputs)[0]
        with clearhead.watch(fused, aux=WEIGHTS) as seen:
            assert torch.equal(fused(**inputs)[0], plain)
        own = fused(**inputs, output_attentions=True)
        if alibi:
            module = transformers.models.falcon.modeling_falcon
            whole = module.build_alibi_tensor
            monkeypatch.setattr(module, "build_alibi_tensor", lambda *a, **k: whole(*a, **k) / 2)
        else:
            # Without the mask that these weights were made with, rows see what follows them.
            assert all(weights.triu(1).max() > 0.1 for weights in own.attentions)
        assert (own[0] - plain)[1].abs().max() > 1e-3
        right = eager(**inputs, output_attentions=True)
        close(seen, right.attentions)
        assert_close(plain[1], right[0][1], atol=1e-5, rtol=1e-5)


def test_checkpointing_is_counted_once():
    model = causal_model().train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    inputs = draw(padded=0)
    with clearhead.watch(model) as seen:
        model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
    assert len(seen) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast(dtype):
    model = causal_model()
    inputs = draw(padded=0)
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        plain = model(**inputs).logits
        with clearhead.watch(model, aux=WEIGHTS) as seen:
            assert torch.equal(model(**inputs).logits, plain)
    for record in seen:
        assert record.aux.weights.dtype == torch.float32
        assert_close(record.aux.weights.sum(-1), torch.ones(2, 4, 13))
