"""The stand-in for Transformer Engine, for one test or for all of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.te.te_stand_in import StandIn, installed


@pytest.fixture
def te() -> Iterator[StandIn]:
    """Transformer Engine can be imported, and remembers what it was asked for."""
    with installed() as stand_in:
        yield stand_in


@pytest.fixture(scope="module")
def te_throughout() -> Iterator[None]:
    """Transformer Engine can be imported in all tests of a module."""
    with installed():
        yield
