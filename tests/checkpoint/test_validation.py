"""Right checksums are not enough: a run goes on only from tensors that fit it.

More of what does not is in tests/faults/inputs/input_corruptions.py.
"""

from dataclasses import replace

import pytest
from torch import Tensor

from fp8stack.checkpoint import reader
from fp8stack.checkpoint.validation import can_go_on
from fp8stack.errors import UserError
from tests.faults.inputs.input_corruptions import NEWEST

UP = "blocks.0.mlp.up"


@pytest.mark.parametrize(
    ("group", "name", "change"),
    [
        ("optimizer", f"{UP}.weight.exp_avg", lambda t: t[:3]),
        ("optimizer", f"{UP}.weight.exp_avg_sq", Tensor.double),
        ("optimizer", f"{UP}.weight.step", None),
        ("model", "embedding.weight", lambda t: t[:3]),
        ("rng", "cpu", Tensor.float),
        ("fp8", f"{UP}.input.amax_history", lambda t: t[:5]),
    ],
)
def test_tensors_that_do_not_fit_are_named(group, name, change, pristine):
    saved = reader.load(pristine / "checkpoints" / NEWEST)
    can_go_on(saved)
    tensors = {key: dict(of) for key, of in saved.tensors.items()}
    tensor = tensors[group].pop(name)
    if change is not None:
        tensors[group][name] = change(tensor)
    with pytest.raises(UserError, match=name if group != "rng" else "RNG state"):
        can_go_on(replace(saved, tensors=tensors))
