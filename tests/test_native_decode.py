"""Few query rows (csrc/decode.inl.h): right, and with the bits that they have among many."""

import math

import pytest
import torch
from test_native import ALL_RULES, DTYPES, HAVE, lacks, run_with
from torch.testing import assert_close

from clearhead import AuxRequest, attention, attention_by_definition
from clearhead.testing import Case, assert_within_budget, plain

MOST_FEW = 12  # rows that it serves where a vector has as many lanes
SPAN = 16 * 96
MANY = 41  # rows that it does not serve


@pytest.fixture(autouse=True)
def two_threads():
    torch.set_num_threads(2)


def attend(*tensors, **rules):
    return attention(*tensors, **rules, backend="native")


def draw(B=1, Hkv=2, L=MANY, S=200, D=20, Dv=12, dtype=torch.float32, G=1):
    return torch.randn(B, Hkv * G, L, D, dtype=dtype), *(
        torch.randn(B, Hkv, S, size, dtype=dtype) for size in (D, Dv)
    )


def same_bits(one, other):
    """To the bit, NaN at the same places included."""
    assert_close(one, other, rtol=0, atol=0, equal_nan=True)


# -- the definition -------------------------------------------------------------------------------

LENGTHS = [1, 2, 15, 17, 95, 96, 97, 193]


def hold(cases, dtype=torch.float32):
    """Each length by its own budget."""
    for case in cases:
        *tensors, rules = case.make(dtype)
        exact = {name: t.double() if _is_float(t) else t for name, t in rules.items()}
        gold = attention_by_definition(*(t.double() for t in tensors), **exact)
        peer = plain(*tensors, **rules)[0]
        assert_within_budget(attend(*tensors, **rules), gold, peer, name=f"S = {case.S}")


def _is_float(rule):
    return isinstance(rule, torch.Tensor) and rule.is_floating_point()


@pytest.mark.parametrize("rows", [(1, 1), (1, 2), (3, 1), (2, 2), (1, 5), (1, 7), (4, 2), (3, 3),
                                  (13, 1)])  # fmt: skip
@pytest.mark.parametrize("rules", ALL_RULES.values(), ids=ALL_RULES)
def test_every_rule(rules, rows):
    G, L = rows
    hold(Case("few", B=32, H=2 * G, Hkv=2, L=L, S=S, D=20, Dv=12, rules=rules) for S in LENGTHS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("D", "Dv"), [(1, 17), (3, 512), (5, 1), (15, 1), (16, 33), (17, 3),
                                       (31, 64), (33, 16), (64, 65), (72, 40), (128, 128),
                                       (257, 100), (512, 31)])  # fmt: skip
def test_head_sizes(D, Dv, dtype):
    rules = ALL_RULES["nothing"]
    hold([Case("sizes", B=24, H=G, Hkv=1, L=1, S=S, D=D, Dv=Dv, rules=rules)
          for G in (1, 2, 4, 7) for S in (2, 6, 35, 101)], dtype)  # fmt: skip


@pytest.mark.parametrize("S", [SPAN - 1, SPAN, SPAN + 1, 5000])
@pytest.mark.parametrize("rules", ["nothing", "key mask", "documents", "numbers"])
def test_long(rules, S):
    hold(Case("long", B=2, H=4, Hkv=1, L=1, S=n, D=16, Dv=8, rules=ALL_RULES[rules])
         for n in (2, 90, S))  # fmt: skip


HELD = """
import math

import torch
from test_native_decode import (test_every_rule, test_head_sizes, test_long,
                                test_the_same_bits_among_many_rows,
                                test_numbers_at_the_end_of_their_range_have_the_same_bits,
                                test_what_is_seen_and_not_finite_arrives_as_among_many_rows,
                                test_a_row_whose_keys_end_with_it_has_the_bits_it_has_in_a_prompt)
from test_native import ALL_RULES
from clearhead.backends import library
print(library.find_library().isa[torch.bfloat16])
torch.manual_seed(0)
for rules in ("causal", "key mask", "masks", "numbers"):
    for rows in ((1, 1), (2, 1), (3, 1), (4, 2)):
        test_every_rule(ALL_RULES[rules], rows)
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for D, Dv in ((5, 3), (33, 18), (40, 72), (128, 64)):
        test_head_sizes(D, Dv, dtype)
    test_the_same_bits_among_many_rows("causal", dtype)
    test_the_same_bits_among_many_rows("window", dtype)
    test_a_row_whose_keys_end_with_it_has_the_bits_it_has_in_a_prompt(dtype)
    test_numbers_at_the_end_of_their_range_have_the_same_bits(dtype)
    for where in ("key", "value"):
        for poison in (math.nan, math.inf):
            test_what_is_seen_and_not_finite_arrives_as_among_many_rows(where, poison, dtype)
test_long("nothing", 5000)
"""


@pytest.mark.parametrize("isa", HAVE)
def test_every_instruction_set(isa):
    if lacks(isa):
        pytest.skip("the processor lacks this instruction set")
    told = run_with(isa, HELD)
    assert (told.stdout, told.stderr) == (f"{isa}\n", "")


# -- to the bit -----------------------------------------------------------------------------------

LAST = {
    "causal": {"is_causal": True},
    "window": {"window": (1600, 0)},
    "softcap, alibi, sinks": {
        "is_causal": True,
        "softcap": 3.0,
        "alibi_slopes": torch.tensor([0.5, 0.25]),
        "sinks": torch.tensor([0.5, -0.25]),
    },
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAST)
def test_the_same_bits_among_many_rows(name, dtype):
    """Each of the last rows alone, and few of them, as at the end of a call with many."""
    rules = LAST[name]
    for S, D, Dv in ((MANY, 5, 3), (96, 16, 33), (96, 512, 31), (97, 128, 64),
                     (SPAN, 40, 72), (SPAN + 1, 64, 17),
                     (3 * SPAN + 5, 33, 16)):  # fmt: skip
        query, key, value = draw(S=S, D=D, Dv=Dv, dtype=dtype)
        many, of_many = attend(query, key, value, **rules, return_aux=AuxRequest(lse=True))
        for L in range(1, MOST_FEW + 2):
            few, of_few = attend(query[:, :, -L:], key, value, **rules,
                                 return_aux=AuxRequest(lse=True))  # fmt: skip
            same_bits(few, many[:, :, -L:])
            same_bits(of_few.lse, of_many.lse[:, :, -L:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_whose_keys_end_with_it_has_the_bits_it_has_in_a_prompt(dtype):
    """Decoding step by step, in groups of any size, by any number of threads; keys and values that
    are not finite are seen by some rows and not by others."""
    for G, S, D, Dv in ((1, 97, 5, 3), (2, 130, 33, 31), (3, 193, 64, 80), (4, SPAN + 40, 96, 65),
                        (5, 400, 17, 128), (7, 3 * SPAN + 3, 31, 16),
                        (8, 5000, 15, 33)):  # fmt: skip
        query, key, value = draw(G=G, S=S, D=D, Dv=Dv, dtype=dtype)
        for poison, at in ((math.nan, S - 4), (math.inf, S - 9), (-math.inf, S - 20)):
            key[:, 0, at, D // 2] = poison
            value[:, 1, at, Dv // 2] = poison
        many = attend(query, key, value, is_causal=True)
        for i, threads in ((MANY - 1, 3), (MANY - 5, 2), (MANY - 15, 4), (MANY - 30, 1)):
            end = S - MANY + 1 + i
            torch.set_num_threads(threads)
            alone = attend(query[:, :, i : i + 1], key[:, :, :end], value[:, :, :end])
            same_bits(alone, many[:, :, i : i + 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_at_the_end_of_their_range_have_the_same_bits(dtype):
    """Products and sums that are no normal float32 any more, and small weights: some instructions
    take these for 0."""
    for G, sharpness in ((1, 1), (2, 6), (4, 1), (5, 6)):
        query, key, value = draw(G=G, S=300, D=40, Dv=70, dtype=dtype)
        query, value = query * sharpness, value * (torch.finfo(dtype).tiny * 4)
        many = attend(query, key, value)
        assert many.any()
        for i in (0, 7):
            same_bits(attend(query[:, :, i : i + 1], key, value), many[:, :, i : i + 1])
        tiny = key * torch.finfo(dtype).tiny
        many = attend(query, tiny, value, scale=1e30)
        same_bits(attend(query[:, :, 3:4], tiny, value, scale=1e30), many[:, :, 3:4])


@pytest.mark.parametrize("G", [2, 3, 8])
def test_a_group_has_the_bits_of_its_heads(G):
    query, key, value = draw(G=G, L=1, S=2 * SPAN + 7)
    together = attend(query, key, value)
    for h in range(2 * G):
        kv = slice(h // G, h // G + 1)
        same_bits(attend(query[:, h : h + 1], key[:, kv], value[:, kv]), together[:, h : h + 1])


def test_threads_share_the_spans_of_a_row():
    query, key, value = draw(Hkv=1, L=2, S=5000)
    torch.set_num_threads(1)
    expected = attend(query, key, value, is_causal=True)
    for threads in (2, 3, 4):
        torch.set_num_threads(threads)
        for _ in range(20):
            same_bits(attend(query, key, value, is_causal=True), expected)


@pytest.mark.parametrize("S", [50, SPAN, 2 * SPAN + 1])
def test_a_row_knows_neither_the_batch_nor_its_padding(S):
    query, key, value = draw(B=3, L=1, S=S, G=2)
    together = attend(query, key, value)
    longer = [torch.cat([t, torch.full_like(t[:, :, :1], math.nan).expand(-1, -1, 300, -1)], 2)
              for t in (key, value)]  # fmt: skip
    seen = (torch.arange(S + 300) < S).expand(3, -1)
    same_bits(attend(query, *longer, key_mask=seen), together)
    for b in range(3):
        same_bits(attend(query[b], key[b], value[b]), together[b])


def test_a_cache_is_read_where_it_lies():
    """Strides, offsets and expanded axes; an odd offset puts rows at addresses no vector has."""
    for dtype in DTYPES:
        query, key, value = draw(B=2, L=1, S=130, D=19, Dv=33, dtype=dtype)
        expected = attend(query, key, value)
        cache = [torch.full((2, 150, 2, t.shape[3] + 3), math.nan, dtype=dtype)
                 for t in (key, value)]  # fmt: skip
        views = [c.transpose(1, 2)[:, :, 7:137, 1:-2] for c in cache]
        for view, t in zip(views, (key, value), strict=True):
            view.copy_(t)
        same_bits(attend(query, *views), expected)
        shared = [t[:1, :1].expand(2, 2, -1, -1) for t in (key, value)]
        same_bits(attend(query, *shared), attend(query, *(t.contiguous() for t in shared)))


# -- what may not be seen -------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("how", ["key mask", "causal", "window", "bool mask", "float mask"])
def test_blocked_keys_are_inert(how, poison):
    S = 130
    for L, dtype in ((1, torch.float32), (3, torch.float32), (3, torch.bfloat16)):
        query, key, value = draw(L=L, S=S, dtype=dtype)
        blocked = torch.zeros(S, dtype=torch.bool)
        blocked[[3, 60, 97, 99]] = True
        rows = slice(None)
        rules = {"key_mask": ~blocked[None]}
        if how == "causal":
            rules, blocked, rows = {"is_causal": True}, torch.arange(S) >= S - 1, slice(0, L - 1)
        elif how == "window":
            rules, blocked = {"window": (5, 4)}, torch.arange(S) < S - L - 5
        elif how == "bool mask":
            rules = {"attn_mask": (~blocked).expand(L, S)}
        elif how == "float mask":
            rules = {"attn_mask": torch.randn(L, S).masked_fill(blocked.expand(L, S), -math.inf)}
        spoiled = [t.masked_fill(blocked[:, None], poison) for t in (key, value)]
        clean = [t.masked_fill(blocked[:, None], 0) for t in (key, value)]
        out = attend(query, *spoiled, **rules)[:, :, rows]
        same_bits(out, attend(query, *clean, **rules)[:, :, rows])
        assert bool(out.isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["key", "value"])
def test_what_is_seen_and_not_finite_arrives_as_among_many_rows(where, poison, dtype):
    query, key, value = draw(S=MANY + 90, Dv=37, dtype=dtype)
    spoiled = key if where == "key" else value
    spoiled[:, :, -3, 7] = poison
    spoiled[:, :, 40, 9] = math.inf
    many = attend(query, key, value, is_causal=True)
    assert not bool(many[:, :, -1].isfinite().all())
    for L in (1, 3, 8, 11):
        same_bits(attend(query[:, :, -L:], key, value, is_causal=True), many[:, :, -L:])


def test_rows_that_see_nothing():
    query, key, value = draw(L=5, S=2)
    out = attend(query, key, value, is_causal=True)
    same_bits(out[:, :, :3], torch.zeros(1, 2, 3, 12))
    nothing = torch.zeros(1, 5000, dtype=torch.bool)
    query, key, value = draw(L=1, S=5000)
    same_bits(attend(query, key, value, key_mask=nothing), torch.zeros(1, 2, 1, 12))
