"""A plan in full, as text and as JSON: every operation, every cast, and notes on sizes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

from fp8stack.common.formats import ELEMENT_FORMATS
from fp8stack.common.quantizer_table import Quantizers
from fp8stack.common.tables import aligned
from fp8stack.model.config import GPTConfig
from fp8stack.planning.operations import (
    GRADIENT,
    IN_COMPUTE_DTYPE,
    IN_FP32,
    Cast,
    Operation,
    casts_of,
    operations_of,
)
from fp8stack.planning.run_config import RunConfig
from fp8stack.planning.tensor_core_sizes import size_notes
from fp8stack.precision import Plan

if TYPE_CHECKING:
    from rich.table import Table

HEADINGS = ("layer", "operation", "operands", "accumulates in", "output", "why")
_BLOCK = re.compile(r"blocks\.(\d+)")


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
    tokens = run.batch // run.accumulate * (run.context or config.context)
    notes, checkpointing = size_notes(config, plan, tokens), run.activation_checkpointing
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
        "operations": [asdict(operation) for operation in table.operations],
        "casts": [asdict(cast) for cast in table.casts],
        "accumulate": table.accumulate,
        "casts_per_micro_batch": table.counts("micro-batch"),
        "casts_per_step": table.counts("step"),
        "in_compute_dtype": IN_COMPUTE_DTYPE,
        "in_fp32": IN_FP32,
        "notes": list(table.notes),
    }


def as_lines(table: PrecisionTable) -> list[str]:
    """The lines below the operations: casts, quantizers and notes."""
    lines = [_counts(table, "micro-batch")]
    if table.accumulate > 1 or any(cast.per == "step" for cast in table.casts):
        lines.append(_counts(table, "step"))
    lines += [*_where(table.casts), *_quantizers(table.plan)]
    return lines + [f"note: {note}" for note in table.notes]


def _quantizers(plan: Plan) -> list[str]:
    """A line for each table of quantizers that layers have: their formats, blocks, scales and
    rounding."""
    precisions: dict[Quantizers, list[str]] = {}
    for layer in plan.layers:
        if layer.quantizers is not None:
            precisions.setdefault(layer.quantizers, []).append(layer.precision)
    lines = []
    for quantizers, names in precisions.items():
        places: dict[str, list[str]] = {}
        for place, quantizer in quantizers.each.items():
            if place in quantizers.casts:
                places.setdefault(str(quantizer), []).append(place)
        phrases = [f"{', '.join(of_rules)}: {rules}" for rules, of_rules in places.items()]
        lines.append(f"quantizers of {', '.join(dict.fromkeys(names))}: {'; '.join(phrases)}")
    return lines


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


def _where(casts: Sequence[Cast]) -> list[str]:
    """A line for the casts of each layer; equal lines of several blocks are merged."""
    layers: dict[str, list[Cast]] = {}
    for cast in casts:
        layers.setdefault(cast.path, []).append(cast)
    lines: dict[tuple[str, str], list[int]] = {}
    for path, of_layer in layers.items():
        lines.setdefault((_star(path), "; ".join(_phrases(of_layer))), []).append(_block(path))
    return [f"  {_unstar(path, blocks)}: {line}" for (path, line), blocks in lines.items()]


def _phrases(casts: Sequence[Cast]) -> list[str]:
    tensors = {(cast.what, cast.source, cast.target) for cast in casts}
    gradients = {(name + GRADIENT, target, source) for name, source, target in tensors}
    phrases = []
    for cast in casts:
        if (cast.what, cast.source, cast.target) in gradients:
            continue  # the phrase of the tensor names it
        mirrored = (cast.what + GRADIENT, cast.target, cast.source) in tensors
        back = " and its gradient back" if mirrored else ""
        once = ", once per optimizer step" if cast.per == "step" else ""
        phrases.append(f"{cast.what} {cast.source} -> {cast.target}{back}{once}")
    return phrases


def rows_of(operations: Sequence[Operation]) -> list[tuple[str, ...]]:
    """The operations as rows under `HEADINGS`; blocks that are alike are merged, `blocks.0-11`, and
    so are operations of one layer that differ in their names alone."""
    merged: list[Operation] = []
    for operation in _grouped(operations):
        last = merged[-1] if merged else None
        if last is not None and replace(last, name=operation.name) == operation:
            merged[-1] = replace(last, name=f"{last.name}, {operation.name}")
        else:
            merged.append(operation)
    return [
        (x.path or "model", x.name, " x ".join(x.operands), x.adds_in, x.output, x.why)
        for x in merged
    ]


def _grouped(operations: Sequence[Operation]) -> list[Operation]:
    """Merge blocks whose operations are the same, in the place of the first of them."""
    groups: dict[tuple[Operation, ...], list[int]] = {}
    for block, of_block in groupby(operations, key=lambda x: _block(x.path)):
        starred = tuple(replace(x, path=_star(x.path)) for x in of_block)
        groups.setdefault(starred, []).append(block)
    merged = groups.items()
    return [replace(x, path=_unstar(x.path, blocks)) for group, blocks in merged for x in group]


def _block(path: str) -> int:
    """The index of the block that a module is in; -1 if it is in none."""
    match = _BLOCK.match(path)
    return int(match[1]) if match else -1


def _star(path: str) -> str:
    """`blocks.*.mlp` of the MLP of any block."""
    return _BLOCK.sub("blocks.*", path)


def _unstar(path: str, blocks: Sequence[int]) -> str:
    """`blocks.0-3,5.mlp` of `blocks.*.mlp` and the blocks 0, 1, 2, 3 and 5."""
    runs: list[list[int]] = []
    for block in blocks:
        if runs and block == runs[-1][-1] + 1:
            runs[-1][1:] = [block]
        else:
            runs.append([block])
    return path.replace("*", ",".join("-".join(map(str, run)) for run in runs))


def text_rows(table: PrecisionTable) -> list[str]:
    """The operations as lines of text, in columns."""
    return aligned([HEADINGS, *rows_of(table.operations)])


WIDE = 140
"""Columns of a terminal from which the table has room for reasons and whole names."""


def rich_table(table: PrecisionTable, width: int) -> Table:
    """The operations as a table for a terminal of so many columns; in a narrow terminal, layers are
    named within their block, and `reasons_of` replaces the last column."""
    from rich.table import Table

    is_wide = width >= WIDE
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for heading in HEADINGS if is_wide else HEADINGS[:-1]:
        grid.add_column(heading, no_wrap=heading == "layer", overflow="fold")
    shown_block = ""
    for layer, *cells, reason in rows_of(table.operations):
        if is_wide:
            grid.add_row(layer, *cells, reason)
            continue
        match = _SHOWN_BLOCK.match(layer)
        if match and match[0] != shown_block:
            grid.add_row(match[0])
        shown_block = match[0] if match else ""
        inner = layer.removeprefix(shown_block).removeprefix(".") or "block"
        grid.add_row(f"  {inner}" if match else layer, *cells)
    return grid


_SHOWN_BLOCK = re.compile(r"blocks\.[\d,-]+")


def reasons_of(table: PrecisionTable) -> list[str]:
    """The reasons for the operations' dtypes, each once."""
    reasons: dict[str, list[str]] = {}
    for layer, name, *_, reason in rows_of(table.operations):
        if reason:
            reasons.setdefault(reason, []).append(layer if layer == "lm_head" else name)
    return [f"{', '.join(dict.fromkeys(names))}: {x}" for x, names in reasons.items()]
