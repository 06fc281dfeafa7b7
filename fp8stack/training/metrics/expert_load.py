"""The load of experts: the tokens of a step that each expert gets, over micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fp8stack.model.mixture import RoutingRecord


class ExpertLoad(NamedTuple):
    """The load of one step.

    Attributes:
        counts: the number of tokens of each expert: float64 [layers, experts].
        balance: the load balancing loss of each layer, without its coefficient: float64 [layers].
    """

    counts: Tensor
    balance: Tensor

    def metrics(self) -> dict[str, Any]:
        """The figures of `metrics.jsonl`: the mean load balancing loss of the layers, 1 if all
        experts get as many tokens, None if it is not finite; and the number of experts, in all
        layers, without a token."""
        balance = float(self.balance.mean())
        return {
            "balance_loss": round(balance, 6) if math.isfinite(balance) else None,
            "idle_experts": int((self.counts == 0).sum()),
        }

    def numbers(self, layers: Sequence[str]) -> dict[str, float]:
        """The figures for trackers, by layer: the largest share, times the number of experts, and
        the number of experts without a token."""
        largest = self.counts.amax(1) / self.counts.mean(1)
        idle = (self.counts == 0).sum(1)
        return {
            f"experts/{key}/{layer}": value
            for key, values in (("largest", largest), ("idle", idle))
            for layer, value in zip(layers, values.tolist(), strict=True)
        }

    def rows(self, step: int, layers: Sequence[str]) -> list[dict[str, Any]]:
        """Rows of `telemetry.jsonl`, one for each of the `layers`: the share of the tokens' choices
        that each expert gets."""
        shares = self.counts / self.counts.sum(1, keepdim=True)
        return [
            {"step": step, "experts": layer, "shares": [round(share, 6) for share in of_layer]}
            for layer, of_layer in zip(layers, shares.tolist(), strict=True)
        ]


@torch.no_grad()
def load_in(record: RoutingRecord, ranks: int) -> ExpertLoad | None:
    """The load of the step that `record` has, for which all `ranks` call this; None for a model
    without experts."""
    if record.counts is None or record.balance is None:
        return None
    figures = torch.cat([record.counts.double(), record.balance.double()[:, None]], dim=1)
    if ranks > 1:
        dist.all_reduce(figures)
    return ExpertLoad(figures[:, :-1], figures[:, -1] / (record.passes * ranks))
