"""`fp8stack bench roofline`: how long a training step should take on a GPU, predicted part by part,
in bf16 and in each FP8 recipe, beside what was measured.

A trace of the model says which operators a step has and what they read and write; `ideal_work` says
which of it has to move. A part's time is its work over a rate that is assumed: operations over a
GEMM rate, bytes over a bandwidth. Parts do not overlap, launches take no time, one micro-batch is
one step.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from fp8stack import presets
from fp8stack.errors import UserError, quoted
from fp8stack.io import parse_json
from fp8stack.model.config import GPTConfig, plan_for
from fp8stack.model.meta import kinds_of
from fp8stack.model.trace import Part, Rate, Trace, trace
from fp8stack.precision import Hardware, Plan, load_recipe
from fp8stack.precision.attention import FP8_ATTENTION
from fp8stack.precision.gpus import Gpu, find_gpu
from fp8stack.precision.hardware import machine_for
from fp8stack.precision.profit import Rates, achievable
from fp8stack.tables import markdown

LINEARS = ("qkv", "output", "up", "down", "lm_head")
PARTS = ("GEMMs", "attention", "casts", "norms, elementwise", "head and loss", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a kernel does for one of `PARTS`: bytes that it moves and, if it multiplies matrices,
    operations at one of the rates."""

    part: str
    moved: int
    flops: int = 0
    rate: Rate = "half"

    def seconds(self, rates: Rates) -> float:
        """Its operations or its bytes, whichever takes longer."""
        rate: float = getattr(rates, self.rate)
        return max(self.flops / rate, self.moved / rates.memory)


_Where = tuple[int, int]
"""A kernel: how many others it waits for, and the place of the operator that it is alone, or -1."""


def ideal_work(made: Trace) -> Iterator[Work]:
    """What a traced pass is for an ideal GPU.

    A GEMM is a kernel, and attention. All that waits for equally many of them, one after the other,
    is one kernel together: it reads once what others gave, and writes once what others need. What
    needs a number that follows from a whole tensor, as scales of current scaling do, waits for that
    as well. What only the backward pass needs of such a kernel of the forward pass is not written:
    it is made again, of what is in memory.
    """
    operators = made.operators
    maker = {number: at for at, one in enumerate(operators) for number in one.writes}
    readers: dict[int, list[int]] = {}
    waits: dict[int, int] = {}  # for a value
    kernel: list[_Where] = []  # of an operator
    for at, one in enumerate(operators):
        level = max((waits.get(part.value, 0) for part in one.reads), default=0)
        kernel.append((level, at if one.multiplies else -1))
        waits |= dict.fromkeys(one.writes, level + (one.multiplies or one.reduces))
        for part in one.reads:
            readers.setdefault(part.value, []).append(at)
    # Some operators of the backward pass need no gradient: they begin to make something again.
    forward = max(
        level for (level, _), one in zip(kernel, operators, strict=True) if not one.backward
    )

    def in_memory(value: int) -> bool:
        if value not in maker or value in made.lasting:
            return True
        own = maker[value]
        others = [operators[x] for x in readers.get(value, ()) if kernel[x] != kernel[own]]
        stays = operators[own].multiplies or kernel[own][0] > forward
        return any(stays or one.multiplies or not one.backward for one in others)

    def read(at: int, where: _Where) -> Iterator[Part]:
        """What an operator, run in a kernel, reads from memory."""
        for part in operators[at].reads:
            own = maker.get(part.value)
            if own is None or (kernel[own] != where and in_memory(part.value)):
                yield part
            elif kernel[own] != where:
                yield from read(own, where)

    parts = _parts(made, maker)
    moved = {where: Counter[str]() for where in kernel}
    found: dict[tuple[_Where, int], tuple[set[Part], set[str]]] = {}
    for at, one in enumerate(operators):
        for value in filter(in_memory, one.writes):
            by = {parts[x] for x in readers.get(value, ()) if kernel[x] != kernel[at]}
            for_casts = by == {"casts"} and not one.multiplies
            moved[kernel[at]]["casts" if for_casts else parts[at]] += made.values[value]
        for part in read(at, kernel[at]):
            pieces, told = found.setdefault((kernel[at], part.value), (set(), set()))
            pieces.add(part)
            told.add(parts[at])
    for (where, value), (pieces, told) in found.items():
        size = min(made.values[value], sum(part.bytes for part in pieces))
        moved[where][max(told, key=PARTS.index)] += size  # a cast reads what nothing else does
    for (_, alone), sizes in moved.items():
        one = operators[alone]
        more: Any = {} if alone < 0 else {"flops": one.flops, "rate": one.rate}
        for name, size in sizes.items():
            yield Work(part=name, moved=size, **more)


def _parts(of: Trace, maker: Mapping[int, int]) -> list[str]:
    """To which of `PARTS` each operator belongs. Casts are what is done with weights before the
    first layer, and what linears do beside their GEMMs, but for sums, and for the rounding to two
    bytes of what is no weight and the gradient of that."""
    parts: list[str] = []
    for one in of.operators:
        path = one.path.rpartition(".")[2]
        made = [maker[part.value] for part in one.reads if part.value in maker]
        of_weights = not one.backward and {parts[at] for at in made} <= {"casts"}
        of_weights |= not of.lasting.isdisjoint(one.writes)
        makers = (of.operators[at] for at in made)
        back = any(x.multiplies and x.path == one.path for x in makers)
        rounds = one.name == "aten::_to_copy" and (one.element_bytes == 2 or back)
        if one.multiplies:
            part = "head and loss" if path == "lm_head" else "GEMMs"
            parts.append("attention" if one.rate in ("attention", "fp8_attention") else part)
        elif path == "loss":
            parts.append("head and loss")
        elif one.name == "aten::sum" or (rounds and not of_weights):
            parts.append("norms, elementwise")
        elif path in LINEARS or (path == "" and of_weights and not one.backward):
            parts.append("casts")
        else:
            parts.append("norms, elementwise")
    return parts


def traced_work(
    config: GPTConfig, plan: Plan, batch: int, context: int
) -> Iterator[tuple[int, Work]]:
    """The work of a pass, and how often it is done: that of a model with a block of each kind, and
    for each other block what one more of its kind adds."""
    kinds = kinds_of(plan)
    firsts = [first for first, *_ in kinds]
    traces = [(1 + len(kinds) - sum(map(len, kinds)), firsts)]
    traces += [(len(kind) - 1, [*firsts, kind[0]]) for kind in kinds if len(kind) > 1]
    for times, blocks in traces:
        made = trace(config, plan, batch, context, blocks=tuple(blocks), backward=True)
        yield from ((times, work) for work in ideal_work(made))


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
) -> Prediction:
    """The step of `batch` sequences of `context` tokens, as `plan` has it, layer by layer: its
    layers are decided, in native FP8 or none. `rates` are what the GPU is assumed to reach, by
    default what is `achievable`; MFU divides by its peak. `free_casts` leaves out all casts,
    for a bound that no implementation passes."""
    rates = rates or achievable(gpu)
    tokens = batch * context
    seconds = dict.fromkeys(PARTS, 0.0)
    for times, work in traced_work(config, plan, batch, context):
        seconds[work.part] += times * work.seconds(rates)
    if free_casts:
        seconds["casts"] = 0.0
    seconds["optimizer"] = optimizer_s(config, rates)
    total = sum(seconds.values())
    peak, peak_of = gpu.peak(plan.units if plan.runs_fp8 else "half")
    if peak is None:
        peak, peak_of = gpu.half_tflops, "half"
    return Prediction(
        precision=plan.precision,
        fp8_layers=sum(layer.fp8 for layer in plan.layers),
        layers=len(plan.layers),
        parts_ms={name: 1000 * part for name, part in seconds.items()},
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
    if (found := find_gpu(machine.name)) is not None:
        return found, machine
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
    """Predictions for bf16 (fp16 on a GPU without it) and for every FP8 recipe that `hardware` runs
    natively. With `ceiling`, the head is in FP8 too, and casts take no time. `results` of a step
    benchmark stand beside. Raises what `measured_steps` raises."""
    if context > config.context:
        raise UserError(f"--context {context} is more than the {config.context} of model {model}.")
    predictions, left_out = [], {}
    fp8 = [name for name in presets.names("recipes") if load_recipe(name).is_fp8]
    sizes: dict[str, Any] = {"batch": batch, "context": context}
    for name in ["bf16", *fp8]:
        recipe = load_recipe(name, {"head": True} if ceiling and name != "bf16" else {})
        plan = plan_for(config, recipe, hardware)
        if plan.is_fp8 == (name != "bf16") and (plan.native or name == "bf16"):
            predictions.append(predict(config, plan, gpu, **sizes, free_casts=ceiling))
        else:
            left_out[name] = plan.reasons[0]
    measured = measured_steps(results, model) if results else {}
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
        found = [(str(r["model"]), str(r["arm"]), float(r["median_ms"])) for r in rows]
        return {arm: ms for of, arm, ms in found if of == model}
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
    told = {"predicted": True, "assumed": asdict(achievable(roofline.gpu))}
    return asdict(roofline) | told | {"predictions": predictions}


def as_lines(roofline: Roofline) -> list[str]:
    """The predictions as lines of Markdown, with what they assume."""
    gpu, measured = roofline.gpu, roofline.measured_ms
    rates = achievable(gpu)
    bound = ", an upper bound: the head in FP8, casts that take no time" if roofline.ceiling else ""
    tokens = f"{roofline.batch} x {roofline.context} tokens per step"
    first, rows = roofline.predictions[0], []
    low = (("FP8", rates.fp8, gpu.fp8_tflops), ("FP4", rates.fp4, gpu.fp4_tflops))
    has_fp8 = any(kind.gpus.have(gpu.capability) for kind in FP8_ATTENTION.values())
    fp8_attention = (
        f", in FP8 {_share(rates.fp8_attention, gpu.fp8_tflops)}"
        if has_fp8 and gpu.fp8_tflops
        else ""
    )
    assumed = [
        f"{first.precision} GEMMs {_share(rates.half, gpu.half_tflops)} TFLOP/s",
        *(f"{name} GEMMs {_share(rate, peak)}" for name, rate, peak in low if peak),
        f"attention {_share(rates.attention, gpu.half_tflops)}{fp8_attention}",
        f"memory {_share(rates.memory, gpu.memory_tb_per_s, 1)} TB/s",
    ]
    heads = ["recipe", "FP8 layers", *PARTS, "step ms", "tokens/s", "MFU", f"vs {first.precision}"]
    heads += ["measured ms", f"measured vs {first.precision}"] if measured else []
    for row in roofline.predictions:
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
        rows.append(cells)
    lines = [
        f"Predicted, not measured: {roofline.model} on one {gpu.name}, {tokens}{bound}",
        f"Assumed of the peak ({gpu.source}): {', '.join(assumed)}",
        "",
        *markdown(heads, rows),
    ]
    said: dict[str, list[str]] = {}
    for name, why in roofline.left_out.items():
        said.setdefault(why, []).append(name)
    lines += [f"{', '.join(names)}: no prediction, {why}" for why, names in said.items()]
    if measured:
        lines.append(f"measured: {roofline.measured_in}, at the batch and context given there")
    return lines


def _share(rate: float, peak: float, digits: int = 0) -> str:
    return f"{rate / 1e12:.{digits}f} of {peak:g} ({100 * rate / 1e12 / peak:.0f} %)"
