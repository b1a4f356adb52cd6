"""Every statistic on every backend, held to the definition case by case."""

import pytest
import torch

from clearhead import attention, explain
from clearhead.backends import blocks
from clearhead.testing import CASES, PLANTED_STATISTICS, check_statistics

FULL, HALF = (torch.float32, torch.float64), (torch.bfloat16, torch.float16)
NAMES = {case.name: case for case in CASES}
BACKENDS = ("auto", "native", "sdpa", "chunked")


def claims(backend, case, dtype=torch.float32):
    query, key, value, rules = case.make(dtype)
    return explain(query, key, value, **rules, backend=backend).backend is not None


CLAIMED = [
    (name, backend) for name, case in NAMES.items() for backend in BACKENDS if claims(backend, case)
]


@pytest.mark.parametrize("reduce", [None, "head"])
@pytest.mark.parametrize(("name", "backend"), CLAIMED)
def test_every_backend(name, backend, reduce):
    check_statistics(NAMES[name], backend=backend, reduce=reduce)
