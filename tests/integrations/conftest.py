"""The threads of these tests."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _one_thread(one_thread: None) -> None:
    """Tiny GEMMs run on one thread."""
