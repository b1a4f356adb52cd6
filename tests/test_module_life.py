"""MultiHeadAttention as a module: start, copies, hooks, compilers, learning, refusals."""

import copy
import pickle
import re

import pytest
import torch
from torch import nn
from torch.export import Dim, export
from torch.nn.utils import parametrize
from torch.testing import assert_close

from clearhead import AuxRequest, MultiHeadAttention, SelfAttention

B, L, E, D, H = 2, 5, 7, 3, 4
CLOSE = {"atol": 2e-5, "rtol": 1e-4}
ALL = {
    "num_kv_heads": 2, "value_head_dim": 5, "output_dim": 13, "qkv_bias": True, "out_bias": True,
    "sliding_window": 3, "scale": 0.9, "softcap": 1.5, "sinks": True, "alibi": True,
    "qk_norm": "layer", "gate": True,
}  # fmt: skip
BOTH = pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "all"])


def build(**options):
    return MultiHeadAttention(E, D, H, **options)


class LowRank(nn.Module):
    """A linear layer with a trainable low-rank one beside it."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, 2, bias=False)
        self.up = nn.Linear(2, linear.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.linear(x) + self.up(self.down(x))


# -- the start ------------------------------------------------------------------------------------


def test_a_unit_input_gives_unit_queries_keys_and_scores():
    for kv_heads in (1, 8):
        module = MultiHeadAttention(384, 64, 8, num_kv_heads=kv_heads, value_head_dim=32)
        x = torch.randn(256, 384)
        with torch.no_grad():
            q, k, v = module.W_query(x), module.W_key(x), module.W_value(x)
            scores = q.unflatten(-1, (8, 64))[:, 0] @ k.unflatten(-1, (-1, 64))[:, 0].T / 64**0.5
        for tensor in (q, k, v, scores):
            assert abs(tensor.var().item() - 1) < 0.1
        for linear in (module.W_query, module.W_key, module.W_value, module.out_proj):
            assert abs(linear.weight.var().item() * linear.in_features - 1) < 0.05
            assert abs(linear.weight.mean().item()) < 0.01


def test_biases_sinks_and_norms_start_neutral_and_all_is_drawn_anew():
    module = build(**ALL)
    start = {name: value.clone() for name, value in module.state_dict().items()}
    for name, value in start.items():
        if name.endswith("bias") or name == "sinks":
            assert torch.equal(value, torch.zeros_like(value))
        if name.startswith("norm") and name.endswith("weight"):
            assert torch.equal(value, torch.ones_like(value))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(9.0)
    module.reset_parameters()
    for name, value in module.state_dict().items():
        assert not (value == 9.0).any()
        assert value.ndim == 1 or not torch.equal(value, start[name])


# -- state and copies -----------------------------------------------------------------------------


def test_the_names_are_the_textbooks():
    shapes = {name: tuple(value.shape) for name, value in build().state_dict().items()}
    assert shapes == {
        "W_query.weight": (H * D, E),
        "W_key.weight": (H * D, E),
        "W_value.weight": (H * D, E),
        "out_proj.weight": (H * D, H * D),
    }
    head = dict(SelfAttention(E, D).named_parameters())
    assert set(head) == set(shapes) - {"out_proj.weight"}
    assert set(build(**ALL).state_dict()) == {
        *shapes,
        *(f"{name}.bias" for name in ("W_query", "W_key", "W_value", "out_proj")),
        *(f"norm_{name}.{part}" for name in ("query", "key") for part in ("weight", "bias")),
        "W_gate.weight",
        "sinks",
    }


@BOTH
def test_state_dicts_copies_and_pickles_keep_every_bit(options):
    module, x = build(**options), torch.randn(B, L, E)
    out = module(x)
    loaded = build(**options)
    assert not torch.equal(loaded(x), out)
    assert str(loaded.load_state_dict(module.state_dict())) == "<All keys matched successfully>"
    for other in (loaded, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x), out)
        assert repr(other) == repr(module)
        assert all(
            one is not two for one, two in zip(other.parameters(), module.parameters(), strict=True)
        )


@BOTH
def test_modules_without_storage(options):
    module, x = build(**options), torch.randn(B, L, E)
    bare = build(device="meta", **options)
    assert all(p.is_meta for p in bare.parameters())
    assert bare(x.to("meta")).shape == module(x).shape
    empty = bare.to_empty(device="cpu")
    skipped = nn.utils.skip_init(MultiHeadAttention, E, D, H, **options)
    for other in (empty, skipped):
        other.load_state_dict(module.state_dict())
        assert torch.equal(other(x), module(x))


def test_skip_init_draws_nothing():
    before = torch.get_rng_state()
    nn.utils.skip_init(MultiHeadAttention, E, D, H, **ALL)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_dtype_is_that_of_all_parameters(dtype):
    assert {p.dtype for p in build(dtype=dtype, **ALL).parameters()} == {dtype}


def test_the_name_in_print_shows_all_that_is_not_usual():
    assert build().extra_repr() == "input_dim=7, head_dim=3, num_heads=4"
    usual = {"num_kv_heads": 4, "context_dim": 7, "value_head_dim": 3, "output_dim": 12}
    assert build(**usual).extra_repr() == build().extra_repr()
    others = {"context_dim": 11, **ALL, "is_causal": False, "dropout": 0.1, "backend": "chunked"}
    shown = build(**others).extra_repr().removeprefix("input_dim=7, head_dim=3, num_heads=4, ")
    assert eval(f"dict({shown})") == others
    assert "scale=0.0" in build(scale=0.0).extra_repr()


# -- hooks, adapters and parametrisations ---------------------------------------------------------


@pytest.mark.parametrize("mode", ["train", "eval", "inference"])
def test_every_part_is_called_once_per_call(mode):
    module = build(**ALL).train(mode == "train")
    parts = dict(module.named_children())
    assert set(parts) == {
        "W_query",
        "W_key",
        "W_value",
        "out_proj",
        "W_gate",
        "norm_query",
        "norm_key",
    }
    calls = []
    for name, part in parts.items():
        part.register_forward_hook(lambda *_, name=name: calls.append(name))
    with torch.inference_mode(mode == "inference"):
        module(torch.randn(B, L, E))
        assert sorted(calls) == sorted(parts)
        module(torch.randn(B, L, E), return_aux=AuxRequest(lse=True, weights=True))
    assert sorted(calls) == sorted([*parts, *parts])


def test_a_hook_may_change_a_projection():
    module, x = build(), torch.randn(B, L, E)
    module.W_value.register_forward_hook(lambda *_: torch.zeros(B, L, H * D))
    assert torch.equal(module(x), torch.zeros(B, L, H * D))


@pytest.mark.parametrize("name", ["W_query", "W_key", "W_value", "out_proj"])
def test_parametrisations_run(name):
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    module, x = build(), torch.randn(B, L, E)
    wanted = copy.deepcopy(module)
    with torch.no_grad():
        getattr(wanted, name).weight.mul_(2)
    parametrize.register_parametrization(getattr(module, name), "weight", Doubled())
    out = module(x)
    assert torch.equal(out, wanted(x))
    out.square().sum().backward()
    assert getattr(module, name).parametrizations.weight.original.grad.abs().max() > 0


@pytest.mark.parametrize("name", ["W_query", "W_key", "W_value", "out_proj"])
def test_an_adapter_in_the_place_of_a_projection_learns(name):
    module, x = build().requires_grad_(False), torch.randn(B, L, E)
    before = module(x)
    setattr(module, name, LowRank(getattr(module, name)))
    assert torch.equal(module(x), before)
    trained = [p for p in module.parameters() if p.requires_grad]
    assert len(trained) == 2
    optimizer = torch.optim.Adam(trained, 0.02)
    target, losses = torch.randn(B, L, H * D), []
    for _ in range(30):
        loss = (module(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.97 * losses[0]
    assert "LowRank" in repr(module)


# -- compiled and exported ------------------------------------------------------------------------


@BOTH
def test_it_compiles_in_one_graph_forward_and_backward(options):
    module, x = build(**options), torch.randn(B, L, E, requires_grad=True)
    key_mask = torch.arange(L) < torch.tensor([[L], [0]])
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for arguments in ({}, {"key_mask": key_mask}):
        results = []
        for call in (module, compiled):
            out = call(x, **arguments)
            grads = torch.autograd.grad(out.square().sum(), [x, *module.parameters()])
            results.append((out, *grads))
        for eager, other in zip(*results, strict=True):
            assert_close(other, eager, **CLOSE)


LENGTH = Dim("length", min=2, max=64)


@pytest.mark.parametrize(
    ("options", "masked"),
    [({}, False), ({}, True), ({"sliding_window": 3}, False), ({"is_causal": False}, False)],
    ids=["causal", "mask", "window", "not causal"],
)
def test_case_65_it_exports_with_a_length_that_may_change(options, masked):
    module = build(**options).eval()

    def arguments(n):
        return {"attn_mask": torch.rand(1, 1, n, n) > 0.3} if masked else {}

    shapes = {"x": {1: LENGTH}, **({"attn_mask": {2: LENGTH, 3: LENGTH}} if masked else {})}
    x = torch.randn(B, L, E)
    exported = export(module, (x,), arguments(L), dynamic_shapes=shapes).module()
    for n in (2, 9, 64):
        x, named = torch.randn(B, n, E), arguments(n)
        assert_close(exported(x, **named), module(x, **named), **CLOSE)


# -- derivatives and learning ---------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {**ALL, "qk_norm": "rms"}], ids=["plain", "all"])
def test_gradcheck_of_the_whole_module(options):
    module = MultiHeadAttention(3, 2, 2, dtype=torch.float64, **{**options, "num_kv_heads": 1})
    names = [name for name, _ in module.named_parameters()]
    x = torch.randn(1, 3, 3, dtype=torch.float64, requires_grad=True)

    def run(x, *parameters):
        state = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(module, state, (x,))

    assert torch.autograd.gradcheck(run, (x, *module.parameters()))
    assert torch.autograd.gradgradcheck(run, (x, *module.parameters()))


def test_it_learns_to_fetch_the_marked_token():
    """Only attention can: the target stands in another row, and any row may be the marked one."""
    module = MultiHeadAttention(5, 4, 1, qkv_bias=True, is_causal=False)
    optimizer = torch.optim.Adam(module.parameters(), 0.1)
    losses = []
    for _ in range(80):
        x, marked = torch.randn(64, 5, 5), torch.randint(5, (64,))
        x[..., 4] = 3.0 * nn.functional.one_hot(marked, 5)
        target = x[torch.arange(64), marked, :4][:, None].expand(64, 5, 4)
        loss = (module(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 1  # the variance of the target, which is what a constant output costs
    assert sum(losses[-10:]) / 10 < 0.1


# -- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"input_dim": 0}, ValueError, "MultiHeadAttention: input_dim is 0; it must be 1 or more"),
        ({"head_dim": -3}, ValueError, "MultiHeadAttention: head_dim is -3; it must be 1 or more"),
        ({"num_heads": 0}, ValueError, "MultiHeadAttention: num_heads is 0; it must be 1 or more"),
        ({"num_kv_heads": 0}, ValueError, "num_kv_heads is 0; it must be 1 or more"),
        ({"context_dim": 0}, ValueError, "context_dim is 0; it must be 1 or more"),
        ({"value_head_dim": 0}, ValueError, "value_head_dim is 0; it must be 1 or more"),
        ({"output_dim": 0}, ValueError, "output_dim is 0; it must be 1 or more"),
        ({"sliding_window": 0}, ValueError, "sliding_window is 0; it must be 1 or more"),
        ({"head_dim": 3.0}, TypeError, "head_dim is 3.0; it must be a whole number"),
        ({"num_heads": True}, TypeError, "num_heads is True; it must be a whole number"),
        ({"sliding_window": "3"}, TypeError, "sliding_window is '3'; it must be a whole number"),
        (
            {"num_kv_heads": 3},
            ValueError,
            "num_heads = 4 must be a multiple of num_kv_heads = 3",
        ),
        ({"num_kv_heads": 8}, ValueError, "num_heads = 4 must be a multiple of num_kv_heads = 8"),
        ({"qk_norm": "l2"}, ValueError, 'qk_norm is \'l2\'; it must be "rms", "layer" or None'),
        ({"dropout": 1.5}, ValueError, "dropout is 1.5; it must lie in 0 ... 1"),
        ({"dropout": -0.1}, ValueError, "dropout is -0.1; it must lie in 0 ... 1"),
        ({"softcap": 0.0}, ValueError, "softcap is 0.0; it must be positive, None for none"),
        ({"softcap": -2.0}, ValueError, "softcap is -2.0; it must be positive, None for none"),
        (
            {"rope": "any"},
            NotImplementedError,
            "rope comes with a later version; until then rotate queries and keys yourself",
        ),
    ],
    ids=str,
)
def test_the_constructor_says_what_it_needs(arguments, error, text):
    sizes = {"input_dim": E, "head_dim": D, "num_heads": H}
    with pytest.raises(error, match=re.escape(text)):
        MultiHeadAttention(**{**sizes, **arguments})


@pytest.mark.parametrize(
    ("options", "shapes", "text"),
    [
        ({}, [(B, L, 6)], "x has shape (2, 5, 6); it must be (..., length, input_dim) with"),
        ({}, [(E,)], "x has shape (7,); it must be (..., length, input_dim)"),
        ({}, [(B, L, E), (B, 4, E)], "build the module with is_causal=False for cross-attention"),
        (
            {"context_dim": 11, "is_causal": False},
            [(B, L, E)],
            "context_dim = 11 differs from input_dim = 7, so a context must be passed",
        ),
        (
            {"context_dim": 11, "is_causal": False},
            [(B, L, E), (B, 4, E)],
            "context has shape (2, 4, 7); it must have x's 3 axes and end in context_dim = 11",
        ),
        ({"is_causal": False}, [(B, L, E), (4, E)], "it must have x's 3 axes"),
        ({"is_causal": False}, [(B, L, E), (3, 4, E)], "the leading axes of query (2,), key (3,)"),
    ],
)
def test_forward_says_what_it_needs(options, shapes, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        build(**options)(*(torch.randn(shape) for shape in shapes))


@pytest.mark.parametrize("name", ["positions", "cache"])
def test_what_comes_later_is_refused(name):
    text = f"MultiHeadAttention: {name} comes with a later version; until then pass all tokens"
    with pytest.raises(NotImplementedError, match=text):
        build()(torch.randn(B, L, E), **{name: torch.arange(L)})


def test_masks_of_a_wrong_size_and_unknown_backends_are_refused():
    x = torch.randn(B, L, E)
    with pytest.raises(ValueError, match=r"key_mask has shape \(2, 4\)"):
        build()(x, key_mask=torch.ones(B, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"attn_mask has shape \(4, 4\)"):
        build()(x, attn_mask=torch.ones(4, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="backend is 'fast'; it must be one of"):
        build(backend="fast")(x)
    with pytest.raises(NotImplementedError, match=r'attention\(backend="sdpa"\): .*softcap'):
        build(backend="sdpa", softcap=2.0)(x)
