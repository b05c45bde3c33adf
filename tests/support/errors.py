"""Errors, and the words that they must say."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest


def assert_refused(error: type[Exception], words: Sequence[str], call: Callable[[], Any]) -> str:
    """Fail unless the call raises `error` with all words."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    for word in words:
        assert word in message, f"{word!r} not in: {message}"
    return message
