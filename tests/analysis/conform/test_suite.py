"""`fp8stack conform`: the command, its report, and what it refuses."""

from __future__ import annotations

import json

import pytest
import torch

from fp8stack.analysis.conform import suite
from fp8stack.analysis.conform.checks import Context, Row
from fp8stack.precision import load_recipe, probe
from tests.analysis.conform.conform_faults import OWN

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = ("conform", "--device", "cpu", "--quick")


def test_it_prints_what_was_judged_a_line_for_each_check_and_the_counts(command, capsys):
    assert command(*CPU, "--only", "casts") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"machine: {probe('cpu')}"
    for word in ("torch ", "numba ", "transformer-engine not installed"):
        assert word in lines[1]
    assert ["casts", "bf16", "to", "e4m3,", "eager", "pass"] in [x.split()[:-1] for x in lines]
    assert "skipped 8: Transformer Engine is not installed" in lines
    assert "skipped 4: the kernel for many weights needs Triton and a GPU with FP8" in lines
    assert lines[-1].startswith("12 pass, 0 FAIL, 12 skipped after ")


def row(name: str, computed, expected: float = 1.0) -> Row:
    """A row of the group of layouts that calls `computed`."""
    oracle = lambda case: {"x": torch.tensor([expected])}  # noqa: E731
    return Row("layouts", name, lambda case: {"x": computed()}, oracle, lambda: [("", None)])


def good() -> torch.Tensor:
    return torch.ones(1)


def test_its_json_has_a_row_for_each_check_on_the_terminal_and_in_a_file(command, capsys, tmp_path):
    assert (
        command(*CPU, "--only", "layouts: *", "--json", "--out", "report.json", "--seed", "7") == 0
    )
    report = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert (report["quick"], report["seed"], report["holds"]) == (True, 7, True)
    assert report["counts"] == {"pass": 4, "FAIL": 0, "skipped": 0}
    assert {row["group"] for row in report["rows"]} == {"layouts"}
    assert {"check", "verdict", "why", "seconds", "checked"} <= report["rows"][0].keys()
    assert {"machine", "torch", "fp8stack", "threads"} <= report["machine"].keys()


def test_a_run_that_is_cut_off_leaves_the_rows_of_the_checks_that_it_finished(
    tmp_path, monkeypatch
):
    def cut_off():
        raise KeyboardInterrupt

    named = [row("good", good), row("long", cut_off), row("late", good)]
    monkeypatch.setitem(suite.GROUPS, "layouts", lambda context: iter(named))
    with pytest.raises(KeyboardInterrupt):
        suite.run(Context(probe("cpu")), "layouts", file=tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    assert [result["check"] for result in report["rows"]] == ["good"]
    assert report["counts"] == {"pass": 1, "FAIL": 0, "skipped": 0}
    assert (report["checks"], report["holds"]) == (3, False)


def test_something_wrong_ends_in_exit_code_1_and_is_named(command, capsys, monkeypatch):
    def fail():
        raise ValueError("a kernel is missing\nand more")

    wrong = [row("odd", good, 2.0), row("broken", fail)]
    monkeypatch.setitem(suite.GROUPS, "layouts", lambda context: iter(wrong))
    assert command(*CPU, "--only", "layouts") == 1
    printed = capsys.readouterr().out
    assert "FAIL layouts: odd: 1 of 1 differ: x[0]: 1 (0x3f800000), not 2 (0x40000000)" in printed
    assert "FAIL layouts: broken: ValueError: a kernel is missing\n" in printed
    assert "0 pass, 2 FAIL, 0 skipped" in printed
    assert "in fail" in wrong[1].run()["traceback"]


@pytest.mark.parametrize(
    ("flags", "phrase"),
    [
        (["--only", "nonsense"], "No check matches --only 'nonsense'. Groups: casts, quantizers, "),
        (["--device", "tpu"], "No device 'tpu'. Known: auto, cpu, cuda, xpu."),
        (["--out", "missing/r.json"], "--out missing/r.json is not a file in an existing folder"),
        (["--out", "."], "Give another."),
        (["--seed", "-1"], "--seed"),
    ],
)
def test_bad_input_is_refused_in_a_line(flags, phrase, refused):
    refused(*CPU, *flags, message=phrase)


def test_a_name_is_chosen_by_a_part_of_it_or_by_a_pattern():
    context = Context(probe("cpu"), quick=True)
    every = suite.rows(context)
    assert {row.group for row in every} == set(suite.GROUPS)
    assert len({*map(str, every)}) == len(every)
    (matching,) = suite.rows(context, "layouts: scales 1x128")
    assert matching.name == "scales 1x128"
    assert len(suite.rows(context, "*e5m2, eager")) == 2


@pytest.mark.capability("B1")
def test_every_quantizer_of_a_recipe_is_checked_and_nothing_else(tmp_path):
    (tmp_path / "own.toml").write_text(OWN)
    recipe = load_recipe(str(tmp_path / "own.toml"))
    report = suite.run(Context(probe("cpu"), quick=True, recipe=recipe))
    assert report["counts"]["FAIL"] == 0
    shape = "by emulate, 48 x 128 -> 256 + bias"
    assert [f"{r['group']}: {r['check']}" for r in report["rows"] if r["verdict"] == "pass"] == [
        "quantizers: own, bytes, eager",
        "quantizers: own, values, by torch's operators",
        "quantizers: own, values, by numba in 1 thread",
        "quantizers: own, values, by numba in 3 threads",
        "quantizers: own, values in bfloat16, by numba",
        "histories: updates, eager",
        f"gemms: own {shape}",
        f"gemms: own, 'last 1 block' {shape}",
    ]
    (row,) = suite.rows(Context(probe("cpu"), recipe=recipe), "bytes, eager")
    (_, cases), *_ = row.inputs()
    quantizers = {q for table in recipe.tables for q in table.each.values()}
    assert {case.quantizer for case in cases} == quantizers
    assert len(quantizers) == 4


def test_the_command_names_the_recipe_and_refuses_one_that_quantizes_nothing(
    command, capsys, refused, tmp_path
) -> None:
    (tmp_path / "own.toml").write_text(OWN)
    flags = ("--device", "cpu", "--quick", "--only", "updates", "--json")
    assert command("conform", "--recipe", "own.toml", *flags) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["recipe"], report["counts"]["pass"]) == ("own", 1)
    refused("conform", "--recipe", "bf16", message="--recipe bf16 quantizes nothing")
    (tmp_path / "bad.toml").write_text(OWN.replace("e3m4", "e9m9"))
    refused("conform", "--recipe", "bad.toml", message="quantizer.format = 'e9m9': No format")


@pytest.mark.parametrize("text", ["mine", '{"checks": 3}', "[" * 100_000])
def test_a_file_that_is_no_report_is_left_as_it_is_and_a_report_is_written_over(
    text, refused, command, tmp_path
):
    file = tmp_path / "mine.json"
    file.write_text(text)
    words = [*CPU, "--only", "layouts: scales 1x128", "--out", "mine.json"]
    refused(*words, message="--out mine.json exists and is no report of conform. Give another.")
    assert file.read_text() == text
    file.write_text("")
    for seed in (1, 2):
        assert command(*words, "--seed", str(seed)) == 0
        assert json.loads(file.read_text())["seed"] == seed
