"""The parts of the table: comparisons, inputs, and the rows of TE on its stand-in."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fp8stack import numerics
from fp8stack.analysis.conform import gemms, suite
from fp8stack.analysis.conform import te_casts as te
from fp8stack.analysis.conform.casts import RECIPES, SERVED_RECIPES
from fp8stack.analysis.conform.check_inputs import amaxes, bf16_values, fp32_values, spiky_steps
from fp8stack.analysis.conform.checks import (
    Bounded,
    Context,
    Facts,
    Share,
    equal,
    merged,
    within,
)
from fp8stack.precision import Hardware, load_recipe, resolve
from fp8stack.precision.rules import shipped
from tests.support.study_recipes import NO_HADAMARD
from tests.support.te import te_stand_in
from tests.support.te.te_quantizers import te_with_quantizers

CPU = Context(Hardware("cpu", name="a CPU"), compiler="eager")
WITH_TE = Context(Hardware("cpu", has_te=True, te_version="2.20.2"), quick=True)

pytestmark = pytest.mark.usefixtures("one_thread")


def results(context: Context, only: str) -> list[Facts]:
    """The results of the rows that match `only`."""
    return [row.run() for row in suite.rows(context, only)]


def assert_hold(facts: list[Facts]) -> None:
    wrong = [row for row in facts if row["verdict"] != "pass"]
    assert not wrong, wrong


def test_bits_that_differ_are_counted_and_shown():
    expected = torch.tensor([1.0, -0.0, math.nan, 3.0])
    actual = torch.tensor([1.0, 0.0, -math.nan, 3.0000002])
    facts = equal({"x": actual, "y": None}, {"x": expected})
    assert (facts["holds"], facts["checked"], facts["differing"]) == (False, 4, 2)
    assert facts["first"] == [
        "x[1]: 0 (0x00000000), not -0 (0x80000000)",
        "x[3]: 3.00000024 (0x40400001), not 3 (0x40400000)",
    ]
    assert equal({"x": actual}, {"x": expected}, {"x": expected})["first"][1].startswith("x of 3: ")
    facts = equal({"x": actual}, {"x": expected[:3]})
    assert facts["first"] == ["x: torch.float32 (4,) instead of torch.float32 (3,)"]
    facts = merged(
        {"a": equal({"x": actual}, {"x": expected}), "": equal({"x": actual}, {"x": actual})}
    )
    assert (facts["holds"], facts["differing"], len(facts["first"])) == (False, 2, 2)
    with pytest.raises(AssertionError, match="nothing was compared"):
        equal({"x": None}, {"x": expected})


def test_errors_are_shares_of_their_bounds():
    x, zero = torch.tensor([1.0, -2.0]), torch.zeros(())
    exact = {"x": Bounded(x.double(), torch.full((2,), 0.5).double(), zero)}
    assert within({"x": x + 0.25}, exact) == {"holds": True, "worst": {"x": 0.5}}
    assert not within({"x": x + 0.51}, exact)["holds"]
    rounded = {"x": Bounded(x.double(), zero, x.abs())}
    assert within({"x": (x * (1 + 2.0**-9)).bfloat16()}, rounded)["holds"]
    assert not within({"x": x * (1 + 2.0**-9)}, rounded)["holds"]  # float32 has more bits
    assert within({"x": 1.1 * x}, {"x": Share(x.double(), 0.11)})["holds"]
    for wrong in (x * math.nan, x * math.inf, x[:1], 2 * x):
        for bound in (exact["x"], Share(x.double(), 0.9)):
            assert not within({"x": wrong}, {"x": bound})["holds"]


def test_inputs_have_all_that_a_cast_may_meet():
    bf16, fp32 = bf16_values(), fp32_values()
    assert len(bf16.view(torch.int16).unique()) == 2**16
    for x in (bf16, fp32):
        assert x.shape == (256, 256)
        assert x.isnan().any() & x.isinf().any()
        assert ((x != 0) & (x.abs() < 1e-38)).sum() > 200
    for tie in (1.0625, 464.0, 2.0**-10, 61440.0, 2.0**-17):  # E4M3's, and E5M2's
        assert (fp32 == tie).any() & (fp32 == -tie).any()
    steps = spiky_steps(50, 16, 32, 16)
    assert {0.0, math.inf} < {float(numerics.amax(step.x)) for step in steps}
    assert any(step.w.isnan().all() for step in steps)
    assert {0.0, math.inf} < set(amaxes().tolist())


def test_the_quantizers_of_every_shipped_recipe_are_checked():
    def quantizers(names) -> set:
        return {q for n in names for t in load_recipe(n).tables for q in t.each.values()}

    assert quantizers((*RECIPES, *SERVED_RECIPES)) >= quantizers(shipped())


# The long form


@pytest.mark.parametrize(
    "pattern",
    [
        *("casts: bf16 to e4m3, comp*", "quantizers: mxfp8, values, comp*"),
        *("gemms: mxfp8 by emulate, comp*", "histories: updates, comp*"),
        pytest.param("*compiled*", marks=pytest.mark.slow),
    ],
)
@pytest.mark.full
def test_what_is_compiled_holds(pattern):
    """Inductor's own code is tried by `fp8stack conform` itself."""
    facts = results(CPU, pattern)
    assert_hold([row for row in facts if row["verdict"] != "skipped"])
    assert any(row["verdict"] == "pass" for row in facts)


@pytest.mark.full
def test_rows_and_features_that_no_fp8_gemm_takes_are_emulated_and_models_are_near_float32():
    assert_hold(results(CPU, "*by emulate, 33 x 50*"))
    assert_hold(results(CPU, "gemms: [cd]* by torch, 200*"))
    assert_hold(results(CPU, "a model in delayed by torch"))
    (row,) = results(CPU, "block by torch, 48")
    assert "block" in row["why"]
    (row,) = results(CPU, "gemms: delayed by emulate, 48")
    assert set(row["worst"]) == {"y", "dx", "dw", "db"}
    assert max(row["worst"].values()) > 0.5  # the bound is no larger than it has to be


def test_a_scale_product_beyond_float32_is_infinite_and_no_error():
    """Such as this seed's operands have: found by `fp8stack conform --seed 5`."""
    context = Context(CPU.hardware, quick=True, seed=5)
    assert_hold(results(context, "fp8_state of emulate, max"))


# Transformer Engine


def test_without_transformer_engine_its_rows_say_so():
    reasons = {row["why"] for row in results(CPU, "*, by TE")}
    assert reasons == {"Transformer Engine is not installed"}


def test_what_transformer_engine_casts_is_compared(monkeypatch):
    with te_with_quantizers():
        for only in ("casts: bf16*TE*", "specials bf16, by TE", "block of uneven fp32", "nvfp4 of"):
            assert_hold(results(WITH_TE, only))
        cast = te.cast
        monkeypatch.setattr(te, "cast", lambda x, scale, *options: cast(x, scale * 2, *options))
        assert {row["verdict"] for row in results(WITH_TE, "bf16 to e4m3, by TE")} == {"FAIL"}


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", NO_HADAMARD])
def test_what_transformer_engine_multiplies_is_compared(recipe, monkeypatch):
    """NVFP4 is compared with its own reference, Hadamard transforms included; drawn gradients are
    not compared."""
    blackwell = Hardware("cuda", (10, 0), has_te=True)
    monkeypatch.setattr(
        *(gemms, "plan_of"),
        lambda recipe, context, backend: replace(resolve(recipe, blackwell, backend), device="cpu"),
    )
    with te_with_quantizers():
        for shape in gemms.SHAPES[:3:2]:
            row = gemms.linear(WITH_TE, load_recipe(recipe), "te", shape)
            facts = row.compare()
            assert facts["holds"]
            assert min(facts["worst"].values()) > 0.4
        monkeypatch.setattr(te_stand_in, "_gemm", lambda a, b, scale: a @ b * scale * 1.01)
        assert not row.compare()["holds"]
