"""`python -m bench reliability`: rows are run and written, and what is committed holds."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from bench.quality import reliability
from bench.runner import RESULTS
from tests.faults.case import Case, Outcome

COMMITTED = RESULTS / "cpu" / "reliability.json"


def _case(lost: tuple[str, ...] = (), fails: bool = False) -> Case:
    def run(folder: Path, count: int) -> Outcome:
        if fails:
            raise RuntimeError("no sparks here")
        return Outcome(injected=count, survived=count - len(lost), lost=lost)

    return Case(description="sparks", passes="nothing burns", run=run, short=2, long=20)


def _run(folder: Path, *words: str) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=folder)
    reliability.add_arguments(parser)
    reliability.run(parser.parse_args(words))


def _results(folder: Path) -> dict[str, dict]:
    text = (folder / "reliability.json").read_text()
    return {row["case"]: row for row in json.loads(text)["results"]}


def test_rows_are_run_and_written_and_what_was_lost_is_shown(tmp_path, capsys, monkeypatch):
    cases = {"R2": _case(), "R10": _case(lost=("spark 3: gone",)), "R11": _case(fails=True)}
    monkeypatch.setattr(reliability, "all_cases", lambda: cases)
    with pytest.raises(SystemExit) as exit:
        _run(tmp_path)
    assert exit.value.code == 1
    results = _results(tmp_path)
    assert [(row["injected"], row["survived"]) for row in results.values()] == [
        *((20, 20), (20, 19), (0, 0)),
    ]
    assert results["R11"]["lost"] == ["the row itself failed: RuntimeError: no sparks here"]
    assert results["R2"]["command"] == "python -m bench reliability --only R2"
    assert results["R2"]["versions"]["torch"] == torch.__version__
    assert "LOST: spark 3: gone" in capsys.readouterr().out
    text = (tmp_path / "reliability.md").read_text()
    assert "| R2 | sparks | nothing burns | 20 | 20 | none |" in text
    assert "- spark 3: gone\n" in text
    cases["R10"] = _case()
    _run(tmp_path, "--only", "R10", "--short")
    again = _results(tmp_path)
    assert again["R2"] == results["R2"]
    assert (again["R10"]["injected"], again["R10"]["lost"]) == (2, [])
    assert again["R10"]["command"].endswith("--short")


@pytest.mark.skipif(not COMMITTED.exists(), reason="the table is not made yet")
def test_nothing_is_lost_in_the_committed_table():
    cases = reliability.all_cases()
    assert {"R1", "R5", "R10", "R12", "R16"} <= cases.keys()
    for name, row in _results(COMMITTED.parent).items():
        assert row["lost"] == [], name
        assert row["injected"] == row["survived"] >= cases[name].long, name
