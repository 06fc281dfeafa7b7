"""The code that torch generates for our models on a GPU, judged on a machine without one.

The blocks and the loss of a model are compiled for a pretended GPU. Counted is what their kernels
read and write in a pass of 8,192 tokens, each tensor once, GEMMs and attention left out; an H200
moves 4.1 TB/s of it at best. "Weights" are the kernels that run once per optimizer step, before its
first micro-batch, for one layer and the state of all. "Narrow stores" are those of kernels that
write some of their output byte by byte, which takes a GPU several times as long as writing 16 bytes
at once: of the variants that inductor's autotuner tries, the best one counts. Copies change only
strides, padding or the name of a dtype, forward and backward; the transposed copy of an operand is
not one of them. One is left where attention's gradients of q, k and v, three tensors, are joined
for a GEMM or a cast's kernel. Waits are copies and reads for which the host waits for the device.
torch's meta functions have taken the operands and scales of every scaled GEMM in the code.

The host's time is that of this machine's CPU, with launches that do nothing, in the fastest of 500
steps, for one micro-batch of a gpt2-1.5b that is very narrow, but has all its 192 linears. Weights
are cast; amaxes are moved into the history, and give scales; the guard judges the step; a compiled
block runs forward and backward, without what torch.compile does before and after its own code. A
call is one of `x.mul_(x)` of a single number, the fastest meanwhile. Launches are those of kernels
and CUDA graphs, without single operators of torch. A CPU casts the parameters of bf16 one by one; a
GPU does so in a few launches.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial

from bench.cells import failure, words
from bench.gpu_code import TOKENS, executed
from bench.gpu_code.process import told
from bench.report import Report, Row, heading, markdown, report_of
from fp8stack.common import presets
from fp8stack.common.errors import UserError
from fp8stack.model.config import load_config
from fp8stack.precision import load_recipe, resolve
from fp8stack.precision.hardware import machine_for

FOLDER = "gpu-code"
TERABYTES_PER_S = 4.1
"""The best copy rate of an H200 (4.8 TB/s), by published measurements."""
LARGEST = "llama-8b"
CAPABILITIES = ("9.0", "8.9", "10.0", "12.0")
RESIDUAL = [f"bench/recipes/{name}_bf16_residual.toml" for name in ("delayed", "current")]
HOST_MODEL = "gpt2-1.5b"
HOST_RECIPES = ("bf16", "delayed", "current", "block")
TOLERANCE = 0.03


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    help_text = "(default: all; capabilities but the first have the largest alone)"
    add("--models", type=words, default=[], metavar="A,B", help=help_text)
    add("--recipes", type=words, default=[], metavar="A,B", help="(default: all that run natively)")
    help_text = f"compute capabilities (default: {','.join(CAPABILITIES)})"
    add("--capabilities", type=words, default=[*CAPABILITIES], metavar="A,B", help=help_text)
    help_text = "run the code of small models, and compare their steps with eager ones, instead"
    add("--execute", action="store_true", help=help_text)
    add("--no-stores", action="store_true", help="leave the width of stores out: twice as fast")


def measure(arguments: argparse.Namespace) -> Report:
    """Compile every model in every recipe, each in a separate process."""
    stores = not arguments.no_stores
    for name in arguments.models:  # raises for an unknown name before anything is compiled
        load_config(name)
    for name in arguments.recipes:
        load_recipe(name)
    if arguments.execute:
        return executed.measure(arguments)
    rows: list[Row] = []
    for model, recipe, capability in _chosen(arguments):
        measured = partial(_row, model, recipe, capability, stores)
        rows += arguments.cells.rows(f"{model} on {capability}", [recipe], measured)
    host: list[Row] = []
    for recipe in HOST_RECIPES:
        if "9.0" in arguments.capabilities and recipe in (arguments.recipes or HOST_RECIPES):
            case = f"host of {HOST_MODEL}"
            host += arguments.cells.rows(case, [recipe], partial(_host_rows, case, recipe))
    settings = {"tokens": TOKENS, "terabytes_per_s": TERABYTES_PER_S}
    return report_of("cpu", settings, rows, ("triton",)) | {"host": host}


def _row(model: str, recipe: str, capability: str, stores: bool) -> list[Row]:
    case = f"{model} on {capability}"
    try:
        figures = summary(compiled(model, recipe, capability, stores=stores))
    except UserError as error:
        return [failure(case, recipe, error)]
    return [{"case": case, "arm": recipe, **figures}]


def _host_rows(case: str, recipe: str) -> list[Row]:
    try:
        times = told(HOST_MODEL, recipe, "9.0", "--host")
    except UserError as error:
        return [failure(case, recipe, error)]
    return [{"case": case, "arm": recipe, **time} for time in times]


def _chosen(arguments: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    for capability in arguments.capabilities:
        first = capability == arguments.capabilities[0]
        models = arguments.models or (presets.names("models") if first else [LARGEST])
        chosen = arguments.recipes or ["bf16", *presets.training_recipes(), *RESIDUAL]
        native = [recipe for recipe in dict.fromkeys(chosen) if is_native(recipe, capability)]
        if arguments.recipes and len(native) < len(chosen):
            missing = ", ".join(recipe for recipe in chosen if recipe not in native)
            print(
                f"left out on {capability}, where they do not run natively: {missing}", flush=True
            )
        for model in models:
            for recipe in native:
                yield model, recipe, capability


def is_native(name: str, capability: str) -> bool:
    """Whether such a GPU runs a low-precision recipe natively by torch alone. True for bf16, the
    baseline."""
    recipe = load_recipe(name)
    plan = resolve(recipe, machine_for(capability, te=False))
    return name == "bf16" or (recipe.is_fp8 and plan.is_fp8 and plan.native)


def compiled(model: str, recipe: str, capability: str, *, stores: bool = True) -> list[Row]:
    """The kernels of a model, see `blocks.Kernel`.

    Raises:
        UserError: torch could not compile it.
    """
    options = () if stores else ("--no-stores",)
    kernels: list[Row] = told(model, recipe, capability, *options)["kernels"]
    return kernels


def scaled_gemms(model: str, recipes: Sequence[str], capability: str) -> dict[str, list[Row]]:
    """The scaled GEMMs of a model's code in each recipe, see `gemms.ScaledGemm`.

    Raises:
        UserError: torch could not compile it, or its meta function refuses a GEMM.
    """
    gemms: dict[str, list[Row]] = told(model, ",".join(recipes), capability, "--gemms")
    return gemms


def summary(kernels: Sequence[Row]) -> Row:
    """The figures of a row: bytes and launches by part, copies and waits."""
    counted = [k for k in kernels if k["kind"] not in ("GEMM", "attention")]
    block = [k for k in counted if k["part"] == "block"]
    narrow = [k for k in block if 0 < k["store"] < 4 and k["bytes"] > 2**20]

    def moved(model_part: str) -> int:
        return sum(k["bytes"] for k in counted if k["part"] == model_part)

    return {
        **{f"{model_part}_bytes": moved(model_part) for model_part in ("block", "loss", "weights")},
        "block_ms": round(moved("block") / TERABYTES_PER_S / 1e9, 4),
        "launches": sum(k["part"] == "block" for k in kernels),
        "weight_launches": sum(k["part"] == "weights" for k in kernels),
        "copies": sum(k["copies"] for k in kernels),
        "waits": sum(k["waits"] for k in kernels),
        "narrow_bytes": sum(k["bytes"] for k in narrow),
    }


def grown(committed: Report, fresh: Report) -> list[str]:
    """A line for each figure that exceeds the committed one by more than 3 %."""
    before = {(row["case"], row["arm"]): row for row in committed["results"]}
    counts = ("launches", "weight_launches", "copies", "waits")
    keys = ("block_bytes", "loss_bytes", "weights_bytes", *counts)
    return [
        f"{row['case']}, {row['arm']}: {key} {row[key]:,}, committed {committed_row[key]:,}"
        for row in fresh["results"]
        if (committed_row := before.get((row["case"], row["arm"]))) is not None
        for key in keys
        if row[key] > committed_row[key] * (1 + TOLERANCE)
    ]


def table(data: Report) -> str:
    if data["scenario"] == executed.SCENARIO:
        return executed.table(data)
    text = (__doc__ or "").partition("\n\n")[2].strip()
    header = ["model on capability", "recipe", "block GB", "narrow stores, GB", "weights GB"]
    header += [
        "loss GB",
        "ms of a block at 4.1 TB/s",
        "its launches",
        "of the weights",
        "copies",
        "waits",
    ]
    gigabytes = ("block_bytes", "narrow_bytes", "weights_bytes", "loss_bytes")
    cells = [
        [
            row["case"],
            row["arm"],
            *(f"{row[key] / 1e9:.2f}" for key in gigabytes),
            f"{row['block_ms']:.2f}",
            *(str(row[key]) for key in ("launches", "weight_launches", "copies", "waits")),
        ]
        for row in data["results"]
    ]
    host = [
        [
            row["arm"],
            row["part"],
            f"{row['ms']:.3f}",
            f"{row['calls']:.0f}",
            str(row["launches"]),
        ]
        for row in data["host"]
    ]
    names = ["recipe", "part of a step", "ms of the host", "in calls", "launches"]
    hosts = "\n" + markdown(names, host) if host else ""
    return heading(data, "Code for GPUs", text) + markdown(header, cells) + hosts
