"""A plan in full, as text and as JSON: every operation, every cast, and notes on sizes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

from fp8stack.formats import FORMATS
from fp8stack.model.config import GPTConfig
from fp8stack.planner.operations import (
    GRADIENT,
    IN_COMPUTE_DTYPE,
    IN_FP32,
    Cast,
    Operation,
    casts_of,
    operations_of,
)
from fp8stack.planner.sizes import size_notes
from fp8stack.precision import Plan
from fp8stack.tables import aligned

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
        """How many tensors are cast, "to_fp8" and between "other" dtypes; per step in all its
        micro-batches."""
        found = {"to_fp8": 0, "other": 0}
        for cast in self.casts:
            times = self.accumulate if per == "step" and cast.per == "micro-batch" else 1
            found["to_fp8" if cast.to_fp8 else "other"] += times * (per in ("step", cast.per))
        return found


def make_table(
    config: GPTConfig,
    plan: Plan,
    *,
    model: str,
    machine: str,
    accumulate: int = 1,
    optimizer: str = "adamw",
    grad_compression: str = "none",
    activation_checkpointing: str = "none",
) -> PrecisionTable:
    """The table of a plan whose layers have been decided.

    Args:
        config: the shape of the model.
        plan: a plan with its layers.
        model: its name.
        machine: the machine, in words.
        accumulate: micro-batches per step.
        optimizer: of the run, by name.
        grad_compression: of the run.
        activation_checkpointing: of the run.
    """
    notes = size_notes(config, plan)
    if activation_checkpointing != "none":
        but = ", GEMMs and attention left out" if activation_checkpointing == "selective" else ""
        again = "runs the blocks' forward operations and casts once more"
        notes.append(f"activation checkpointing {again}{but}")
    run: Any = {"optimizer": optimizer, "grad_compression": grad_compression}
    return PrecisionTable(
        model=model,
        machine=machine,
        plan=plan,
        operations=tuple(operations_of(config, plan, **run)),
        casts=tuple(casts_of(config, plan)),
        accumulate=accumulate,
        notes=tuple(notes),
    )


def as_json(table: PrecisionTable) -> dict[str, Any]:
    """The table as JSON data, layer by layer."""
    return {
        "model": table.model,
        "machine": table.machine,
        "plan": table.plan.to_json(),
        "operations": [asdict(one) for one in table.operations],
        "casts": [asdict(one) for one in table.casts],
        "accumulate": table.accumulate,
        "casts_per_micro_batch": table.counts("micro-batch"),
        "casts_per_step": table.counts("step"),
        "in_compute_dtype": IN_COMPUTE_DTYPE,
        "in_fp32": IN_FP32,
        "notes": list(table.notes),
    }


def as_lines(table: PrecisionTable) -> list[str]:
    """The lines below the operations: casts and notes."""
    lines = [_counts(table, "micro-batch")]
    if table.accumulate > 1 or any(cast.per == "step" for cast in table.casts):
        lines.append(_counts(table, "step"))
    lines += _where(table.casts)
    return lines + [f"note: {note}" for note in table.notes]


def _counts(table: PrecisionTable, per: Literal["micro-batch", "step"]) -> str:
    fp8, other = table.counts(per).values()
    what = "micro-batch"
    if per == "step":
        plural = "es" if table.accumulate > 1 else ""
        what = f"optimizer step of {table.accumulate} micro-batch{plural}"
    if not fp8 and not other:
        return f"casts per {what}: none"
    named = {cast.target.split(" ")[0] for cast in table.casts if cast.to_fp8}
    bits = sorted({FORMATS[name].bits for name in named}) or [8]
    low = " and ".join(f"FP{each}" for each in bits)
    return f"casts per {what}: {fp8} tensors to {low}, {other} between other dtypes"


def _where(casts: Sequence[Cast]) -> list[str]:
    """The casts of each layer in a line; layers of several blocks that are alike share one."""
    layers: dict[str, list[Cast]] = {}
    for cast in casts:
        layers.setdefault(cast.path, []).append(cast)
    alike: dict[tuple[str, str], list[int]] = {}
    for path, found in layers.items():
        alike.setdefault((_star(path), "; ".join(_phrases(found))), []).append(_block(path))
    return [f"  {_unstar(path, blocks)}: {line}" for (path, line), blocks in alike.items()]


def _phrases(casts: Sequence[Cast]) -> list[str]:
    there = {(cast.what + GRADIENT, cast.source, cast.target) for cast in casts}
    backs = {(cast.what, cast.target, cast.source) for cast in casts}
    phrases = []
    for cast in casts:
        if (cast.what, cast.target, cast.source) in there:
            continue
        mirrored = (cast.what + GRADIENT, cast.source, cast.target) in backs
        back = " and its gradient back" if mirrored else ""
        once = ", once per optimizer step" if cast.per == "step" else ""
        phrases.append(f"{cast.what} {cast.source} -> {cast.target}{back}{once}")
    return phrases


def rows_of(operations: Sequence[Operation]) -> list[tuple[str, ...]]:
    """The operations as rows under `HEADINGS`; blocks that are alike are one, `blocks.0-11`, and so
    are operations of one layer that differ in their names alone."""
    merged: list[Operation] = []
    for one in _grouped(operations):
        last = merged[-1] if merged else None
        if last is not None and replace(last, name=one.name) == one:
            merged[-1] = replace(last, name=f"{last.name}, {one.name}")
        else:
            merged.append(one)
    return [
        (one.path or "model", one.name, " x ".join(one.operands), one.adds_in, one.output, one.why)
        for one in merged
    ]


def _grouped(operations: Sequence[Operation]) -> list[Operation]:
    """Blocks whose operations are the same are shown in the first one's place, once."""
    alike: dict[tuple[Operation, ...], list[int]] = {}
    for block, found in groupby(operations, key=lambda one: _block(one.path)):
        starred = tuple(replace(one, path=_star(one.path)) for one in found)
        alike.setdefault(starred, []).append(block)
    groups = alike.items()
    return [replace(x, path=_unstar(x.path, blocks)) for group, blocks in groups for x in group]


def _block(path: str) -> int:
    """The index of the block that a module is in; -1 if it is in none."""
    found = _BLOCK.match(path)
    return int(found[1]) if found else -1


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
    """The operations as a table for a terminal of so many columns; where that is narrow, layers are
    named within their block, and `reasons_of` has what the last column would say."""
    from rich.table import Table

    is_wide = width >= WIDE
    made = Table(box=None, pad_edge=False, header_style="bold")
    for heading in HEADINGS if is_wide else HEADINGS[:-1]:
        made.add_column(heading, no_wrap=heading == "layer", overflow="fold")
    within = ""
    for layer, *cells, why in rows_of(table.operations):
        if is_wide:
            made.add_row(layer, *cells, why)
            continue
        found = _SHOWN_BLOCK.match(layer)
        if found and found[0] != within:
            made.add_row(found[0])
        within = found[0] if found else ""
        inner = layer.removeprefix(within).removeprefix(".") or "block"
        made.add_row(f"  {inner}" if found else layer, *cells)
    return made


_SHOWN_BLOCK = re.compile(r"blocks\.[\d,-]+")


def reasons_of(table: PrecisionTable) -> list[str]:
    """The reasons for the operations' dtypes, each once."""
    found: dict[str, list[str]] = {}
    for layer, name, *_, why in rows_of(table.operations):
        if why:
            found.setdefault(why, []).append(layer if layer == "lm_head" else name)
    return [f"{', '.join(dict.fromkeys(names))}: {why}" for why, names in found.items()]
