"""The results of this GPU: the checks of `fp8stack conform`."""

from __future__ import annotations

import pytest

from fp8stack.analysis.conform import suite
from fp8stack.analysis.conform.checks import Check
from tests.gpu.machine import CONTEXT, require

pytestmark = pytest.mark.gpu

CHECKS = [pytest.param(check, id=f"{group}: {check}") for group, check in suite.checks(CONTEXT)]


@pytest.mark.parametrize("check", CHECKS)
def test_this_gpu_computes_what_the_formats_say(check: Check) -> None:
    require(check)
