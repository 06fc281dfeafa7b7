"""The events of the first steps, in `debug.jsonl`. Values are copied to the host, so these steps
sync with the device."""

import json
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fp8stack.common.io import storage_errors
from fp8stack.layers.fsdp import local_shard
from fp8stack.training.optim.chained import optimizers_in, parameters_of, plain
from fp8stack.training.run import Run


class DebugLog:
    """Writes the events of the first `debug_steps` steps of `run` in this process, one row each."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.path = run.folder.debug
        self.step = 0
        self._left = run.config.debug_steps if run.ranks.is_main else 0
        self._began = 0.0
        self._micro = -1

    def begin(self, step: int) -> None:
        """Start the clock of a step."""
        self.step, self._micro = step, -1
        self._left -= 1
        self._began = time.perf_counter()

    def add(self, event: str, **values: object) -> None:
        """Write the event with its values, tensors of one number or JSON data, its time in ms since
        the step began, and dtypes."""
        if self._left < 0:
            return
        if event == "forward":
            self._micro += 1
        details = {key: _read(value) for key, value in values.items()} | self._more(event)
        row: dict[str, Any] = {"step": self.step, "event": event}
        if event in ("forward", "scale_loss", "backward"):
            row["micro_batch"] = self._micro
        row["time_ms"] = round(1000 * (time.perf_counter() - self._began), 3)
        if self.run.scaler is None and event in ("scale_loss", "unscale", "update_scale"):
            details = {"skipped": f"no loss scale in {self.run.plan.precision}"}
        with storage_errors(self.path), self.path.open("a") as file:
            file.write(json.dumps(row | details) + "\n")

    def _more(self, event: str) -> dict[str, Any]:
        """Dtypes, and which optimizers skip the step."""
        optimizer = self.run.optimizer
        parameters = parameters_of(optimizer)
        if event == "forward":
            weights = _dtypes(parameters)
            return {"weights": weights, "computes_in": self.run.plan.compute_dtype}
        if event == "backward":
            return {"gradients": _dtypes(p.grad for p in parameters if p.grad is not None)}
        if event != "optimizer":
            return {}
        states = [plain(state) for state in optimizer.state.values()]
        moments = (value for state in states for key, value in state.items() if key != "step")
        inner = optimizers_in(optimizer)
        skipping = [
            type(single).__name__ for single in inner if getattr(single, "found_inf", False)
        ]
        names = " and ".join(skipping)
        skipped = {"skipped": f"{names}: the step was judged bad"} if skipping else {}
        return {"moments": _dtypes(moments)} | skipped


def _dtypes(tensors: Iterable[Tensor]) -> str:
    return ", ".join(
        sorted({str(local_shard(tensor).dtype).removeprefix("torch.") for tensor in tensors})
    )


def _read(value: object) -> object:
    """A tensor's numbers, on the host; values that are not finite as strings, for JSON."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, list):
        return [_read(element) for element in value]
    if isinstance(value, float) and not torch.tensor(value).isfinite():
        return str(value)
    return value
