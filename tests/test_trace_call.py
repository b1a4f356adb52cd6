"""The steps of a call inside any model: the model's own weights, context and output."""

import math

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import clearhead
from clearhead import AuxRequest, hf
from clearhead.inspection import caught
from clearhead.view.terminal import make_console, show_step

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 48, "vocab_size": 61, "max_position_embeddings": 64}  # fmt: skip
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61}
ALL = ("eager", "sdpa", "clearhead")
MODELS = {  # class, options, implementations, the second attention, last step, whether scores fit
    "llama": ("LlamaModel", {**SMALL, "num_key_value_heads": 2}, ALL, "layers.1.self_attn",
              "output"),
    "gpt2": ("GPT2Model", GPT2, ALL, "h.1.attn", "output"),
    "bert": ("BertModel", SMALL, ALL, "encoder.layer.1.attention.self", "recombined"),
    "gpt_oss": ("GptOssModel", {**SMALL, "num_key_value_heads": 2, "head_dim": 8,
                                "sliding_window": 4, "num_local_experts": 2,
                                "num_experts_per_tok": 1}, ("eager",), "layers.1.self_attn",
                "output"),
    "gemma2": ("Gemma2Model", {**SMALL, "num_key_value_heads": 2, "head_dim": 8,
                               "attn_logit_softcapping": 5.0, "sliding_window": 3},
               ("eager", "clearhead"), "layers.1.self_attn", "output"),
    # By baddbmm with a bias, and by einsum with a second product.
    "bloom": ("BloomModel", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61},
              ("eager",), "h.1.self_attention", "output"),
    "xlnet": ("XLNetModel", {"d_model": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61,
                             "d_inner": 48}, ("eager",), "layer.1.rel_attn", None),
}  # fmt: skip
PARAMETERS = [(name, way) for name, row in MODELS.items() for way in row[2]]


def by_name(steps):
    assert len({step.name for step in steps}) == len(steps)
    return {step.name: step.values for step in steps}


def built(name, way):
    class_name, options, _, layer, last = MODELS[name]
    kind = getattr(transformers, class_name)
    model = kind(kind.config_class(**options)).eval()
    if way == "clearhead":
        hf.register()
    if name not in ("bloom", "xlnet"):
        model.set_attn_implementation(way)
    return model, layer, last


def output_of(model, path, inputs):
    """What the module at a path returns."""
    found = []
    hook = model.get_submodule(path).register_forward_hook(lambda *call: found.append(call[-1]))
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    return found[0][0] if isinstance(found[0], tuple) else found[0]


def run_again(steps):
    """Execute the code of all steps, which must make their values."""
    names = {"call": steps.call, "torch": torch, "math": math}
    if steps.call.query is not None:
        names["head_dim"] = steps.call.query.shape[-1]
    for step in steps:
        exec(step.code, names)
        assert_close(names[step.name], step.values, rtol=0, atol=0)
        assert len(step.axes) == len(step.shape) and step.per_head == (step.axes[0] == "heads")


@pytest.mark.parametrize(("name", "way"), PARAMETERS)
def test_models_of_transformers(name, way):
    model, path, last = built(name, way)
    ids = torch.randint(3, 61, (2, 11))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["attention_mask"][1, -3:] = 0
    with torch.no_grad(), clearhead.watch(model, path, aux=AuxRequest(weights=True)) as seen:
        model(**inputs)
    for b in range(2):
        steps = clearhead.trace(model, inputs, layer=path, sequence=b)
        values = by_name(steps)
        assert_close(values["weights"], seen.maps(path)[b], atol=2e-6, rtol=0)
        assert_close(values["context"], values["weights"] @ values["v"])
        assert_close(values["scores"], values["q"] @ values["k"].mT)
        assert values["q"].shape[:2] == (4, 11)
        if last is not None:
            assert steps[-1].name == last
            rows = output_of(model, path, inputs)[b]
            assert_close(values[last], rows, atol=2e-6, rtol=2e-5)
        run_again(steps)


def test_the_steps_of_a_decoder_read_like_the_textbook_s():
    model, path, _ = built("llama", "sdpa")
    ids = torch.randint(3, 61, (1, 5))
    steps = clearhead.trace(model, {"input_ids": ids}, list("abcde"), layer=path)
    assert [step.name for step in steps] == ["q", "k", "v", "scores", "masked", "weights",
                                             "context", "recombined", "output"]  # fmt: skip
    code = {step.name: step.code for step in steps}
    assert code["k"] == "k = call.key.repeat_interleave(2, dim=0)"
    assert code["masked"].splitlines()[0].endswith(".triu(diagonal=1)")
    assert code["weights"] == "weights = torch.softmax(masked / math.sqrt(head_dim), dim=-1)"
    assert code["output"] == "output = recombined @ call.out_weight.T"
    assert torch.equal(steps.parameters["out_proj"].T, model.layers[1].self_attn.o_proj.weight)
    assert steps[0].tokens == tuple("abcde") and steps.call.layer == path
    eager = by_name(clearhead.trace(built_like(model), {"input_ids": ids}, layer=path))
    for step in steps:
        assert_close(step.values, eager[step.name], atol=1e-6, rtol=1e-5)


def built_like(model):
    other = type(model)(model.config).eval()
    other.load_state_dict(model.state_dict())
    other.set_attn_implementation("eager")
    return other


@pytest.mark.parametrize("way", ["eager", "sdpa"])
def test_some_heads_and_a_layer_by_number(way):
    model, path, _ = built("llama", way)
    ids = torch.randint(3, 61, (1, 7))
    every = by_name(clearhead.trace(model, {"input_ids": ids}, layer=path))
    steps = clearhead.trace(model, {"input_ids": ids}, layer=1, heads=[3, 0])
    assert [step.name for step in steps][-1] == "context"
    for step in steps:
        assert_close(step.values, every[step.name][[3, 0]])
    assert steps.call.heads == [3, 0]
    run_again(steps)


def test_an_encoder_layer_of_torch_with_padding():
    layer = nn.TransformerEncoderLayer(12, 3, 16, batch_first=True).eval()
    x, pad = torch.randn(2, 5, 12), torch.zeros(2, 5, dtype=torch.bool)
    pad[1, 3:] = True
    inputs = {"src": x, "src_key_padding_mask": pad}
    steps = clearhead.trace(layer, inputs, layer="self_attn", sequence=1)
    with torch.no_grad():
        out, weights = layer.self_attn(x, x, x, pad, average_attn_weights=False)
    values = by_name(steps)
    assert_close(values["weights"], weights[1])
    assert_close(values["output"], out[1])
    assert steps[-1].code == "output = recombined @ call.out_weight.T + call.out_bias"
    assert (values["weights"][:, :, 3:] == 0).all()
    run_again(steps)


def test_torch_s_module_between_two_texts():
    module = nn.MultiheadAttention(12, 3, kdim=7, vdim=5, add_bias_kv=True, add_zero_attn=True,
                                   batch_first=True)  # fmt: skip
    q, k, v = torch.randn(1, 4, 12), torch.randn(1, 6, 7), torch.randn(1, 6, 5)
    steps = clearhead.trace(module, (q, k, v), layer=0)
    out, weights = module(q, k, v, average_attn_weights=False)
    values = by_name(steps)
    assert values["weights"].shape == (3, 4, 8)
    assert_close(values["weights"], weights[0].detach())
    assert_close(values["output"], out[0].detach())
    run_again(steps)


class Block(nn.Module):
    """Attention as small teaching models write it."""

    def __init__(self, way, bias=True):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(12, 36, bias=bias), nn.Linear(12, 12, bias=bias)
        self.drop, self.way = nn.Dropout(0.5), way

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, 3, 4) for t in self.c_attn(x).split(C, dim=2))
        if self.way == "einsum":
            att = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(4)
        elif self.way == "turned":
            att = torch.einsum("bkhd,bqhd->bhkq", k, q).mT / math.sqrt(4)
        elif self.way == "own scale":
            att = (q * 0.3).transpose(1, 2) @ k.permute(0, 2, 3, 1)
        else:
            att = (q.transpose(1, 2) @ k.permute(0, 2, 3, 1)) * (1.0 / math.sqrt(4))
        att = att.masked_fill(torch.ones(T, T).tril() == 0, float("-inf"))
        att = self.drop(F.softmax(att, dim=-1))
        if self.way in ("einsum", "turned"):
            y = torch.einsum("bhqk,bkhd->bqhd", att, v)
        else:
            y = (att @ v.transpose(1, 2)).transpose(1, 2)
        return self.c_proj(y.reshape(B, T, C))


@pytest.mark.parametrize("way", ["matmul", "einsum", "turned", "own scale"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_attention_written_by_hand(way, dtype):
    model = nn.Sequential(nn.LayerNorm(12), Block(way)).eval().to(dtype)
    x = torch.randn(2, 6, 12, dtype=dtype)
    with torch.no_grad(), clearhead.watch(model, aux=AuxRequest(weights=True)) as seen:
        out = model(x)
    steps = clearhead.trace(model, x, sequence=1)
    values = by_name(steps)
    wide = torch.promote_types(dtype, torch.float32)
    assert all(v.dtype == wide for v in values.values())
    near = {"atol": 3e-2, "rtol": 3e-2} if dtype == torch.bfloat16 else {}
    assert_close(values["weights"], seen.maps("1")[1].to(wide), **near)
    assert_close(values["output"], out[1].to(wide), **near)
    q, k, v = (t.to(wide) for t in model[1].c_attn(model[0](x[1])).detach().split(12, dim=1))
    split = lambda t: t.view(6, 3, 4).transpose(0, 1)  # noqa: E731
    assert_close(values["k"], split(k), **near)
    assert_close(values["v"], split(v), **near)
    assert_close(values["q"], split(q) * (0.3 if way == "own scale" else 1), **near)
    run_again(steps)


T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 61,
      "decoder_start_token_id": 0}  # fmt: skip
BIASED = "decoder.block.1.layer.0.SelfAttention"
CROSSED = "decoder.block.1.layer.1.EncDecAttention"


@pytest.mark.parametrize("way", ["eager", "sdpa"])
@pytest.mark.parametrize(("path", "L", "S"), [(BIASED, 5, 5), (CROSSED, 5, 9)])
def test_a_decoder_with_biases_between_two_texts(way, path, L, S):
    model = transformers.T5Model(transformers.T5Config(**T5)).eval()
    model.set_attn_implementation(way)
    inputs = {"input_ids": torch.randint(3, 61, (2, 9)),
              "decoder_input_ids": torch.randint(3, 61, (2, 5))}  # fmt: skip
    steps = clearhead.trace(model, inputs, layer=path, sequence=1)
    values = by_name(steps)
    assert (values["q"].shape, values["k"].shape) == ((4, L, 8), (4, S, 8))
    assert steps[-1].name == "output" and steps[-1].code.endswith("call.out_weight.T")
    assert_close(values["output"], output_of(model, path, inputs)[1])
    with torch.no_grad(), clearhead.watch(model, path, aux=AuxRequest(weights=True)) as seen:
        model(**inputs)
    assert_close(values["weights"], seen.maps(path)[1], atol=1e-6, rtol=1e-5)
    run_again(steps)


@pytest.mark.parametrize("way", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_shows_the_same_steps(way, dtype):
    model, path, _ = built("llama", way)
    model = model.to(dtype)
    ids = {"input_ids": torch.randint(3, 61, (1, 7))}
    steps = clearhead.trace(model, ids, layer=path)
    values = by_name(steps)
    assert list(values) == ["q", "k", "v", "scores", "masked", "weights", "context", "recombined",
                            "output"]  # fmt: skip
    assert "future" in steps[4].code and "sqrt" in steps[5].code
    assert all(value.dtype == torch.float32 for value in values.values())
    assert_close(values["output"], output_of(model, path, ids)[0].float(), atol=1e-2, rtol=1e-2)


def test_steps_begin_at_the_softmax_where_its_operands_cannot_be_read():
    q, k, v = torch.randn(3, 1, 2, 4, 3)

    def call():
        weights = torch.einsum("...ld,...sd->...ls", q, k).softmax(-1)
        return torch.einsum("...ls,...sd->...ld", weights, v)

    steps = clearhead.trace(call)
    assert [step.name for step in steps] == ["masked", "weights"]
    assert_close(steps[0].values, (q @ k.mT)[0])
    run_again(steps)


@pytest.mark.parametrize("mends", [True, False])
def test_a_row_that_is_blocked_whole_weighs_nothing_whatever_the_code_makes_of_it(mends):
    q, k, v = torch.randn(3, 1, 2, 4, 3)
    mask = torch.ones(4, 4, dtype=torch.bool).tril(-1)

    def call():
        weights = (q @ k.mT).masked_fill(~mask, -math.inf).softmax(-1)
        return (weights.nan_to_num(0) if mends else weights) @ v

    steps = clearhead.trace(call)
    values = by_name(steps)
    assert (values["weights"][:, 0] == 0).all() and (values["context"][:, 0] == 0).all()
    assert_close(values["context"][:, 1:], call()[0, :, 1:])
    assert steps[5].explanation.endswith("A row that sees nothing gets 0 everywhere.")
    run_again(steps)


def test_dropout_is_refused_and_not_shown_as_if_it_were_none():
    model = Block("matmul")
    with pytest.raises(NotImplementedError, match=r"their context differs .* call eval\(\) first"):
        clearhead.trace(model, torch.randn(1, 6, 12))
    model = nn.MultiheadAttention(12, 3, dropout=0.5)
    x = torch.randn(6, 12)
    with pytest.raises(NotImplementedError, match="their output differs"):
        clearhead.trace(model, (x, x, x), layer=0)


def test_functions_and_clearhead_s_own_rules(capsys):
    q, k, v = torch.randn(2, 4, 5, 3), torch.randn(2, 2, 7, 3), torch.randn(2, 2, 7, 6)
    rules = {"window": (3, 0), "softcap": 2.0, "sinks": torch.randn(4), "scale": 0.7,
             "alibi_slopes": torch.rand(4), "bias": torch.randn(4, 5, 7)}  # fmt: skip
    steps = clearhead.trace(lambda: clearhead.attention(q, k, v, **rules), sequence=1)
    out, aux = clearhead.attention(q, k, v, **rules, return_aux=AuxRequest(weights=True))
    values = by_name(steps)
    assert list(values) == ["q", "k", "v", "scores", "scaled", "masked", "weights", "context"] + [
        "recombined"
    ]
    assert_close(values["context"], out[1])
    assert_close(values["weights"], aux.weights[1])
    assert steps[3].tokens == tuple("1234567")
    run_again(steps)
    console = make_console(width=100)
    for n, step in enumerate(steps):
        show_step(console, n, step)
    assert capsys.readouterr().out.count(" Weights") == 1


@pytest.mark.parametrize("axes", [2, 3, 5])
def test_fewer_and_more_axes_and_rows_that_see_nothing(axes):
    q, k, v = torch.randn(3, *(1, 2, 1)[: axes - 2], 4, 3)
    mask = torch.tensor([True, True, False, True])[:, None].expand(4, 4)
    steps = clearhead.trace(
        lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask), layer="call 0"
    )
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    values = by_name(steps)
    first = out.flatten(0, -3)[:1] if axes > 2 else out  # (2, 1, 4, 3): two texts of one head
    assert_close(values["context"], first.reshape(1, 4, 3))
    assert (values["weights"][:, 2] == 0).all()
    run_again(steps)


def test_decoding_with_a_cache_shows_one_row():
    model, path, _ = built("llama", "sdpa")
    ids = torch.randint(3, 61, (1, 6))
    with torch.no_grad():
        cache = model(ids[:, :5], use_cache=True).past_key_values
    steps = clearhead.trace(
        model, {"input_ids": ids[:, 5:], "cache": cache}, list("abcdef"), layer=path
    )
    whole = by_name(clearhead.trace(model, {"input_ids": ids}, layer=path))
    values = by_name(steps)
    assert values["weights"].shape == (4, 1, 6)
    assert_close(values["weights"][:, 0], whole["weights"][:, 5], atol=1e-6, rtol=1e-5)
    assert_close(values["output"], whole["output"][5:], atol=1e-6, rtol=1e-5)
    assert steps.to_html().count('id="map0"') == 0


def test_a_page_and_the_terminal_show_them(capsys):
    model, path, _ = built("gpt2", "sdpa")
    steps = clearhead.trace(model, torch.randint(3, 61, (1, 4)), list("abcd"), layer=path)
    console = make_console(width=100)
    for n, step in enumerate(steps, 1):
        show_step(console, n, step)
    told = capsys.readouterr().out
    assert all(step.title in told for step in steps)
    assert path in steps.to_html() and steps._repr_html_().startswith("<iframe srcdoc=")


def test_errors_say_what_to_do(monkeypatch):
    model, path, _ = built("llama", "sdpa")
    ids = {"input_ids": torch.randint(3, 61, (1, 6))}

    def refused(message, kind=ValueError, **options):
        with pytest.raises(kind, match=message):
            clearhead.trace(model, ids, **options)

    refused("^trace: no attention of layer 7 was called; called were 'layers.0.self_attn'", layer=7)
    refused("^watch: no module of the model is called 'nix'", layer="nix")
    refused(r"^trace: heads are \[4\], but layer layers.0.self_attn has 4, from 0 to 3", heads=[4])
    refused(r"^trace: heads are \[\], but", heads=[])
    refused("^trace: sequence is 1, but layer layers.0.self_attn was called with 1", sequence=1)
    refused("^trace: got 2 tokens for 6 keys of layer layers.0.self_attn; give", tokens=["a", "b"])
    monkeypatch.setattr(caught, "LARGEST", 4 * 6 * 6)
    assert clearhead.trace(model, ids)
    monkeypatch.setattr(caught, "LARGEST", 4 * 6 * 6 - 1)
    refused(r"^trace: layer .* has 4 heads of 6 x 6 weights; .* as in heads=\[0\], or pass a sh")
    assert clearhead.trace(model, ids, heads=[0])
    assert not any(m._forward_hooks for m in model.modules())
    with pytest.raises(ValueError, match="^trace: no attention of layer 0 was called; called were"):
        clearhead.trace(nn.Linear(7, 6), torch.randn(5, 7))
