"""`fp8stack eval`: the losses of trained models on the same windows, in several recipes."""

from fp8stack.evaluation.scores import evaluate
from fp8stack.evaluation.table import as_json, notes, rich_table, text_lines

__all__ = ["as_json", "evaluate", "notes", "rich_table", "text_lines"]
