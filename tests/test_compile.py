"""torch.compile, torch.export and the custom ops underneath."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch.testing import assert_close

from clearhead import AuxRequest, MultiHeadAttention, attention, varlen_attention
from clearhead.arguments import make_problem
from clearhead.backends import chunked

EVERYTHING = AuxRequest(lse=True, weights=True)
H, HKV = 4, 2


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    torch.set_num_threads(1)  # two wait for each other longer than such small calls take


def draw(L=5, S=7, D=8, Dv=8, B=2, dtype=torch.float32):
    shapes = (B, H, L, D), (B, HKV, S, D), (B, HKV, S, Dv)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


MASK = torch.tensor([[1, 0, 1, 1, 1, 0, 1], [0] * 7, *[[1, 1, 1, 0, 1, 1, 1]] * 3]).bool()
RULES = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window": (2, 1)},
    "bool mask with an empty row": {"attn_mask": MASK},
    "float mask": {"attn_mask": torch.linspace(-1, 1, 35).view(5, 7)},
    "key mask, documents": {
        "key_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1] * 7]).bool(),
        "documents": (torch.tensor([[0, 0, 1, 1, 1]]), torch.tensor([[0, 0, 0, 1, 1, 1, 1]])),
    },
    "softcap, sinks, alibi, head mask": {
        "softcap": 2.0,
        "sinks": torch.linspace(-1, 1, H),
        "alibi_slopes": torch.linspace(0.1, 0.4, H),
        "head_mask": torch.linspace(-1, 1, H),
        "is_causal": True,
    },
    "deterministic": {"deterministic": True, "is_causal": True},
}


def graphs():
    """How many graphs have been compiled in this test."""
    return counters["stats"]["unique_graphs"]


def in_dtype(rules, dtype):
    return {
        k: t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t
        for k, t in rules.items()
    }


def both_ways(compiled, eager, leaves, tolerance):
    """Outputs and gradients of the compiled function are those of the eager one."""
    factor = torch.randn_like(eager(*leaves).detach())
    found, expected = [], []
    for function, results in ((compiled, found), (eager, expected)):
        out = function(*leaves)
        results += [out, *torch.autograd.grad((out * factor).sum(), leaves)]
    for actual, right in zip(found, expected, strict=True):
        assert actual.dtype == right.dtype
        assert_close(actual, right, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_one_graph_under_every_rule(name, dtype):
    """fullgraph=True: no break, and forward and backward equal to eager."""
    rules = in_dtype(RULES[name], dtype)

    def call(query, key, value):
        return attention(query, key, value, **rules)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    both_ways(compiled, call, draw(dtype=dtype), 2e-6 if dtype == torch.float32 else 0.03)


# Inductor loads torch's scripted decompositions, which warn of their own age.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_inductor():
    """The default compiler, forward and backward, for a whole module."""
    mha, x = MultiHeadAttention(16, 8, H, num_kv_heads=HKV), torch.randn(2, 5, 16)
    key_mask = torch.tensor([[True] * 5, [True, True, True, False, False]])

    def call(x, *parameters):
        return mha(x, key_mask=key_mask)

    leaves = [x.requires_grad_(), *mha.parameters()]
    both_ways(torch.compile(call, fullgraph=True), call, leaves, 1e-5)


def test_weights_and_lse():
    def call(query, key, value):
        out, aux = attention(query, key, value, is_causal=True, return_aux=EVERYTHING)
        return torch.cat([out.flatten(), aux.lse.flatten(), aux.weights.flatten()])

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    both_ways(compiled, call, draw(), 2e-6)


def test_dropout():
    """Another draw per call, the same for the same seed, and its gradient's pattern is its own."""
    leaves = draw(Dv=7)
    identity = torch.eye(7).expand(2, HKV, 7, 7).clone().requires_grad_()

    def call(query, key, value):
        return attention(query, key, value, dropout_p=0.5)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.manual_seed(1)
    first = compiled(*leaves[:2], identity)
    second = compiled(*leaves[:2], identity)
    torch.manual_seed(1)
    assert torch.equal(compiled(*leaves[:2], identity), first)
    assert not torch.equal(first, second)
    # d out / d value sums the weights that survived, so it must vanish where none did.
    (grad,) = torch.autograd.grad(first.sum(), identity)
    kept = first.sum(2).view(2, HKV, H // HKV, 7).sum(2)
    assert_close(grad[..., 0], kept, atol=1e-5, rtol=1e-5)


def test_packed_rows():
    """Offsets are numbers to look at, so a graph may break there, and the result may not change."""
    offsets = torch.tensor([0, 2, 2, 7])
    rows = [torch.randn(7, n, 8) for n in (H, HKV, HKV)]
    compiled = torch.compile(varlen_attention, backend="aot_eager")
    expected = varlen_attention(*rows, offsets, offsets, is_causal=True)
    assert_close(compiled(*rows, offsets, offsets, is_causal=True), expected)


@pytest.mark.parametrize("name", ["plain", "causal", "window", "deterministic"])
def test_dynamic_lengths_compile_once(name):
    """No length is built into the graph: seven lengths, one graph."""

    def call(query, key, value):
        return attention(query, key, value, **RULES[name])

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for L, S in ((5, 7), (9, 11), (13, 13), (2, 64), (65, 130), (64, 128), (3, 2)):
        both_ways(compiled, call, draw(L, S), 5e-6)
    assert graphs() == 1


def test_lengths_become_dynamic_by_themselves():
    """Without dynamic=True a second length recompiles once, and no later one does."""

    def call(x):
        return attention(x, x[:, :HKV], x[:, :HKV], is_causal=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for L in (5, 9, 13, 64, 65):
        x = torch.randn(2, H, L, 8)
        assert_close(compiled(x), call(x), atol=2e-6, rtol=2e-6)
    assert graphs() == 2


def test_a_decoding_loop_compiles_a_bounded_number_of_times():
    """One new row against a growing past, with a padding mask that grows too."""

    def call(query, key, value, key_mask):
        return attention(query, key, value, is_causal=True, key_mask=key_mask)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for S in (5, 6, 7, 8, 20, 70):
            tensors, mask = draw(1, S), torch.ones(2, S).bool()
            mask[1, :3] = False
            assert_close(compiled(*tensors, mask), call(*tensors, mask), atol=2e-6, rtol=2e-6)
    assert graphs() == 2


# -- export ---------------------------------------------------------------------------------------


class Masked(torch.nn.Module):
    def forward(self, query, key, value, mask):
        return attention(query, key, value, mask)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32], ids=str)
def test_export_with_a_dynamic_length_and_a_mask(kind):
    """pytorch#124502: mask (1,1,L,L), L 2 to 64, traced at 5; no guard on L modulo 8."""

    def arguments(L):
        mask = torch.rand(1, 1, L, L) < 0.7
        mask[..., 0] = True
        if kind != torch.bool:
            mask = torch.randn(1, 1, L, L).masked_fill(~mask, -torch.inf)
        return (*(torch.randn(1, 2, L, 8) for _ in range(3)), mask)

    L = torch.export.Dim("L", min=2, max=64)
    shapes = ({2: L}, {2: L}, {2: L}, {2: L, 3: L})
    exported = torch.export.export(Masked(), arguments(5), dynamic_shapes=shapes).module()
    for length in (2, 5, 8, 9, 63, 64):
        given = arguments(length)
        assert_close(exported(*given), attention(*given), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("options", [
    {}, {"sliding_window": 3}, {"num_kv_heads": 2, "sinks": True, "alibi": True, "softcap": 5.0},
    {"is_causal": False, "qk_norm": "rms", "gate": True},
], ids=str)  # fmt: skip
def test_export_of_the_module_with_a_dynamic_length(options):
    """pytorch#124502: with padding whose length follows, in both dynamic axes."""
    mha = MultiHeadAttention(12, 8, 4, **options).eval()
    B, L = torch.export.Dim("B", min=2, max=16), torch.export.Dim("L", min=2, max=64)

    def arguments(items, length):
        key_mask = torch.arange(length) < torch.randint(1, length + 1, (items, 1))
        return (torch.randn(items, length, 12),), {"key_mask": key_mask}

    args, kwargs = arguments(3, 5)
    shapes = {"x": {0: B, 1: L}, "key_mask": {0: B, 1: L}}
    exported = torch.export.export(mha, args, kwargs, dynamic_shapes=shapes).module()
    for items, length in ((2, 2), (3, 5), (5, 9), (16, 64)):
        args, kwargs = arguments(items, length)
        assert_close(exported(*args, **kwargs), mha(*args, **kwargs), atol=5e-6, rtol=5e-6)


def test_export_without_a_mask():
    """pytorch#124502: causal alone, and plain."""

    class Causal(torch.nn.Module):
        def forward(self, x):
            return attention(x, x, x, is_causal=True), attention(x, x, x)

    L = torch.export.Dim("L", min=2, max=64)
    exported = torch.export.export(
        Causal(), (torch.randn(1, 2, 5, 8),), dynamic_shapes=({2: L},)
    ).module()
    for length in (2, 9, 64):
        x = torch.randn(1, 2, length, 8)
        causal, full = exported(x)
        assert_close(causal, attention(x, x, x, is_causal=True), atol=2e-6, rtol=2e-6)
        assert_close(full, attention(x, x, x), atol=2e-6, rtol=2e-6)


# -- the ops --------------------------------------------------------------------------------------

OPS = {
    **RULES,
    "biases": {"attn_mask": torch.linspace(-1, 1, 35).view(5, 7), "bias": torch.ones(H, 1, 1)},
    "dropout": {"dropout_p": 0.5},
}


def op_arguments(name):
    """The flat arguments of clearhead::chunked for a call, its floating ones as leaves."""
    problem = make_problem(*draw(L=5, S=7, D=3, Dv=4), **OPS[name])
    flat = chunked.flat(problem, chunked.draw_seed(problem))
    return tuple(
        t.detach().clone().requires_grad_() if isinstance(t, torch.Tensor) and n < 7 else t
        for n, t in enumerate(flat)
    )


@pytest.mark.parametrize("name", OPS)
def test_opcheck_of_the_forward(name):
    torch.library.opcheck(torch.ops.clearhead.chunked, op_arguments(name))


@pytest.mark.parametrize("name", ["bool mask with an empty row", "biases", "dropout",
                                  "softcap, sinks, alibi, head mask"])  # fmt: skip
def test_opcheck_of_the_backward(name):
    arguments = op_arguments(name)
    out, lse, m, z = (t.detach() for t in torch.ops.clearhead.chunked(*arguments))
    upstream = torch.randn_like(out), torch.randn_like(lse)
    needs = [t is not None for t in arguments[:7]]
    torch.library.opcheck(
        torch.ops.clearhead.chunked_backward, (*upstream, m, z, needs, *arguments)
    )


def test_opcheck_notices_an_op_that_is_not_what_it_says():
    """The two tests above can fail: here one input is written to in secret."""

    @torch.library.custom_op("clearhead_test::writes", mutates_args=())
    def writes(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2).clone()

    writes.register_fake(lambda x: torch.empty_like(x))
    with pytest.raises(Exception, match="was modified|mutated"):
        torch.library.opcheck(writes, (torch.ones(3),))
