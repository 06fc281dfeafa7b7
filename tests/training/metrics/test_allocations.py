"""The allocations of a step, as `--profile` shows them."""

import re
import sys

import pytest
import torch

from fp8stack.training.metrics import profiler
from fp8stack.training.metrics.allocations import (
    Allocations,
    heap_bytes,
    on_cpu,
    on_gpu,
    words,
)
from tests.support.small_loop import SmallLoop

MIB = 2**20
CPU = torch.device("cpu")


def test_a_gpus_figures_are_those_of_the_step_alone():
    before = {
        "allocation.all.allocated": 1000, "allocated_bytes.all.allocated": 500 * MIB,
        "allocated_bytes.all.current": 100 * MIB, "segment.all.allocated": 7,
        "num_alloc_retries": 1,
    }  # fmt: skip
    after = {
        "allocation.all.allocated": 1250, "allocated_bytes.all.allocated": 620 * MIB,
        "allocated_bytes.all.current": 100 * MIB, "allocated_bytes.all.peak": 140 * MIB,
        "reserved_bytes.all.current": 200 * MIB, "inactive_split_bytes.all.current": 15 * MIB,
        "segment.all.allocated": 9, "num_alloc_retries": 3,
    }  # fmt: skip
    allocations = on_gpu(before, after)
    assert allocations == Allocations(
        count=250, bytes=120 * MIB, peak_bytes=40 * MIB, held_bytes=200 * MIB,
        unused_bytes=15 * MIB, fresh=2, retries=2,
    )  # fmt: skip
    assert words(allocations) == (
        "Memory in 1 step: 250 allocations of 120.0 MiB together, 40.0 MiB at once beyond what was "
        "in use before. The allocator holds 200.0 MiB, of which 15.0 MiB (7.5 %) lie unused "
        "between blocks in use. Segments newly reserved on the GPU: 2. Memory ran out 2 times and "
        "caches were emptied: lower --batch or use --activation-checkpointing selective."
    )


def test_a_cpus_figures_count_allocations_and_the_most_at_once(monkeypatch):
    changes = [10 * MIB, 20 * MIB, -10 * MIB, 5 * MIB, -40 * MIB]
    allocations = on_cpu(changes, (64 * MIB, 16 * MIB))
    assert (allocations.count, allocations.bytes, allocations.peak_bytes) == (3, 35 * MIB, 30 * MIB)
    assert "of which 16.0 MiB (25.0 %)" in words(allocations)
    assert "GPU" not in words(allocations)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert heap_bytes() is None
    assert "holds" not in words(on_cpu(changes, heap_bytes()))


def test_the_profiler_sees_each_tensor():
    a = torch.ones(256, 256)  # 256 KiB
    with profiler.recording(CPU) as recorded:
        negated = a.neg()
        for _ in range(3):
            a.mm(a)
    allocations = recorded.allocations
    assert allocations is not None
    assert (allocations.count, allocations.bytes) == (4, 4 * a.nbytes)
    assert allocations.peak_bytes == 2 * a.nbytes
    assert negated.nbytes == a.nbytes


@pytest.mark.capability("D9")
@pytest.mark.full
def test_a_profiled_step_tells_its_allocations_and_its_slowest_operators(tmp_path):
    """A step in the steady state allocates as often and as much as the step before."""
    counts = []
    for extra in (0, 1):
        small = SmallLoop(tmp_path / str(extra), "delayed", profile=True, profile_step=5 + extra)
        small.advance(5 + extra)
        text = (tmp_path / str(extra) / "profile" / "profile.md").read_text()
        (line,) = [
            text_line for text_line in text.splitlines() if text_line.startswith("Memory in 1 step")
        ]
        counts.append(re.findall(r"([\d,.]+) allocations of ([\d,.]+) MiB", line)[0])
        assert len(re.findall(r"^.*\d% .*$", text, re.M)) == profiler.TOP
        assert (tmp_path / str(extra) / "profile" / "trace.json.gz").stat().st_size > 1000
    assert counts[0] == counts[1]
    assert int(counts[0][0].replace(",", "")) > 100
