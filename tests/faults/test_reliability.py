"""`python -m bench reliability`: rows are run, kept, shown and judged; what is committed holds."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from bench import report
from bench.quality import reliability
from bench.runner import RESULTS
from fp8stack.common.errors import UserError
from tests.faults.case import Case, Outcome

COMMITTED = RESULTS / "cpu" / "reliability.json"


def _case(outcome: Outcome | None = None, fails: str = "", **facts: bool) -> Case:
    def run(folder: Path, count: int) -> Outcome:
        assert not list(folder.iterdir())
        (folder / "trace").write_text(str(count))
        if fails:
            raise RuntimeError(fails)
        return outcome or Outcome(injected=count, survived=count)

    return Case(description="sparks", passes="nothing burns", run=run, short=2, long=20, **facts)


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> dict[str, Case]:
    """The rows there are, to be changed by a test; two that survive all."""
    rows = {"R2": _case(), "R10": _case()}
    monkeypatch.setattr(reliability, "all_cases", lambda: rows)
    return rows


def _run(folder: Path, *words: str) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=folder)
    reliability.add_arguments(parser)
    reliability.run(parser.parse_args(words))


def _results(folder: Path) -> dict[str, dict]:
    text = (folder / "reliability.json").read_text()
    return {row["case"]: row for row in json.loads(text)["results"]}


def test_every_row_is_run_in_its_long_form_and_written(cases, tmp_path, capsys, monkeypatch):
    _run(tmp_path)
    results = _results(tmp_path)
    assert list(results) == ["R2", "R10"]
    assert [(row["injected"], row["survived"], row["lost"]) for row in results.values()] == [
        (20, 20, []),
        (20, 20, []),
    ]
    assert results["R2"]["command"] == "python -m bench reliability --only R2"
    assert results["R2"]["versions"]["torch"] == torch.__version__
    assert "R10: 20 of 20 survived" in capsys.readouterr().out
    assert "| R2 | sparks | nothing burns | 20 | 20 | none |" in (
        (tmp_path / "reliability.md").read_text()
    )


def test_rows_that_are_not_run_now_stay_as_they_were(cases, tmp_path):
    _run(tmp_path)
    before = _results(tmp_path)
    _run(tmp_path, "--only", "R10", "--short")
    results = _results(tmp_path)
    assert results["R2"] == before["R2"]
    assert results["R10"]["injected"] == 2
    assert results["R10"]["command"].endswith("--short")
    assert "(short) |" in (tmp_path / "reliability.md").read_text()


def test_rows_of_another_machine_are_told_apart(cases, tmp_path):
    _run(tmp_path)
    path = tmp_path / "reliability.json"
    before = json.loads(path.read_text())
    before["machine"]["machine"] = "a Z80"
    for row in before["results"]:
        del row["machine"]  # as older versions wrote it
    path.write_text(json.dumps(before))
    _run(tmp_path, "--only", "R10")
    text = (tmp_path / "reliability.md").read_text()
    assert "Measured on a Z80 (R2); " in text
    assert "(R10), torch" in text


def test_what_was_lost_is_shown_and_the_exit_code_is_1(cases, tmp_path, capsys):
    cases["R2"] = _case(Outcome(injected=3, survived=1, lost=("spark 2: burnt", "spark 3: gone")))
    with pytest.raises(SystemExit) as exit:
        _run(tmp_path)
    assert exit.value.code == 1
    assert list(_results(tmp_path)) == ["R2", "R10"]  # the rows after it were run all the same
    text = (tmp_path / "reliability.md").read_text()
    assert "| 3 | 1 | **2 LOST** |" in text
    assert "- spark 3: gone\n" in text
    assert "LOST: spark 2: burnt" in capsys.readouterr().out


def test_a_row_that_fails_by_itself_counts_as_lost(cases, tmp_path):
    cases["R2"] = _case(fails="no sparks here")
    with pytest.raises(SystemExit):
        _run(tmp_path)
    results = _results(tmp_path)
    assert results["R2"]["lost"] == ["the row itself failed: RuntimeError: no sparks here"]
    assert results["R10"]["survived"] == 20


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_row_for_a_gpu_is_left_out_without_one_and_the_table_says_so(cases, tmp_path):
    cases["R16"] = _case(needs_cuda=True)
    _run(tmp_path)
    assert "R16" not in _results(tmp_path)
    assert "not run, needs a GPU |" in (tmp_path / "reliability.md").read_text()


def test_a_short_run_leaves_the_committed_table_alone(cases, capsys, monkeypatch):
    monkeypatch.setattr(report, "write", lambda *a: pytest.fail("it was written"))
    _run(RESULTS, "--short")
    assert "nothing is written" in capsys.readouterr().out


def test_runs_are_kept_where_asked_and_not_written_over_and_rows_are_known(cases, tmp_path):
    keep = ["--keep", str(tmp_path / "runs"), "--only"]
    _run(tmp_path / "out", *keep, "R2")
    assert (tmp_path / "runs" / "R2" / "trace").read_text() == "20"
    with pytest.raises(UserError, match="is there already"):
        _run(tmp_path / "out", *keep, "R2")
    with pytest.raises(UserError, match="No row 'R3'"):
        _run(tmp_path / "out", *keep, "R3")


def test_the_rows_of_all_themes_are_found_in_order():
    cases = reliability.all_cases()
    assert {"R1", "R2", "R3", "R4", "R14", "R16"} <= cases.keys()
    assert list(cases) == sorted(cases, key=lambda name: int(name[1:]))
    assert all(0 < case.short <= case.long for case in cases.values())


@pytest.mark.skipif(not COMMITTED.exists(), reason="the table is not made yet")
def test_nothing_is_lost_in_the_committed_table():
    cases = reliability.all_cases()
    for name, row in _results(COMMITTED.parent).items():
        assert row["lost"] == [], name
        assert row["injected"] == row["survived"], name
        assert row["injected"] >= cases[name].long, name
