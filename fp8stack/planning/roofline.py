"""The prediction of `fp8stack bench roofline`: the time of a training step on a GPU, part by part,
in bf16 and in each FP8 recipe, with measured steps if there are any.

A trace of the model has the operators of a step, with the bytes that they read and write;
`ideal_work` decides which of these bytes have to move. The time of a part is its work over an
assumed rate: operations over a GEMM rate, bytes over a bandwidth. Parts do not overlap, launches
take no time, one micro-batch is one step.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from fp8stack.common import presets
from fp8stack.common.errors import UserError, quoted
from fp8stack.common.io import parse_json
from fp8stack.common.tables import markdown
from fp8stack.model.config import GPTConfig, plan_for
from fp8stack.model.gpt import Recompute
from fp8stack.planning.roofline_trace import OperatorTrace, Rate, Slice, trace_operators
from fp8stack.planning.trace import kinds_of
from fp8stack.precision import Hardware, Plan, load_recipe
from fp8stack.precision.fp8_attention import FP8_ATTENTION
from fp8stack.precision.gpus import Gpu, find_gpu
from fp8stack.precision.hardware import machine_for
from fp8stack.precision.profit import Rates, achievable

LINEARS = ("qkv", "output", "up", "down", "lm_head")
PARTS = ("GEMMs", "attention", "casts", "norms, elementwise", "head and loss", "optimizer")
RECOMPUTED: dict[Recompute, tuple[str, ...]] = {
    "selective": ("norms, elementwise",),
    "block": ("GEMMs", "attention", "norms, elementwise"),
}
"""The parts of the forward pass that activation checkpointing computes again."""


@dataclass(frozen=True, kw_only=True)
class KernelWork:
    """The work of a kernel for one of `PARTS`, its category: bytes that it moves and, if it
    multiplies matrices, operations at one of the rates."""

    category: str
    moved: int
    flops: int = 0
    rate: Rate = "half"

    def seconds(self, rates: Rates) -> float:
        """Its operations or its bytes, whichever takes longer."""
        rate: float = getattr(rates, self.rate)
        bandwidth = rates.casts if self.category == "casts" else rates.memory
        return max(self.flops / rate, self.moved / bandwidth)


_Kernel = tuple[int, int]
"""The number of kernels that it waits for, one after the other, and the place of the only operator
in it if that multiplies, else -1."""


def ideal_work(traced: OperatorTrace) -> Iterator[KernelWork]:
    """The work of a traced pass on an ideal GPU.

    Each GEMM and each attention is a kernel. All operators that wait for equally many of them, one
    after the other, are one kernel together: it reads once what other kernels wrote, and writes
    once what others need. An operator that needs a number that follows from a whole tensor, such
    as a scale of current scaling, waits for that number as well. Values of the forward pass that
    only such a kernel of the backward pass needs are not written: it computes them again, from
    values in memory.
    """
    operators = traced.operators
    writer = {value: at for at, operator in enumerate(operators) for value in operator.writes}
    readers: dict[int, list[int]] = {}
    for at, operator in enumerate(operators):
        for piece in operator.reads:
            readers.setdefault(piece.value, []).append(at)
    kernels = _kernels(traced)
    # Operators of the backward pass that need no gradient start to compute a value again.
    forward = max(level for at, (level, _) in enumerate(kernels) if not operators[at].backward)

    def in_memory(value: int) -> bool:
        if value not in writer or value in traced.lasting:
            return True
        at = writer[value]
        stays = operators[at].multiplies or kernels[at][0] > forward
        outside = (operators[x] for x in readers.get(value, ()) if kernels[x] != kernels[at])
        return any(stays or reader.multiplies or not reader.backward for reader in outside)

    def loads(at: int, kernel: _Kernel) -> Iterator[Slice]:
        """Yield the slices that an operator, run in a kernel, reads from memory."""
        for piece in operators[at].reads:
            source = writer.get(piece.value)
            if source is None or (kernels[source] != kernel and in_memory(piece.value)):
                yield piece
            elif kernels[source] != kernel:
                yield from loads(source, kernel)

    categories = _categories(traced, writer)
    moved = {kernel: Counter[str]() for kernel in kernels}
    loaded: dict[tuple[_Kernel, int], tuple[set[Slice], set[str]]] = {}
    for at, (operator, kernel) in enumerate(zip(operators, kernels, strict=True)):
        for value in filter(in_memory, operator.writes):
            users = {categories[x] for x in readers.get(value, ()) if kernels[x] != kernel}
            for_casts = users == {"casts"} and not operator.multiplies
            moved[kernel]["casts" if for_casts else categories[at]] += traced.values[value]
        for piece in loads(at, kernel):
            pieces, users = loaded.setdefault((kernel, piece.value), (set(), set()))
            pieces.add(piece)
            users.add(categories[at])
    for (kernel, value), (pieces, users) in loaded.items():
        size = min(traced.values[value], sum(piece.bytes for piece in pieces))
        moved[kernel][max(users, key=PARTS.index)] += size  # casts count only reads of their own
    for (_, at), sizes in moved.items():
        multiplied: Any = (
            {} if at < 0 else {"flops": operators[at].flops, "rate": operators[at].rate}
        )
        for category, size in sizes.items():
            yield KernelWork(category=category, moved=size, **multiplied)


def _kernels(traced: OperatorTrace) -> list[_Kernel]:
    """The kernel that each operator runs in."""
    waits: dict[int, int] = {}  # kernels to wait for, by value
    kernels: list[_Kernel] = []
    for at, operator in enumerate(traced.operators):
        level = max((waits.get(piece.value, 0) for piece in operator.reads), default=0)
        kernels.append((level, at if operator.multiplies else -1))
        ends = operator.multiplies or operator.reduces
        waits |= dict.fromkeys(operator.writes, level + ends)
    return kernels


def _categories(traced: OperatorTrace, writer: Mapping[int, int]) -> list[str]:
    """The category, among `PARTS`, of each operator. Casts are operators on weights before the
    first layer, and operators of linears other than GEMMs, except sums and the rounding of
    activations and their gradients to two bytes."""
    categories: list[str] = []
    for operator in traced.operators:
        module = operator.path.rpartition(".")[2]
        sources = [writer[piece.value] for piece in operator.reads if piece.value in writer]
        of_weights = not operator.backward and {categories[at] for at in sources} <= {"casts"}
        of_weights |= not traced.lasting.isdisjoint(operator.writes)
        gemms = (x for at in sources if (x := traced.operators[at]).multiplies)
        of_output = any(gemm.path == operator.path for gemm in gemms)
        rounds = operator.name == "aten::_to_copy" and (operator.element_bytes == 2 or of_output)
        category = "norms, elementwise"
        if operator.rate in ("attention", "fp8_attention"):
            category = "attention"
        elif operator.multiplies:
            category = "head and loss" if module == "lm_head" else "GEMMs"
        elif module == "loss":
            category = "head and loss"
        elif operator.name == "aten::sum" or (rounds and not of_weights):
            pass
        elif module in LINEARS or (module == "" and of_weights and not operator.backward):
            category = "casts"
        categories.append(category)
    return categories


def traced_work(
    config: GPTConfig, plan: Plan, batch: int, context: int, backward: bool = True
) -> Iterator[tuple[int, KernelWork]]:
    """Yield the work of a pass, and how often it is done: the work of a model with a block of each
    kind, and for each further block the work that one more of its kind adds."""
    kinds = kinds_of(plan)
    firsts = tuple(first for first, *_ in kinds)
    traces = [(1 + len(kinds) - sum(map(len, kinds)), firsts)]
    traces += [(len(kind) - 1, tuple(sorted((*firsts, kind[0])))) for kind in kinds if kind[1:]]
    for times, blocks in traces:
        sizes = config, plan, batch, context
        traced = trace_operators(*sizes, blocks=blocks, backward=backward)
        yield from ((times, work) for work in ideal_work(traced))


def optimizer_s(config: GPTConfig, rates: Rates) -> float:
    """Seconds of AdamW with clipping, all float32, 36 bytes per parameter. The gradients are read
    for their norm: 4. AdamW reads weight, gradient and two moments, scales the gradient as it takes
    it, and writes all four: 32."""
    return 36 * config.parameters() / rates.memory


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
    checkpointing: Recompute = "none",
) -> Prediction:
    """Predict a step of `batch` sequences of `context` tokens. The layers of `plan` are decided,
    and no FP8 of it is emulated. What `checkpointing` computes again counts, but for casts. `rates`
    are the rates that the GPU is assumed to reach, by default `achievable` ones; MFU divides by its
    peak. `free_casts` leaves out casts, for a bound that no implementation passes."""
    rates = rates or achievable(gpu, plan.compute_dtype)
    if plan.recipe.attention == "fp32":
        rates = replace(rates, attention=achievable(gpu, "fp32").attention)
    if not plan.runs_fp8:  # its casts write one copy and no amax, like any other kernel
        rates = replace(rates, casts=rates.memory)
    tokens = batch * context
    seconds = dict.fromkeys(PARTS, 0.0)
    for times, work in traced_work(config, plan, batch, context):
        seconds[work.category] += times * work.seconds(rates)
    if checkpointing != "none":
        for times, work in traced_work(config, plan, batch, context, backward=False):
            if work.category in RECOMPUTED[checkpointing]:
                seconds[work.category] += times * work.seconds(rates)
    if free_casts:
        seconds["casts"] = 0.0
    seconds["optimizer"] = optimizer_s(config, rates)
    total = sum(seconds.values())
    peak, peak_of = gpu.peak(plan.units if plan.runs_fp8 else plan.compute_dtype)
    if peak is None:
        peak, peak_of = gpu.half_tflops, "half"
    return Prediction(
        precision=plan.precision,
        fp8_layers=sum(layer.fp8 for layer in plan.layers),
        layers=len(plan.layers),
        parts_ms={name: 1000 * duration for name, duration in seconds.items()},
        step_ms=1000 * total,
        tokens_per_s=tokens / total,
        mfu=config.flops_per_token(context) * tokens / total / (peak * 1e12),
        peak_tflops=peak,
        peak_of=peak_of,
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
    machine = machine_for(capability, None, gpu=gpu)
    if (known_gpu := find_gpu(machine.name)) is not None:
        return known_gpu, machine
    if capability is None:
        raise UserError(f"No data on this machine's {machine}. Give a GPU, such as --gpu H200.")
    raise UserError(f"No data on a GPU of compute capability {capability}. Give --gpu.")


def predict_all(
    model: str,
    config: GPTConfig,
    gpu: Gpu,
    hardware: Hardware,
    *,
    batch: int,
    context: int,
    ceiling: bool = False,
    results: Path | None = None,
) -> Roofline:
    """Predict a step in bf16 (fp16 on a GPU without it) and in every FP8 recipe that `hardware`
    runs natively. With `ceiling`, the head is in FP8 too, and casts take no time. `results` of a
    step benchmark are added. Raises a UserError as `measured_steps` does."""
    if context > config.context:
        raise UserError(f"--context {context} is more than the {config.context} of model {model}.")
    measured = measured_steps(results, model) if results else {}
    predictions, left_out = [], {}
    fp8 = [name for name in presets.training_recipes() if load_recipe(name).is_fp8]
    sizes: dict[str, Any] = {"batch": batch, "context": context}
    for name in ["bf16", *fp8]:
        recipe = load_recipe(name, {"head": True} if ceiling and name != "bf16" else {})
        plan = plan_for(config, recipe, hardware)
        emulated = [layer.sentence for layer in plan.emulated_layers]
        native = plan.native and not emulated
        if plan.is_fp8 == (name != "bf16") and (native or name == "bf16"):
            predictions.append(predict(config, plan, gpu, **sizes, free_casts=ceiling))
        else:
            left_out[name] = emulated[0] if plan.native and emulated else plan.reasons[0]
    return Roofline(
        model=model,
        gpu=gpu,
        **sizes,
        ceiling=ceiling,
        predictions=predictions,
        left_out=left_out,
        measured_ms=measured,
        measured_in=str(results) if measured else "",
    )


def find_results(gpu: Gpu) -> Path | None:
    """The `step.json` in a checkout's `bench/results/<machine>/` that was measured on `gpu`."""
    folder = Path(str(files("fp8stack"))).parent / "bench" / "results"
    for path in sorted(folder.glob("*/step.json")):
        if find_gpu(path.parent.name.replace("-", " ").replace("_", " ")) == gpu:
            return path
    return None


def measured_steps(path: Path, model: str) -> dict[str, float]:
    """The median milliseconds of a model's step by arm, from the results of a step benchmark.
    Raises a UserError if the file cannot be read, or is no such file."""
    try:
        rows = parse_json(path.read_bytes(), str(path))["results"]
        steps = [(str(r["model"]), str(r["arm"]), float(r["median_ms"])) for r in rows]
        return {arm: ms for name, arm, ms in steps if name == model}
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
        asdict(row) | {"speedup": base / row.step_ms, "measured_ms": measured.get(row.precision)}
        for row in roofline.predictions
    ]
    assumed = {"predicted": True, "assumed": asdict(achievable(roofline.gpu))}
    return asdict(roofline) | assumed | {"predictions": predictions}


def as_lines(roofline: Roofline) -> list[str]:
    """The predictions as lines of Markdown, with their assumptions."""
    gpu, first = roofline.gpu, roofline.predictions[0].precision
    bound = ", an upper bound: the head in FP8, casts that take no time" if roofline.ceiling else ""
    sources = "; rates ".join(filter(None, (gpu.source, achievable(gpu).source)))
    tokens = f"{roofline.batch} x {roofline.context} tokens per step"
    heads = ["recipe", "FP8 layers", *PARTS, "step ms", "tokens/s", "MFU", f"vs {first}"]
    heads += ["measured ms", f"measured vs {first}"] if roofline.measured_ms else []
    lines = [
        f"Predicted, not measured: {roofline.model} on one {gpu.name}, {tokens}{bound}",
        f"Assumed of the peak ({sources}): {', '.join(_assumed(gpu, first))}",
        "",
        *markdown(heads, (_cells(row, roofline) for row in roofline.predictions)),
    ]
    left_out: dict[str, list[str]] = {}
    for name, reason in roofline.left_out.items():
        left_out.setdefault(reason, []).append(name)
    lines += [f"{', '.join(names)}: no prediction, {reason}" for reason, names in left_out.items()]
    if roofline.measured_ms:
        lines.append(f"measured: {roofline.measured_in}, at the batch and context given there")
    return lines


def _assumed(gpu: Gpu, half: str) -> list[str]:
    """The assumed rates of a GPU, in words; `half` is its format of two bytes."""
    rates = achievable(gpu)
    low = (("FP8", rates.fp8, gpu.fp8_tflops), ("FP4", rates.fp4, gpu.fp4_tflops))
    attention = f"attention {_share(rates.attention, gpu.half_tflops)}"
    if gpu.fp8_tflops and any(kind.gpus.have(gpu.capability) for kind in FP8_ATTENTION.values()):
        attention += f", in FP8 {_share(rates.fp8_attention, gpu.fp8_tflops)}"
    return [
        f"{half} GEMMs {_share(rates.half, gpu.half_tflops)} TFLOP/s",
        *(f"{name} GEMMs {_share(rate, peak)}" for name, rate, peak in low if peak),
        attention,
        f"memory {_share(rates.memory, gpu.memory_tb_per_s, 1)} TB/s",
        *([f"casts {rates.casts / 1e12:.2f} TB/s"] if rates.casts != rates.memory else []),
    ]


def _cells(row: Prediction, roofline: Roofline) -> list[str]:
    """A row of the table."""
    first, measured = roofline.predictions[0], roofline.measured_ms
    cells = [
        row.precision,
        f"{row.fp8_layers}/{row.layers}",
        *(f"{100 * ms / row.step_ms:.0f} %" for ms in row.parts_ms.values()),
        f"{row.step_ms:.1f}",
        f"{row.tokens_per_s:,.0f}",
        f"{100 * row.mfu:.0f} % of {row.peak_tflops:.0f}",
        f"{first.step_ms / row.step_ms:.2f}",
    ]
    if measured:
        ms, base = measured.get(row.precision), measured.get(first.precision)
        cells += ["-" if ms is None else f"{ms:.1f}"]
        cells += ["-" if ms is None or base is None else f"{base / ms:.2f}"]
    return cells


def _share(rate: float, peak: float, digits: int = 0) -> str:
    return f"{rate / 1e12:.{digits}f} of {peak:g} ({100 * rate / 1e12 / peak:.0f} %)"
