"""`fp8stack bench roofline`: predictions for bf16 and each FP8 recipe, beside what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from fp8stack import presets
from fp8stack.benchmark.roofline import PARTS, Prediction, predict
from fp8stack.errors import UserError, quoted
from fp8stack.model.config import GPTConfig, padded_vocabulary
from fp8stack.precision import Hardware, Plan, load_recipe, probe, resolve
from fp8stack.precision.gpus import Gpu, find_gpu
from fp8stack.precision.hardware import machine_for
from fp8stack.precision.profit import Efficiency, achievable


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """All predictions for a model on a GPU, the one without FP8 first.

    `left_out` says of the other recipes why nothing is predicted; `measured_ms` is a step's median
    time by recipe, from the file `measured_in`.
    """

    model: str
    gpu: Gpu
    batch: int
    context: int
    ceiling: bool
    predictions: list[Prediction]
    left_out: dict[str, str]
    measured_ms: dict[str, float]
    measured_in: str = ""


def choose_gpu(capability: str | None, gpu: str | None) -> tuple[Gpu, Hardware]:
    """The GPU to predict for, and a machine that has it: by name, by capability, or this one.

    Raises:
        UserError: an unknown GPU or capability, two that contradict each other, or no GPU here.
    """
    if gpu is None and capability is None:
        here = probe()
        found = find_gpu(here.name)
        if found is None:
            raise UserError(f"No data on this machine's {here}. Give a GPU, such as --gpu H200.")
        return found, here
    machine = machine_for(capability, None, gpu=gpu)
    found = find_gpu(machine.name)
    if found is None:
        raise UserError(f"No data on a GPU of compute capability {capability}. Give --gpu.")
    return found, machine


def predict_all(
    model: str,
    config: GPTConfig,
    gpu: Gpu,
    hardware: Hardware,
    *,
    batch: int,
    context: int,
    ceiling: bool = False,
    measured: tuple[dict[tuple[str, str], float], str] = ({}, ""),
) -> Roofline:
    """Predictions for bf16 and for every FP8 recipe that `hardware` runs natively.

    With `ceiling`, the head is in FP8 too, and casts take no time.
    """
    if context > config.context:
        raise UserError(f"--context {context} is more than the {config.context} of model {model}.")
    predictions, left_out = [], {}
    fp8 = [name for name in presets.names("recipes") if load_recipe(name).is_fp8]
    for name in ["bf16", *fp8]:
        plan = _plan(config, name, hardware, ceiling)
        if plan.is_fp8 == (name != "bf16") and (plan.native or name == "bf16"):
            predictions.append(
                predict(config, plan, gpu, batch=batch, context=context, free_casts=ceiling)
            )
        else:
            left_out[name] = plan.reasons[0]
    times, path = measured
    own = {arm: ms for (of, arm), ms in times.items() if of == model}
    return Roofline(
        model=model,
        gpu=gpu,
        batch=batch,
        context=context,
        ceiling=ceiling,
        predictions=predictions,
        left_out=left_out,
        measured_ms=own,
        measured_in=path if own else "",
    )


def _plan(config: GPTConfig, name: str, hardware: Hardware, ceiling: bool) -> Plan:
    recipe = load_recipe(name)
    if ceiling and recipe.is_fp8:
        recipe = recipe.model_copy(update={"head": True})
    plan = resolve(recipe, hardware)
    shapes = config.linear_shapes(padded_vocabulary(config, plan.vocabulary_multiple))
    return plan.for_layers(shapes)


def find_results(gpu: Gpu) -> Path | None:
    """The `step.json` in a checkout's `bench/results/<machine>/` that was measured on `gpu`."""
    folder = Path(str(files("fp8stack"))).parent / "bench" / "results"
    for path in sorted(folder.glob("*/step.json")):
        if find_gpu(path.parent.name.replace("-", " ").replace("_", " ")) == gpu:
            return path
    return None


def read_results(path: Path) -> dict[tuple[str, str], float]:
    """The median milliseconds of a step by (model, arm), from the results of a step benchmark.

    Raises:
        UserError: the file cannot be read, or is no such file.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["results"]
        return {(str(r["model"]), str(r["arm"])): float(r["median_ms"]) for r in rows}
    except OSError as error:
        raise UserError(f"Cannot read {quoted(str(path))}: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{quoted(str(path))} has no results of a step benchmark: it should hold "
            '{"results": [{"model": ..., "arm": ..., "median_ms": ...}]}.'
        ) from error


def as_json(roofline: Roofline) -> dict[str, Any]:
    """The predictions as JSON data."""
    base = roofline.predictions[0].step_ms
    predictions = [
        asdict(prediction)
        | {"speedup": base / prediction.step_ms}
        | {"measured_ms": roofline.measured_ms.get(prediction.precision)}
        for prediction in roofline.predictions
    ]
    return asdict(roofline) | {
        "predicted": True,
        "assumed": asdict(achievable(roofline.gpu, Efficiency())),
        "predictions": predictions,
    }


def as_lines(roofline: Roofline) -> list[str]:
    """The predictions as lines of Markdown, with what they assume."""
    gpu, measured = roofline.gpu, roofline.measured_ms
    rates = achievable(gpu, Efficiency())
    bound = ", an upper bound: the head in FP8, casts that take no time" if roofline.ceiling else ""
    tokens = f"{roofline.batch} x {roofline.context} tokens per step"
    assumed_rates = [f"bf16 GEMMs {_share(rates.half, gpu.half_tflops)} TFLOP/s"]
    if gpu.fp8_tflops:
        assumed_rates.append(f"FP8 GEMMs {_share(rates.fp8, gpu.fp8_tflops)}")
    assumed_rates.append(f"attention {_share(rates.attention, gpu.half_tflops)}")
    assumed_rates.append(f"memory {_share(rates.memory, gpu.memory_tb_per_s, 1)} TB/s")
    lines = [
        f"Predicted, not measured: {roofline.model} on one {gpu.name}, {tokens}{bound}",
        f"Assumed of the peak ({gpu.source}): {', '.join(assumed_rates)}",
        "",
    ]
    heads = ["recipe", "FP8 layers", *PARTS, "step ms", "tokens/s", "MFU", "vs bf16"]
    heads += ["measured ms", "measured vs bf16"] if measured else []
    lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    first = roofline.predictions[0]
    for row in roofline.predictions:
        cells = [row.precision, f"{row.fp8_layers}/{row.layers}"]
        cells += [f"{100 * ms / row.step_ms:.0f} %" for ms in row.parts_ms.values()]
        cells += [f"{row.step_ms:.1f}", f"{row.tokens_per_s:,.0f}"]
        cells += [f"{100 * row.mfu:.0f} % of {row.peak_tflops:.0f}"]
        cells += [f"{first.step_ms / row.step_ms:.2f}"]
        if measured:
            cells += _measured_cells(measured, first.precision, row.precision)
        lines.append(f"| {' | '.join(cells)} |")
    lines += [f"{name}: no prediction, {why}" for name, why in roofline.left_out.items()]
    if measured:
        lines.append(f"measured: {roofline.measured_in}, at the batch and context given there")
    return lines


def _measured_cells(measured: Mapping[str, float], base: str, name: str) -> list[str]:
    if name not in measured:
        return ["-", "-"]
    ratio = f"{measured[base] / measured[name]:.2f}" if base in measured else "-"
    return [f"{measured[name]:.1f}", ratio]


def _share(rate: float, peak: float, digits: int = 0) -> str:
    return f"{rate / 1e12:.{digits}f} of {peak:g} ({100 * rate / 1e12 / peak:.0f} %)"
