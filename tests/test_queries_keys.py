"""Queries and keys in 8 bits: the weights that a page computes from them."""

import math

import pytest
import torch

from clearhead.inspection.queries_keys import FAITHFUL, pack, unpack


def weights_of(query, key, scale=None, causal=True):
    key = key.repeat_interleave(len(query) // len(key), 0)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = scale * (query.double() @ key.double().transpose(1, 2))
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
    return scores.softmax(-1).float()


def unpacked(query, key, scale=None, causal=True):
    weights = weights_of(query, key, scale, causal)
    queries, keys = pack(query, key, scale, weights)
    L = query.shape[1]
    return weights, torch.stack(
        [unpack(q, k, L, causal) for q, k in zip(queries, keys, strict=True)]
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("H", "Hkv", "L", "D"), [(4, 2, 37, 16), (3, 3, 1, 5), (6, 1, 11, 1)])
def test_weights_come_back(H, Hkv, L, D, causal):
    query, key = 2 * torch.randn(H, L, D), 2 * torch.randn(Hkv, L, D)
    weights, again = unpacked(query, key, causal=causal)
    apart = (again - weights).abs().sum(-1) / 2
    assert float(apart.mean()) < 0.02
    torch.testing.assert_close(again.sum(-1), torch.ones(H, L))


def test_keys_far_from_zero_and_uneven_channels_cost_little():
    # As in real models: keys share a large mean, and one channel is much larger than the rest.
    query, key = torch.randn(2, 50, 16), torch.randn(2, 50, 16)
    weights, again = unpacked(query, key)
    plain = (again - weights).abs().mean()
    key[..., 3] *= 30
    query[..., 3] /= 30
    key += 20 * torch.randn(2, 1, 16)
    weights, again = unpacked(query, key)
    assert float((again - weights).abs().mean()) < 2 * float(plain)


def test_the_scale_is_that_of_the_model():
    query, key = torch.randn(2, 23, 8), torch.randn(1, 23, 8)
    weights, again = unpacked(query, key, scale=1.25)
    assert float((again - weights).abs().sum(-1).mean() / 2) < 0.02
    assert not torch.allclose(weights, weights_of(query, key), atol=0.05)


def test_shared_keys_share_their_bytes():
    query, key = torch.randn(6, 7, 4), torch.randn(2, 7, 4)
    queries, keys = pack(query, key, None, weights_of(query, key))
    assert len(queries) == len(keys) == 6
    assert keys[0] is keys[2] and keys[3] is keys[5] and keys[0] != keys[3]
    assert {len(part) for part in (*queries, *keys)} == {7 * 4 + 7 * 4}


def test_a_layer_that_does_more_than_softmax_is_refused():
    query, key = torch.randn(2, 31, 8), torch.randn(2, 31, 8)
    weights = weights_of(query, key)
    window = torch.ones(31, 31).tril().triu(-3).bool()
    with pytest.raises(ValueError, match='full="maps" is right') as error:
        pack(query, key, None, weights * window / (weights * window).sum(-1, keepdim=True))
    apart = float(str(error.value).split(" off on average")[0].rsplit(" ", 1)[1])
    assert apart > FAITHFUL
