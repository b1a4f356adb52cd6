"""The list that trace returns, and the page that it makes of itself."""

import json
import re

import pytest
import torch

from clearhead import MultiHeadAttention, MultiHeadAttentionWrapper
from clearhead.inspection.call_steps import heads_at_work
from clearhead.inspection.steps import Steps
from clearhead.inspection.trace import trace, worked_example


def facts_of(text):
    return json.loads(re.search(r'id="facts">(.*?)</script>', text, re.DOTALL)[1])


def test_a_page_of_steps_opens_there_and_shows_the_weights_too():
    steps = worked_example(["the", "dog", "fetched", "the", "ball"])
    facts = facts_of(steps.to_html())
    assert facts["start"] == "steps" and facts["about"] == "15 steps, 5 words, 2 heads"
    assert [step["name"] for step in facts["steps"][0]["steps"]] == [step.name for step in steps]
    assert facts["attention"]["tokens"] == ["the", " dog", " fetched", " the", " ball"]
    assert facts["attention"]["heads"] == [2]


@pytest.mark.parametrize("out_proj", [True, False])
def test_parameters_are_what_the_code_multiplies_by(out_proj):
    wrapper = MultiHeadAttentionWrapper(5, 3, 2, out_proj=out_proj)
    x = torch.randn(4, 5)
    steps = trace(wrapper, x)
    values = {step.name: step.values for step in steps}
    assert ("out_proj" in steps.parameters) == out_proj
    for name, learned in (("q", "W_query"), ("k", "W_key"), ("v", "W_value")):
        torch.testing.assert_close(x @ steps.parameters[learned], values[name])
    if out_proj:
        torch.testing.assert_close(
            values["recombined"] @ steps.parameters["out_proj"], values["output"]
        )


def test_parameters_of_the_efficient_module():
    module = MultiHeadAttention(7, 3, 2)
    x = torch.randn(4, 7)
    steps = trace(module, x)
    assert {name: tuple(p.shape) for name, p in steps.parameters.items()} == {
        "W_query": (7, 6), "W_key": (7, 6), "W_value": (7, 6), "out_proj": (6, 6),
    }  # fmt: skip
    torch.testing.assert_close(x @ steps.parameters["W_key"], steps[2].values)
    assert not steps.parameters["W_key"].requires_grad


def test_steps_write_themselves_and_stand_in_a_notebook(tmp_path):
    steps = worked_example(["a", "b"])
    told = steps.write(tmp_path / "steps.html")
    assert re.fullmatch(r".*steps\.html: \d+ kB", told)
    assert (tmp_path / "steps.html").read_text(encoding="utf-8") == steps.to_html()
    assert steps._repr_html_().startswith("<iframe srcdoc=")


def test_steps_are_a_list():
    steps = worked_example(["a"])
    assert isinstance(steps, Steps) and isinstance(steps, list) and len(steps) == 15
    *path, plain, difference = steps
    assert plain.name == "wrapper_output" and len(path) == 13


def test_heads_at_work_compute_attention_from_queries_keys_and_values():
    q, k, v = torch.randn(3, 2, 5, 4)
    steps = {step.name: step.values for step in heads_at_work(q, k, v, "abcde")}
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(steps["context"], expected)
    assert torch.equal(steps["q"], q) and torch.equal(steps["k"], k)
