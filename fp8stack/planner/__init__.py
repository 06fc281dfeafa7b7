"""What each operation of a training step computes in, before it runs: `make_table(config, plan)`.

It reads a trace of the model, which allocates nothing, and its plan.
"""

from __future__ import annotations

from fp8stack.planner.casts import Cast, casts_of
from fp8stack.planner.operations import IN_COMPUTE_DTYPE, IN_FP32, Operation, operations_of
from fp8stack.planner.table import (
    WIDE,
    PrecisionTable,
    as_json,
    as_lines,
    make_table,
    reasons_of,
    rich_table,
    text_rows,
)

__all__ = [
    "IN_COMPUTE_DTYPE",
    "IN_FP32",
    "WIDE",
    "Cast",
    "Operation",
    "PrecisionTable",
    "as_json",
    "as_lines",
    "casts_of",
    "make_table",
    "operations_of",
    "reasons_of",
    "rich_table",
    "text_rows",
]
