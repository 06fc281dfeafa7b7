"""The results of this GPU: the rows of `fp8stack conform`."""

from __future__ import annotations

import pytest

from fp8stack.analysis.conform import suite
from fp8stack.analysis.conform.checks import Row
from tests.gpu.machine import CONTEXT

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("row", suite.rows(CONTEXT), ids=str)
def test_this_gpu_computes_what_the_formats_say(row: Row) -> None:
    result = row.run()
    if result["verdict"] == "skipped":
        pytest.skip(result["why"])
    assert result["verdict"] == "pass", result
