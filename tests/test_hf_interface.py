"""What transformers passes to the attention function is served, ignored for a reason or refused."""

import ast
from pathlib import Path

import pytest
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from clearhead import hf
from clearhead.hf import families, interface, masks
from clearhead.textbook import attention_by_definition

MODELING = sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py"))
B, H, Hkv, L, S, D, Dv = 2, 4, 2, 5, 7, 6, 3


@pytest.fixture(autouse=True)
def registered():
    hf.register()


@pytest.fixture
def layer():
    module = torch.nn.Module().eval()
    module.is_causal = False
    return module


def tensors(b=B, queries=L, keys=S):
    shapes = (b, H, queries, D), (b, Hkv, keys, D), (b, Hkv, keys, Dv)
    return [torch.randn(shape) for shape in shapes]


def assert_defined(result, q, k, v, scale=None, **rules):
    """Output and weights as the definition has them."""
    out, weights = result
    true_out, _, true_weights = attention_by_definition(
        q, k, v, scale=scale, return_aux=True, **rules
    )
    assert out.is_contiguous() and out.dtype == q.dtype
    torch.testing.assert_close(out.transpose(1, 2).double(), true_out, rtol=0, atol=2e-6)
    torch.testing.assert_close(weights.double(), true_weights, rtol=0, atol=2e-6)


# ---- what transformers passes ----


def passed(path):
    """Names of the keyword arguments with which a modeling file calls its attention function."""
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(function, ast.FunctionDef):
            continue
        fetched = {
            ast.unparse(target)
            for line in ast.walk(function)
            if isinstance(line, ast.Assign | ast.AnnAssign)
            and line.value is not None
            and "ALL_ATTENTION_FUNCTIONS" in ast.unparse(line.value)
            for target in getattr(line, "targets", None) or [line.target]
        }
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in fetched:
                assert len(call.args) <= 5, path
                yield from (keyword.arg for keyword in call.keywords if keyword.arg)


def test_every_argument_that_a_family_passes_is_known():
    served = set(interface.attend.__annotations__)
    found, files = {}, 0
    for path in MODELING:
        names = set(passed(path))
        files += bool(names)
        for name in names:
            found.setdefault(name, []).append(path.parent.name)
    assert files > 300 and len(found) > 15  # the walk finds what it looks for
    known = served | set(interface.IGNORED) | set(interface.REFUSED)
    assert {name: where for name, where in found.items() if name not in known} == {}
    assert not served & (set(interface.IGNORED) | set(interface.REFUSED))
    assert set(interface.REFUSED) <= set(found)


def test_families_that_use_the_interface_in_part_are_known():
    # A class with a softmax of its own that adds the very mask which the interface gets, in a
    # family that does not serve "sdpa", whose masks are boolean as well.
    own_masks = {"clap", "longt5", "pegasus_x"}  # looked at one by one
    found = set()
    for path in MODELING:
        code = path.read_text(encoding="utf-8")
        if families.INTERFACE not in code or "_supports_sdpa = True" in code:
            continue
        for part in ast.parse(code).body:
            own = ast.unparse(part)
            adds = any("mask" in line and " + " in line for line in own.splitlines())
            by_itself = "softmax(" in own and "ALL_ATTENTION_FUNCTIONS" not in own
            if isinstance(part, ast.ClassDef) and by_itself and adds:
                found.add(path.parent.name)
    assert found == set(families.MIXED) | own_masks


def test_arguments_that_change_nothing(layer):
    q, k, v = tensors()
    plain, _ = interface.attend(layer, q, k, v, None)
    for name in (*interface.IGNORED, "something_unknown"):
        value = None if name == "something_unknown" else 3
        assert torch.equal(interface.attend(layer, q, k, v, None, **{name: value})[0], plain)
    assert all(len(reason.split()) > 2 for reason in interface.IGNORED.values())


def test_arguments_that_cannot_be_served(layer):
    q, k, v = tensors()
    with pytest.raises(NotImplementedError) as caught:
        interface.attend(layer, q, k, v, None, sinks=torch.zeros(B, H, L, 1))
    assert str(caught.value) == (
        "clearhead.hf: Module passes sinks, one sink per query row; clearhead has one per head "
        '(s_aux); load the model with attn_implementation="eager"'
    )
    with pytest.raises(TypeError) as caught:
        interface.attend(layer, q, k, v, None, temperature=False)
    assert str(caught.value) == (
        "clearhead.hf: Module passes temperature, and nothing is known about what that means for "
        "its attention; do not pass it to the model, or load the model with "
        'attn_implementation="eager"'
    )
    with pytest.raises(ValueError) as caught:
        interface.attend(layer, q, k, v, None, cu_seq_lens_q=torch.tensor([0, 5]))
    assert str(caught.value) == (
        "clearhead.hf: cu_seq_lens_q comes with a batch of 2; sequences that are packed one behind "
        "the other need a batch of 1"
    )


# ---- what each argument does ----


def test_masks_of_every_form(layer):
    q, k, v = tensors()
    boolean = torch.rand(B, 1, L, S) > 0.4
    boolean[0, 0, 2] = False
    keys = torch.rand(B, S) > 0.3
    added = torch.randn(B, H, L, S)
    for mask, rules in [
        (None, {}),
        (boolean, {"attn_mask": boolean}),
        (keys[:, None, None], {"key_mask": keys}),
        (added, {"attn_mask": added}),
        (torch.where(boolean, 0.0, -torch.inf), {"attn_mask": boolean}),
    ]:
        assert_defined(
            interface.attend(layer, q, k, v, mask, output_attentions=True), q, k, v, **rules
        )
    out, weights = interface.attend(layer, q, k, v, boolean)
    assert weights is None and not out[0, 2].any()


def test_scale_softcap_sinks_and_bias(layer):
    q, k, v = tensors()
    sinks, bias = torch.randn(H), torch.randn(1, H, L, S)
    mask = torch.rand(B, 1, L, S) > 0.3
    result = interface.attend(
        layer, q, k, v, mask, scaling=1.0, softcap=2.0, s_aux=sinks, position_bias=bias,
        output_attentions=True,
    )  # fmt: skip
    assert_defined(result, q, k, v, scale=1.0, softcap=2.0, sinks=sinks, bias=bias, attn_mask=mask)
    added = torch.randn(B, 1, L, S)
    result = interface.attend(layer, q, k, v, added, position_bias=bias, output_attentions=True)
    assert_defined(result, q, k, v, bias=bias + added)


def test_empty_slots_take_no_part(layer):
    q, k, v = tensors()
    bias = torch.randn(1, H, L, S)
    k[:, :, L:], v[:, :, L:] = torch.nan, torch.inf
    result = interface.attend(
        layer, q, k, v, None, is_causal=True, position_bias=bias, output_attentions=True
    )
    seen = torch.ones(L, S, dtype=torch.bool).tril()
    assert_defined(result, q, k, v, bias=bias, attn_mask=seen)
    given = masks.make(B, L, S, 0, 0)
    for options in ({}, {"indices": torch.tensor([[[0, 1]] * L] * B)}):
        result = interface.attend(layer, q, k, v, given, output_attentions=True, **options)
        chosen = torch.arange(S) < (2 if options else S)
        assert_defined(result, q, k, v, attn_mask=seen & chosen)


def test_chosen_keys(layer):
    q, k, v = tensors()
    indices = torch.stack([torch.randperm(S)[:3] for _ in range(B * L)]).view(B, L, 3)
    chosen = torch.zeros(B, L, S, dtype=torch.bool).scatter(-1, indices, True)[:, None]
    boolean, added = torch.rand(B, 1, L, S) > 0.3, torch.randn(B, 1, L, S)
    for mask, rules in [
        (None, {"attn_mask": chosen}),
        (boolean, {"attn_mask": chosen & boolean}),
        (added, {"attn_mask": chosen, "bias": added}),
    ]:
        result = interface.attend(layer, q, k, v, mask, indices=indices, output_attentions=True)
        assert_defined(result, q, k, v, **rules)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences(layer, causal):
    q, k, v = tensors(1, 7, 7)
    offsets = torch.tensor([0, 2, 3, 7], dtype=torch.int32)
    documents = torch.tensor([[0, 0, 1, 2, 2, 2, 2]])
    for mask in (None, masks.make(1, 7, 7) if causal else torch.ones(1, 1, 7, 7).bool()):
        result = interface.attend(
            layer, q, k, v, mask, is_causal=causal, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets,
            max_length_q=4, max_length_k=4, output_attentions=True,
        )  # fmt: skip
        assert_defined(result, q, k, v, documents=documents, is_causal=causal)


def test_dropout_is_for_training(layer):
    q, k, v = tensors()
    plain, _ = interface.attend(layer, q, k, v, None)
    assert torch.equal(interface.attend(layer, q, k, v, None, dropout=0.5)[0], plain)
    dropped, weights = interface.attend(
        layer.train(), q, k, v, None, dropout=0.5, output_attentions=True
    )
    assert not torch.allclose(dropped, plain)
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, H, L))  # from before dropout


def test_half_types_get_their_weights_back_in_their_dtype(layer):
    q, k, v = (t.bfloat16() for t in tensors())
    out, weights = interface.attend(layer, q, k, v, None, output_attentions=True)
    assert out.dtype == weights.dtype == torch.bfloat16


# ---- families that cannot be served ----

SMALL = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
OWN_CODE = ("bloom", "deberta-v2", "falcon", "megatron-bert", "mpnet", "rembert", "roformer")


@pytest.mark.parametrize("family", OWN_CODE)
def test_a_family_with_code_of_its_own_is_refused_when_it_is_built(family):
    config = AutoConfig.for_model(family, **SMALL)
    with pytest.raises(NotImplementedError) as caught:
        AutoModel.from_config(config, attn_implementation="clearhead")
    assert str(caught.value).endswith(
        "Model computes attention in code of its own and not through transformers' attention "
        'interface, so attn_implementation="clearhead" would have no effect; load it with '
        'attn_implementation="eager"'
    )
    model = AutoModel.from_config(AutoConfig.for_model(family, **SMALL))  # others are not touched
    for ask in (hf.check, hf.use):
        with pytest.raises(NotImplementedError, match=f"^{type(model).__name__} computes"):
            ask(model)


@pytest.mark.parametrize("family", families.MIXED)
def test_a_family_that_uses_the_interface_in_part_is_refused(family):
    with pytest.raises(NotImplementedError, match=r"^\w+Model reads the mask in code of its own"):
        AutoModel.from_config(AutoConfig.for_model(family), attn_implementation="clearhead")


def test_a_part_that_cannot_be_served_is_found():
    model = LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=8))
    hf.check(model)
    config = AutoConfig.for_model("bloom", **SMALL)
    model.model.extra = AutoModelForCausalLM.from_config(config)
    with pytest.raises(NotImplementedError, match="^BloomForCausalLM computes"):
        hf.check(model)


def test_a_class_whose_code_cannot_be_read_is_trusted(monkeypatch):
    monkeypatch.setattr(BertModel, "__module__", "typed_in_a_session")
    monkeypatch.setattr(BertModel, "_can_set_attn_implementation", lambda: False)
    families.check_class(BertModel)


def test_use_switches_a_model():
    model = LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=8))
    assert hf.use(model) is model and model.config._attn_implementation == "clearhead"


def test_registering_twice_changes_nothing():
    before = transformers.PreTrainedModel.get_correct_attn_implementation
    hf.register()
    assert transformers.PreTrainedModel.get_correct_attn_implementation is before
    assert before.refuses
