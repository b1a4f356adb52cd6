"""What compat.MultiheadAttention keeps of torch's class, how it replaces it, what it refuses."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.testing import assert_close

from clearhead.compat import MultiheadAttention, replace_torch_attention

N, L, S, H, E = 2, 5, 7, 4, 16
KINDS = {
    "plain": {},
    "kdim and vdim": {"kdim": 7, "vdim": 8},
    "no bias": {"bias": False},
    "extra tokens": {"add_bias_kv": True, "add_zero_attn": True},
}


# -- what is torch's stays torch's ----------------------------------------------------------------


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_parameters_and_their_start_are_torchs(options):
    torch.manual_seed(7)
    theirs = nn.MultiheadAttention(E, H, **options)
    torch.manual_seed(7)
    mine = MultiheadAttention(E, H, **options)
    assert isinstance(mine, nn.MultiheadAttention)
    state = mine.state_dict()
    assert list(state) == list(theirs.state_dict())
    assert all(torch.equal(state[name], value) for name, value in theirs.state_dict().items())
    for module in (theirs, mine):  # and so is drawing them anew
        torch.manual_seed(8)
        module._reset_parameters()
    anew = theirs.state_dict()
    assert all(torch.equal(value, anew[name]) for name, value in mine.state_dict().items())


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_copies_pickles_and_modules_without_storage(options):
    mine = MultiheadAttention(E, H, batch_first=True, **options)
    x = (
        torch.randn(N, L, E),
        *(torch.randn(N, S, n) for n in (mine.kdim, mine.vdim)),
    )
    out, weights = mine(*x)
    bare = MultiheadAttention(E, H, batch_first=True, device="meta", **options)
    assert bare(*(t.to("meta") for t in x))[0].shape == out.shape
    skipped = nn.utils.skip_init(MultiheadAttention, E, H, batch_first=True, **options)
    for other in (copy.deepcopy(mine), pickle.loads(pickle.dumps(mine)), skipped):
        other.load_state_dict(mine.state_dict())
        assert type(other) is MultiheadAttention and not other._qkv_same_embed_dim
        assert torch.equal(other(*x)[0], out) and torch.equal(other(*x)[1], weights)


@pytest.mark.parametrize("batch_first", [False, True])
def test_the_output_can_be_viewed_as_torchs_can(batch_first):
    mine = MultiheadAttention(E, H, batch_first=batch_first)
    x = torch.randn(L, N, E)
    assert mine(x, x, x)[0].is_contiguous()


@pytest.mark.parametrize(("items", "rows", "keys"), [(0, 5, 7), (2, 0, 7), (2, 5, 0)])
def test_axes_of_size_zero(items, rows, keys):
    mine = MultiheadAttention(E, H, batch_first=True)
    x, memory = torch.randn(items, rows, E), torch.randn(items, keys, E)
    padding = torch.zeros(items, keys, dtype=torch.bool)
    for mask in (None, torch.zeros(rows, keys), torch.zeros(items * H, rows, keys)):
        for is_causal in (False, True):
            out, weights = mine(x, memory, memory, padding, True, mask, False, is_causal)
            assert out.shape == (items, rows, E) and weights.shape == (items, H, rows, keys)
            if keys == 0:
                assert torch.equal(out, mine.out_proj.bias.expand(items, rows, E))


def test_dropout_works_in_training_only():
    mine = MultiheadAttention(E, H, dropout=0.5, batch_first=True)
    plain = MultiheadAttention(E, H, batch_first=True)
    plain.load_state_dict(mine.state_dict())
    x = torch.randn(N, 9, E)
    assert not torch.equal(mine(x, x, x)[0], mine(x, x, x)[0])
    torch.manual_seed(3)
    out, state = mine(x, x, x)[0], torch.get_rng_state()
    torch.manual_seed(3)
    assert torch.equal(mine(x, x, x, need_weights=False)[0], out)
    assert torch.equal(torch.get_rng_state(), state)
    mine.eval()
    assert torch.equal(mine(x, x, x)[0], mine(x, x, x)[0])
    assert torch.equal(mine(x, x, x)[0], plain(x, x, x)[0])
    mine.train().dropout = 1.0
    assert torch.equal(mine(x, x, x)[0], mine.out_proj.bias.expand(N, 9, E))


def test_a_mask_of_zeros_that_learns_gets_its_gradient():
    mine = MultiheadAttention(E, H, batch_first=True)
    x = torch.randn(N, L, E)
    padding, mask = torch.zeros(N, L, requires_grad=True), torch.zeros(L, L, requires_grad=True)
    out, _ = mine(x, x, x, padding, attn_mask=mask)
    assert torch.equal(out, mine(x, x, x, padding.detach() + 0, attn_mask=mask)[0])
    for grad in torch.autograd.grad(out.square().sum(), (padding, mask)):
        assert (grad != 0).all()


def test_vmap_over_inputs_and_masks_is_a_loop():
    mine = MultiheadAttention(E, H, batch_first=True)
    x = torch.randn(3, N, L, E)
    masks = torch.zeros(3, L, L).masked_fill(torch.rand(3, L, L) > 0.7, -torch.inf)

    def run(x, mask):
        return mine(x, x, x, attn_mask=mask)

    outs, weights = torch.func.vmap(run)(x, masks)
    for n in range(3):
        out, weight = run(x[n], masks[n])
        assert_close(outs[n], out, atol=2e-6, rtol=0)
        assert_close(weights[n], weight, atol=2e-6, rtol=0)


# -- replacing ------------------------------------------------------------------------------------


def test_replacing_keeps_parameters_hooks_and_optimizers():
    model = nn.Transformer(E, H, 2, 1, 24, 0.0, batch_first=True, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    parameters, state = (
        list(model.parameters()),
        {k: v.clone() for k, v in model.state_dict().items()},
    )
    x, y = torch.randn(N, S, E).double(), torch.randn(N, L, E).double()
    calls = []
    model.encoder.layers[1].self_attn.register_forward_hook(lambda *_: calls.append(1))
    before = model(x, y)
    calls.clear()
    assert replace_torch_attention(model) == 4
    assert model.encoder.use_nested_tensor is False
    after = model(x, y)
    assert calls == [1]
    assert_close(after, before, atol=1e-12, rtol=0)
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())
    after.square().sum().backward()
    optimizer.step()
    assert not torch.equal(model(x, y), after)
    assert replace_torch_attention(model) == 0


def test_replacing_a_module_itself_and_none_at_all():
    module = nn.MultiheadAttention(E, H)
    assert replace_torch_attention(module) == 1 and type(module) is MultiheadAttention
    assert replace_torch_attention(nn.Linear(2, 2)) == 0


def test_a_subclass_with_its_own_forward_is_left_alone():
    class Own(nn.MultiheadAttention):
        def forward(self, query):
            return query

    model = nn.ModuleList([Own(E, H), nn.MultiheadAttention(E, H)])
    assert replace_torch_attention(model) == 1
    assert [type(module) for module in model] == [Own, MultiheadAttention]


def test_a_parametrised_module_is_refused_before_anything_changes():
    model = nn.ModuleList([nn.MultiheadAttention(E, H), nn.MultiheadAttention(E, H)])
    parametrize.register_parametrization(model[1], "in_proj_weight", nn.Identity())
    with pytest.raises(TypeError, match="ParametrizedMultiheadAttention.*before you parametrise"):
        replace_torch_attention(model)
    assert type(model[0]) is nn.MultiheadAttention


# -- refused --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_with_the_remedy():
    nested = torch.nested.nested_tensor([torch.randn(3, E), torch.randn(5, E)])
    mine = MultiheadAttention(E, H, batch_first=True).eval()
    with pytest.raises(TypeError, match="query is a nested tensor; pass a padded one with key_pad"):
        mine(nested, nested, nested)
    layer = nn.TransformerEncoderLayer(E, H, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    for layer in encoder.layers:
        layer.self_attn = MultiheadAttention(E, H, batch_first=True)
    x, padding = torch.randn(N, L, E), torch.arange(L) >= torch.tensor([[5], [3]])
    with torch.no_grad():
        with pytest.raises(TypeError, match="use_nested_tensor to False, as replace_torch_att"):
            encoder(x, src_key_padding_mask=padding)
        encoder.use_nested_tensor = False
        assert encoder.eval()(x, src_key_padding_mask=padding).isfinite().all()


SHAPES = {"query": (N, L, E), "key": (N, S, E), "value": (N, S, E)}


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (
            {"query": (L, 3)},
            ValueError,
            r"query has shape \(5, 3\); it must be \(N, length, 16\), or",
        ),
        ({"query": (1, N, L, E)}, ValueError, r"query has shape \(1, 2, 5, 16\)"),
        ({"key": (N, S, 3)}, ValueError, r"key has shape \(2, 7, 3\)"),
        ({"query": (L, E)}, ValueError, "all three must have the same batch"),
        ({"query": (3, L, E)}, ValueError, r"query \(3, 5, 16\), key \(2, 7, 16\), value \(2, 7"),
        ({"value": (N, L, E)}, ValueError, "key and value the same length"),
        ({"attn_mask": (L, L)}, ValueError, r"\(5, 5\); it must be \(5, 7\) or \(8, 5, 7\)"),
        ({"attn_mask": (N, L, S)}, ValueError, r"attn_mask has shape \(2, 5, 7\)"),
        ({"attn_mask": (N, H, L, S)}, ValueError, r"attn_mask has shape \(2, 4, 5, 7\)"),
        ({"key_padding_mask": (S, N)}, ValueError, r"key_padding_mask has .* must be \(2, 7\)$"),
        ({"key_padding_mask": (S,)}, ValueError, r"key_padding_mask has shape \(7,\)"),
    ],
)
def test_errors_say_what_was_got_and_what_is_needed(change, error, text):
    mine = MultiheadAttention(E, H, batch_first=True)
    arguments = {name: torch.randn(shape) for name, shape in {**SHAPES, **change}.items()}
    with pytest.raises(error, match=text):
        mine(**arguments)


def test_errors_name_the_axes_of_the_layout():
    mine = MultiheadAttention(E, H)
    with pytest.raises(ValueError, match=r"it must be \(length, N, 16\), or \(length, 16\)"):
        mine(torch.randn(E), torch.randn(S, E), torch.randn(S, E))


@pytest.mark.parametrize("name", ["attn_mask", "key_padding_mask"])
def test_masks_of_whole_numbers_are_refused(name):
    mine = MultiheadAttention(E, H)
    x = torch.randn(L, E)
    mask = torch.zeros((L, L) if name == "attn_mask" else (L,), dtype=torch.uint8)
    with pytest.raises(TypeError, match=rf"{name} has dtype torch.uint8.*pass {name}.bool\(\)"):
        mine(x, x, x, **{name: mask})
    assert mine(x, x, x, **{name: mask.bool()})[0].isfinite().all()
