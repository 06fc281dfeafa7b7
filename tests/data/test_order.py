"""`order="epochs"`: every window once an epoch, in an order that only the seed decides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fp8stack.data import StepBatches, describe, load_corpora
from fp8stack.data.order import key, mixed, shuffled, windows_of_epoch
from tests.conftest import refusal
from tests.data.test_sources import in_memory
from tests.support.data_writers import write_llmc

SHUFFLED = [24, 87, 69, 42, 11, 13]
STARTS = [186, 642, 618, 426, 18, 434]


def batches_of(length: int, **changes: Any) -> StepBatches:
    usual = {"batch": 5, "context": 8, "seed": 7, "vocabulary": 2**31}
    return StepBatches(in_memory(range(length), "numbers"), **usual | changes, order="epochs")


def starts(batches: StepBatches, rows: int) -> list[int]:
    """The positions at which the first `rows` rows of a run begin."""
    steps = range(1, 2 + rows // batches.batch)
    return torch.cat([batches[step][:, 0] for step in steps]).tolist()[:rows]


@pytest.mark.parametrize("length", [1, 2, 5, 16, 17, 64, 1000, 4097])
def test_a_shuffle_holds_every_number_once_and_is_read_at_any_place_alone(length):
    places = np.arange(length)
    for word in range(3):
        values = shuffled(places, length, word)
        assert sorted(values.tolist()) == places.tolist()
        for place in {0, length // 2, length - 1}:
            assert shuffled(np.array([place]), length, word).tolist() == [values[place]]


def test_the_orders_never_change_between_releases():
    assert mixed(np.array([0, 1], dtype=np.uint64)).tolist() == [
        0xE220A8397B1DCDAF,  # the first output of splitmix64 that is seeded with 0
        0x910A2DEC89025CC1,  # and with 1
    ]
    assert shuffled(np.arange(6), 100, key(3, 4)).tolist() == SHUFFLED
    assert starts(batches_of(1003), 6) == STARTS


def test_neighbours_do_not_stay_neighbours_and_another_key_gives_another_order():
    """Chi-square of the distance between the numbers at neighbouring places of a long shuffle."""
    length = 2**16
    values = shuffled(np.arange(length), length, key(1))
    assert (shuffled(np.arange(length), length, key(2)) == values).sum() < 8  # 1 is expected
    distance = np.diff(values) % length
    counts = np.bincount(distance // (length // 64), minlength=64)
    expected = (length - 1) / 64
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert 30 < chi_square < 109
    assert (values == np.arange(length)).sum() < 8


@pytest.mark.parametrize("length", [9, 16, 17, 1003])
def test_an_epoch_reads_every_window_once_and_none_overlap(length):
    batches = batches_of(length)
    windows = windows_of_epoch(length, 8)
    run_starts = starts(batches, 3 * windows)
    for epoch in range(3):
        epoch_starts = sorted(run_starts[epoch * windows : (epoch + 1) * windows])
        assert epoch_starts == [epoch_starts[0] + 8 * number for number in range(windows)]
        assert 0 <= epoch_starts[0] <= epoch_starts[-1] < length - 8


def test_the_tokens_left_over_at_the_end_have_their_turn():
    length = 8 * 20 + 1 + 7  # 7 tokens more than the windows and the last label need
    batches = batches_of(length, batch=20)
    assert {int(batches[1 + epoch][:, 0].min()) for epoch in range(60)} == set(range(8))


def test_rows_of_a_run_do_not_depend_on_how_they_are_cut_into_steps():
    assert starts(batches_of(1003, batch=5), 300) == starts(batches_of(1003, batch=7), 300)
    assert starts(batches_of(9), 12) == [0] * 12  # the only window is read again and again
    batch = batches_of(1003)[0]  # step 0 reads windows too
    assert batch.shape == (5, 9)
    assert (batch - batch[:, :1] == torch.arange(9)).all()


def test_sources_of_one_length_are_read_in_different_orders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        write_llmc(tmp_path / f"{name}.bin", range(2000))
    corpus = load_corpora("1:a.bin,1:b.bin", 2000)[0]
    batches = StepBatches(corpus, batch=64, context=8, seed=1, vocabulary=2000, order="epochs")
    sources: dict[bool, list[int]] = {False: [], True: []}
    for step in range(1, 4):
        for start in batches._starts(step).tolist():
            sources[start >= 1800].append(start % 1800)
    length = min(map(len, sources.values()))
    assert length > 70
    assert sources[False][:length] != sources[True][:length]
    for source_starts in sources.values():
        assert len(set(source_starts)) == len(source_starts)


def test_an_unknown_order_is_refused():
    usual = {"batch": 1, "context": 8, "seed": 0, "vocabulary": 99}
    message = refusal(StepBatches, in_memory(range(99)), **usual, order="epoch")
    assert "Did you mean 'epochs'" in message


def test_describe_gives_the_windows_and_epochs_of_a_run():
    corpus = in_memory(range(1601), "numbers")
    sentences = describe(corpus, batch=5, context=8, steps=100, order="epochs")
    assert sentences == (
        "numbers: 1,601 tokens, 200 windows of 8 an epoch, 2.50 epochs in 100 steps",
    )
    sentences = describe(corpus, batch=5, context=8, steps=100)
    assert sentences == (
        "numbers: 1,601 tokens, windows of 8 at random places, 2.50 times its tokens in 100 steps",
    )
