"""The rows of the matrix in a quick form, and in the short one where they are slow."""

import signal

import pytest
from safetensors.torch import load_file

from tests.faults import kill_rows, rank_rows
from tests.faults.case import Case
from tests.faults.numeric import numeric_rows
from tests.faults.processes import checkpoints
from tests.faults.twins import Twin

pytestmark = pytest.mark.full

CASES: dict[str, Case] = kill_rows.CASES | rank_rows.CASES | numeric_rows.CASES
QUICK = {"R1": 3, "R2": 3, "R3": 4, "R4": 3, "R10": 5, "R12": 1, "R13": 2}
SLOW = {row: CASES[row].short for row in (*QUICK, "R14")} | {
    r: CASES[r].long for r in ("R12", "R13")
}


@pytest.mark.parametrize(
    ("row", "count"),
    [*QUICK.items(), *(pytest.param(*of, marks=pytest.mark.slow) for of in SLOW.items())],
)
def test_faults_of_every_kind_are_survived(row, count, tmp_path):
    outcome = CASES[row].run(tmp_path, count)
    assert outcome.lost == ()
    assert outcome.injected == outcome.survived >= count


def test_a_mixture_that_is_killed_goes_on_to_the_bit(tmp_path):
    """Scales of each expert, biases of the routers and the counts that they follow included."""
    flags = ["--model", "gpt-nano-moe", "--accumulate", "2"]
    for key in ("count=4", "width=32", "bias=0.01"):
        flags += ["--set", f"model.experts.{key}"]
    mixture = Twin(tmp_path / "mixture", "delayed", 6, 2, flags)
    run = mixture.new()
    assert mixture.go(run, "kill@backward:5").code == -signal.SIGKILL
    assert checkpoints(run)
    assert mixture.finish(run)[1] == ""
    tensors = load_file(checkpoints(run)[-1] / "model.safetensors")
    assert tensors["blocks.0.mlp.balance_bias"].any()
