"""compat.MultiheadAttention inside torch's transformer layers, under hooks, and compiled."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.testing import assert_close

from clearhead.compat import MultiheadAttention, replace_torch_attention

N, L, S, H, E = 2, 5, 7, 4, 16
EXACT = {"atol": 1e-12, "rtol": 0}
CLOSE = {"atol": 2e-5, "rtol": 1e-4}
PADDING = torch.arange(L) >= torch.tensor([[5], [3]])
ALL_PADDED = torch.arange(L) >= torch.tensor([[5], [0]])
CAUSAL = torch.ones(L, L, dtype=torch.bool).triu(1)
MODES = {
    "train": lambda module: (module.train(), torch.enable_grad())[1],
    "eval": lambda module: (module.eval(), torch.enable_grad())[1],
    "no_grad": lambda module: (module.eval(), torch.no_grad())[1],
    "inference_mode": lambda module: (module.eval(), torch.inference_mode())[1],
}


def encoder_layer(dtype=torch.float64, **options):
    options = {"batch_first": True, "dropout": 0.0, "dim_feedforward": 24, **options}
    return nn.TransformerEncoderLayer(E, H, dtype=dtype, **options)


def encoder(dtype=torch.float64):
    """Two layers with ours in torch's encoder, and torch's own with the same weights."""
    theirs = nn.TransformerEncoder(encoder_layer(dtype), 2)
    mine = copy.deepcopy(theirs)
    assert replace_torch_attention(mine) == 2
    return mine, theirs


def draw(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


class LowRank(nn.Module):
    """A frozen linear layer with a trainable low-rank one beside it."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, 2, bias=False, dtype=linear.weight.dtype)
        self.up = nn.Linear(2, linear.out_features, bias=False, dtype=linear.weight.dtype)
        nn.init.zeros_(self.up.weight)

    @property
    def weight(self):
        return self.linear.weight

    @property
    def bias(self):
        return self.linear.bias

    def forward(self, x):
        return self.linear(x) + self.up(self.down(x))


# -- inside torch's layers ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options",
    [{}, {"norm_first": True}, {"batch_first": False}, {"bias": False, "activation": "gelu"}],
    ids=lambda options: " ".join(options) or "plain",
)
def test_an_encoder_layer_gives_torchs_output(options, mode):
    theirs = encoder_layer(**options)
    mine = copy.deepcopy(theirs)
    assert replace_torch_attention(mine) == 1
    x = draw(N, L, E) if options.get("batch_first", True) else draw(L, N, E)
    with MODES[mode](mine), MODES[mode](theirs):
        for mask in (None, CAUSAL):
            for padding in (None, PADDING):
                out = mine(x, mask, padding)
                wanted = theirs(x, mask, padding)
                if padding is not None and x.shape[0] == N:  # torch's fused kernel gives 0 there
                    out, wanted = (t.masked_fill(padding[..., None], 0) for t in (out, wanted))
                assert_close(out, wanted, **EXACT)


def test_an_encoder_gives_torchs_output_and_gradients():
    mine, theirs = encoder()
    x = draw(N, L, E)
    for module in (mine, theirs):
        module(x, src_key_padding_mask=PADDING)[~PADDING].square().sum().backward()
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert_close(one.grad, other.grad, atol=1e-9, rtol=0)


def test_a_decoder_layer_gives_torchs_output():
    theirs = nn.TransformerDecoderLayer(E, H, 24, 0.0, batch_first=True, dtype=torch.float64)
    mine = copy.deepcopy(theirs)
    assert replace_torch_attention(mine) == 2
    x, memory = draw(N, L, E), draw(N, S, E)
    unread = torch.zeros(N, S, dtype=torch.bool)
    unread[1, 4:] = True
    arguments = {"tgt_mask": CAUSAL, "memory_key_padding_mask": unread}
    for mode in ("train", "eval"):
        one, other = getattr(mine, mode)(), getattr(theirs, mode)()
        for hint in (False, True):
            out = one(x, memory, **arguments, tgt_is_causal=hint)
            assert_close(out, other(x, memory, **arguments), **EXACT)
    without_mask = mine(x, memory, memory_key_padding_mask=unread, tgt_is_causal=True)
    assert_close(without_mask, out, **EXACT)


@pytest.mark.parametrize("mode", MODES)
def test_case_36_the_length_stays(mode):
    mine, _ = encoder()
    padding = torch.zeros(3, 6, dtype=torch.bool)
    padding[:, 4:] = True
    with MODES[mode](mine):
        assert mine(draw(3, 6, E), src_key_padding_mask=padding).shape == (3, 6, E)


@pytest.mark.parametrize(
    "padding", [ALL_PADDED, torch.ones(N, L, dtype=torch.bool)], ids=["1", "2"]
)
@pytest.mark.parametrize("mode", MODES)
def test_case_9_items_of_padding_only(mode, padding):
    """torch raises where all items are padding, and its compiled layers give NaN."""
    mine, _ = encoder()
    x = draw(N, L, E)
    with MODES[mode](mine):
        out = mine(x, src_key_padding_mask=padding)
        assert out.isfinite().all()
        if not padding[0].all():
            assert_close(out[:1], mine(x[:1], src_key_padding_mask=padding[:1]), **EXACT)
    if mode in ("train", "eval"):
        out.sum().backward()
        assert all(p.grad.isfinite().all() for p in mine.parameters())


def test_case_9_compiled_equals_eager():
    mine, _ = encoder(torch.float32)
    x = draw(N, L, E, dtype=torch.float32)
    with torch.no_grad():
        eager = mine.eval()(x, src_key_padding_mask=ALL_PADDED)
        torch.compiler.reset()
        compiled = torch.compile(mine, fullgraph=True, backend="aot_eager")
        out = compiled(x, src_key_padding_mask=ALL_PADDED)
    assert out.isfinite().all()
    assert_close(out, eager, **CLOSE)


@pytest.mark.parametrize("mode", ["train", "no_grad"])
def test_case_38_autocast_with_a_float_padding_mask(mode):
    mine, _ = encoder(torch.float32)
    x = draw(N, L, E, dtype=torch.float32)
    padding = torch.zeros(N, L).masked_fill(PADDING, -torch.inf)
    with MODES[mode](mine):
        wanted = mine(x, src_key_padding_mask=PADDING)
        assert torch.equal(mine(x, src_key_padding_mask=padding), wanted)
        with torch.autocast("cpu", torch.bfloat16):
            out = mine(x, src_key_padding_mask=padding)
    assert_close(out.float(), wanted, atol=6e-2, rtol=3e-2)


def test_torchs_encoder_says_that_it_makes_no_nested_tensors():
    layer = encoder_layer()
    layer.self_attn = MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    with pytest.warns(UserWarning, match="enable_nested_tensor is True, but"):
        encoder = nn.TransformerEncoder(layer, 2)
    for built in (encoder, nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)):
        with torch.no_grad():
            assert built.eval()(draw(N, L, E), src_key_padding_mask=ALL_PADDED).isfinite().all()


# -- hooks, adapters and parametrisations ---------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padding", [None, PADDING], ids=["", "padding"])
def test_case_50_hooks_fire_once_per_call(padding, mode):
    mine, _ = encoder()
    calls = []
    for layer in mine.layers:
        for module in (layer.self_attn, layer.self_attn.out_proj):
            module.register_forward_hook(lambda module, *_: calls.append(module))
    with MODES[mode](mine):
        mine(draw(N, L, E), src_key_padding_mask=padding)
        layers = [layer.self_attn for layer in mine.layers]
        assert calls == [m for layer in layers for m in (layer.out_proj, layer)]
        calls.clear()
        x = draw(N, L, E)
        for need_weights in (True, False):
            layers[0](x, x, x, padding, need_weights)
        assert calls == [layers[0].out_proj, layers[0]] * 2


@pytest.mark.parametrize("mode", MODES)
def test_case_50_no_hook_is_needed_for_out_proj_to_be_called(mode):
    """Without hooks torch's layer takes its fast path, past whatever stands in out_proj's place."""
    mine, _ = encoder()
    x = draw(N, L, E)
    with MODES[mode](mine):
        before = mine(x, src_key_padding_mask=PADDING)
        attention = mine.layers[0].self_attn
        attention.out_proj = LowRank(attention.out_proj)
        assert torch.equal(mine(x, src_key_padding_mask=PADDING), before)
        nn.init.normal_(attention.out_proj.up.weight)
        assert (mine(x, src_key_padding_mask=PADDING) - before).abs().max() > 1e-3


def test_case_50_an_adapter_learns():
    mine, _ = encoder()
    mine.requires_grad_(False)
    attention = mine.layers[0].self_attn
    attention.out_proj = LowRank(attention.out_proj)
    x, target = draw(N, L, E), draw(N, L, E)
    trained = [attention.out_proj.down.weight, attention.out_proj.up.weight]
    optimizer = torch.optim.Adam(trained, 0.02)
    losses = []
    for _ in range(40):
        loss = (mine(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_parametrisations_run():
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    mine = MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    x = draw(N, L, E)
    with torch.no_grad():
        wanted = copy.deepcopy(mine)
        wanted.in_proj_weight.mul_(2)
        wanted.out_proj.weight.mul_(2)
    parametrize.register_parametrization(mine, "in_proj_weight", Doubled())
    parametrize.register_parametrization(mine.out_proj, "weight", Doubled())
    out, weights = mine(x, x, x)
    assert torch.equal(out, wanted(x, x, x)[0]) and torch.equal(weights, wanted(x, x, x)[1])
    out.sum().backward()
    for module, name in ((mine, "in_proj_weight"), (mine.out_proj, "weight")):
        assert module.parametrizations[name].original.grad.abs().max() > 0


# -- compiled -------------------------------------------------------------------------------------


@pytest.mark.parametrize("need_weights", [True, False])
def test_it_compiles_in_one_graph_forward_and_backward(need_weights):
    mine = MultiheadAttention(E, H, batch_first=True)
    x = draw(N, L, E, dtype=torch.float32).requires_grad_()
    arguments = x, x, x, ALL_PADDED, need_weights, torch.randn(N * H, L, L), False, True
    torch.compiler.reset()
    compiled = torch.compile(mine, fullgraph=True, backend="aot_eager")
    results = []
    for module in (mine, compiled):
        out, weights = module(*arguments)
        loss = out.square().sum() + (weights.square().sum() if need_weights else 0)
        results.append((out, *torch.autograd.grad(loss, [x, *mine.parameters()])))
    for eager, other in zip(*results, strict=True):
        assert other.isfinite().all()
        assert_close(other, eager, **CLOSE)
