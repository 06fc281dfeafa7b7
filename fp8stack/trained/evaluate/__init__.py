"""`fp8stack eval`: the losses of trained models on the same windows, in several recipes."""

from fp8stack.trained.evaluate.score_table import as_json, notes, rich_table, text_lines
from fp8stack.trained.evaluate.scores import evaluate

__all__ = ["as_json", "evaluate", "notes", "rich_table", "text_lines"]
