"""Runs without what takes longer than the training of a tiny one."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from fp8stack.training import finalize
from fp8stack.training.metrics import throughput


@contextmanager
def quick_runs() -> Iterator[None]:
    """Within, the losses of a run are listed and not drawn, and a CPU's peak, which is measured
    once a process, is measured in a moment."""
    with patch.object(finalize, "loss_plot", _listed), patch.object(throughput, "BURSTS_S", 0.0):
        yield


def _listed(metrics: Sequence[dict[str, Any]], title: str) -> bytes:
    losses = [(row["step"], row.get("loss"), row.get("val_loss")) for row in metrics]
    return json.dumps({title: losses}).encode()
