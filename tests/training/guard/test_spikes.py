"""Losses that spike are caught; clean steps are left alone; what is as good as infinite is one."""

import math

import pytest
import torch

from fp8stack.planning.run_config import GuardConfig
from fp8stack.training.guard.spikes import LARGEST, spike_limit
from tests.conftest import metrics
from tests.faults.numeric.numeric_rows import SPIKES, spiked


@pytest.mark.full
def test_all_of_twenty_tenfold_losses_are_caught_and_no_clean_step_is(tmp_path):
    outcome = spiked(tmp_path, "delayed", SPIKES, steps=160)
    assert (outcome.injected, outcome.survived, outcome.lost) == (20, 20, ())
    rows = metrics(tmp_path / "delayed-spikes")
    assert [row["event"] for row in rows if "event" in row] == ["skip"] * 20


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
