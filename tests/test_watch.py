"""watch: what it sees of any code, that it changes nothing, and what it says of the rest."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import clearhead
from clearhead import AuxRequest, MultiHeadAttention, MultiHeadAttentionWrapper, attention
from clearhead.inspection import fastpath

WEIGHTS = AuxRequest(weights=True)
B, H, L, D = 2, 3, 7, 4


class Fused(nn.Module):
    """Self-attention as nanoGPT and others write it."""

    def __init__(self, width=12, heads=3):
        super().__init__()
        self.qkv, self.num_heads = nn.Linear(width, 3 * width), heads

    def forward(self, x, **rules):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, **rules).transpose(1, 2).flatten(2)


def fused_model():
    return nn.Sequential(Fused(), nn.Linear(12, 12), Fused())


def by_definition(q, k, mask=None, scale=None):
    scores = q.double() @ k.double().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    return (scores if mask is None else scores.masked_fill(~mask, -math.inf)).softmax(-1)


def draw(*lengths):
    return [torch.randn(B, H, length, D) for length in lengths]


@pytest.mark.parametrize(("L", "S"), [(7, 7), (5, 7), (7, 5), (1, 7)])
@pytest.mark.parametrize("rule", ["none", "causal", "bool", "float", "scale"])
def test_every_way_to_call_torch_s_function(L, S, rule):
    q, k, v = draw(L, S, S)
    mask, rules = None, {}
    if rule == "causal":
        mask, rules = torch.ones(L, S, dtype=torch.bool).tril(), {"is_causal": True}
    elif rule in ("bool", "float"):
        mask = torch.rand(B, 1, L, S) < 0.6
        mask[..., 0] = True
        rules = {"attn_mask": mask if rule == "bool" else torch.where(mask, 0.0, -math.inf)}
    elif rule == "scale":
        rules = {"scale": 0.3}
    plain = F.scaled_dot_product_attention(q, k, v, **rules)
    with clearhead.watch(aux=WEIGHTS) as seen:
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, **rules), plain)
    assert seen.layers == ["call 0"]
    expected = by_definition(q, k, mask, rules.get("scale"))
    assert_close(seen.maps(0).double(), expected, atol=2e-6, rtol=0)


def test_grouped_heads_and_dropout():
    q, k, v = torch.randn(B, 6, L, D), *draw(L, L)
    with clearhead.watch(aux=WEIGHTS) as seen:
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, enable_gqa=True)
        F.scaled_dot_product_attention(*(t.repeat_interleave(2, 1) for t in (q[:, ::2], k, v)))
    expected = by_definition(q, k.repeat_interleave(2, 1))
    assert_close(seen.maps(0).double(), expected, atol=2e-6, rtol=0)
    assert seen.maps(1).shape == (B, 6, L, L)


@pytest.mark.parametrize("axes", [2, 3, 5])
def test_fewer_and_more_axes(axes):
    shape = (2, 3, 4, L, D)[-axes:]
    q = torch.randn(shape)
    with clearhead.watch(aux=WEIGHTS) as seen:
        F.scaled_dot_product_attention(q, q, q)
    assert_close(seen.maps(0).double().reshape(*shape[:-1], L), by_definition(q, q), atol=2e-6,
                 rtol=0)  # fmt: skip


def test_clearhead_s_own_with_every_rule():
    q, k, v = torch.randn(2, 3, 4, L, D).unbind(0) + (torch.randn(3, 4, L, D),)
    rules = {
        "window": (2, 0), "key_mask": torch.rand(3, L) < 0.8, "softcap": 2.0, "scale": 0.7,
        "sinks": torch.randn(4), "alibi_slopes": torch.rand(4), "bias": torch.randn(4, L, L),
        "documents": torch.tensor([[0, 0, 0, 1, 1, 1, 1]]).expand(3, L),
    }  # fmt: skip
    expected, aux = attention(q, k, v, **rules, return_aux=WEIGHTS)
    with clearhead.watch(aux=WEIGHTS) as seen:
        out, again = attention(q, k, v, **rules, return_aux=WEIGHTS)
        attention(q[0], k[0], v[0], is_causal=True)
        attention(q[None], k[None], v[None], attn_mask=torch.ones(1, 1, 4, L, L).bool().tril())
    assert torch.equal(out, expected)
    assert torch.equal(again.weights, aux.weights)
    assert_close(seen.maps(0), aux.weights)
    causal = torch.ones(L, L, dtype=torch.bool).tril()
    assert_close(seen.maps(1)[0].double(), by_definition(q[0], k[0], causal), atol=2e-6, rtol=0)
    assert_close(seen.maps(2).double(), by_definition(q, k, causal), atol=2e-6, rtol=0)


def test_clearhead_s_module_and_the_textbook_s():
    wrapper = MultiHeadAttentionWrapper(6, 3, 2)
    x = torch.randn(5, 6)
    module = MultiHeadAttention.from_heads(wrapper)
    with clearhead.watch(module, aux=WEIGHTS) as efficient:
        module(x)
    with clearhead.watch(wrapper, aux=WEIGHTS) as plain:
        wrapper(x)
    assert efficient.layers == ["MultiHeadAttention"]
    assert plain.layers == ["heads.0", "heads.1"]
    heads = torch.cat([plain.maps(0), plain.maps(1)], 1)
    assert_close(efficient.maps(0), heads, atol=2e-6, rtol=0)


@pytest.mark.parametrize("options", [{}, {"kdim": 5, "vdim": 6}, {"add_bias_kv": True},
                                     {"add_zero_attn": True}, {"bias": False},
                                     {"batch_first": True}])  # fmt: skip
@pytest.mark.parametrize("masks", ["none", "bool", "float", "padding", "per head"])
def test_torch_s_module_in_every_call_style(options, masks):
    mha = nn.MultiheadAttention(12, 3, **options)
    x, context = torch.randn(L, B, 12), torch.randn(5, B, 12)
    source = (context, context)
    if "kdim" in options:
        source = torch.randn(5, B, 5), torch.randn(5, B, 6)
    inputs = (x, *source)
    if options.get("batch_first"):
        inputs = tuple(t.transpose(0, 1) for t in inputs)
    block = torch.rand(L, 5) < 0.3
    block[:, 0] = False
    pad = torch.tensor([[False] * 4 + [True], [False] * 5])
    rules = {
        "none": {}, "bool": {"attn_mask": block, "key_padding_mask": pad},
        "float": {"attn_mask": torch.randn(L, 5), "key_padding_mask": pad.float() * -9},
        "padding": {"key_padding_mask": pad},
        "per head": {"attn_mask": torch.randn(B * 3, L, 5)},
    }[masks]  # fmt: skip
    _, expected = mha(*inputs, **rules, average_attn_weights=False)
    for need, average in itertools.product((True, False), repeat=2):
        asked = {"need_weights": need, "average_attn_weights": average}
        plain = mha(*inputs, **rules, **asked)
        with clearhead.watch(mha, aux=WEIGHTS) as seen:
            out = mha(*inputs, **rules, **asked)
        assert torch.equal(out[0], plain[0])
        assert (out[1] is None) == (plain[1] is None)
        if plain[1] is not None:
            assert torch.equal(out[1], plain[1])
        assert_close(seen.maps("MultiheadAttention"), expected, atol=2e-6, rtol=0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_fused_encoder_layers_keep_their_bits(nested, padded):
    layer = nn.TransformerEncoderLayer(12, 2, 24, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()
    x, pad = torch.randn(B, L, 12), None
    if padded:
        pad = torch.zeros(B, L, dtype=torch.bool)
        pad[0, 5:] = True
    with torch.no_grad():
        plain = model(x, src_key_padding_mask=pad)
        with (
            clearhead.watch(model, aux=WEIGHTS) as seen,
            clearhead.watch(model, every=2) as other,
        ):
            for _ in range(3):
                assert torch.equal(model(x, src_key_padding_mask=pad), plain)
        assert not any("forward" in vars(module) for module in model.modules())
        assert torch.equal(model(x, src_key_padding_mask=pad), plain)
    assert seen.unseen == other.unseen == []
    assert seen.layers == ["layers.0.self_attn", "layers.1.self_attn"]
    assert [record.step for record in seen] == [0, 0, 1, 1, 2, 2]
    assert [record.step for record in other] == [0, 0, 2, 2]
    first = model.layers[0].self_attn
    _, expected = first(x, x, x, key_padding_mask=pad, average_attn_weights=False)
    assert_close(seen.maps(0, step=0), expected, atol=2e-6, rtol=0)


def test_a_fused_layer_is_seen_by_the_name_of_its_attention():
    layer = nn.TransformerEncoderLayer(12, 2, 24, batch_first=True).eval()
    x = torch.randn(2, 5, 12)
    with torch.no_grad():
        expected = layer(x)
        with clearhead.watch(layer, layers="self_attn") as seen:
            assert torch.equal(layer(x), expected)
    assert (seen.layers, len(seen.records), seen.unseen) == (["self_attn"], 1, [])


def test_a_decoder_of_torch_has_two_layers_of_attention_in_each():
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(12, 2, 24, batch_first=True), 2).eval()
    x, memory = torch.randn(B, L, 12), torch.randn(B, 5, 12)
    with torch.no_grad():
        plain = model(x, memory)
        with clearhead.watch(model) as seen:
            assert torch.equal(model(x, memory), plain)
    assert seen.layers == [f"layers.{n}.{which}" for n in (0, 1)
                           for which in ("self_attn", "multihead_attn")]  # fmt: skip
    assert [(record.L, record.S) for record in seen] == [(L, L), (L, 5)] * 2


def test_without_a_model_a_mode_of_the_stack_is_given_back_in_its_place():
    with clearhead.watch(), torch.device("cpu"):
        (mode,) = [m for m in torch.overrides._get_current_function_mode_stack()
                   if type(m).__name__ == "Mode"]  # fmt: skip
        before = torch.overrides._get_current_function_mode_stack()
        with fastpath.without(mode):
            assert mode not in torch.overrides._get_current_function_mode_stack()
        assert torch.overrides._get_current_function_mode_stack() == before


class Written(nn.Module):
    """Attention written out, and softmaxes that are none."""

    def __init__(self):
        super().__init__()
        self.vocabulary = nn.Parameter(torch.randn(12, 12))

    def forward(self, q, k, v):
        scores = torch.einsum("bhid,bhjd->bhij", q, k) / 2
        weights = nn.Dropout(0.5)(scores.masked_fill(scores > 3, -math.inf).softmax(dim=-1))
        context = (weights @ v).transpose(1, 2).flatten(2)
        (context @ self.vocabulary.T).softmax(-1)  # logits of a layer
        torch.softmax(v, dim=-1)  # of no product
        F.softmax(q @ k.mT, dim=-2)  # over the queries
        return context


def test_written_out_attention_is_seen_and_other_softmaxes_are_listed():
    q, k, v = draw(L, L, L)
    model = Written()
    with clearhead.watch(model, aux=AuxRequest(weights=True, entropy=True, lse=True)) as seen:
        model(q, k, v)
    scores = q @ k.mT / 2
    expected = scores.masked_fill(scores > 3, -math.inf)
    assert_close(seen.maps(0), expected.softmax(-1), atol=2e-6, rtol=0)
    (record,) = seen
    assert_close(record.aux.lse, expected.logsumexp(-1))
    assert_close(record.aux.entropy, torch.special.entr(expected.softmax(-1)).sum(-1))
    reasons = [skipped.why for skipped in seen.passed_over]
    assert len(reasons) == 3
    assert sum("no product of two activations" in why for why in reasons) == 2
    assert sum("over axis -2" in why for why in reasons) == 1


def test_training_keeps_gradients_to_the_bit():
    model, x = fused_model(), torch.randn(B, L, 12)

    def gradients():
        model.zero_grad()
        model(x).square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients()
    with clearhead.watch(model, aux=WEIGHTS) as seen:
        assert all(map(torch.equal, gradients(), plain))
    assert len(seen) == 2


def test_layers_heads_and_every():
    model, x = fused_model(), torch.randn(B, L, 12)
    with clearhead.watch(model, aux=WEIGHTS) as everything:
        model(x)
    for layers in (1, [1], "2", ["2"], "[2]"):
        with clearhead.watch(model, layers, heads=[2, 0], aux=WEIGHTS) as seen:
            for _ in range(3):
                model(x)
        assert seen.layers == ["2"]
        assert [record.step for record in seen] == [0, 1, 2]
        for step in range(3):
            assert_close(seen.maps("2", step=step), everything.maps(1)[:, [2, 0]])
            assert_close(seen.maps("2", 0, step=step), everything.maps(1)[:, [0]])


def test_two_calls_in_one_module_have_two_names():
    class Twice(nn.Module):
        def forward(self, q, k):
            F.scaled_dot_product_attention(q, q, q)
            F.scaled_dot_product_attention(q, k, k)

    model = nn.ModuleDict({"both": Twice()})
    q, k = draw(L, 5)
    with clearhead.watch(model) as seen:
        for _ in range(2):
            model["both"](q, k)
    assert [(r.layer, r.step, r.S) for r in seen] == [
        ("both", 0, L), ("both#1", 0, 5), ("both", 1, L), ("both#1", 1, 5)]  # fmt: skip
    with clearhead.watch(model, "both#1") as seen:
        model["both"](q, k)
    assert seen.layers == ["both#1"]


def test_two_watches_and_one_inside_the_other():
    model, x = fused_model(), torch.randn(B, L, 12)
    with clearhead.watch(model) as a, clearhead.watch() as b, clearhead.watch(model, 1) as c:
        model(x)
        with clearhead.watch(model) as d:
            model(x)
    assert [len(seen) for seen in (a, b, c, d)] == [4, 4, 2, 2]


def hooks(model):
    return [(len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in vars(m))
            for m in model.modules()]  # fmt: skip


def modes():
    return torch.overrides._get_current_function_mode_stack()


def test_an_exception_leaves_nothing_behind():
    class Fails(nn.Module):
        def forward(self, x):
            raise ArithmeticError("on purpose")

    model = nn.Sequential(Fused(), nn.MultiheadAttention(12, 2), Fails())
    model[1].register_forward_hook(lambda module, args, out: out[0])
    before = hooks(model)
    watch = clearhead.watch(nn.Sequential(model[0], model[2]))
    with watch, pytest.raises(ArithmeticError):
        model[2](model[0](torch.randn(B, L, 12)))
    with pytest.raises(ArithmeticError), clearhead.watch(model) as seen:
        try:
            nn.Sequential(model[0], model[2])(torch.randn(B, L, 12))
        except ArithmeticError:
            assert modes() == []
            raise
    assert len(seen) == 1
    assert hooks(model) == before
    assert modes() == []


def test_a_user_s_pre_hook_that_fails_leaves_the_names_right():
    model = fused_model()
    handle = model[0].register_forward_pre_hook(lambda module, args: 1 / 0)
    with clearhead.watch(model) as seen:
        with pytest.raises(ZeroDivisionError):
            model(torch.randn(B, L, 12))
        handle.remove()
        model(torch.randn(B, L, 12))
    assert seen.layers == ["0", "2"]
    assert len(seen) == 2


def test_what_torch_compile_made_is_seen():
    torch._dynamo.reset()
    model, x = fused_model(), torch.randn(B, L, 12)
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        plain = compiled(x)
        for watched in (model, compiled, None):
            with clearhead.watch(watched, aux=WEIGHTS) as seen:
                assert_close(compiled(x), plain)
            assert len(seen) == 2
            assert seen.unseen == []
        assert torch.equal(compiled(x), plain)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_a_module_in_which_nothing_was_recognised_is_listed():
    from torch.nn.attention.flex_attention import flex_attention

    class FlexAttention(nn.Module):
        def forward(self, q):
            return flex_attention(q, q, q)

    class OwnAttention(nn.Module):
        def forward(self, q):
            return torch.exp(q @ q.mT).clamp(max=1) @ q

    q = torch.randn(1, 2, 16, 16)
    for model, word in ((FlexAttention(), "kernel"), (OwnAttention(), "no attention was recog")):
        with clearhead.watch(model) as seen:
            model(q)
        (unseen,) = seen.unseen
        assert word in unseen.why
        assert unseen.times == 1
        assert "unseen: " in repr(seen)


def test_layers_that_never_came_are_listed_or_refused():
    model, x = fused_model(), torch.randn(B, L, 12)
    with clearhead.watch(model, layers=[7]) as seen:
        model(x)
        model(x)
    assert [(u.where, u.times) for u in seen.unseen] == [("7", 1)]
    with pytest.raises(ValueError, match="^watch: no module of the model is called 'h.3'; its mod"):
        clearhead.watch(model, layers="h.3")
    with (
        pytest.raises(ValueError, match="^watch: heads are .5., but layer 0 has 3, from 0 to 2$"),
        clearhead.watch(model, heads=[5]),
    ):
        model(x)
