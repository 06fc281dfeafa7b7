"""Runs without the work that takes longer than training a tiny model."""

import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import typer.main

from fp8stack.analysis.compare import comparison
from fp8stack.analysis.compare.gaps import RecipeFigures
from fp8stack.data import Corpus
from fp8stack.data.sources import _Loader
from fp8stack.data.tokenizer.byte_level import ByteTokenizer
from fp8stack.precision import Hardware, Plan, system_memory
from fp8stack.training import finalize, run_plans
from fp8stack.training.memory_check import Footprint, require_memory
from fp8stack.training.metrics import throughput
from fp8stack.training.metrics.read import Metrics

_splits, _fingerprint = _Loader.splits, Corpus.fingerprint
_library: dict[int, Corpus] = {}


@contextmanager
def quick_runs() -> Iterator[None]:
    """Skip slow work in this context. The losses of a run and of a comparison are listed and not
    drawn, a CPU's peak, which is measured once a process, is measured in a moment, no file waits
    for the disk, and the standard library's source is read and the command's options are parsed
    once a process. The memory of a tiny run is not estimated where there is plenty."""
    with (
        patch.object(finalize, "loss_plot", _listed),
        patch.object(comparison, "comparison_plot", _compared),
        patch.object(throughput, "BURSTS_S", 0.0),
        patch.object(run_plans, "require_memory", _require_memory_of_large_runs),
        patch.object(os, "fsync", lambda descriptor: None),
        patch.object(_Loader, "splits", _read_once),
        patch.object(Corpus, "fingerprint", _summed_once),
        patch.object(typer.main, "get_command", cache(typer.main.get_command)),
    ):
        yield


def _require_memory_of_large_runs(
    footprint: Footprint,
    plans: Sequence[Plan],
    hardware: Hardware,
    **options: Any,
) -> None:
    tokens = footprint.config.batch * footprint.context
    is_tiny = footprint.model.parameters() < 2**20 and tokens < 2**14
    free = system_memory.available_memory(hardware.device)
    if not is_tiny or free is None or free < 2**30:
        require_memory(footprint, plans, hardware, **options)


def _listed(metrics: Metrics, title: str) -> bytes:
    losses = [(row["step"], row.get("loss"), row.get("val_loss")) for row in metrics.rows]
    return json.dumps({title: losses}).encode()


def _compared(rows: Sequence[RecipeFigures], baseline: str, title: str, confidence: float) -> bytes:
    return json.dumps({title: {row.recipe: row.val_loss for row in rows}}).encode()


def _read_once(loader: _Loader, data: str | None) -> tuple[Corpus, Corpus]:
    if data is not None or not isinstance(loader.texts, ByteTokenizer | None):
        return _splits(loader, data)
    return _read(sysconfig.get_path("stdlib"), loader.vocabulary, loader.held_out)


@cache
def _read(root: str, vocabulary: int, held_out: float) -> tuple[Corpus, Corpus]:
    loader = _Loader(vocabulary=vocabulary, held_out=held_out, end_of_text=None, texts=None)
    corpora = _splits(loader, None)
    _library.update({id(corpus): corpus for corpus in corpora})
    return corpora


def _summed_once(corpus: Corpus) -> str:
    return _sum(id(corpus)) if id(corpus) in _library else _fingerprint(corpus)


@cache
def _sum(number: int) -> str:
    return _fingerprint(_library[number])
