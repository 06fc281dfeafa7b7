"""The table of `fp8stack conform`, row by row on a CPU, and the same rows of every kind of
quantizer and recipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fp8stack.analysis.conform import suite
from fp8stack.analysis.conform.casts import MATRICES, casts, quantizer_rows
from fp8stack.analysis.conform.checks import Context, Row
from fp8stack.analysis.conform.gemms import Shape, linear
from fp8stack.common.formats import ELEMENT_FORMATS, Quantizer
from fp8stack.precision import load_recipe, probe
from tests.support.backend_models import LOW, PER_TENSOR
from tests.support.cases import case
from tests.support.casts import cast_by
from tests.support.quantizers import EVERY, RULES

CONTEXT = Context(probe("cpu"), quick=True)
ROWS = suite.rows(CONTEXT)

pytestmark = pytest.mark.usefixtures("one_thread")


def assert_holds(row: Row) -> None:
    result = row.run()
    assert result["verdict"] == "pass", (str(row), result)


@pytest.mark.capability("B2")
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_row_of_the_table_holds_or_says_why_it_does_not_apply(row: Row) -> None:
    result = row.run()
    assert result["verdict"] == "pass" or (result["verdict"] == "skipped" and result["why"]), result


# Formats of one's own, to the nearest with E8M0 scales and at random with powers of two.
OWN = {name: Quantizer(format=name, block=(1, 32), scale="e8m0") for name in ELEMENT_FORMATS} | {
    f"{name} stochastic": Quantizer(
        format=name, block=(1, 32), scale="power_of_two", rounding="stochastic"
    )
    for name in ELEMENT_FORMATS
}
QUANTIZERS = EVERY | RULES | {f"own {name}": quantizer for name, quantizer in OWN.items()}


@pytest.mark.capability("B6")
@pytest.mark.parametrize("name", QUANTIZERS)
def test_every_implementation_of_a_quantizer_gives_the_oracles_results(name: str) -> None:
    """Also where threads share tiles that are as small as blocks allow."""
    matrices = [*MATRICES[:3], ("specials", "fp16"), ("odd", "fp32")]
    for row in quantizer_rows(CONTEXT, name, [QUANTIZERS[name]], matrices=matrices):
        assert_holds(row)
        if "numba" in row.name:
            with cast_by("many tiles"):
                assert_holds(row)


# Compiled by inductor, which takes seconds each.
COMPILED = ("mxfp8", "hadamard row", "stochastic mxfp6 e3m2 floor", "128x128", "nvfp4 16x16", "row",
            "mxfp4 even", "mxfp8 e5m2 floor", "1x64", "tensor e5m2", "fp6 power of two", "nvfp4",
            "hadamard nvfp4", "stochastic tensor e5m2", "stochastic hadamard nvfp4")  # fmt: skip


@pytest.mark.full
def test_compiled_casts_give_the_oracles_bytes() -> None:
    rows = [row for row in casts(Context(CONTEXT.hardware)) if "compiled" in row.name]
    for row in rows[::3]:  # every dtype and every format
        assert_holds(row)


@pytest.mark.parametrize("name", [case(n, quick=n in COMPILED[:2]) for n in COMPILED])
@pytest.mark.full
def test_compiled_code_gives_the_oracles_results(name: str) -> None:
    rows = quantizer_rows(Context(CONTEXT.hardware), name, [QUANTIZERS[name]])
    results = [row.run() for row in rows if "compiled" in row.name]
    assert {result["verdict"] for result in results} <= {"pass", "skipped"}, results
    assert any(result["verdict"] == "pass" for result in results)


# Sizes that 16, 32 and 128 divide, and sizes that they do not.
SHAPES = (
    Shape(128, 128, 256, True), Shape(64, 32, 64, False), Shape(21, 48, 40, True),
    Shape(30, 130, 33, True), Shape(1, 7, 5, False), Shape(150, 200, 129, False),
)  # fmt: skip
GROUPS = ((5, 33, 16, 1), (0, 40, 0, 0), (0, 0, 1, 0), (32, 128, 32, 64))
HIGH, FORWARD = {"backward": "high_precision"}, {"backward": "dequantized"}
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("current", {"power_of_two": True}),
    ("current", {"quantizer": {"eps": 50.0}}),
    ("current", {"forward_format": "e5m2", "backward_format": "e4m3"}),
    ("delayed", {"backward_format": "e4m3"}),
    ("delayed", {"forward_format": "e5m2"}),
    ("block", {"power_of_two": False}),
    ("mxfp8", {"scale_rounding": "floor"}),
    ("mxfp8", {"scale_rounding": "even"}),
    # Backward GEMMs that take the values of the forward pass, or no quantized ones.
    *((name, FORWARD) for name in LOW if not name.startswith(("served:", "delayed", "nvfp4_f"))),
    *((name, FORWARD | {"power_of_two": False}) for name in ("rowwise", "block", "current")),
    ("mxfp8", FORWARD | {"quantizer": {"block": [32, 32]}}),
    ("rowwise", {"input": {"wgrad": "forward"}, "power_of_two": False}),
    ("rowwise", {"weight": {"dgrad": "forward"}, "power_of_two": False}),
    ("delayed", {"input": {"wgrad": "forward"}, "weight": {"dgrad": "forward"}}),
    ("nvfp4", HIGH),
]


def linears() -> Iterator[Any]:
    for name in LOW:
        recipe = load_recipe(name)
        for shape in SHAPES:
            yield linear(CONTEXT, recipe, "emulate", shape)
        for groups in GROUPS:
            grouped = Shape(sum(groups), 72, 40, False, groups)
            yield linear(CONTEXT, recipe, "emulate", grouped)
    for name in PER_TENSOR:
        for rows in (1, 3, 16, 17):
            yield linear(CONTEXT, load_recipe(name), "torch", Shape(rows, 48, 32, True))


@pytest.mark.capability("B4", "B5")
@pytest.mark.parametrize("row", linears(), ids=str)
def test_a_linears_gemms_are_near_float64_on_the_exact_operands(row: Row) -> None:
    assert_holds(row)


@pytest.mark.parametrize("compiled", [case(False, quick=True), case(True, quick=False)])
@pytest.mark.parametrize(("recipe", "options"), OPTIONS, ids=str)
def test_the_options_of_a_recipe_reach_its_gemms(recipe, options, compiled) -> None:
    chosen = load_recipe(recipe, options)
    shapes = (SHAPES[0],) if compiled else (SHAPES[0], SHAPES[4])
    for shape in shapes:
        assert_holds(linear(CONTEXT, chosen, "emulate", shape, compiled))
