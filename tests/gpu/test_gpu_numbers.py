"""Bytes, scales, histories and layers on this GPU: the same cases as `python -m bench gpu`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.gpu import casts, histories, layers
from bench.gpu.cases import Case
from tests.gpu.machine import CONTEXT, require

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", casts.cases(CONTEXT), ids=str)
def test_casts_scales_and_blocks_are_the_cpus_to_the_bit(case: Case) -> None:
    require(case)


@pytest.mark.parametrize("case", histories.cases(CONTEXT), ids=str)
def test_histories_are_the_same_whoever_keeps_them(case: Case) -> None:
    require(case)


@pytest.mark.parametrize("case", layers.cases(replace(CONTEXT, quick=True)), ids=str)
def test_a_layers_output_and_gradients_are_near_float64s(case: Case) -> None:
    require(case)
