"""Golden files: results of Transformer Engine to compare every machine with.

A golden file is a safetensors file with the inputs and TE's results; its metadata describes each
case as JSON. `fp8stack conform` recomputes casts, scales and histories;
tests/numerics/test_golden.py recomputes the modules as well.
"""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.gpu import references, te_modules
from bench.gpu.facts import facts, slug
from bench.gpu.references import matrix
from fp8stack.analysis.conform import histories
from fp8stack.analysis.conform import te_casts as te_raw
from fp8stack.analysis.conform.casts import SCALES, TE_QUANTIZERS
from fp8stack.analysis.conform.check_inputs import (
    DTYPES,
    FORMAT_NAMES,
    LinearOperands,
    spiky_steps,
    values_of,
)
from fp8stack.analysis.conform.checks import Context, Facts, Skipped
from fp8stack.analysis.conform.golden import FOLDER
from fp8stack.common.formats import AmaxAlgorithm, Quantizer
from fp8stack.precision import probe

STEPS = 50
# Windows that spikes leave, one that they never leave, and the shortest possible.
LENGTHS = (1, 4, 16, 1024)
HISTORY_SIZES = (16, 32, 16)  # rows, in, out
# Factors of x and dy in the steps of a module, so that its delayed scales change.
FACTORS = (1.0, 4.0, 0.5)
MODULE_HISTORY = 4
ROWS = 32
SIZES = {"Linear": (64, 32), "LayerNormLinear": (64, 32), "LayerNormMLP": (32, 64)}
MATRICES = (("ordinary", "bf16"), ("special", "bf16"), ("ordinary", "fp32"))

Tensors = dict[str, Tensor]
# The parameters of a case, including its "kind", and its tensors.
Captured = tuple[dict[str, Any], Tensors]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(out=FOLDER)
    add = parser.add_argument
    add(
        "--references", type=Path, metavar="TESTS", help="TE's Python references; its tests/pytorch"
    )
    add("--commit", default="unknown", help="of the checkout that TESTS is in")


def run(arguments: argparse.Namespace) -> None:
    """Capture a golden file into the folder. Exits with code 1 if a case could not be captured."""
    if arguments.references:
        description, tensors = references.captured(arguments.references, arguments.commit)
        version = description["versions"]["transformer-engine"]
        path = arguments.out / f"te-{version}-python-references.safetensors"
        write(path, description, tensors)
        print(f"written: {path}, {len(description['cases'])} cases, {path.stat().st_size} bytes")
        return
    context = Context(probe())
    if not context.hardware.has_te:
        reason = context.hardware.te_problem or "there is none here"
        print(f"python -m bench golden needs a CUDA GPU and Transformer Engine: {reason}.")
        raise SystemExit(2)
    result = captured(context, arguments.out)
    print(json.dumps(result, indent=2))
    if not result["holds"]:
        raise SystemExit(1)


def captured(context: Context, folder: Path) -> Facts:
    """Write a golden file. The check holds if every case that TE supports on this GPU was
    captured."""
    context.need_te("delayed")
    cases: list[dict[str, Any]] = []
    tensors = inputs()
    refused: dict[str, str] = {}
    failed: dict[str, str] = {}
    for name, capture in captures(context):
        try:
            case, case_tensors = capture()
        except Skipped as reason:
            refused[name] = str(reason)
        except Exception:
            failed[name] = traceback.format_exc()[-1500:]
        else:
            cases.append({"name": name, **case})
            tensors |= {f"{name}/{key}": value for key, value in case_tensors.items()}
    made_by = f"TE on {context.hardware.name}"
    description = {
        **facts(context.hardware), "made_by": made_by, "cases": cases, "refused": refused,
        "failed": failed,
    }  # fmt: skip
    version = str(context.hardware.te_version).partition("+")[0]  # a local build has a suffix
    path = folder / f"te-{version}-{slug(context.hardware.name)}.safetensors"
    write(path, description, tensors)
    return {
        "holds": not failed,
        "file": path.name,
        "bytes": path.stat().st_size,
        "captured": len(cases),
        "refused": refused,
        "not_captured": failed,
    }


def write(path: Path, description: dict[str, Any], tensors: Tensors) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    on_cpu = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    save_file(on_cpu, path, metadata={"description": json.dumps(description)})


def captures(context: Context) -> Iterator[tuple[str, Callable[[], Captured]]]:
    device = context.device
    for dtype in DTYPES:
        for format in FORMAT_NAMES:
            yield f"cast {dtype} {format}", partial(_cast, device, dtype, format)
    for length in LENGTHS:
        for algorithm in histories.ALGORITHMS:
            for margin in (0, 1):
                name = f"history {length} {algorithm} margin {margin}"
                yield name, partial(_history, device, length, algorithm, margin)
    for kind, dtype in MATRICES:
        for scaling in ("current", "block", "mxfp8"):
            for quantizer in TE_QUANTIZERS[scaling]:
                rules = quantizer.format, quantizer.block, quantizer.scale, f"eps {quantizer.eps:g}"
                name = f"{scaling} {kind} {dtype}: {', '.join(map(str, rules))}"
                yield name, partial(_quantizer, context, scaling, f"{kind} {dtype}", quantizer)
    for module in te_modules.MODULES:
        for dtype in DTYPES:
            for scaling in ("delayed", "current", "block", "mxfp8"):
                name = f"module {module} {dtype} {scaling}"
                yield name, partial(_module, context, module, dtype, scaling)


# Inputs


def inputs() -> Tensors:
    """Inputs that several cases share, named "inputs/..."."""
    tensors: Tensors = {f"inputs/table {dtype}": table(dtype) for dtype in DTYPES}
    steps = spiky_steps(STEPS, *HISTORY_SIZES)
    for field, series in zip(LinearOperands._fields, zip(*steps, strict=True), strict=True):
        tensors[f"inputs/steps {field}"] = torch.stack(list(series))
    for kind, dtype in MATRICES:
        tensors[f"inputs/matrix {kind} {dtype}"] = small_matrix(kind, dtype)
    for module in te_modules.MODULES:
        for key, value in module_inputs(module).items():
            tensors[f"inputs/{module} {key}"] = value
    return tensors


def table(dtype: str) -> Tensor:
    """Values to cast: [64, 64]."""
    values = values_of(dtype).flatten()
    return (values[::16] if dtype == "bf16" else values[:4096]).reshape(64, 64)


def small_matrix(kind: str, dtype: str) -> Tensor:
    """A matrix [160, 160] with blocks of all magnitudes, and the special values of its kind."""
    x = matrix(kind, dtype)
    return torch.cat([x[:160, :96], x[:160, 256:320]], dim=1)


def module_inputs(module: str) -> Tensors:
    """x, dy and the parameters of a TE module, by TE's names; bfloat16 for every dtype it runs
    in."""
    first, second = SIZES[module]
    generator = torch.Generator().manual_seed(7)
    if module == "LayerNormMLP":
        outputs, weights = first, {"fc1_": (second, first), "fc2_": (first, second)}
    else:
        outputs, weights = second, {"": (second, first)}
    shapes: dict[str, tuple[int, ...]] = {"x": (ROWS, first), "dy": (ROWS, outputs)}
    for prefix, (rows, columns) in weights.items():
        shapes |= {f"{prefix}weight": (rows, columns), f"{prefix}bias": (rows,)}
    if module != "Linear":
        shapes |= {"layer_norm_weight": (first,), "layer_norm_bias": (first,)}
    sizes = {"x": 1.0, "dy": 1e-3, "layer_norm_weight": 0.1}
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator) * sizes.get(name, 0.05)
        tensors[name] = (noise + (name == "layer_norm_weight")).bfloat16()
    return tensors


# Captures


def _cast(device: str, dtype: str, format: str) -> Captured:
    x = table(dtype).to(device)
    casts = [te_raw.cast(x, torch.tensor(scale), format, transpose=False) for scale in SCALES]
    tensors = {
        "scales": torch.tensor(SCALES),
        "bytes": torch.stack([quantized.rowwise for quantized, _ in casts]),
        "inverses": torch.stack([quantized.scales for quantized, _ in casts]),
        "amax": torch.stack([amax for _, amax in casts]),
    }
    return {"kind": "cast", "input": f"inputs/table {dtype}", "format": format}, tensors


def _history(device: str, length: int, algorithm: AmaxAlgorithm, margin: int) -> Captured:
    steps, scales = spiky_steps(STEPS, *HISTORY_SIZES), []
    for state in te_modules.te_states(device, steps, length, algorithm, margin):
        scales.append(torch.stack([state[f"{slot}.scale"] for slot in histories.FORMATS]))
    saved = [state[f"{slot}.amax_history"] for slot in histories.FORMATS]
    case = {"kind": "history", "length": length, "algorithm": algorithm, "margin": margin}
    return case, {"scales": torch.stack(scales), "histories": torch.stack(saved, dim=1)}


def _quantizer(context: Context, scaling: str, x: str, quantizer: Quantizer) -> Captured:
    context.need_te(scaling)
    quantized = te_raw.quantize(small_matrix(*x.split()).to(context.device), quantizer)
    tensors = {"bytes along": quantized.rowwise, "scales along": quantized.scales}
    # The other copy has the same bytes, transposed, with one scale per tensor or square blocks:
    # `fp8stack conform` compares it.
    if (
        not quantizer.turns
        and quantized.columnwise is not None
        and quantized.columnwise_scales is not None
    ):
        tensors |= {
            "bytes across": quantized.columnwise,
            "scales across": quantized.columnwise_scales,
        }
    return references.quantizer_case(quantizer, f"matrix {x}"), tensors


def _weight_bytes(layer: Any) -> dict[str, Tensor]:
    """The FP8 weight that a module with one GEMM keeps after a first micro-batch: "weight bytes"
    and, with one scale per tensor, "weight inverse"; empty if TE does not keep it in the module."""
    weight = getattr(layer, "_fp8_workspaces", {}).get("weight")
    data = getattr(weight, "_data", getattr(weight, "_rowwise_data", None))
    tensors = {} if data is None else {"weight bytes": data}
    inverse = getattr(weight, "_scale_inv", None)
    return tensors if inverse is None else tensors | {"weight inverse": inverse.reshape(())}


def _module(context: Context, kind: str, dtype: str, scaling: str) -> Captured:
    context.need_te(scaling)
    te_modules.forget()
    options = {"amax_history_len": MODULE_HISTORY} if scaling == "delayed" else {}
    recipe = te_modules.recipe(scaling, **options)
    layer = te_modules.module(kind, SIZES[kind], DTYPES[dtype], context.device)
    module_tensors = module_inputs(kind)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(module_tensors[name])
    x, dy = (module_tensors[name].to(context.device, DTYPES[dtype]) for name in ("x", "dy"))
    for factor in FACTORS:
        results = te_modules.run(layer, recipe, x * factor, dy * factor, first=True)
    if scaling == "delayed":
        for name, (scale, history) in te_modules.scales_and_histories(layer).items():
            results |= {f"scale {name}": scale, f"amax_history {name}": history}
    results |= _weight_bytes(layer)
    te_modules.forget()
    case = {"kind": "module", "module": kind, "dtype": dtype, "scaling": scaling}
    return {**case, "factors": FACTORS, "history_length": MODULE_HISTORY}, results
