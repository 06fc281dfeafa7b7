"""Losses that spike are caught; clean steps are left alone; what is as good as infinite is one."""

import math
from unittest.mock import Mock

import pytest
import torch

from fp8stack.planning.run_config import GuardConfig
from fp8stack.training.guard.spikes import LARGEST, spike_limit
from tests.conftest import metrics
from tests.faults.case import Outcome
from tests.faults.numeric import numeric_rows
from tests.faults.numeric.numeric_rows import SPIKES, clean, falsely_skipped, spiked, spikes
from tests.support.cases import case

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "recipe", [case(name, quick=name == "delayed") for name in ("fp32", "delayed", "current")]
)
@pytest.mark.full
def test_all_of_twenty_tenfold_losses_are_caught_and_no_clean_step_is(recipe, tmp_path):
    outcome = spiked(tmp_path, recipe, SPIKES, steps=160)
    assert (outcome.injected, outcome.survived, outcome.lost) == (20, 20, ())
    rows = metrics(tmp_path / f"{recipe}-spikes")
    assert [row["event"] for row in rows if "event" in row] == ["skip"] * 20


@pytest.mark.full
def test_of_clean_steps_in_fp16_none_is_skipped(tmp_path):
    assert falsely_skipped(tmp_path, "fp16", 80) == 0


def test_a_guard_that_lets_spikes_pass_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(numeric_rows, "loss_spikes", lambda run: None)
    monkeypatch.setattr(numeric_rows, "spiked_steps", lambda steps: [7, 8])
    outcome = spiked(tmp_path, "fp32", 2, steps=10)
    assert (outcome.injected, outcome.survived) == (2, 0)
    assert outcome.lost[0] == "fp32: the spike of step 7 was taken"


def test_clean_steps_that_are_skipped_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(numeric_rows, "falsely_skipped", lambda *_: 3)
    assert clean(tmp_path, "fp32", 1000).lost == (
        "fp32: 3 of 1,000 clean steps were skipped (0.3 %)",
    )
    monkeypatch.setattr(numeric_rows, "falsely_skipped", lambda *_: 1)
    assert clean(tmp_path, "fp32", 1000).lost == ()


def test_spikes_are_spread_over_the_recipes(tmp_path, monkeypatch):
    skipped = Mock(return_value=0)
    monkeypatch.setattr(numeric_rows, "falsely_skipped", skipped)
    monkeypatch.setattr(numeric_rows, "spiked", lambda _, r, n: Outcome(injected=n, survived=n))
    assert spikes(tmp_path, 20).injected == 20
    arguments = [call.args[1:] for call in skipped.call_args_list]
    assert arguments == [(recipe, 2500) for recipe in ("fp32", "delayed", "current", "fp16")]


def test_what_float32_cannot_square_counts_as_infinite():
    largest = torch.tensor(LARGEST)
    assert (largest * largest).isinf()
    below = torch.nextafter(largest, torch.tensor(0.0))
    assert (below * below).isfinite()


def test_a_tenfold_loss_is_a_spike_while_losses_fall_fast():
    steps = torch.arange(128, dtype=torch.float64)[:, None]
    falling = 0.6 + 4.9 * torch.exp(-steps / 40)
    limit = spike_limit(falling, GuardConfig(), 1.5).item()
    assert limit == pytest.approx(1.5 * falling[-32].item())
    assert falling[-1] < limit < 10 * falling[-1]


def test_a_window_without_values_has_no_limit():
    for rows in (0, 8):
        window = torch.full((rows, 2), math.nan)
        limit = spike_limit(window, GuardConfig(warmup=8, window=8), 1.5)
        assert limit.tolist() == [math.inf, math.inf]
