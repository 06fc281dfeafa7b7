"""Token data: sources, splits, and the windows of each batch. Names that need torch are imported
lazily, so that tokenizing processes start without it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fp8stack.data.corpus import Corpus, DataError, Segment
from fp8stack.data.source_mixture import Mixture, absolute
from fp8stack.data.sources import holds_text, load_corpora, tokenizer_of, vocabulary_of

if TYPE_CHECKING:
    from fp8stack.data.batches import Order, StepBatches, describe, validation_windows

__all__ = [
    "Corpus",
    "DataError",
    "Mixture",
    "Order",
    "Segment",
    "StepBatches",
    "absolute",
    "describe",
    "holds_text",
    "load_corpora",
    "tokenizer_of",
    "validation_windows",
    "vocabulary_of",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fp8stack.data import batches

    return getattr(batches, name)
