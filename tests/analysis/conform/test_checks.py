"""The checks of `fp8stack conform`: what they compare; those of TE on its stand-in."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from fp8stack import numerics
from fp8stack.analysis.conform import casts, gemms, histories, quantizers, suite
from fp8stack.analysis.conform import te_casts as te
from fp8stack.analysis.conform.check_inputs import (
    QUANTIZED_RECIPES,
    SERVED_RECIPES,
    amaxes,
    bf16_values,
    fp32_values,
    spiky_steps,
)
from fp8stack.analysis.conform.checks import (
    Check,
    Context,
    Facts,
    agreement_db,
    broken,
    merged,
    run_check,
    same_bits,
    same_values,
)
from fp8stack.precision import Hardware, resolve
from fp8stack.precision.rules import shipped
from tests.analysis.conform.conform_faults import OF_WEIGHTS
from tests.support.study_recipes import NO_HADAMARD
from tests.support.te import te_stand_in
from tests.support.te.te_quantizers import te_with_quantizers
from tests.support.triton_code import launched_on_a_cpu

CPU = Context(Hardware("cpu", name="a CPU"), compiler="eager")
WITH_TE = Context(Hardware("cpu", has_te=True, te_version="2.20.2"), compiler="eager")

pytestmark = pytest.mark.usefixtures("one_thread")


def rows(checks, *words: str) -> list[Facts]:
    """The rows of the checks that have all of `words` in their name."""
    chosen = [check for check in checks if all(word in check.name for word in words)]
    assert chosen
    return [run_check(check) for check in chosen]


def assert_hold(facts: list[Facts]) -> None:
    wrong = [row for row in facts if row.get("holds") is not True]
    assert not wrong, wrong


def test_bits_that_differ_are_counted_and_shown():
    expected = torch.tensor([1.0, -0.0, math.nan, 3.0])
    actual = torch.tensor([1.0, 0.0, math.nan, 3.0000002])
    facts = same_bits({"x": (actual, expected)})
    assert (facts["holds"], facts["checked"], facts["differing"]) == (False, 4, 2)
    assert facts["first"] == [
        "x[1]: 0 (0x00000000), not -0 (0x80000000)",
        "x[3]: 3.00000024 (0x40400001), not 3 (0x40400000)",
    ]
    assert same_values({"x": (actual[:3], expected[:3])})["holds"]
    assert not same_values({"x": (actual, expected)})["holds"]
    facts = same_bits({"x": (actual, expected[:3])})
    assert facts["first"] == ["x: torch.float32 (4,) instead of torch.float32 (3,)"]
    facts = merged({"a": same_bits({"x": (actual, expected)}), "b": same_bits({})})
    assert (facts["holds"], facts["differing"], len(facts["first"])) == (False, 2, 2)


def test_signal_to_noise_is_in_decibel():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert agreement_db(x * 1.01, x) == pytest.approx(40, abs=0.01)
    assert agreement_db(x, x) == 200
    assert (
        agreement_db(x * math.nan, x)
        == agreement_db(x * math.inf, x)
        == agreement_db(x, x * 0)
        == -200
    )


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
    recipes = (*QUANTIZED_RECIPES, *SERVED_RECIPES)
    checked = {q for recipe in recipes for q in quantizers.quantizers_of(recipe)}
    in_recipes = {q for recipe in shipped() for q in quantizers.quantizers_of(recipe)}
    assert checked == {q for q in in_recipes if not q.delayed}


# The long form


def compiled_checks() -> list[Check]:
    """The checks of compiled code that a CPU can do with a compiler that takes no time."""
    groups = casts.casts, casts.scales, quantizers.quantizers, histories.histories
    checks = [check for group in groups for check in group(CPU) if "compiled" in check.name]
    on_a_cpu = ("by emulate, compiled", "delayed by torch, compiled")
    checks += [
        check for check in gemms.gemms(CPU) if any(words in check.name for words in on_a_cpu)
    ]
    nvfp4 = partial(gemms.linear, CPU, "nvfp4", "emulate", gemms.SHAPES[0], compiled=True)
    return [*checks, Check("nvfp4 by emulate", nvfp4)]


SHORT = (
    "bf16 to e4m3", "fp32 to e5m2", "scales and inverses", "rowwise, values", "mxfp6_e2m3, values",
    "mxfp8 by emulate",
)  # fmt: skip


@pytest.mark.parametrize("words", [SHORT, pytest.param(("",), marks=pytest.mark.slow)])
def test_what_is_compiled_holds(words):
    """Inductor's own code is tried by `fp8stack conform` itself."""
    checks = compiled_checks()
    for word in words:
        compiled = rows(checks, word)
        assert_hold([row for row in compiled if "float8_e8m0fnu" not in row.get("skipped", "")])


def test_rows_and_features_that_no_fp8_gemm_takes_are_emulated_and_norms_are_near_float64():
    checks = list(gemms.gemms(CPU))
    assert_hold(rows(checks, "emulate, 33 x 50"))
    assert_hold(rows(checks, "by torch, 200")[:2])
    assert_hold(rows(checks, "norms and MLP in delayed by torch"))
    (row,) = rows(checks, "block by torch, 48")
    assert "block" in row["skipped"]
    (row,) = rows(checks, "delayed by emulate, 48")
    assert set(row["worst"]) == {"y", "dx", "dw", "db"}
    assert max(row["worst"].values()) > 0.5  # the bound is no larger than it has to be


def test_fused_layers_that_are_not_finite_fail_with_facts_that_json_can_hold(monkeypatch):
    run = gemms.one_pass
    monkeypatch.setattr(
        *(gemms, "one_pass"),
        lambda *arguments: {name: x * math.nan for name, x in run(*arguments).items()},
    )
    (row,) = rows(gemms.gemms(CPU), "norms and MLP in current by emulate")
    assert broken(row)
    assert set(row["unquantized_db"].values()) == {-200}
    json.dumps(row, allow_nan=False)


def interpreted_copies() -> list[str]:
    """Differences of the kernels of both NVFP4 copies, in Triton's interpreter, from the
    reference."""
    check = "nvfp4, both copies at once"
    with launched_on_a_cpu():
        (row,) = suite.run(Context(CPU.hardware, quick=True), check)["rows"]
    return [] if row["verdict"] == "pass" else [row["why"]]


def interpreted_weights() -> list[str]:
    """Differences of the kernel for many weights, in Triton's interpreter, from the reference, and
    its faults that are not found."""
    context, wrong = Context(CPU.hardware, quick=True), []
    with launched_on_a_cpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(casts, "has_kernel", lambda device: True)
        report = suite.run(context, "many weights")
        wrong += [row["why"] for row in report["rows"] if row["verdict"] != "pass"]
    for name, (only, put) in OF_WEIGHTS.items():
        with launched_on_a_cpu(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(casts, "has_kernel", lambda device: True)
            put(patch)
            rows = suite.run(context, only)["rows"]
        detected = any(row.get("differing") for row in rows)  # by its numbers
        wrong += [] if detected else [f"not found: {name}: {rows}"]
    return wrong


# Transformer Engine


def test_without_transformer_engine_its_checks_say_so():
    for group in (casts.casts, quantizers.quantizers):
        assert {row["skipped"] for row in rows(group(CPU), "by TE")} == {
            "Transformer Engine is not installed"
        }


def test_what_transformer_engine_casts_is_compared(monkeypatch):
    with te_with_quantizers():
        for group, words in (
            (casts.casts, ["bf16", "TE"]),
            (quantizers.quantizers, ["special bf16", "TE"]),
            (quantizers.quantizers, ["block of ordinary fp32", "TE"]),
            (quantizers.quantizers, ["nvfp4 of ordinary", "TE"]),
        ):
            assert_hold(rows(group(WITH_TE), *words))
        cast = te.cast
        monkeypatch.setattr(te, "cast", lambda x, scale, *options: cast(x, scale * 2, *options))
        assert all(broken(row) for row in rows(casts.casts(WITH_TE), "bf16 to e4m3, by TE"))


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
            facts = gemms.linear(WITH_TE, recipe, "te", shape)
            assert facts["holds"]
            assert min(facts["worst"].values()) > 0.4
        monkeypatch.setattr(te_stand_in, "_gemm", lambda a, b, scale: a @ b * scale * 1.01)
        assert not gemms.linear(WITH_TE, recipe, "te", shape)["holds"]


def test_transformer_engines_own_histories_are_compared(monkeypatch):
    monkeypatch.setattr(histories, "STEPS", 26)  # each kind of step comes once
    with te_with_quantizers():
        checks = list(histories.histories(WITH_TE))
        for word in ("of 1, max, margin 1", "of 4, max", "of 16, most_recent, margin 0"):
            assert_hold(rows(checks, "TE's history", word))
        feed = histories.feed
        monkeypatch.setattr(histories, "feed", lambda slots, step: feed(slots, step[::-1]))
        assert all(broken(row) for row in rows(checks, "TE's history of 4, max, margin 0"))


def test_a_scale_product_beyond_float32_is_infinite_and_no_error():
    """Such as this seed's operands have: found by `fp8stack conform --seed 5`."""
    context = Context(CPU.hardware, quick=True, seed=5)
    assert_hold(rows(histories.histories(context), "fp8_state of emulate, max"))


def test_a_check_that_raises_fails_with_what_it_said():
    def fail() -> Facts:
        raise ValueError("a kernel is missing\nand more")

    row = run_check(Check("f", fail))
    assert broken(row)
    assert row["failed"] == "ValueError: a kernel is missing"
    assert "in fail" in row["traceback"]
