"""A plan in full, as text and as JSON: every operation, every cast, and notes on sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal, TypeVar

from fp8stack.common.formats import ELEMENT_FORMATS
from fp8stack.common.quantizer_table import Quantizers
from fp8stack.model.config import GPTConfig
from fp8stack.planning.operations import IN_COMPUTE_DTYPE, IN_FP32, casts_of, operations_of
from fp8stack.planning.run_config import RunConfig
from fp8stack.planning.steps import GRADIENT, Cast, Operation
from fp8stack.planning.tensor_core_sizes import size_notes
from fp8stack.precision import Plan

HEADINGS = ("layer", "operation", "operands", "accumulates in", "output", "why")
_BLOCK = re.compile(r"blocks\.(\d+)")
_Item = TypeVar("_Item", Operation, Cast)


@dataclass(frozen=True, kw_only=True)
class PrecisionTable:
    """A plan in full; `accumulate` micro-batches make a step."""

    model: str
    machine: str
    plan: Plan
    operations: tuple[Operation, ...]
    casts: tuple[Cast, ...]
    accumulate: int
    notes: tuple[str, ...]

    def counts(self, per: Literal["micro-batch", "step"]) -> dict[str, int]:
        """The number of tensors that are cast "to_fp8" and between "other" dtypes; per step in all
        its micro-batches."""
        counts = {"to_fp8": 0, "other": 0}
        for cast in self.casts:
            times = self.accumulate if per == "step" and cast.per == "micro-batch" else 1
            counts["to_fp8" if cast.to_fp8 else "other"] += times * (per in ("step", cast.per))
        return counts


def make_table(config: GPTConfig, plan: Plan, run: RunConfig, machine: str) -> PrecisionTable:
    """The table of a run of a model with this plan, whose layers have been decided."""
    notes, checkpointing = size_notes(config, plan), run.activation_checkpointing
    if checkpointing != "none":
        but = ", GEMMs and attention left out" if checkpointing == "selective" else ""
        again = "runs the blocks' forward operations and casts once more"
        notes.append(f"activation checkpointing {again}{but}")
    operations = operations_of(
        config, plan, optimizer=run.optimizer, grad_compression=run.grad_compression
    )
    return PrecisionTable(
        model=run.model,
        machine=machine,
        plan=plan,
        operations=tuple(operations),
        casts=tuple(casts_of(config, plan)),
        accumulate=run.accumulate,
        notes=tuple(notes),
    )


def as_json(table: PrecisionTable) -> dict[str, Any]:
    """The table as JSON data, layer by layer."""
    return {
        "model": table.model,
        "machine": table.machine,
        "plan": table.plan.to_json(),
        "times": [asdict(time) | {"verdict": time.verdict} for time in table.plan.times],
        "operations": [asdict(operation) for operation in table.operations],
        "casts": [asdict(cast) for cast in table.casts],
        "accumulate": table.accumulate,
        "casts_per_micro_batch": table.counts("micro-batch"),
        "casts_per_step": table.counts("step"),
        "in_compute_dtype": IN_COMPUTE_DTYPE,
        "in_fp32": IN_FP32,
        "notes": list(table.notes),
    }


def rows_of(operations: Sequence[Operation]) -> list[tuple[str, ...]]:
    """The operations as rows under `HEADINGS`; blocks that are alike are merged, `blocks.0-11`, and
    so are operations of one layer that differ in their names alone."""
    merged: list[Operation] = []
    for operation in _merged_blocks(operations):
        last = merged[-1] if merged else None
        if last is not None and replace(last, name=operation.name) == operation:
            merged[-1] = replace(last, name=f"{last.name}, {operation.name}")
        else:
            merged.append(operation)
    return [
        (x.path or "model", x.name, " x ".join(x.operands), x.adds_in, x.output, x.why)
        for x in merged
    ]


def as_lines(table: PrecisionTable) -> list[str]:
    """The lines below the operations: casts, quantizers and notes."""
    lines = [_counts(table, "micro-batch")]
    if table.accumulate > 1 or any(cast.per == "step" for cast in table.casts):
        lines.append(_counts(table, "step"))
    for path, casts in groupby(_merged_blocks(table.casts), key=attrgetter("path")):
        lines.append(f"  {path}: {'; '.join(_phrases(list(casts)))}")
    lines += _quantizers(table.plan)
    return lines + [f"note: {note}" for note in table.notes]


def _counts(table: PrecisionTable, per: Literal["micro-batch", "step"]) -> str:
    to_fp8, between = table.counts(per).values()
    unit = "micro-batch"
    if per == "step":
        plural = "es" if table.accumulate > 1 else ""
        unit = f"optimizer step of {table.accumulate} micro-batch{plural}"
    if not to_fp8 and not between:
        return f"casts per {unit}: none"
    formats = {cast.target.split(" ")[0] for cast in table.casts if cast.to_fp8}
    bits = sorted({ELEMENT_FORMATS[name].bits for name in formats}) or [8]
    low = " and ".join(f"FP{width}" for width in bits)
    return f"casts per {unit}: {to_fp8} tensors to {low}, {between} between other dtypes"


def _phrases(casts: Sequence[Cast]) -> Iterator[str]:
    """Yield a phrase for each tensor that is cast, which names its gradient's cast too."""
    tensors = {(cast.what, cast.source, cast.target) for cast in casts}
    for cast in casts:
        tensor = cast.what.removesuffix(GRADIENT)
        if tensor != cast.what and (tensor, cast.target, cast.source) in tensors:
            continue  # the phrase of the tensor names it
        mirrored = (cast.what + GRADIENT, cast.target, cast.source) in tensors
        once = ", once per optimizer step" if cast.per == "step" else ""
        back = f"{once and ','} and its gradient back" if mirrored else ""
        yield f"{cast.what} {cast.source} -> {cast.target}{once}{back}"


def _quantizers(plan: Plan) -> Iterator[str]:
    """Yield a line for each table of quantizers that layers have: their formats, blocks, scales and
    rounding."""
    precisions: dict[Quantizers, dict[str, None]] = {}
    for layer in plan.layers:
        if layer.quantizers is not None:
            precisions.setdefault(layer.quantizers, {})[layer.precision] = None
    for quantizers, names in precisions.items():
        places: dict[str, list[str]] = {}
        for place, quantizer in quantizers.casts.items():
            places.setdefault(str(quantizer), []).append(place)
        phrases = [f"{', '.join(of_rules)}: {rules}" for rules, of_rules in places.items()]
        yield f"quantizers of {', '.join(names)}: {'; '.join(phrases)}"


def _merged_blocks(items: Sequence[_Item]) -> list[_Item]:
    """Merge blocks whose operations or casts are the same, in the place of the first of them."""
    groups: dict[tuple[_Item, ...], list[int]] = {}
    for block, of_block in groupby(items, key=lambda item: _block(item.path)):
        starred = tuple(replace(item, path=_BLOCK.sub("blocks.*", item.path)) for item in of_block)
        groups.setdefault(starred, []).append(block)
    return [
        replace(item, path=item.path.replace("*", _ranges(blocks)))
        for group, blocks in groups.items()
        for item in group
    ]


def _block(path: str) -> int:
    """The index of the block that a module is in; -1 if it is in none."""
    match = _BLOCK.match(path)
    return int(match[1]) if match else -1


def _ranges(blocks: Sequence[int]) -> str:
    """`0-3,5` of the blocks 0, 1, 2, 3 and 5."""
    ranges: list[list[int]] = []
    for block in blocks:
        if ranges and block == ranges[-1][-1] + 1:
            ranges[-1][1:] = [block]
        else:
            ranges.append([block])
    return ",".join("-".join(map(str, ends)) for ends in ranges)
