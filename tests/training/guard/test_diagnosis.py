"""A bad step is repeated to name the operand in which it goes wrong first."""

import pytest
import torch

from fp8stack.training.guard.diagnosis import diagnose
from tests.support.small_loop import MIXTURE, SmallLoop, changed

UP, DOWN = "blocks.0.mlp.experts.up", "blocks.0.mlp.experts.down"


@pytest.mark.parametrize(
    ("recipe", "where", "factor", "expected"),
    [
        ("delayed", UP, torch.nan, f"{UP}.2, output is not finite"),
        ("delayed", f"{UP}.weight", torch.inf, f"{UP}.2, weight gradient is not finite"),
        ("mxfp8", DOWN, 1e3, f"{DOWN}.2, output is "),
    ],
)
def test_the_expert_that_goes_wrong_first_is_named(recipe, where, factor, expected, tmp_path):
    small = SmallLoop(tmp_path / "r", recipe, **MIXTURE)
    small.spoil(where, {4}, factor, group=2)
    small.advance(3)
    before = small.everything()
    diagnosis = diagnose(small.run, 4, 3)
    assert diagnosis is not None
    assert str(diagnosis).startswith(expected)
    assert (diagnosis.layer, diagnosis.group) == (where.removesuffix(".weight"), 2)
    assert not changed(before, small.everything())
