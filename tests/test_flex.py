"""FlexAttention: a few calls compiled, and all cases through its uncompiled form.

Compiling takes seconds per kind of call, and on a CPU there is neither a backward nor an lse; so
what this backend makes of a call (its mask_mod, score_mod, sinks, lse) is held to the definition
through torch's own uncompiled flex_attention. scripts/gpu_check.py runs the compiled one on a GPU.
"""

from dataclasses import replace

import pytest
import torch

from clearhead import attention, attention_by_definition, explain
from clearhead.backends import flex
from clearhead.testing import CASES, PLANTED_BUGS, assert_within_budget, check, plain

# The sizes that FlexAttention's kernels want.
WIDER = {case.name: replace(case, D=max(case.D, 16), Dv=max(case.Dv, 16)) for case in CASES}
# Bugs in gradients, which it has on a GPU only.
HIDDEN_FROM_FLEX = {
    *("key gradient off by 1 %", "query gradient off by 1 %", "value gradient off by 1 %"),
    *("no gradient to a mask", "no gradient to a bias", "no gradient to sinks"),
    *("no gradient to slopes",),
}


@pytest.fixture
def uncompiled(monkeypatch):
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(flex, "_compiled", lambda: flex_attention)
    monkeypatch.setattr(flex, "_why_not_on_cpu", lambda problem: None)
    monkeypatch.setattr(flex, "gives", lambda problem: {"lse"})


def claims(case):
    query, key, value, rules = case.make()
    return explain(query, key, value, **rules, backend="flex").backend == "flex"


def run(case, attend=attention):
    return check(case, attend, backend="flex", gradients=False)


pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]


@pytest.mark.parametrize("name", WIDER)
def test_every_case_uncompiled(name, uncompiled):
    case = WIDER[name]
    served = min(case.B, case.H, case.L, case.S) > 0
    assert claims(case) == served
    if served:
        run(case)


@pytest.mark.parametrize("bug", PLANTED_BUGS)
def test_every_planted_bug_that_flex_could_have_is_caught(bug, uncompiled):
    broken = PLANTED_BUGS[bug](attention)
    caught = False
    for case in filter(claims, WIDER.values()):
        try:
            run(case, broken)
        except AssertionError:
            caught = True
            break
    assert caught == (bug not in HIDDEN_FROM_FLEX)


# -- compiled -------------------------------------------------------------------------------------

FLEX = {
    "causal": {"is_causal": True},
    "documents, window, key mask": {
        "window": (9, 2),
        "documents": (torch.arange(20)[None] // 8, torch.arange(23)[None] // 8),
        "key_mask": torch.arange(23)[None] < torch.tensor([[23], [19]]),
    },
    "softcap, alibi, float mask": {
        "softcap": 3.0,
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625]),
        "attn_mask": torch.linspace(-1, 1, 23),
        "is_causal": True,
    },
}


@pytest.mark.parametrize("rules", FLEX.values(), ids=FLEX)
def test_compiled(rules):
    query, key = torch.randn(2, 4, 20, 32), torch.randn(2, 2, 23, 32)
    value = torch.randn(2, 2, 23, 16)
    assert explain(query, key, value, **rules, backend="flex").backend == "flex"
    out = attention(query, key, value, **rules, backend="flex")
    gold = attention_by_definition(query, key, value, **rules)
    assert_within_budget(out, gold, plain(query, key, value, **rules)[0])
