"""Token data: what is read, how it is split, and which windows make the batch of a step."""

from fp8stack.data.batches import Order, StepBatches, describe, validation_windows
from fp8stack.data.corpus import Corpus, DataError, Part
from fp8stack.data.mixture import Mixture, absolute
from fp8stack.data.sources import holds_text, load_corpora, tokenizer_of

__all__ = [
    "Corpus",
    "DataError",
    "Mixture",
    "Order",
    "Part",
    "StepBatches",
    "absolute",
    "describe",
    "holds_text",
    "load_corpora",
    "tokenizer_of",
    "validation_windows",
]
