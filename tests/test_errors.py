"""Each error of a call: its kind and its whole text."""

import pytest

from clearhead.testing import ERRORS


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.name)
def test_error(error):
    with pytest.raises(error.kind) as raised:
        error.call()
    assert type(raised.value) is error.kind
    assert str(raised.value) == error.text
