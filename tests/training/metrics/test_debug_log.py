"""The events of a step, in `debug.jsonl`: their order and values, and that they change nothing."""

import json
import math
from pathlib import Path

import pytest
import torch

from tests.conftest import metrics
from tests.support.small_loop import SmallLoop, changed, host_reads

pytestmark = pytest.mark.usefixtures("one_thread")

# The second to the fourth repeat for each micro-batch.
ORDER = ["batch", "forward", "scale_loss", "backward", "unscale", "clip", "judge", "optimizer"]
ORDER += ["update_scale"]


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "debug.jsonl").read_text().splitlines()]


def of_step(folder: Path, step: int) -> dict[str, dict]:
    """The events of a step of one micro-batch, by name."""
    return {row["event"]: row for row in rows(folder) if row["step"] == step}


def test_in_fp16_a_step_is_nine_events_in_their_order_with_what_they_saw(tmp_path):
    small = SmallLoop(tmp_path / "r", "fp16", debug_steps=2, first_loss_scale=1024.0, clip=0.5)
    small.advance(3)
    logged = rows(tmp_path / "r")
    assert [(row["step"], row["event"]) for row in logged] == [
        (s, e) for s in (1, 2) for e in ORDER
    ]
    for step in (1, 2):
        times = [row["time_ms"] for row in logged if row["step"] == step]
        assert times == sorted(times)
        assert times[0] >= 0
    events = of_step(tmp_path / "r", 2)
    metrics_row = metrics(tmp_path / "r")[1]
    assert events["batch"]["shape"] == [4, 33]
    assert events["forward"]["loss"] == events["judge"]["loss"] == metrics_row["loss"]
    assert events["scale_loss"]["loss"] == 1024 * events["forward"]["loss"]
    assert events["unscale"]["scale"] == events["update_scale"]["scale"] == 1024
    assert events["clip"]["norm"] == events["judge"]["norm"] == metrics_row["grad_norm"]
    assert (events["clip"]["mode"], events["clip"]["limit"]) == ("norm", 0.5)
    assert events["judge"]["skip"] == [False]
    assert events["optimizer"]["lr"] == metrics_row["lr"]
    assert (events["forward"]["weights"], events["forward"]["computes_in"]) == ("float32", "fp16")
    assert events["backward"]["gradients"] == events["optimizer"]["moments"] == "float32"
    assert not any("skipped" in row for row in logged)


def test_without_a_loss_scale_its_events_say_so_and_passes_repeat_by_micro_batch(tmp_path):
    small = SmallLoop(tmp_path / "r", "delayed", debug_steps=1, accumulate=2)
    small.advance(2)
    logged = rows(tmp_path / "r")
    passes = ORDER[1:4]
    assert [row["event"] for row in logged] == [ORDER[0], *passes, *passes, *ORDER[4:]]
    places = [row["micro_batch"] for row in logged if row["event"] in passes]
    assert places == [0, 0, 0, 1, 1, 1]
    for row in logged:
        scaling = row["event"] in ("scale_loss", "unscale", "update_scale")
        assert (row.get("skipped") == "no loss scale in delayed-emulated") == scaling
    losses = [row["loss"] for row in logged if row["event"] == "forward"]
    assert logged[-3]["loss"] == pytest.approx(sum(losses) / 2)


def test_a_step_that_overflows_says_which_optimizer_skipped_it_and_that_the_scale_fell(tmp_path):
    small = SmallLoop(
        tmp_path / "r", "fp16", debug_steps=3, first_loss_scale=1024.0, optimizer="muon"
    )
    small.spoil("blocks.0.mlp.up.weight", {2}, math.inf)
    small.advance(3)
    bad = of_step(tmp_path / "r", 2)
    assert list(bad) == ORDER
    assert bad["clip"]["norm"] in ("inf", "nan")
    assert bad["judge"]["skip"] == [True, False]
    assert bad["optimizer"]["skipped"] == "Muon: the step was judged bad"
    assert (bad["unscale"]["scale"], bad["update_scale"]["scale"]) == (1024, 512)
    assert "skipped" not in of_step(tmp_path / "r", 3)["optimizer"]


def test_a_bad_loss_is_told_as_json_and_skips_the_step(tmp_path):
    small = SmallLoop(tmp_path / "r", "fp32", debug_steps=1)
    small.spoil("", {1})
    small.advance(1)
    events = of_step(tmp_path / "r", 1)
    assert events["forward"]["loss"] == events["judge"]["loss"] == "nan"
    assert events["judge"]["skip"] == [True]
    assert events["optimizer"]["skipped"] == "AdamW: the step was judged bad"


@pytest.mark.parametrize(("recipe", "accumulate"), [("fp16", 1), ("delayed", 2)])
def test_the_log_changes_no_number_of_the_run(recipe, accumulate, tmp_path):
    ends = []
    for steps in (0, 3):
        folder = tmp_path / str(steps)
        small = SmallLoop(folder, recipe, debug_steps=steps, accumulate=accumulate)
        small.advance(4)
        ends.append(small.everything())
        ends[-1]["losses"] = torch.tensor([row["loss"] for row in metrics(folder)])
    assert not (tmp_path / "0" / "debug.jsonl").exists()
    assert changed(*ends) == []


def test_after_the_steps_that_were_asked_for_nothing_is_read_or_written(tmp_path):
    small = SmallLoop(tmp_path / "r", "fp16", debug_steps=1)
    assert sum(host_reads(small.next_step()).values()) > 0
    written = len(rows(tmp_path / "r"))
    assert host_reads(small.next_step()) == {}
    assert len(rows(tmp_path / "r")) == written == len(ORDER)


def test_a_start_that_goes_on_writes_its_own_first_steps(tmp_path):
    small = SmallLoop(tmp_path / "r", "fp32", save_every=2)
    small.advance(2)
    small.resumed(debug_steps=1).advance(2)
    assert {row["step"] for row in rows(tmp_path / "r")} == {3}
