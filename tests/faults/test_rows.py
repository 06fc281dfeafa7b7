"""The rows of the matrix in a quick form, and in the short one where they are slow."""

import pytest

from tests.faults import kill_rows, rank_rows
from tests.faults.case import Case
from tests.faults.numeric import numeric_rows

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
