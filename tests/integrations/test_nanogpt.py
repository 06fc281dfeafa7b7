"""The loop of nanoGPT's train.py, in our words, with the lines that docs/integrations.md adds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8stack
from tests.integrations.loops import gpt2, language_loss
from tests.support.backend_models import same


@torch.no_grad()
def estimate_loss(model: nn.Module) -> float:
    model.eval()
    loss = torch.stack([language_loss(model, 1000 + k) for k in range(2)]).mean().item()
    model.train()
    return loss


def train(
    path: Path, recipe: str, *, resume: bool = False, compiled: bool = False
) -> tuple[Any, list[float]]:
    """Steps 0 to 5, or 3 to 5 from the checkpoint that an earlier run saved before step 3."""
    raw_model, first = gpt2(None, seed=5 if resume else 0), 0
    checkpoint: dict[str, Any] = {}
    if resume:
        checkpoint = torch.load(path, weights_only=True)
        weights = {n.removeprefix("_orig_mod."): t for n, t in checkpoint["model"].items()}
        raw_model.load_state_dict(weights)
        first = checkpoint["iter_num"]
    plan = fp8stack.resolve(recipe, fp8stack.probe("cpu"))
    fp8stack.convert(raw_model, plan)  # added
    if resume:
        fp8stack.load_fp8_state(raw_model, checkpoint["fp8"])  # added
    decayed = {"params": [p for p in raw_model.parameters() if p.dim() >= 2], "weight_decay": 0.1}
    undecayed = {"params": [p for p in raw_model.parameters() if p.dim() < 2], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([decayed, undecayed], betas=(0.9, 0.95))
    if resume:
        optimizer.load_state_dict(checkpoint["optimizer"])
    model: Any = torch.compile(raw_model) if compiled else raw_model
    losses: list[float] = []
    for step in range(first, 6):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 + math.cos(math.pi * step / 6)) / 2
        losses.append(estimate_loss(model))
        if step == 3 and not resume:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            saved |= {"iter_num": step, "fp8": fp8stack.fp8_state(model)}  # added
            torch.save(saved, path)
        for micro_step in range(2):
            loss = language_loss(model, 10 * step + micro_step)
            losses.append(loss.item())
            (loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (scaling := fp8stack.delayed_scaling_of(raw_model)) is not None:
            scaling.apply_pending_update()  # added
    return raw_model, losses


CASES = [
    ("delayed", False),
    ("nvfp4", False),
    pytest.param("delayed", True, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("recipe", "compiled"), CASES)
def test_a_resumed_run_repeats_one_that_was_not_interrupted_to_the_bit(recipe, compiled, tmp_path):
    model, losses = train(tmp_path / "ckpt.pt", recipe, compiled=compiled)
    assert len(losses) == 18
    assert all(map(math.isfinite, losses))
    assert model.transformer.wte.weight is model.lm_head.weight
    plan = fp8stack.plan_of(model)
    assert [layer.name for layer in plan.layers if not layer.fp8] == ["lm_head"]
    again, resumed_losses = train(tmp_path / "ckpt.pt", recipe, resume=True, compiled=compiled)
    assert resumed_losses == losses[9:]
    assert same(again.state_dict(), model.state_dict())
    assert same(fp8stack.fp8_state(again), fp8stack.fp8_state(model))
