"""The traced steps against the textbook's modules: the same numbers, step for step."""

import copy
import inspect
import math

import pytest
import torch
from torch.testing import assert_close

from clearhead import AuxRequest
from clearhead.inspection.trace import trace, worked_example
from clearhead.module import MultiHeadAttention
from clearhead.testing import assert_within_budget
from clearhead.textbook import MultiHeadAttentionWrapper

NAMES = ["queries", "keys", "values", "q", "k", "v", "scores", "masked", "weights", "context",
         "recombined", "output"]  # fmt: skip
SENTENCE = ["the", "dog", "fetched", "the", "ball"]


def by_name(steps):
    assert len({step.name for step in steps}) == len(steps)
    return {step.name: step for step in steps}


def assert_answer_of(wrapper, x, values):
    """Within the table's budget: one head's products and all heads' differ on some processors."""
    gold = copy.deepcopy(wrapper).double()(x.double()).detach()
    assert_within_budget(values, gold, wrapper(x).detach())


@pytest.fixture
def wrapper():
    return MultiHeadAttentionWrapper(input_dim=7, head_dim=3, num_heads=2)


@pytest.fixture
def x():
    return torch.randn(5, 7)


def test_last_step_is_the_module_s_answer(wrapper, x):
    module = MultiHeadAttention.from_heads(wrapper)
    steps = trace(module, x)
    assert [step.name for step in steps] == ["x", *NAMES]
    assert_close(steps[-1].values, wrapper(x).detach())
    assert_close(steps[-1].values, module(x).detach())


def test_wrapper_and_efficient_agree_at_every_step_they_share(wrapper, x):
    plain = by_name(trace(wrapper, x))
    efficient = by_name(trace(MultiHeadAttention.from_heads(wrapper), x))
    assert list(plain) == ["x", *NAMES[3:]]
    for name, step in plain.items():
        assert_close(step.values, efficient[name].values)
    assert_answer_of(wrapper, x, plain["output"].values)


def test_wrapper_without_out_proj_ends_with_the_joined_heads(x):
    wrapper = MultiHeadAttentionWrapper(7, 3, 2, out_proj=False)
    steps = trace(wrapper, x)
    assert steps[-1].name == "recombined"
    assert_answer_of(wrapper, x, steps[-1].values)


def test_one_head_of_the_trace_is_that_head_alone(wrapper, x):
    steps = by_name(trace(MultiHeadAttention.from_heads(wrapper), x))
    for h, head in enumerate(wrapper.heads):
        assert_close(steps["q"].values[h], head.W_query(x).detach())
        assert_close(steps["context"].values[h], head(x).detach())


def test_shapes_of_the_worked_example():
    steps = by_name(worked_example(SENTENCE))
    shapes = {name: step.shape for name, step in steps.items()}
    assert shapes == {
        **dict.fromkeys(["x", "queries", "keys", "values"], (5, 6)),
        **dict.fromkeys(["q", "k", "v", "context"], (2, 5, 3)),
        **dict.fromkeys(["scores", "masked", "weights"], (2, 5, 5)),
        **dict.fromkeys(["recombined", "output", "wrapper_output"], (5, 6)),
        "difference": (),
    }
    for step in steps.values():
        assert len(step.axes) == len(step.shape)
        assert step.per_head == (len(step.shape) == 3)
        assert step.tokens == tuple(SENTENCE)
    grouped = {name for name, step in steps.items() if step.heads == 2}
    assert grouped == {"queries", "keys", "values", "recombined"}


def test_split_and_recombine_change_no_number(wrapper, x):
    steps = by_name(trace(MultiHeadAttention.from_heads(wrapper), x))
    for whole, split in (("queries", "q"), ("keys", "k"), ("values", "v")):
        for h in range(2):
            block = steps[whole].values[:, 3 * h : 3 * h + 3]
            assert torch.equal(steps[split].values[h], block)
    for h in range(2):
        assert torch.equal(
            steps["recombined"].values[:, 3 * h : 3 * h + 3], steps["context"].values[h]
        )


def test_future_is_minus_infinity_then_exactly_zero_and_rows_sum_to_one(wrapper, x):
    steps = by_name(trace(MultiHeadAttention.from_heads(wrapper), x))
    future = torch.ones(5, 5, dtype=torch.bool).triu(1)
    masked, weights = steps["masked"].values, steps["weights"].values
    assert (masked[:, future] == -math.inf).all()
    assert torch.equal(masked[:, ~future], steps["scores"].values[:, ~future])
    assert (weights[:, future] == 0).all()
    assert (weights[:, ~future] > 0).all()
    assert_close(weights.sum(-1), torch.ones(2, 5))


def test_each_step_s_code_makes_its_values_from_the_steps_before(wrapper, x):
    module = MultiHeadAttention.from_heads(wrapper)
    names: dict = {"module": module, "inputs": x, "num_heads": 2, "head_dim": 3}
    names |= {"torch": torch, "math": math}
    for step in trace(module, x):
        exec(step.code, names)
        assert_close(names[step.name].detach(), step.values, rtol=0, atol=0)


def test_hooks_on_the_projections_are_seen(wrapper, x):
    module = MultiHeadAttention.from_heads(wrapper)
    before = by_name(trace(module, x))["queries"].values
    module.W_query.register_forward_hook(lambda *call: 2 * call[-1])
    steps = by_name(trace(module, x))
    assert_close(steps["queries"].values, 2 * before)
    assert_close(steps["output"].values, module(x).detach())


def test_tokens_default_to_numbers(wrapper, x):
    assert trace(wrapper, x)[0].tokens == ("1", "2", "3", "4", "5")
    assert trace(wrapper, x, SENTENCE)[0].tokens == tuple(SENTENCE)


@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 1, 1), (1, 4, 5, 20), (5, 3, 2, None), (3, 1, 7, 2)],
    ids=["one of all", "one word", "usual width", "seven heads of size one"],
)
def test_worked_example_agrees_with_the_wrapper_for_any_size(sizes):
    count, num_heads, head_dim, input_dim = sizes
    steps = by_name(worked_example(SENTENCE[:count], num_heads, head_dim, input_dim, seed=3))
    width = num_heads * head_dim
    assert steps["x"].shape == (count, width if input_dim is None else input_dim)
    assert_close(steps["output"].values, steps["wrapper_output"].values)
    far = (steps["output"].values - steps["wrapper_output"].values).abs().max()
    assert torch.equal(steps["difference"].values, far)


def test_equal_words_have_equal_vectors_and_the_seed_decides_all():
    first, again, other = (worked_example(SENTENCE, seed=seed) for seed in (0, 0, 1))
    x = first[0].values
    assert torch.equal(x[0], x[3])
    assert not torch.equal(x[0], x[1])
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a.values, b.values)
    assert not torch.equal(x, other[0].values)


def test_worked_example_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    worked_example(SENTENCE)
    assert torch.equal(torch.get_rng_state(), before)


def test_trace_leaves_no_graph_and_no_gradient(wrapper, x):
    steps = trace(MultiHeadAttention.from_heads(wrapper), x.requires_grad_())
    assert not any(step.values.requires_grad for step in steps)


@pytest.mark.parametrize("shape", [(2, 5, 7), (7,), (0, 7), (5, 6)])
def test_wrong_inputs_are_named(wrapper, shape):
    with pytest.raises(ValueError) as error:
        trace(wrapper, torch.zeros(shape))
    assert str(error.value) == (
        f"trace: x has shape {shape}; it needs one sequence (L, 7) of at least one token. "
        "From a batch pass x[b]"
    )


def test_wrong_number_of_tokens_is_named(wrapper, x):
    with pytest.raises(ValueError, match="^trace: got 2 tokens for 5 rows of x; give one a row$"):
        trace(wrapper, x, ["the", "dog"])


@pytest.mark.parametrize("name", ["num_heads", "head_dim", "input_dim"])
def test_sizes_below_one_are_named(name):
    with pytest.raises(ValueError, match=f"^worked_example: {name} is 0; it must be 1 or more$"):
        worked_example(SENTENCE, **{name: 0})


def test_no_words_is_an_error():
    with pytest.raises(ValueError, match="^worked_example: there are no words"):
        worked_example([])


OPTIONS = {
    "num_kv_heads": {"num_kv_heads": 1},
    "value_head_dim": {"value_head_dim": 4},
    "is_causal": {"is_causal": False},
    "sliding_window": {"sliding_window": 2},
    "window to both sides": {"sliding_window": 2, "is_causal": False},
    "scale": {"scale": 0.3},
    "qk_norm": {"qk_norm": "rms"},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "gate": {"gate": True},
    "all": {"num_kv_heads": 1, "value_head_dim": 4, "sliding_window": 3, "scale": 0.7,
            "qk_norm": "layer", "softcap": 2.0, "sinks": True, "alibi": True, "gate": True,
            "qkv_bias": True},
}  # fmt: skip
REFUSED = {
    "context_dim": {"is_causal": False, "context_dim": 4},
    "dropout while training": {"dropout": 0.5},
}


@pytest.mark.parametrize("named", OPTIONS)
def test_every_option_shows_in_the_steps_and_their_numbers(named, x):
    module = MultiHeadAttention(7, 3, 2, **OPTIONS[named])
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    out, aux = module(x, return_aux=AuxRequest(weights=True))
    steps = by_name(trace(module, x))
    assert_close(steps["weights"].values, aux.weights.detach(), atol=2e-6, rtol=2e-6)
    assert_close(steps["output"].values, out.detach(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"batch_first": True}])
def test_torch_s_module_is_traced(options, x):
    mha = torch.nn.MultiheadAttention(7 * 2, 2, **options).eval()
    x = torch.cat([x, x], -1)
    out, weights = mha(x, x, x, average_attn_weights=False)
    steps = by_name(trace(mha, x))
    assert_close(steps["weights"].values, weights.detach(), atol=2e-6, rtol=2e-6)
    assert_close(steps["output"].values, out.detach(), atol=2e-6, rtol=2e-6)
    assert "masked" not in steps


@pytest.mark.parametrize("named", REFUSED)
def test_options_without_a_step_are_named(named, x):
    module = MultiHeadAttention(7, 3, 2, **REFUSED[named])
    with pytest.raises(NotImplementedError, match=f"^trace: the steps have no {named}; trace a"):
        trace(module, x)


@pytest.mark.parametrize(
    "options", [{"qkv_bias": True, "out_bias": True}, {"output_dim": 4}, {"backend": "chunked"}]
)
def test_options_that_change_no_step_are_followed(options, x):
    module = MultiHeadAttention(7, 3, 2, **options)
    for name, bias in module.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(bias)
    assert_close(trace(module, x)[-1].values, module(x).detach())


def test_dropout_in_eval_is_followed(x):
    module = MultiHeadAttention(7, 3, 2, dropout=0.5).eval()
    assert_close(trace(module, x)[-1].values, module(x).detach())


def test_every_option_of_the_module_is_followed_or_refused(x):
    """A new option must not be drawn as if it were not there."""
    known = {"self", "input_dim", "head_dim", "num_heads", "device", "dtype", "rope"}
    known |= {"qkv_bias", "out_bias", "output_dim", "backend"}
    known |= {name for table in (OPTIONS, REFUSED) for opts in table.values() for name in opts}
    assert set(inspect.signature(MultiHeadAttention.__init__).parameters) == known


def test_wrapper_without_heads_is_named(wrapper, x):
    wrapper.heads = torch.nn.ModuleList()
    with pytest.raises(ValueError, match="^trace: the wrapper has no heads; it needs one or more$"):
        trace(wrapper, x)


def test_what_cannot_be_called_is_named(wrapper, x):
    with pytest.raises(TypeError, match="^trace: module is a Tensor; it must be a module, or"):
        trace(x, x)
    with pytest.raises(TypeError, match=r"^trace: x is a NoneType; .* one sequence \(L, 7\)$"):
        trace(wrapper)
    with pytest.raises(ValueError, match="^trace: heads and sequence are of a call inside a model"):
        trace(wrapper, x, heads=[0])
