"""The rows of the matrix in a quick form, and in the short one where they are slow; and what is
behind them: twins, their differences, leaks."""

import signal
import time

import pytest
from safetensors.torch import load_file

from tests.faults import kill_rows, rank_rows
from tests.faults.case import Case
from tests.faults.kill_rows import MEMORY_MIB, Sample, growth, kills
from tests.faults.numeric import numeric_rows
from tests.faults.processes import checkpoint_difference, checkpoints, difference, rows, run_ranks
from tests.faults.twins import Twin

CASES: dict[str, Case] = kill_rows.CASES | rank_rows.CASES | numeric_rows.CASES
QUICK = {"R1": 3, "R2": 3, "R3": 4, "R4": 3, "R10": 5, "R12": 1, "R13": 2}
SLOW = {row: CASES[row].short for row in (*QUICK, "R14")} | {
    r: CASES[r].long for r in ("R12", "R13")
}


@pytest.mark.parametrize(
    ("row", "count"),
    [*QUICK.items(), *(pytest.param(*of, marks=pytest.mark.slow) for of in SLOW.items())],
)
@pytest.mark.full
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


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    """A run of 6 steps that nothing disturbs, with checkpoints of steps 3 and 6."""
    return Twin(tmp_path_factory.mktemp("twin") / "fp32", "fp32", 6, 3)


def test_a_kill_that_never_happens_is_not_counted_as_survived(tmp_path, twin, monkeypatch):
    monkeypatch.setattr(Twin, "go_all", lambda self, run, faults="": twin.ended)
    with pytest.raises(RuntimeError, match="not killed as they should be"):
        kills(tmp_path, 1, ["fp32"])


def test_places_are_reached_in_the_order_of_training(twin):
    faults = "note@step:2,note@forward:2,note@backward:2,note@step:3,note@forward:9"
    ended = twin.go(twin.new(), faults)
    assert ended.code == 0
    places = [line.split(":")[1].strip() for line in ended.stderr.splitlines() if "fault" in line]
    assert places == ["step 2", "forward 2", "backward 2", "step 3"]


def test_all_file_operations_of_a_save_are_found(twin):
    second = [operation.description for operation in twin.operations() if operation.step == 6]
    kinds = {operation.split()[0] for operation in second}
    assert {"os.mkdir", "open", "os.fsync", "os.rename"} <= kinds
    for file in ("model.safetensors", "checkpoint.json"):
        assert any(
            operation.startswith("os.fsync") and operation.endswith(file) for operation in second
        )


def test_two_runs_that_differ_in_one_thing_are_told_apart(twin):
    same, different = twin.new(), twin.new()
    assert twin.go(same).code == 0
    assert difference(same, twin.path) == ""
    words = [*twin.words, "--seed", "1", "--out", different.name]
    assert [rank.code for rank in run_ranks(words, twin.folder, twin.ranks)] == [0] * twin.ranks
    assert "tensors" in difference(different, twin.path)
    assert "tensors" in checkpoint_difference(*(checkpoints(run)[-1] for run in (different, same)))
    metrics = same / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:-1]))
    assert "rows of metrics, not" in difference(same, twin.path)
    metrics.write_text("".join(lines).replace('"loss": ', '"loss": 1'))
    assert "row 1 of the metrics" in difference(same, twin.path)
    assert difference(same.with_name("none"), twin.path) == "the newest checkpoint is missing"


def test_a_run_that_does_not_end_is_killed(twin):
    (child,) = twin.start(twin.new(), "stop@step:2").children
    while not child.is_stopped:
        time.sleep(0.01)
    with pytest.raises(TimeoutError, match="did not end in 0 s"):
        child.wait(0.1)
    assert not child.is_alive


def test_a_killed_run_has_the_rows_of_its_steps(twin):
    run = twin.new()
    assert twin.go(run, "kill@step:4").code == -signal.SIGKILL
    assert [row["step"] for row in rows(run)] == [1, 2, 3]


def _samples(memory_mib: list[float], open_files: list[int]) -> list[Sample]:
    return [Sample(*pair) for pair in zip(memory_mib, open_files, strict=True)]


def test_memory_or_files_that_grow_are_seen():
    flat = [100.0] * 50
    assert growth(_samples(flat, [9] * 50)) == ""
    # Growth before the middle is the start of the run; what varies a little is no growth.
    assert growth(_samples([*range(20), *flat[:30]], [*[3] * 20, *[9] * 30])) == ""
    assert growth(_samples([100 + MEMORY_MIB * (n % 2) for n in range(50)], [9] * 50)) == ""
    leak = [100 + 3 * MEMORY_MIB * n / 50 for n in range(50)]
    assert "grew by" in growth(_samples(leak, [9] * 50))
    assert "files open, 9 before" in growth(_samples(flat, [*[9, 10] * 18, *[10] * 14]))
    assert "too short" in growth(_samples(flat[:3], [9] * 3))
