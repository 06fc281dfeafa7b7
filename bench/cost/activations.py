"""The bytes that a forward pass keeps for the backward pass, by mode of recomputation.

Every storage that is allocated in the forward pass and still alive at its end counts once:
activations, saved quantized operands, casts of weights. Parameters and buffers do not count.
Nothing is timed.
"""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench import report
from bench.report import Report, Row
from fp8stack.layers import build_backend
from fp8stack.model.config import GPTConfig, load_config, plan_for
from fp8stack.model.gpt import GPT, Recompute
from fp8stack.precision import Hardware

MODES: tuple[Recompute, ...] = get_args(Recompute)
# Name: recipe and backend.
ARMS = {
    "fp32": ("fp32", "reference"),
    "bf16": ("bf16", "reference"),
    "delayed, emulated": ("delayed", "emulate"),
    "delayed by torch": ("delayed", "torch"),
    "mxfp8, emulated": ("mxfp8", "emulate"),
}
LLAMA = {
    "norm": "rmsnorm", "activation": "swiglu", "positions": "rope", "bias": False, "kv_heads": 2,
    "tied": False,
}  # fmt: skip


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the live bytes of storages that operators allocated in this mode, and their peak.
    Views of parameters allocate nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held: dict[int, tuple[Any, int]] = {}
        self.peak = 0

    def now(self) -> int:
        self._held = {key: entry for key, entry in self._held.items() if not entry[0].expired()}
        return sum(size for _, size in self._held.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = _storages((args, kwargs))
        out = func(*args, **(kwargs or {}))
        for place, storage in _storages(out).items():
            if place not in before:
                reference: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._held[place] = reference, storage.nbytes()
        self.peak = max(self.peak, self.now())
        return out


def _storages(values: Any) -> dict[int, torch.UntypedStorage]:
    storages = (leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    return {storage._cdata: storage for storage in storages}


def kept_bytes(model: GPT, tokens: Tensor) -> int:
    """The bytes that a forward pass keeps, without the loss; `tokens` is int64 [B, T + 1]. A first
    pass, which makes one-time allocations, is not counted."""
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    live = Live()
    with live:
        loss = model(tokens[:, :-1], tokens[:, 1:])
        return live.now() - int(loss.nbytes)


def configs(tiny: bool = False) -> dict[str, GPTConfig]:
    """The models: the default, and one with Llama's architecture."""
    sizes = {"layers": 1, "width": 64, "heads": 4} if tiny else {}
    llama = load_config("gpt-nano", LLAMA | sizes)
    return {"gpt-nano": load_config("gpt-nano", sizes), "gpt-nano as Llama": llama}


def rows(tiny: bool = False) -> list[Row]:
    """A row for every model, arm and mode, on the CPU. Counts do not vary, so one pass is
    enough."""
    batch, context = (1, 16) if tiny else (8, 128)
    rows: list[Row] = []
    for case, config in configs(tiny).items():
        for arm, (recipe, backend) in ARMS.items():
            plan = plan_for(config, recipe, Hardware("cpu"), backend)
            model = GPT(config, build_backend(plan))
            tokens = torch.zeros(batch, context + 1, dtype=torch.int64)
            bytes_by_mode = {}
            for mode in MODES:
                model.recompute = mode
                bytes_by_mode[mode] = kept_bytes(model, tokens)
            rows += [
                {
                    "case": case, "arm": arm, "recompute": mode, "bytes": bytes_by_mode[mode],
                    "batch": batch, "context": context,
                    "share": round(bytes_by_mode[mode] / bytes_by_mode["none"], 4),
                }
                for mode in MODES
            ]  # fmt: skip
    return rows


def table(data: Report) -> str:
    first = data["activations"][0]
    title = "\nWhat a forward pass keeps for the backward pass, in MiB, on a CPU "
    title += f"({first['batch']} x {first['context']} tokens), by `activation_checkpointing`:\n\n"
    cells: dict[tuple[str, str], list[str]] = {}
    for row in data["activations"]:
        cells.setdefault((row["case"], row["arm"]), []).append(
            f"{row['bytes'] / 2**20:.2f} ({row['share'] - 1:+.0%})"
        )
    body = ([*names, *values] for names, values in cells.items())
    return title + report.markdown(["model", "arm", *MODES], body)
