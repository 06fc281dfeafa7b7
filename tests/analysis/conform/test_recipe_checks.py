"""`fp8stack conform --recipe`: the checks of what a recipe uses, and the faults that they find."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp8stack.analysis.conform import suite
from fp8stack.analysis.conform.checks import Context
from fp8stack.precision import load_recipe, probe
from tests.analysis.conform.conform_faults import FAULTS, OF_RECIPE, OF_WEIGHTS, report_with

pytestmark = pytest.mark.usefixtures("one_thread")

# Elements of two formats of one's own: scales of earlier passes, of blocks, and random rounding.
OWN = """
[quantizer]
format = "e3m4"
block = [1, 64]
scale = "power_of_two"

[weight]
block = "tensor"
scale = "float32"
amax = "delayed"
history_length = 4
margin = 1

[grad_output]
format = "e5m1"
rounding = "stochastic"

[[layers]]
match = "last 1 block"
recipe = "mxfp4"
"""


@pytest.fixture
def context(tmp_path: Path) -> Context:
    (tmp_path / "own.toml").write_text(OWN)
    recipe = load_recipe(str(tmp_path / "own.toml"))
    return Context(probe("cpu"), quick=True, recipe=recipe)


def test_every_quantizer_of_a_recipe_is_checked_and_nothing_else(context: Context) -> None:
    report = suite.run(context)
    assert [row for row in report["rows"] if row["verdict"] == "FAIL"] == []
    rows = [(row["group"], row["check"]) for row in report["rows"] if row["verdict"] == "pass"]
    kinds = {
        "e3m4, block [1, 64], scale power_of_two, nearest, ",
        "e3m4, block tensor, scale float32, from 4 amaxes, nearest, with a scale of 2, ",
        "e3m4, block tensor, scale float32, from 4 amaxes, nearest, with a scale of 3, ",
        "e5m1, block [1, 64], scale power_of_two, stochastic, ",
        "e2m1, block [1, 32], scale e8m0, scale_rounding rceil, nearest, ",
    }
    ways = ["bytes, eager", "values, by torch's operators"]
    ways += ["values, by numba in 1 thread", "values, by numba in 3 threads"]
    expected = {("quantizers", kind + way) for kind in kinds for way in ways}
    assert {row for row in rows if row[0] == "quantizers"} == expected
    random = "e5m1, block [1, 64], scale power_of_two, stochastic, "
    assert {check for group, check in rows if group == "rounding"} == {
        random + "draws", random + "mean"
    }  # fmt: skip
    assert [check for group, check in rows if group == "histories"] == [
        "e3m4, block tensor, scale float32, from 4 amaxes, nearest, updates"
    ]
    shape = "by emulate, 48 x 128 -> 256 + bias"
    assert [check for group, check in rows if group == "gemms"] == [
        f"own {shape}", f"own, 'last 1 block' {shape}"
    ]  # fmt: skip


@pytest.mark.parametrize("name", OF_RECIPE)
def test_a_fault_of_ones_own_format_is_found(
    name: str, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = report_with(OF_RECIPE[name], context, monkeypatch)
    assert report["counts"]["FAIL"] > 0
    assert not any("failed" in row for row in report["rows"])


def test_the_documents_count_the_functions_that_tests_break() -> None:
    page = (Path(__file__).parents[3] / "docs/conform.md").read_text()
    faults = [*FAULTS, *OF_WEIGHTS, *OF_RECIPE]
    assert len(set(faults)) == len(faults)
    assert f"Tests break {len(faults)} functions one at a time; `conform` finds each." in page


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
