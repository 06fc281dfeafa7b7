"""A long run with faults of all kinds ends as one without, which does not leak (R14)."""

from __future__ import annotations

from pathlib import Path

from tests.faults.kill_rows import CASES
from tests.faults.soak import MEMORY_MIB, Sample, growth


def test_a_run_with_faults_of_all_kinds_ends_as_one_without(tmp_path: Path) -> None:
    case = CASES["R14"]
    outcome = case.run(tmp_path, case.short)
    assert outcome.lost == ()
    assert outcome.injected == outcome.survived == case.short


def _samples(memory_mib: list[float], open_files: list[int]) -> list[Sample]:
    pairs = zip(memory_mib, open_files, strict=True)
    return [Sample(memory_mib=memory, open_files=files) for memory, files in pairs]


def test_memory_or_files_that_grow_are_seen() -> None:
    flat = [100.0] * 50
    assert growth(_samples(flat, [9] * 50)) == ""
    # Growth before the middle is the start of the run; what varies a little is no growth.
    assert growth(_samples([*range(20), *flat[:30]], [*[3] * 20, *[9] * 30])) == ""
    assert growth(_samples([100 + MEMORY_MIB * (n % 2) for n in range(50)], [9] * 50)) == ""
    leak = [100 + 3 * MEMORY_MIB * n / 50 for n in range(50)]
    assert "grew by" in growth(_samples(leak, [9] * 50))
    assert "files open, 9 before" in growth(_samples(flat, [*[9, 10] * 18, *[10] * 14]))
    assert "too short" in growth(_samples(flat[:3], [9] * 3))
