"""The answer of `fp8stack estimate`: a run's phases with their estimates, as JSON and as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fp8stack.common.formats import Quantizer
from fp8stack.layers.backend import DTYPES
from fp8stack.model.gpt import Recompute
from fp8stack.planning.memory import PARTS, Estimate
from fp8stack.planning.savings import Savings, savings
from fp8stack.precision import Hardware, Plan
from fp8stack.precision.gpus import find_gpu, gpu_of_capability

CHECKPOINTING: tuple[Recompute, ...] = ("none", "selective", "block")
NOT_COUNTED = (
    "Not counted: what the allocator rounds up or leaves unused, the CUDA context, workspaces of "
    "cuBLAS and the like, data. Checked by what a CPU allocates; no GPU has confirmed it yet."
)


@dataclass(frozen=True, kw_only=True)
class PhaseEstimate:
    """A phase of a run with its plan, and an estimate for each kind of checkpointing."""

    name: str
    steps: int
    plan: Plan
    estimates: Mapping[Recompute, Estimate]

    @property
    def element_bytes(self) -> float:
        """Bytes per element of a GEMM's operand, averaged over the layers in FP8."""
        plain, averages = DTYPES[self.plan.compute_dtype].itemsize, []
        for layer in self.plan.layers:
            for pair in layer.quantizers.gemms.values() if layer.quantizers else ():
                sizes = [q.element_bits / 8 if isinstance(q, Quantizer) else plain for q in pair]
                averages.append(sum(sizes) / 2)
        return sum(averages) / len(averages) if averages else plain


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The memory of a run, on the rank that needs most.

    Attributes:
        run: the run's settings by key, as text or number.
        checkpointing: the run's kind of it.
        phases: in order; one without a name of its own if the run has none.
        fp32_peak: the peak of the same step in fp32.
        recipes: the precision and the peak of other recipes in the whole run.
        memory: in bytes, None if not known; `memory_of` names its source.
        largest: the most sequences per step that fit, by checkpointing; empty without `memory`.
        micro_batches: the fewest into which the run's batch can be divided so that they fit; 0 if
            none do, or without `memory`.
    """

    run: Mapping[str, str | int]
    checkpointing: Recompute
    phases: tuple[PhaseEstimate, ...]
    fp32_peak: int
    recipes: Mapping[str, tuple[str, int]]
    memory: int | None = None
    memory_of: str = ""
    largest: Mapping[Recompute, int] = field(default_factory=dict)
    micro_batches: int = 0

    def peak(self, kind: Recompute) -> int:
        """The peak of the worst phase."""
        return max(phase.estimates[kind].peak for phase in self.phases)

    @property
    def worst(self) -> PhaseEstimate:
        """The phase with the highest peak."""
        return max(self.phases, key=lambda phase: phase.estimates[self.checkpointing].peak)

    @property
    def savings(self) -> Savings:
        """The bytes of a step, relative to fp32 throughout."""
        sizes = [(p.steps, p.estimates[self.checkpointing].peak) for p in self.phases]
        return savings(sizes, self.fp32_peak)

    @property
    def average(self) -> int:
        """The average peak over the steps."""
        return round(self.savings.average * self.fp32_peak)

    @property
    def element_savings(self) -> Savings:
        """The bytes of an element that GEMMs take, relative to fp32's 4."""
        return savings([(p.steps, p.element_bytes) for p in self.phases], 4)

    def remedy(self) -> str:
        """Advice where no batch fits: the floor, and how to lower it."""
        assert self.memory is not None
        least = max(
            (phase.estimates[self.checkpointing] for phase in self.phases), key=lambda e: e.floor
        )
        without_batch = least.floor > self.memory  # activations are not what is too much
        # 8-bit moments take a quarter of float32's, but the embeddings' stay float32.
        in_8_bits = least.floor - 0.7 * least.optimizer
        is_useless = {
            "--optimizer adamw8bit": self.run["optimizer"] == "adamw8bit"
            or in_8_bits > self.memory,
            "a shorter --context": without_batch,
            "--activation-checkpointing block": without_batch or self.checkpointing == "block",
        }
        ways = [way for way, skip in is_useless.items() if not skip]
        return (
            f"No batch fits into {gib(self.memory)}: weights take {gib(least.parameters)}, "
            f"gradients {gib(least.gradients)}, the optimizer {gib(least.optimizer)}; with all "
            f"that lasts, {gib(least.floor)} ({least.floor / 1e9:.1f} GB) before any activation. "
            f"Use more memory, a smaller model, {', '.join([*ways, 'or more'])} --ranks with "
            "--parallel fsdp, which shares the model out."
        )


def memory_of(hardware: Hardware) -> tuple[int | None, str]:
    """The memory of a machine in bytes, None if it is not known, and whose it is."""
    if hardware.memory_gib:
        return round(hardware.memory_gib * 2**30), hardware.name or "this machine"
    if hardware.capability is None:
        return None, ""
    gpu, stands = find_gpu(hardware.name), ""
    if gpu is None:
        gpu = gpu_of_capability(hardware.capability)
        capability = "{}.{}".format(*hardware.capability)
        stands = f", which stands for compute capability {capability}; others: --memory"
    return (None, "") if gpu is None else (gpu.memory_gb * 10**9, f"{gpu.name}{stands}")


def as_json(answer: Answer) -> dict[str, Any]:
    """The answer as JSON data; bytes throughout."""
    kind = answer.checkpointing
    phases = [
        {
            "name": phase.name,
            "steps": phase.steps,
            "recipe": phase.plan.recipe.name,
            "runs": phase.plan.precision,
            "backend": phase.plan.backend,
            "estimates": {
                name: {"parts": estimate.parts(), "floor": estimate.floor, "peak": estimate.peak}
                for name, estimate in phase.estimates.items()
            },
        }
        for phase in answer.phases
    ]
    return {
        "asked": dict(answer.run),
        "phases": phases,
        "peak": answer.peak(kind),
        "worst_phase": answer.worst.name,
        "average": answer.average,
        "fp32_peak": answer.fp32_peak,
        "relative_to_fp32": vars(answer.savings),
        "relative_to_fp32_by_element": vars(answer.element_savings),
        "recipes": {n: {"runs": r, "peak": p} for n, (r, p) in answer.recipes.items()},
        "memory": answer.memory,
        "memory_of": answer.memory_of,
        "largest_batch": dict(answer.largest),
        "micro_batches": answer.micro_batches,
        "fits": None if answer.memory is None else answer.peak(kind) <= answer.memory,
        "not_counted": NOT_COUNTED,
    }


Table = tuple[str, list[str], list[list[str]]]
"""A title, heads and rows."""


def tables(answer: Answer) -> list[Table]:
    """The answer's tables: the parts in the worst phase, the phases, the recipes."""
    phase, kind, unit = answer.worst, answer.checkpointing, _unit(answer.peak("none"))
    rows = []
    for name, meaning in (PARTS | {"peak": "the most at one time"}).items():
        sizes = [getattr(phase.estimates[kind], name) for kind in CHECKPOINTING]
        if any(sizes):
            rows.append([name.replace("_", " "), *map(unit, sizes), meaning])
    if answer.largest:
        fits = [str(answer.largest[kind]) for kind in CHECKPOINTING]
        rows.append(["largest batch", *fits, f"sequences per step in {gib(answer.memory or 0)}"])
    where = f"phase {phase.name}, " if len(answer.phases) > 1 else ""
    title = f"{where}{phase.plan.precision}: each rank, by activation checkpointing"
    all_tables: list[Table] = [(title, ["part", *CHECKPOINTING, "what"], rows)]
    if len(answer.phases) > 1:
        rows = [
            [p.name, str(p.steps), p.plan.precision, unit(p.estimates[kind].peak)]
            for p in answer.phases
        ]
        all_tables.append(("phases", ["phase", "steps", "runs", "peak"], rows))
    if answer.recipes:
        rows = [[n, runs, unit(peak)] for n, (runs, peak) in answer.recipes.items()]
        all_tables.append((f"recipes, checkpointing {kind}", ["recipe", "runs", "peak"], rows))
    return all_tables


def sentences(answer: Answer) -> list[str]:
    """The sentences below the tables."""
    kind, lines = answer.checkpointing, []
    if len(answer.phases) > 1:
        saved, element = answer.savings, answer.element_savings
        lines += [
            f"Over the phases: {gib(answer.average)} on average, {saved.average:.2f} of fp32 "
            f"throughout; {gib(answer.peak(kind))} at the peak, {saved.peak:.2f} of it, in phase "
            f"{answer.worst.name}. The peak is what has to fit.",
            f"By the size of GEMMs' elements alone: {element.average:.2f} of fp32 on average, "
            f"{element.peak:.2f} at the peak.",
        ]
    if answer.memory is not None:
        whose = f"{gib(answer.memory)} ({answer.memory_of})"
        fits = "fits" if answer.peak(kind) <= answer.memory else "does not fit"
        lines.append(f"The batch asked for {fits} into {whose}.")
        if count := answer.micro_batches:
            flags = f"--batch {answer.run['batch']} --accumulate {count}"
            lines.append(f"Its largest micro-batches that fit: {flags}")
        if not answer.largest[kind]:
            lines.append(answer.remedy())
    return [*lines, NOT_COUNTED]


def gib(size: int) -> str:
    """Bytes as GiB, or as MiB where that is less than a tenth."""
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:,.2f} MiB"


def _unit(largest: int) -> Callable[[int], str]:
    """How to write the numbers of a table, all in the same unit."""
    name, size = ("GiB", 2**30) if largest >= 2**30 else ("MiB", 2**20)
    return lambda value: f"{value / size:,.2f} {name}"
