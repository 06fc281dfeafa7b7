"""Right checksums are not enough: a run goes on only from tensors that fit it."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fp8stack.checkpoint import reader
from fp8stack.checkpoint.reader import Checkpoint
from fp8stack.checkpoint.validation import can_go_on
from fp8stack.errors import UserError
from tests.faults.inputs.input_corruptions import NEWEST, make_run

UP = "blocks.0.mlp.up"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Of a run in delayed scaling."""
    run = make_run(tmp_path_factory.mktemp("made"))
    return reader.load(run / "checkpoints" / NEWEST)


@pytest.mark.parametrize(
    ("group", "name", "change"),
    [
        ("optimizer", f"{UP}.weight.exp_avg", lambda t: t[:3]),
        ("optimizer", f"{UP}.weight.exp_avg_sq", Tensor.double),
        ("optimizer", f"{UP}.weight.step", None),
        ("model", "embedding.weight", lambda t: t[:3]),
        ("model", f"{UP}.weight", lambda t: t * torch.nan),
        ("model", f"{UP}.weight", None),
        ("rng", "cpu", lambda t: t[:9]),
        ("rng", "cpu", Tensor.float),
        ("fp8", f"{UP}.input.scale", None),
        ("fp8", f"{UP}.input.amax_history", lambda t: t[:5]),
    ],
)
def test_tensors_that_do_not_fit_are_named(group, name, change, saved):
    can_go_on(saved)
    tensors = {key: dict(of) for key, of in saved.tensors.items()}
    tensor = tensors[group].pop(name)
    if change is not None:
        tensors[group][name] = change(tensor)
    with pytest.raises(UserError, match=name if group != "rng" else "RNG state"):
        can_go_on(replace(saved, tensors=tensors))
