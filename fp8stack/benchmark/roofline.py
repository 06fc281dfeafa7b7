"""`fp8stack bench roofline`: how long a training step should take on a GPU, predicted part by part,
in bf16 and in each FP8 recipe, beside what was measured.

Every part's time is its work over a rate that is assumed: floating-point operations over a GEMM
rate, bytes over a bandwidth. Parts do not overlap, what one kernel can do is one kernel, launches
take no time, one micro-batch is one step.

M tokens of a step, T context, K in and N out features of a linear, D width, U and H the MLP's width
before and after its activation, G width of all keys (and of all values), V padded vocabulary.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from fp8stack import presets
from fp8stack.errors import UserError, quoted
from fp8stack.formats import OPERANDS, Quantizer, Quantizers
from fp8stack.model.config import GPTConfig, padded_vocabulary
from fp8stack.precision import Hardware, Plan, load_recipe, probe, resolve
from fp8stack.precision.gpus import Gpu, find_gpu
from fp8stack.precision.hardware import machine_for
from fp8stack.precision.profit import Efficiency, Rates, achievable, cast_bytes
from fp8stack.tables import markdown

PARTS = ("GEMMs", "attention", "casts", "norms, elementwise", "head and loss", "optimizer")


def gemm_s(rows: int, inner: int, columns: int, sizes: tuple[float, int], rates: Rates) -> float:
    """Seconds of one GEMM, [rows, inner] x [inner, columns].

    `2 rows inner columns` operations, or reading both operands and writing the output once,
    whichever takes longer. `sizes` is bytes per element of the operands and of the output.
    """
    operand, output = sizes
    flops = 2 * rows * inner * columns
    moved = operand * (rows * inner + inner * columns) + output * rows * columns
    return max(flops / (rates.fp8 if operand <= 1 else rates.half), moved / rates.memory)


def linear_s(
    tokens: int, shape: tuple[int, int], quantizers: Quantizers | None, rates: Rates
) -> float:
    """Seconds of a linear's three GEMMs: y = x w^T, dx = dy w, dw = dy^T x.

    Operands have their quantizers' bits, or 2 bytes in bf16, outputs 2 (bf16), dw of a GEMM whose
    operands are quantized 4 (float32).
    """
    inputs, outputs = shape
    shapes = {
        "fprop": (tokens, inputs, outputs),
        "dgrad": (tokens, outputs, inputs),
        "wgrad": (outputs, tokens, inputs),
    }
    seconds = 0.0
    for gemm, pair in (quantizers or Quantizers()).gemms.items():
        low = [q.element_bits / 8 for q in pair if isinstance(q, Quantizer)]
        operand = max(low) if len(low) == 2 else 2
        sizes = (operand, 4 if gemm == "wgrad" and len(low) == 2 else 2)
        seconds += gemm_s(*shapes[gemm], sizes, rates)
    return seconds


def attention_s(config: GPTConfig, batch: int, context: int, rates: Rates) -> float:
    """Seconds of causal attention that keeps no T x T matrix, all layers, both passes.

    Per token and layer, of 2 T D operations per matrix product the causal half is done: two
    products in the forward pass, five in the backward pass, which does one of the two again
    (FlashAttention, arXiv 2205.14135): 7 T D. Useful are six halves, 6 T D, as in
    `GPTConfig.flops_per_token`. Bytes, 2 per element: forward reads q, k, v, writes the output
    (2 D + 2 G), backward reads these and the output's gradient, writes those of q, k, v
    (4 D + 4 G). Whichever takes longer.
    """
    tokens = batch * context * config.layers
    groups = config.query_groups * config.head_width
    flops = 7 * context * config.width * tokens
    moved = 12 * (config.width + groups) * tokens
    return max(flops / rates.attention, moved / rates.memory)


PLAIN_CAST_BYTES = (4 + 2) + (2 + 4)
"""bf16 casts the float32 weight, and the gradient back: bytes per element of w."""


def casts_s(
    tokens: int, shape: tuple[int, int], quantizers: Quantizers | None, rates: Rates
) -> float:
    """Seconds of a linear's casts, by `cast_bytes`: M K elements of x, M N of dy and K N of w.

    `quantizers` is None for a layer in bf16, whose x and dy are in bf16 as they come.
    """
    inputs, outputs = shape
    if quantizers is None:
        return PLAIN_CAST_BYTES * inputs * outputs / rates.memory
    sizes = {"input": tokens * inputs, "grad_output": tokens * outputs, "weight": inputs * outputs}
    moved = sum(cast_bytes(quantizers, name) * sizes[name] for name in OPERANDS)
    return moved / rates.memory


def elementwise_s(config: GPTConfig, plan: Plan, tokens: int, rates: Rates) -> float:
    """Seconds of the embedding, norms, residual sums, activations, RoPE and bias gradients.

    Bytes per token. The residual stream is float32, branches bf16, and each residual sum is one
    kernel with the norm after it: forward 4 D + 2 D read, 4 D + 2 D written; backward 2 D + 4 D +
    4 D read (gradient of the norm's output, the stream, the stream's gradient), 4 D + 2 D written:
    28 D, 2 per block. The first norm has no sum before it: 20 D. The embedding: a row read and
    written, its gradient read and added to the table: 20 D. The activation: forward 2 U read, 2 H
    written, backward 2 H + 2 U read, 2 U written: 6 U + 4 H. RoPE and QK-norm on q and k, D + G
    elements: 4 each way, and 2 more for the backward pass of the norm. The gradient of a bias reads
    dy: 2 N.
    """
    width, groups = config.width, config.query_groups * config.head_width
    up, down = (plan.layer(f"blocks.0.mlp.{name}") for name in ("up", "down"))
    block = 2 * 28 * width + 6 * up.out_features + 4 * down.in_features
    if config.positions == "rope" or config.qk_norm:
        block += (10 if config.qk_norm else 8) * (width + groups)
    if config.bias:
        linears = sum(layer.out_features for layer in plan.layers if "." in layer.name)
        block += 2 * linears // config.layers
    moved = config.layers * block + 20 * width + 20 * width
    return moved * tokens / rates.memory


def loss_s(tokens: int, vocabulary: int, rates: Rates) -> float:
    """Seconds of the cross-entropy on V bf16 logits per token. They are read twice in the forward
    pass (the softmax's maximum, then its sum), and read and their gradient written in the backward
    pass: 8 V bytes."""
    return 8 * vocabulary * tokens / rates.memory


def optimizer_s(config: GPTConfig, rates: Rates) -> float:
    """Seconds of AdamW with clipping, all float32, 40 bytes per parameter. AdamW reads weight,
    gradient and two moments and writes all but the gradient: 28. Clipping reads the gradients for
    their norm, reads them again and writes them: 12."""
    return 40 * config.parameters() / rates.memory


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A step's time by part, in milliseconds, and what follows from it."""

    precision: str
    fp8_layers: int
    layers: int
    parts_ms: Mapping[str, float] = field(hash=False)
    step_ms: float
    tokens_per_s: float
    mfu: float  # useful operations per second over `peak_tflops`, which is `peak_of`'s
    peak_tflops: float
    peak_of: str


def predict(
    config: GPTConfig,
    plan: Plan,
    gpu: Gpu,
    *,
    batch: int,
    context: int,
    rates: Rates | None = None,
    free_casts: bool = False,
) -> Prediction:
    """The step of `batch` sequences of `context` tokens, as `plan` has it, layer by layer: its
    layers are decided, in native FP8 or none. `rates` are what the GPU is assumed to reach, by
    default `Efficiency` of its peaks; MFU divides by its peak. `free_casts` leaves out all casts,
    for a bound that no implementation passes."""
    rates = rates or achievable(gpu, Efficiency())
    tokens = batch * context
    seconds = dict.fromkeys(PARTS, 0.0)
    for layer in plan.layers:
        shape = (layer.in_features, layer.out_features)
        part = "head and loss" if layer.name == "lm_head" else "GEMMs"
        seconds[part] += linear_s(tokens, shape, layer.quantizers, rates)
        if not free_casts:
            seconds["casts"] += casts_s(tokens, shape, layer.quantizers, rates)
    vocabulary = plan.layer("lm_head").out_features
    seconds["attention"] = attention_s(config, batch, context, rates)
    seconds["norms, elementwise"] = elementwise_s(config, plan, tokens, rates)
    seconds["head and loss"] += loss_s(tokens, vocabulary, rates)
    seconds["optimizer"] = optimizer_s(config, rates)
    total = sum(seconds.values())
    in_fp8 = plan.runs_fp8 and gpu.fp8_tflops is not None
    peak = gpu.fp8_tflops if in_fp8 and gpu.fp8_tflops else gpu.half_tflops
    return Prediction(
        precision=plan.precision,
        fp8_layers=sum(layer.fp8 for layer in plan.layers),
        layers=len(plan.layers),
        parts_ms={name: 1000 * part for name, part in seconds.items()},
        step_ms=1000 * total,
        tokens_per_s=tokens / total,
        mfu=config.flops_per_token(context) * tokens / total / (peak * 1e12),
        peak_tflops=peak,
        peak_of="fp8" if in_fp8 else "half",
    )


# All recipes, and the table


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """All predictions for a model on a GPU, the one without FP8 first."""

    model: str
    gpu: Gpu
    batch: int
    context: int
    ceiling: bool
    predictions: list[Prediction]
    left_out: dict[str, str]  # why nothing is predicted of other recipes
    measured_ms: dict[str, float]  # a step's median time by recipe
    measured_in: str = ""  # the file that it is from


def choose_gpu(capability: str | None, gpu: str | None) -> tuple[Gpu, Hardware]:
    """The GPU to predict for, and a machine that has it: by name, by capability, or this one.
    Raises a UserError for one that is unknown, two that contradict each other, or no GPU here."""
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
    """Predictions for bf16 and for every FP8 recipe that `hardware` runs natively. With `ceiling`,
    the head is in FP8 too, and casts take no time."""
    if context > config.context:
        raise UserError(f"--context {context} is more than the {config.context} of model {model}.")
    predictions, left_out = [], {}
    fp8 = [name for name in presets.names("recipes") if load_recipe(name).is_fp8]
    for name in ["bf16", *fp8]:
        plan = _plan(config, name, hardware, ceiling)
        if plan.is_fp8 == (name != "bf16") and (plan.native or name == "bf16"):
            sizes: dict[str, Any] = {"batch": batch, "context": context}
            predictions.append(predict(config, plan, gpu, **sizes, free_casts=ceiling))
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
    Raises a UserError if the file cannot be read, or is no such file."""
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
    base, measured = roofline.predictions[0].step_ms, roofline.measured_ms
    predictions = [
        asdict(one) | {"speedup": base / one.step_ms, "measured_ms": measured.get(one.precision)}
        for one in roofline.predictions
    ]
    assumed = asdict(achievable(roofline.gpu, Efficiency()))
    told = {"predicted": True, "assumed": assumed, "predictions": predictions}
    return asdict(roofline) | told


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
    first, rows = roofline.predictions[0], []
    for row in roofline.predictions:
        cells = [row.precision, f"{row.fp8_layers}/{row.layers}"]
        cells += [f"{100 * ms / row.step_ms:.0f} %" for ms in row.parts_ms.values()]
        cells += [f"{row.step_ms:.1f}", f"{row.tokens_per_s:,.0f}"]
        cells += [f"{100 * row.mfu:.0f} % of {row.peak_tflops:.0f}"]
        cells += [f"{first.step_ms / row.step_ms:.2f}"]
        if measured:
            ms, base = measured.get(row.precision), measured.get(first.precision)
            cells += ["-" if ms is None else f"{ms:.1f}"]
            cells += ["-" if ms is None or base is None else f"{base / ms:.2f}"]
        rows.append(cells)
    lines += markdown(heads, rows)
    said: dict[str, list[str]] = {}
    for name, why in roofline.left_out.items():
        said.setdefault(why, []).append(name)
    lines += [f"{', '.join(names)}: no prediction, {why}" for why, names in said.items()]
    if measured:
        lines.append(f"measured: {roofline.measured_in}, at the batch and context given there")
    return lines


def _share(rate: float, peak: float, digits: int = 0) -> str:
    return f"{rate / 1e12:.{digits}f} of {peak:g} ({100 * rate / 1e12 / peak:.0f} %)"
