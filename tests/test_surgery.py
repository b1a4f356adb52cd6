"""Heads taken out: while a model runs, for good, merged, and what each is worth."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import clearhead
from clearhead import MultiHeadAttention, compat, head_importance

OPTIONS = {
    "plain": {},
    "grouped": {"num_kv_heads": 2},
    "biases": {"qkv_bias": True, "out_bias": True},
    "sizes": {"value_head_dim": 5, "output_dim": 9, "num_kv_heads": 2},
    "norm, sinks, gate": {"qk_norm": "rms", "sinks": True, "gate": True},
    "alibi, softcap, window": {"alibi": True, "softcap": 2.0, "sliding_window": 3},
}


def made(**options):
    module = MultiHeadAttention(7, 3, 4, **options).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def without(module, x, heads, mode="zero"):
    with clearhead.watch(module, ablate={0: heads}, mode=mode):
        return module(x)


def by_hand(module, x, heads, mode="zero"):
    """The same by a hook on what out_proj is given (not for a gate, which comes in between)."""

    def hook(_, args):
        context = args[0].unflatten(-1, (module.num_heads, -1)).clone()
        mean = context[..., heads, :].mean(-3, keepdim=True)
        context[..., heads, :] = mean.expand_as(context[..., heads, :]) if mode == "mean" else 0
        return context.flatten(-2)

    handle = module.out_proj.register_forward_pre_hook(hook)
    out = module(x)
    handle.remove()
    return out


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("heads", [[0, 2], [2, 3], []])
def test_pruned_is_what_the_module_gives_without_these_heads(name, heads):
    module, x = made(**OPTIONS[name]), torch.randn(2, 5, 7).double()
    small = module.prune_heads(heads)
    assert_close(small(x), by_hand(module, x, heads))
    assert small.num_heads == 4 - len(heads)
    assert small.W_query.weight.shape == (small.W_query.out_features, small.W_query.in_features)
    assert small.out_proj.weight.shape == (small.out_proj.out_features, small.out_proj.in_features)
    again = small.prune_heads([0]) if small.num_kv_heads == small.num_heads else small
    kept = [h for h in range(4) if h not in heads]
    assert_close(again(x), by_hand(module, x, [*heads, *kept[: small.num_heads - again.num_heads]]))
    again(x).sum().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in again.parameters())
    assert module.num_heads == 4


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ([4], "^prune_heads: there is no head 4; the module has 4, from 0$"),
        ([0, 1, 2, 3], "^prune_heads: all 4 heads would go; leave one or more$"),
        ([1], "^prune_heads: of the 2 groups of 2 heads .1, 2. would be left; each must keep"),
    ],
)
def test_heads_that_cannot_go_are_named(heads, message):
    with pytest.raises(ValueError, match=message):
        made(num_kv_heads=2).prune_heads(heads)


def test_merged_heads_are_the_mean_of_their_group():
    module, x = made(qkv_bias=True), torch.randn(5, 7).double()
    merged = module.merge_kv_heads(2)
    for name in ("W_key", "W_value"):
        whole, half = (getattr(m, name).weight.unflatten(0, (-1, 3)) for m in (module, merged))
        assert_close(half, torch.stack([whole[:2].mean(0), whole[2:].mean(0)]))
    assert merged.num_kv_heads == 2
    # Where the heads of a group are equal already, nothing changes.
    assert_close(merged.merge_kv_heads(2)(x), merged(x))
    spread = made(qkv_bias=True)
    spread.load_state_dict(module.state_dict())
    with torch.no_grad():
        for name in ("W_key", "W_value"):
            for held in getattr(spread, name).parameters():
                mean = held.unflatten(0, (2, 2, 3)).mean(1, keepdim=True)
                held.copy_(mean.expand(2, 2, *mean.shape[2:]).flatten(0, 2))
    assert_close(spread.merge_kv_heads(2)(x), spread(x))
    assert_close(merged(x), spread(x))
    with pytest.raises(ValueError, match="^merge_kv_heads: num_kv_heads is 3; it must divide"):
        module.merge_kv_heads(3)


@pytest.mark.parametrize("mode", ["zero", "mean"])
@pytest.mark.parametrize("name", ["plain", "grouped", "sizes"])
def test_ablated_heads_give_zero_or_their_mean(name, mode):
    module, x = made(**OPTIONS[name]), torch.randn(2, 5, 7).double()
    assert_close(without(module, x, [1, 2], mode), by_hand(module, x, [1, 2], mode))
    assert torch.equal(module(x), without(module, x, [], mode))


class Written(nn.Module):
    """The same attention written out and fused."""

    def __init__(self, fused):
        super().__init__()
        self.fused, self.num_heads = fused, 3

    def forward(self, x):
        q = x.unflatten(-1, (3, -1)).transpose(1, 2)
        if self.fused:
            out = F.scaled_dot_product_attention(q, q, q)
        else:
            out = (q @ q.mT / q.shape[-1] ** 0.5).softmax(-1) @ q
        return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("mode", ["zero", "mean"])
def test_fused_and_written_out_attention_lose_the_same_heads(mode):
    x = torch.randn(2, 5, 12)
    model = nn.Sequential(Written(True), nn.Linear(12, 12))
    with clearhead.watch(model[:1], ablate={"0": [0, 2]}, mode=mode):
        fused = model[:1](x)
    heads = model[0](x).unflatten(-1, (3, -1)).clone()
    heads[:, :, [0, 2]] = heads[:, :, [0, 2]].mean(1, keepdim=True) if mode == "mean" else 0.0
    assert_close(fused, heads.flatten(2))
    written = Written(False)
    with clearhead.watch(written, ablate={0: [0, 2]}, mode=mode, every=2):
        assert_close(written(x), fused)
        assert_close(written(x), fused)  # not recorded, and ablated all the same


def test_what_cannot_be_ablated_raises():
    mha, x = nn.MultiheadAttention(12, 3), torch.randn(5, 2, 12)
    with (
        pytest.raises(NotImplementedError, match="replace_torch_attention"),
        clearhead.watch(mha, ablate={0: [1]}),
    ):
        mha(x, x, x)
    compat.replace_torch_attention(mha)
    with clearhead.watch(mha, ablate={0: [0, 1, 2]}):
        out, _ = mha(x, x, x)
    assert_close(out, mha.out_proj.bias.expand(5, 2, 12))
    module = made()
    x = torch.randn(5, 7).double()
    with (
        pytest.raises(ValueError, match="^watch: ablate names head 4 of layer MultiHeadAttention"),
        clearhead.watch(module, ablate={0: [4]}),
    ):
        module(x)
    with (
        pytest.raises(ValueError, match="^watch: ablate names layer 3, and no attention of that"),
        clearhead.watch(module, ablate={3: [0]}),
    ):
        module(x)


def test_importance_is_the_derivative_with_respect_to_a_head_mask():
    model = nn.Sequential(made(output_dim=7), nn.Linear(7, 7).double(), made(num_kv_heads=2))
    xs = torch.randn(3, 2, 5, 7).double()
    batches = iter(xs)
    found = head_importance(model, lambda m: m(next(batches)).square().sum(), batches=3)
    assert list(found) == ["0", "2"]
    step = 1e-6
    for path, layer in (("0", model[0]), ("2", model[2])):
        for h in range(4):
            by_difference = 0.0
            for x in xs:
                losses = []
                for factor in (1 + step, 1 - step):
                    held = layer.out_proj.weight.detach().clone()
                    with torch.no_grad():
                        layer.out_proj.weight[:, 3 * h : 3 * h + 3] *= factor
                        losses.append(model(x).square().sum())
                        layer.out_proj.weight.copy_(held)
                by_difference += abs(losses[0] - losses[1]) / (2 * step) / 3
            assert_close(found[path][h], by_difference, rtol=1e-5, atol=1e-5)
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_importance_names_what_it_cannot_do():
    with pytest.raises(ValueError, match="^head_importance: Linear holds no MultiHeadAttention"):
        head_importance(nn.Linear(2, 2), lambda m: torch.ones(()))
    with pytest.raises(ValueError, match=r"^head_importance: loss gave a tensor of shape \(3,\)"):
        head_importance(made(), lambda m: torch.ones(3))
