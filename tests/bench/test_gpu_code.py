"""The code that torch compiles for a GPU: counted on a machine without a GPU, and compared with
the committed results."""

from __future__ import annotations

import copy
import json
import re
from argparse import Namespace
from collections import Counter
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import runner
from bench.gpu_code import gpu_code
from bench.gpu_code.blocks import plan_of
from bench.gpu_code.process import told
from bench.runner import RESULTS
from fp8stack.common import presets
from fp8stack.layers.kernels.scaled_gemm import Scaled, ScaleLayout, pack_scales, scaled_gemm
from fp8stack.precision import load_recipe, resolve
from fp8stack.precision.hardware import machine_for
from tests.conftest import refusal

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
COMMITTED = json.loads((RESULTS / gpu_code.FOLDER / "gpu-code.json").read_text())


@cache
def kernels_of(model: str, recipe: str, capability: str) -> list[dict[str, Any]]:
    return gpu_code.compiled(model, recipe, capability, stores=False)


def held(model: str, recipe: str, capability: str) -> list[str]:
    """Figures that are more than 3 % larger than the committed ones."""
    kernels = kernels_of(model, recipe, capability)
    row = {"case": f"{model} on {capability}", "arm": recipe, **gpu_code.summary(kernels)}
    assert row["waits"] == 0
    return gpu_code.grown(COMMITTED, {"results": [row]})


def _same_torch() -> bool:
    return COMMITTED["machine"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]


same_torch = pytest.mark.skipif(not _same_torch(), reason="the results are of another torch")


@same_torch
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "recipe"), [(row["case"], row["arm"]) for row in COMMITTED["results"]]
)
def test_no_figure_is_larger_than_the_committed_one(case, recipe):
    model, _, capability = case.partition(" on ")
    assert held(model, recipe, capability) == []


@pytest.mark.slow
def test_a_whole_model_in_delayed_scaling_compiles_as_one_graph():
    kernels = told("gpt-nano", "delayed", "9.0", "--no-stores", "--whole")["kernels"]
    gemms = [k for k in kernels if k["kind"] == "GEMM" and "_scaled_mm" in k["name"]]
    # Two blocks of four linears.
    assert Counter(k["backward"] for k in gemms) == {False: 2 * 4, True: 2 * 2 * 4}
    assert {k["part"] for k in kernels} == {"model"}
    assert not any(k["waits"] for k in kernels)


def test_a_recipe_is_compiled_for_the_gpus_that_run_it_natively(capsys):
    recipes = ["bf16", "block", "mxfp8", "mxfp4"]
    arguments = Namespace(models=["llama-8b"], recipes=recipes, capabilities=["9.0", "10.0"])
    pairs = [(recipe, capability) for _, recipe, capability in gpu_code._chosen(arguments)]
    assert pairs == [("bf16", "9.0"), ("block", "9.0"), ("bf16", "10.0"), ("mxfp8", "10.0")]
    assert (
        "left out on 9.0, where they do not run natively: mxfp8, mxfp4" in capsys.readouterr().out
    )


def test_a_figure_that_grew_by_four_percent_is_named():
    grown = copy.deepcopy(COMMITTED)
    row = next(row for row in grown["results"] if row["arm"] == "delayed")
    assert gpu_code.grown(COMMITTED, grown) == []
    for key in ("block_bytes", "weights_bytes", "launches"):
        row[key] = row[key] * 1.04 + 1
    lines = gpu_code.grown(COMMITTED, grown)
    assert [line.split(": ")[1].split(" ")[0] for line in lines] == [
        "block_bytes", "weights_bytes", "launches",
    ]  # fmt: skip
    assert all(line.startswith(f"{row['case']}, delayed: ") for line in lines)


def test_an_experts_gemms_are_planned_as_those_of_a_group_of_rows():
    """torch has a grouped GEMM for the output and the input's gradient, not for the weight's."""
    plan = plan_of("olmoe-7b", "rowwise", "9.0")
    experts = [layer for layer in plan.layers if layer.groups]
    assert len(experts) == 16 * 2
    assert {layer.plain_gemms for layer in experts} == {("wgrad",)}
    linears = [layer for layer in plan.layers if layer.fp8 and not layer.groups]
    assert {layer.plain_gemms for layer in linears} == {()}


MODELS = {768: "gpt2-124m", 1600: "gpt2-1.5b", 2048: "llama-1b", 4096: "llama-8b"}  # by width


def copying(model: str, recipe: str, capability: str) -> list[str]:
    """The names of the kernels that copy a tensor in the same order, once for each."""
    kernels = kernels_of(model, recipe, capability)
    return [kernel["name"] for kernel in kernels for _ in range(kernel["copies"])]


@pytest.mark.parametrize(
    "width", [1600, *(pytest.param(width, marks=pytest.mark.slow) for width in (768, 2048, 4096))]
)
@pytest.mark.full
def test_no_copy_in_delayed_scaling_changes_only_strides_or_the_name_of_a_dtype(width):
    """Inductor would pad rows of 1600 bytes, not those of the other widths."""
    assert copying(MODELS[width], "delayed", "9.0") == []


@pytest.mark.full
def test_no_block_casts_a_bias_and_no_allocation_counts_as_a_kernel():
    kernels = kernels_of("gpt2-1.5b", "delayed", "9.0")
    casts = [6 * size for size in (1600, 4800, 6400)]  # float32 is read and bf16 written
    assert not any(k["bytes"] in casts for k in kernels if k["part"] == "block")
    before = [kernel["name"] for kernel in kernels if kernel["part"] == "weights"]
    assert before.count("aten::_foreach_copy_") == 1  # of all biases and the head
    assert not any("empty" in name for name in before)


@pytest.mark.slow
@pytest.mark.parametrize("width", MODELS)
@pytest.mark.parametrize(
    ("recipe", "capability"), [("current", "9.0"), ("block", "9.0"), ("mxfp8", "10.0")]
)
def test_the_one_copy_of_other_recipes_joins_the_gradients_of_q_k_and_v(recipe, capability, width):
    """Attention gives three tensors, and a GEMM or a kernel reads one. The backward pass
    of RoPE joins them as it computes."""
    model = MODELS[width]
    names = copying(model, recipe, capability)
    assert len(names) == model.startswith("gpt2")
    assert all(re.search(r"\bcat\b", name) for name in names)


@pytest.mark.slow
def test_the_host_is_timed_in_what_launches_all_kernels_of_a_step():
    """One cast of all weights; a graph that takes scales and a graph that updates the history; the
    guard's two; and the launches of inductor's code and our operators in a block."""
    rows = told("gpt2-124m", "delayed", "9.0", "--host")
    launches = {row["part"]: row["launches"] for row in rows}
    backward = launches.pop("backward")
    kernels = kernels_of("gpt2-124m", "delayed", "9.0")
    block = [k["backward"] for k in kernels if k["part"] == "block" and k["kind"] != "attention"]
    assert launches == {"weights": 1, "amaxes": 2, "guard": 2, "forward": block.count(False)}
    # A narrow block's sums over rows need some kernels less.
    assert block.count(True) - 4 <= backward <= block.count(True)
    assert all(row["ms"] > 0 and row["calls"] > 0 for row in rows)


def test_no_committed_kernel_of_a_block_writes_byte_by_byte():
    narrow = {(row["case"], row["arm"]) for row in COMMITTED["results"] if row["narrow_bytes"]}
    # inductor writes the gradient of GELU's input, which no cast is fused with, two bytes at a time
    assert narrow <= {("gpt2-1.5b on 10.0", "nvfp4")}


def test_a_model_that_is_not_known_is_refused_before_anything_is_compiled(tmp_path):
    words = ["--models", "gpt2-124m,nope", "--out", str(tmp_path)]
    assert refusal(lambda: runner.run("gpu-code", words)).startswith("No model 'nope'")


# The scaled GEMMs of the code


def native(capability: str) -> list[str]:
    """The recipes with scaled GEMMs on such a GPU."""
    recipes = {*presets.training_recipes(), *gpu_code.RESIDUAL} - {"bf16"}
    return sorted(name for name in recipes if gpu_code.is_native(name, capability))


def check_gemms(model: str, recipes: list[str], capability: str) -> None:
    for recipe, gemms in gpu_code.scaled_gemms(model, recipes, capability).items():
        # A block has four linears. Weight gradients per row are float32, see scaled_gemm.
        bf16 = {"wgrad"} if recipe.startswith("rowwise") and capability != "9.0" else set()
        plan = resolve(load_recipe(recipe), machine_for(capability, te=False))
        (layer,) = plan.for_layers({"linear": (128, 128)}).layers
        bf16 |= {*layer.plain_gemms}
        assert len(gemms) == 4 * (3 - len(bf16)), recipe
        assert Counter(gemm["part"] for gemm in gemms).keys() == {"block"}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama-8b", "gpt2-124m"])
@pytest.mark.parametrize("capability", gpu_code.CAPABILITIES)
def test_torch_takes_every_scaled_gemm_of_every_recipe(model, capability):
    check_gemms(model, native(capability), capability)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def operand(rows: int, kind: ScaleLayout) -> Scaled:
    """An operand with a reduction over 1,024 elements, without values."""
    shapes = {
        ScaleLayout.PER_TENSOR: (), ScaleLayout.PER_ROW: (rows, 1), ScaleLayout.MX: (rows, 32),
        ScaleLayout.NV: (rows, 64), ScaleLayout.ROWS: (rows, 8),
        ScaleLayout.SQUARES: (rows // 128, 8),
    }  # fmt: skip
    dtypes = {ScaleLayout.MX: torch.float8_e8m0fnu, ScaleLayout.NV: torch.float8_e4m3fn}
    scales = meta(*shapes[kind], dtype=dtypes.get(kind, torch.float32))
    if kind is not ScaleLayout.PER_TENSOR:
        scales = pack_scales(scales, kind)
    if kind is ScaleLayout.NV:
        return Scaled(meta(rows, 512, dtype=torch.uint8), scales, kind, meta())
    return Scaled(meta(rows, 1024, dtype=torch.float8_e4m3fn), scales, kind)


LAYOUTS = [
    (ScaleLayout.PER_TENSOR, ScaleLayout.PER_TENSOR), (ScaleLayout.PER_ROW, ScaleLayout.PER_ROW),
    (ScaleLayout.MX, ScaleLayout.MX), (ScaleLayout.NV, ScaleLayout.NV),
    (ScaleLayout.ROWS, ScaleLayout.ROWS), (ScaleLayout.ROWS, ScaleLayout.SQUARES),
]  # fmt: skip
WRONG = {
    "one row less": lambda scales: scales[1:],
    "of another dtype": lambda scales: scales.to(torch.float16),
    "with gaps in memory": lambda scales: scales.repeat_interleave(2, -1)[..., ::2],
}


@pytest.mark.parametrize(
    ("first", "second"), [*LAYOUTS, (ScaleLayout.PER_ROW, ScaleLayout.PER_TENSOR)]
)
def test_torch_takes_the_scales_of_every_layout(first, second):
    from bench.gpu_code.gemms import ScaledGemms

    with ScaledGemms("block") as recorded:
        scaled_gemm(operand(256, first), operand(384, second), torch.bfloat16)
    (gemm,) = recorded.gemms
    assert gemm.operator == ("_scaled_mm" if first in LAYOUTS[1] + LAYOUTS[0] else "_scaled_mm_v2")


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(("first", "second"), LAYOUTS)
def test_scales_that_are_laid_out_otherwise_are_refused(first, second, wrong):
    from bench.gpu_code.gemms import RefusedGemmError, ScaledGemms

    for place in (0, 1):
        operands = [operand(256, first), operand(384, second)]
        scales = operands[place].inv_scale
        if scales.ndim == 0 and wrong != "of another dtype":
            scales = scales.expand(2, 2)
        operands[place] = operands[place]._replace(inv_scale=WRONG[wrong](scales))
        with ScaledGemms("block"), pytest.raises(RefusedGemmError):
            scaled_gemm(operands[0], operands[1], torch.bfloat16)


def test_scales_by_block_are_refused_where_torch_does_not_look_at_their_strides():
    from bench.gpu_code.gemms import RefusedGemmError, ScaledGemms

    a, b = (
        operand(1024, ScaleLayout.ROWS),
        operand(1024, ScaleLayout.SQUARES),
    )  # squares: of any order
    options: Any = {"scale_a": a.inv_scale, "scale_b": b.inv_scale, "out_dtype": torch.bfloat16}
    torch._scaled_mm(a.data, b.data.t(), **options)
    with ScaledGemms("block"), pytest.raises(RefusedGemmError, match="float32 scales by block"):
        torch._scaled_mm(a.data, b.data.t(), **options)
