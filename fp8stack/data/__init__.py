"""Token data: what is read, how it is split, and which windows make the batch of a step.

Knows files, tokens and steps; knows nothing of models, precision or devices.
"""

from fp8stack.data.batches import StepBatches, decode, validation_windows
from fp8stack.data.corpus import Corpus, DataError, Part
from fp8stack.data.sources import load_corpora

__all__ = [
    "Corpus",
    "DataError",
    "Part",
    "StepBatches",
    "decode",
    "load_corpora",
    "validation_windows",
]
