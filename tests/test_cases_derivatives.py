"""Reports J: second derivatives, forward-mode AD, and torch.func transforms."""

import itertools

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

from clearhead import MultiHeadAttention, attention, attention_by_definition, explain

# Forward-mode AD loads torch's scripted decompositions, which warn of their own age.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

RULES = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask with an empty row": {
        "attn_mask": torch.tensor([[1, 1, 0, 1], [0] * 4, [1, 0, 1, 1], [1] * 4]).bool()
    },
    "key mask and window": {"key_mask": torch.tensor([[1, 0, 1, 1]]).bool(), "window": (2, 1)},
}


@pytest.fixture(autouse=True)
def one_thread():
    """Two threads wait for each other longer than such small calls take."""
    torch.set_num_threads(1)


def close(actual, expected, atol=1e-10):
    assert_close(actual, expected, atol=atol, rtol=1e-6)


# -- 43 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_derivatives_of_every_kind_in_float64(name):
    """pytorch#116350: (1, 1, 4, 4); gradgradcheck, and gradcheck with forward-mode AD."""
    inputs = [torch.randn(1, 1, 4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def call(query, key, value):
        return attention(query, key, value, **RULES[name])

    assert gradcheck(call, inputs, check_forward_ad=True)
    assert gradgradcheck(call, inputs)


def penalty(attend, dtype, leaves, backend="auto"):
    """The gradients of a gradient penalty: second derivatives, as a GAN or a force field asks."""
    own = [t.to(dtype).detach().requires_grad_() for t in leaves]
    rules = {"backend": backend} if attend is attention else {}
    first = torch.autograd.grad(attend(*own, **rules).sin().sum(), own, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in first), own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_second_derivatives_are_right_or_refused(dtype):
    """pytorch#116350: never wrong in silence; the refusal names the backend that has them."""
    leaves = torch.randn(3, 1, 2, 4, 4)
    expected = penalty(attention_by_definition, torch.float64, leaves)
    for backend in ("auto", "chunked", "sdpa"):
        own = [t.to(dtype).requires_grad_() for t in leaves]
        runs = explain(*own, backend=backend).backend
        if runs is None:
            continue
        if runs == "sdpa":
            with pytest.raises(
                NotImplementedError, match=r'second derivative; backend="chunked" has'
            ):
                penalty(attention, dtype, leaves, backend)
            continue
        for grad, truth in zip(penalty(attention, dtype, leaves, backend), expected, strict=True):
            close(grad.double(), truth, atol=1e-4 if dtype == torch.float32 else 1e-12)


def test_first_derivatives_do_not_ask_for_more_than_they_need():
    """pytorch#116350: the refusal above is for second derivatives only."""
    leaves = [torch.randn(1, 2, 4, 4, requires_grad=True) for _ in range(3)]
    for backend in ("auto", "sdpa"):
        assert explain(*leaves, backend=backend).backend in ("native", "sdpa")
        out = attention(*leaves, backend=backend)
        grads = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
        assert all(bool(g.isfinite().all()) for g in grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_grad_jvp_and_hessian(name, dtype):
    """pytorch#116350: torch.func's, held against the definition's in float64."""
    tensors = torch.randn(3, 1, 1, 4, 3, dtype=torch.float64)
    tangents = torch.randn(3, 1, 1, 4, 3, dtype=torch.float64)
    atol = 1e-5 if dtype == torch.float32 else 1e-10
    spread = {k: t.expand(1, 1, 4, 4) if k == "attn_mask" else t for k, t in RULES[name].items()}

    def loss(attend, rules):
        return lambda q, k, v: attend(q, k, v, **rules).sin().sum()

    ours, theirs = loss(attention, RULES[name]), loss(attention_by_definition, spread)
    low, directions = tensors.to(dtype).unbind(0), tangents.to(dtype).unbind(0)
    leaves = [t.clone().requires_grad_() for t in tensors]
    gradients = torch.autograd.grad(theirs(*leaves), leaves)
    for found, truth in zip(torch.func.grad(ours, (0, 1, 2))(*low), gradients, strict=True):
        close(found.double(), truth, atol)
    slope = sum((g * t).sum() for g, t in zip(gradients, tangents, strict=True))
    value, tangent = torch.func.jvp(ours, low, directions)
    close(value.double(), theirs(*tensors), atol)
    close(tangent.double(), slope, atol)
    hessian = torch.func.hessian(ours, (0, 1, 2))(*low)
    expected = torch.autograd.functional.hessian(theirs, tuple(tensors.unbind(0)))
    for row, right in zip(hessian, expected, strict=True):
        for block, truth in zip(row, right, strict=True):
            close(block.double(), truth, 10 * atol)


def test_jacobians_by_rows_and_by_columns():
    """pytorch#116350: jacrev and jacfwd agree, and with autograd's own, vectorised and not."""
    tensors = torch.randn(3, 1, 2, 3, 2, dtype=torch.float64)

    def call(value):
        return attention(tensors[0], tensors[1], value, is_causal=True)

    expected = torch.autograd.functional.jacobian(
        lambda value: attention_by_definition(tensors[0], tensors[1], value, is_causal=True),
        tensors[2],
    )
    close(torch.func.jacrev(call)(tensors[2]), expected)
    close(torch.func.jacfwd(call)(tensors[2]), expected)
    close(torch.autograd.functional.jacobian(call, tensors[2]), expected)
    close(torch.autograd.functional.jacobian(call, tensors[2], vectorize=True), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_transforms_reach_parameters_through_the_module(dtype):
    """pytorch#116350: a jvp and a Hessian-vector product of a model's own weights."""
    mha, x = MultiHeadAttention(6, 3, 2, num_kv_heads=1).to(dtype), torch.randn(5, 6, dtype=dtype)
    weights = {n: p.detach() for n, p in mha.named_parameters()}
    tangents = {n: torch.randn_like(p) for n, p in weights.items()}

    def loss(parameters):
        return torch.func.functional_call(mha, parameters, (x,)).square().sum()

    _, slope = torch.func.jvp(loss, (weights,), (tangents,))
    gradients = torch.func.grad(loss)(weights)
    close(slope, sum((gradients[n] * tangents[n]).sum() for n in weights), 1e-3)
    _, product = torch.func.jvp(torch.func.grad(loss), (weights,), (tangents,))
    step = 1e-6 if dtype == torch.float64 else 1e-2
    ahead, behind = (
        torch.func.grad(loss)({n: w + s * tangents[n] for n, w in weights.items()})
        for s in (step, -step)
    )
    for n in weights:
        numerical = (ahead[n] - behind[n]) / (2 * step)
        scale = float(numerical.abs().max())
        close(product[n], numerical, scale * (1e-6 if dtype == torch.float64 else 2e-2))


# -- 44 -------------------------------------------------------------------------------------------


def items(dtype=torch.float32):
    """Three models' or items' queries, keys and values, each (3, 2, 2 heads, 5, 4)."""
    return torch.randn(3, 3, 2, 2, 5, 4).to(dtype).unbind(0)


def looped(call, in_dims, *tensors):
    """call for each item along in_dims, stacked."""
    size = next(t.shape[d] for t, d in zip(tensors, in_dims, strict=True) if d is not None)
    rows = [
        call(*(t if d is None else t.select(d, n) for t, d in zip(tensors, in_dims, strict=True)))
        for n in range(size)
    ]
    return torch.stack(rows)


SHARED = torch.rand(5, 5, generator=torch.Generator().manual_seed(1)) < 0.6
PER_ITEM = torch.rand(3, 5, 5, generator=torch.Generator().manual_seed(2)) < 0.6
WIDE = torch.rand(3, 2, 1, 5, 5, generator=torch.Generator().manual_seed(3)) < 0.6
MASKS = {
    "none": (None, None),
    "shared": (SHARED, None),
    "(3, 5, 5)": (PER_ITEM, 0),
    "(3, 2, 1, 5, 5)": (WIDE, 0),
    "(5, 3, 5), axis 1": (PER_ITEM.transpose(0, 1), 1),
    "floating": (torch.randn(3, 5, 5, generator=torch.Generator().manual_seed(4)), 0),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("batched", ["qkv", "q", "kv"])
def test_vmap_with_masks_equals_a_loop(batched, name):
    """pytorch#151558: mask shared, batched as (3,5,5) and (3,2,1,5,5), q batched only."""
    mask, mask_dim = MASKS[name]
    tensors = [t if letter in batched else t[0] for t, letter in zip(items(), "qkv", strict=True)]
    in_dims = tuple(0 if letter in batched else None for letter in "qkv")

    def call(query, key, value, mask=None):
        return attention(query, key, value, mask)

    if mask is not None:
        tensors, in_dims = [*tensors, mask], (*in_dims, mask_dim)
    found = torch.vmap(call, in_dims)(*tensors)
    close(found, looped(call, in_dims, *tensors), 1e-6)
    assert torch.equal(torch.vmap(call, in_dims, out_dims=2)(*tensors), found.movedim(0, 2))


@pytest.mark.parametrize("rules", [
    {"is_causal": True}, {"window": (1, 2)}, {"softcap": 2.0, "scale": 0.3},
    {"sinks": torch.tensor([0.5, -0.5]), "alibi_slopes": torch.tensor([0.5, 0.25])},
    {"key_mask": torch.tensor([[1, 1, 0, 1, 1], [1, 0, 0, 0, 1]]).bool()},
    {"documents": torch.tensor([[0, 0, 1, 1, 1], [2, 2, 2, 2, 3]])},
], ids=lambda rules: ", ".join(rules))  # fmt: skip
def test_vmap_under_every_rule_equals_a_loop(rules):
    """pytorch#151558: the rules are shared, the tensors batched, on any axis."""
    query, key, value = items()

    def call(*tensors):
        return attention(*tensors, **rules)

    close(torch.vmap(call)(query, key, value), looped(call, (0, 0, 0), query, key, value), 1e-6)
    moved = query.movedim(0, 3), key, value.movedim(0, 1)
    in_dims = (3, None, 1)
    moved = (moved[0], key[0], moved[2])
    close(torch.vmap(call, in_dims)(*moved), looped(call, in_dims, *moved), 1e-6)


def test_vmap_over_rules():
    """pytorch#151558: padding, documents, biases and sinks that differ per item."""
    query, key, value = items()
    batched = {
        "key_mask": torch.rand(3, 2, 5) < 0.7,
        "documents": torch.randint(3, (3, 2, 5)),
        "bias": torch.randn(3, 2, 5, 5),
        "sinks": torch.randn(3, 2),
        "alibi_slopes": torch.rand(3, 2),
        "head_mask": torch.randn(3, 2),
    }
    for name, rule in batched.items():

        def call(query, key, value, rule, name=name):
            return attention(query, key, value, **{name: rule})

        tensors, in_dims = (query, key, value, rule), (0, 0, 0, 0)
        close(torch.vmap(call)(*tensors), looped(call, in_dims, *tensors), 1e-6)


def test_nested_vmap_and_vmap_of_grad():
    """pytorch#151558: per-sample gradients, and a vmap within a vmap."""
    query, key, value = items(torch.float64)

    def call(*tensors):
        return attention(*tensors, SHARED)

    nested = torch.vmap(torch.vmap(call))(query, key, value)
    close(nested, attention(query, key, value, SHARED))

    def loss(query, key, value, mask):
        return attention(query, key, value, mask, is_causal=True).sin().sum()

    per_item = torch.vmap(torch.func.grad(loss, (0, 1, 2)))(query, key, value, PER_ITEM)
    for n in range(3):
        leaves = [t[n].clone().requires_grad_() for t in (query, key, value)]
        gold = attention_by_definition(*leaves, PER_ITEM[n].expand(2, 2, 5, 5), is_causal=True)
        expected = torch.autograd.grad(gold.sin().sum(), leaves)
        for found, right in zip(per_item, expected, strict=True):
            close(found[n], right)


def test_vmap_over_an_ensemble_of_modules():
    """pytorch#151558: three models, one input, one mask."""
    models = [MultiHeadAttention(6, 3, 2, is_causal=False) for _ in range(3)]
    stacked = {
        name: torch.stack([dict(m.named_parameters())[name].detach() for m in models])
        for name, _ in models[0].named_parameters()
    }
    x = torch.randn(2, 5, 6)

    def run(parameters):
        return torch.func.functional_call(models[0], parameters, (x,), {"attn_mask": SHARED})

    found = torch.vmap(run)(stacked)
    for n, model in enumerate(models):
        close(found[n], model(x, attn_mask=SHARED), 1e-6)


def test_randomness_of_dropout_under_vmap():
    """pytorch#151558: "error" raises, "same" drops alike in every item, "different" does not."""
    query = torch.zeros(1, 1, 8, 4)
    value = torch.eye(8)[None, None]  # so that the output shows the weights that survived
    batch = torch.zeros(3, 1, 1, 8, 4)

    def call(query):
        return attention(query, torch.zeros(1, 1, 8, 4), value, dropout_p=0.5)

    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(call)(batch)
    same = torch.vmap(call, randomness="same")(batch)
    assert torch.equal(same[0], same[1]) and torch.equal(same[0], same[2])
    different = torch.vmap(call, randomness="different")(batch)
    assert all(not torch.equal(different[a], different[b])
               for a, b in itertools.combinations(range(3), 2))  # fmt: skip
    for out in (*same, *different, call(query)):
        assert set(out.unique().tolist()) == {0.0, 0.25}
