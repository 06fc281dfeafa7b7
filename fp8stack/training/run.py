"""A run: everything that a training loop needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import AdamW

from fp8stack import data
from fp8stack.backends import Backend
from fp8stack.model import GPT
from fp8stack.precision import Hardware, Plan
from fp8stack.telemetry import Telemetry
from fp8stack.training.config import RunConfig
from fp8stack.training.ranks import ALONE, Ranks
from fp8stack.training.run_folder import RunFolder


@dataclass(kw_only=True)
class Run:
    """Everything a training loop needs, and the step that was done last."""

    config: RunConfig
    context: int
    folder: RunFolder
    hardware: Hardware
    plan: Plan
    backend: Backend
    model: GPT
    wrapped: nn.Module
    optimizer: AdamW
    accelerator: Accelerator
    scaler: torch.amp.GradScaler | None
    train: data.Corpus
    validation: data.Corpus
    windows: Tensor
    telemetry: Telemetry
    identity: dict[str, Any]
    ranks: Ranks = ALONE
    step: int = 0
    notes: tuple[str, ...] = ()
    guard_state: dict[str, Any] | None = None
