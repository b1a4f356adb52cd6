"""deterministic=True: a row has the same bits however its prompt was cut into calls."""

import pytest
import torch

from clearhead import AuxRequest, attention, attention_by_definition, explain
from clearhead.testing import assert_within_budget, plain

H = 4
LSE = AuxRequest(lse=True)
RULES = {
    "causal": {},
    "window": {"window": (70, 0)},
    "narrow window": {"window": (5, 0)},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 0.0, 2.0])},
    "window, softcap, alibi, sinks": {
        "window": (100, 0),
        "softcap": 3.0,
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625]),
        "sinks": torch.tensor([0.5, -1.0, 0.0, 2.0]),
    },
}
# On, below and above the edges of tiles: 64 rows, 128 keys.
CUTTINGS = {
    "two": (100, 33),
    "at the edges": (64, 64, 5),
    "around the edges": (63, 2, 62, 2, 4),
    "long and then single": (125, 1, 1, 1, 1, 1, 1, 1, 1),
    "single and then long": (1, 1, 1, 130),
    "sevens": (7,) * 19,
}
LENGTH = 133


@pytest.fixture(autouse=True)
def one_thread():
    """Two threads wait for each other longer than such small calls take."""
    torch.set_num_threads(1)


def draw(S, D=8, Dv=8, Hkv=2, B=2, dtype=torch.float32):
    shapes = (B, H, S, D), (B, Hkv, S, D), (B, Hkv, S, Dv)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def in_pieces(pieces, query, key, value, **rules):
    """A prompt fed piece by piece, each seeing the keys up to its own end: out and lse."""
    outs, lses, end = [], [], 0
    for piece in pieces:
        start, end = end, end + piece
        out, aux = attention(
            query[:, :, start:end], key[:, :, :end], value[:, :, :end], is_causal=True,
            deterministic=True, return_aux=LSE, **rules,
        )  # fmt: skip
        outs.append(out)
        lses.append(aux.lse)
    assert end == query.shape[2]
    return torch.cat(outs, 2), torch.cat(lses, 2)


def in_dtype(rules, dtype):
    return {k: t.to(dtype) if isinstance(t, torch.Tensor) else t for k, t in rules.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_at_once_in_pieces_and_token_by_token(name, dtype):
    rules = in_dtype(RULES[name], dtype)
    tensors = draw(LENGTH, dtype=dtype)
    out, lse = in_pieces((LENGTH,), *tensors, **rules)
    for pieces in (*CUTTINGS.values(), (1,) * LENGTH):
        again, other = in_pieces(pieces, *tensors, **rules)
        assert torch.equal(again, out) and torch.equal(other, lse)


@pytest.mark.parametrize("name", RULES)
def test_it_is_also_right(name):
    """Equal bits of wrong numbers would be worth nothing."""
    rules = {**RULES[name], "is_causal": True}
    tensors = draw(LENGTH, B=1)
    out = attention(*tensors, **rules, deterministic=True)
    assert_within_budget(
        out, attention_by_definition(*tensors, **rules), plain(*tensors, **rules)[0]
    )


@pytest.mark.parametrize("Hkv", [1, 2, 4])
@pytest.mark.parametrize(("D", "Dv"), [(1, 1), (5, 3), (7, 13), (64, 64), (257, 16)])
def test_head_sizes_and_groups(D, Dv, Hkv):
    """Odd sizes put rows at addresses that no vector load is aligned to."""
    tensors = draw(LENGTH, D, Dv, Hkv, B=3)
    out, lse = in_pieces((LENGTH,), *tensors)
    for pieces in ((100, 33), (63, 2, 62, 2, 4), (130, 1, 1, 1)):
        again, other = in_pieces(pieces, *tensors)
        assert torch.equal(again, out) and torch.equal(other, lse)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("S", [63, 64, 65, 127, 128, 129, 191, 192, 193, 257])
def test_lengths_at_the_edges_of_tiles(S, threads):
    torch.set_num_threads(threads)
    tensors = draw(S, D=5, Dv=5, B=1)
    out, lse = in_pieces((S,), *tensors)
    for pieces in ((S - 1, 1), (1, S - 1), (S // 2, S - S // 2), (62, 1, S - 63)):
        kept = [piece for piece in pieces if piece]
        again, other = in_pieces(kept, *tensors)
        assert torch.equal(again, out) and torch.equal(other, lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_first_rows_do_not_change_when_a_prompt_grows(dtype):
    tensors = draw(LENGTH, dtype=dtype)
    out = attention(*tensors, is_causal=True, deterministic=True)
    for length in (1, 17, 64, 65, 128, 132):
        shorter = attention(
            *(t[:, :, :length] for t in tensors), is_causal=True, deterministic=True
        )
        assert torch.equal(shorter, out[:, :, :length])


def test_what_else_is_in_the_batch_does_not_matter():
    """One item, or one head group, alone gets the bits it gets in company."""
    tensors = draw(LENGTH, D=5, Dv=3, B=5)
    out = attention(*tensors, is_causal=True, deterministic=True)
    for n in range(5):
        alone = attention(*(t[n : n + 1] for t in tensors), is_causal=True, deterministic=True)
        assert torch.equal(alone[0], out[n])


@pytest.mark.parametrize("threads", [1, 2])
def test_repeated_runs_and_threads(threads):
    tensors = [t.requires_grad_() for t in draw(LENGTH, B=3)]

    def run():
        out = attention(*tensors, is_causal=True, deterministic=True)
        return [out, *torch.autograd.grad(out.square().sum(), tensors)]

    expected = run()
    torch.set_num_threads(threads)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(run(), expected, strict=True))


def test_a_cache_is_read_where_it_lies():
    """Keys in a longer buffer, or in another layout, give the bits of a copy."""
    query, key, value = draw(LENGTH, D=5, Dv=5)
    expected, lse = in_pieces((LENGTH,), query, key, value)
    buffers = [torch.full((2, 2, 200, 5), 7.0) for _ in range(2)]
    for buffer, t in zip(buffers, (key, value), strict=True):
        buffer[:, :, :LENGTH] = t
    in_cache = [buffer[:, :, :LENGTH] for buffer in buffers]
    by_token = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key, value)]
    for layout in ((query, *in_cache), by_token):
        for pieces in ((LENGTH,), (100, 33), (64, 64, 5)):
            out, other = in_pieces(pieces, *layout)
            assert torch.equal(out, expected) and torch.equal(other, lse)


def test_without_it_the_bits_may_differ():
    """What is promised above is not what every backend gives: this is why one has to ask. The
    native kernels keep it in any case."""
    query, key, value = draw(LENGTH, D=64, Dv=64)

    def both(backend):
        at_once = attention(query, key, value, is_causal=True, backend=backend)
        steps = [attention(query[:, :, i : i + 1], key[:, :, : i + 1], value[:, :, : i + 1],
                           backend=backend)
                 for i in range(LENGTH)]  # fmt: skip
        return torch.cat(steps, 2), at_once

    assert not torch.equal(*both("sdpa"))
    assert torch.equal(*both("native"))


def test_documents_and_padding_keep_their_bits_too():
    """Rows of a document, and rows with padding before them, in pieces."""
    query, key, value = draw(LENGTH, B=1)
    documents = torch.arange(LENGTH)[None] // 50
    key_mask = torch.rand(1, LENGTH) < 0.8
    full = attention(query, key, value, is_causal=True, deterministic=True, documents=documents,
                     key_mask=key_mask)  # fmt: skip
    end = 0
    for piece in (40, 20, 64, 9):
        start, end = end, end + piece
        out = attention(
            query[:, :, start:end], key[:, :, :end], value[:, :, :end], is_causal=True,
            documents=(documents[:, start:end], documents[:, :end]), key_mask=key_mask[:, :end],
            deterministic=True,
        )  # fmt: skip
        assert torch.equal(out, full[:, :, start:end])


@pytest.mark.parametrize(("backend", "sentence"), [
    ("sdpa", "torch's kernels do not promise one answer for every way a prompt is cut"),
    ("flex", "FlexAttention does not promise one answer for every way a prompt is cut"),
])  # fmt: skip
def test_backends_that_cannot_promise_it_say_so(backend, sentence):
    query, key, value = draw(5, D=16, Dv=16)
    told = explain(query, key, value, deterministic=True)
    assert told.backend == "native" and told.reasons[backend] == sentence
    with pytest.raises(NotImplementedError) as raised:
        attention(query, key, value, deterministic=True, backend=backend)
    assert str(raised.value) == (
        f'attention(backend="{backend}"): {sentence}; backend="auto" runs this call with native'
    )
