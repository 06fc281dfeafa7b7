"""`fp8stack eval`: the losses of trained models on the same windows, in several recipes, and how
much the predictions of the recipes agree."""

from fp8stack.trained.evaluate.agreement import agreements
from fp8stack.trained.evaluate.agreement_table import (
    agreement_lines,
    agreement_notes,
    agreement_rich_table,
    agreements_as_json,
)
from fp8stack.trained.evaluate.score_table import as_json, notes, rich_table, text_lines
from fp8stack.trained.evaluate.scores import evaluate

__all__ = [
    "agreement_lines",
    "agreement_notes",
    "agreement_rich_table",
    "agreements",
    "agreements_as_json",
    "as_json",
    "evaluate",
    "notes",
    "rich_table",
    "text_lines",
]
