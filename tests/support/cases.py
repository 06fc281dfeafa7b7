"""Cases of a parametrized test, of which the default run takes some."""

from __future__ import annotations

from typing import Any

import pytest


def case(*values: Any, quick: bool) -> Any:
    """The values of a case; one that is not `quick` runs with `-m slow`."""
    return pytest.param(*values, marks=[] if quick else pytest.mark.slow)
