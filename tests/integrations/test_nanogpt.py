"""The loop of nanoGPT's train.py, in our words, with the lines that docs/integrations.md adds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8stack
from tests.integrations.loops import tokens
from tests.support.backend_models import same

WIDTH, HEADS, CONTEXT, VOCABULARY = 32, 2, 16, 64


class Block(nn.Module):
    """Attention with q, k and v in one linear, and an MLP; no biases."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = (nn.LayerNorm(WIDTH, bias=False) for _ in range(2))
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.c_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH, bias=False),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            projected.view(*x.shape[:2], HEADS, -1).transpose(1, 2)
            for projected in self.c_attn(self.ln_1(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """Two blocks, and a head that is tied to the token embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(2))
        self.ln_f = nn.LayerNorm(WIDTH, bias=False)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(idx) + self.wpe.weight[: idx.shape[1]]
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> torch.optim.AdamW:
        """Weight decay for matrices alone."""
        parameters = list(self.parameters())
        decayed = {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1}
        undecayed = {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}
        return torch.optim.AdamW([decayed, undecayed], betas=(0.9, 0.95))


def batch(step: int, micro_step: int) -> tuple[Tensor, Tensor]:
    ids = tokens(10 * step + micro_step)
    return ids[:, :-1], ids[:, 1:]


@torch.no_grad()
def estimate_loss(model: nn.Module) -> float:
    model.eval()
    loss = torch.stack([model(*batch(100, k))[1] for k in range(2)]).mean().item()
    model.train()
    return loss


def train(
    path: Path, recipe: str, *, resume: bool = False, compiled: bool = False
) -> tuple[NanoGPT, list[float]]:
    """Steps 0 to 5, or 3 to 5 from the checkpoint that an earlier run saved before step 3."""
    torch.manual_seed(5 if resume else 0)
    raw_model, first = NanoGPT(), 0
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
    optimizer = raw_model.configure_optimizers()
    if resume:
        optimizer.load_state_dict(checkpoint["optimizer"])
    model: Any = torch.compile(raw_model) if compiled else raw_model
    losses: list[float] = []
    for step in range(first, 6):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 + math.cos(math.pi * step / 6)) / 2
        losses.append(estimate_loss(model))
        if step == 3 and not resume:
            torch.save(
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "iter_num": step,
                    "fp8": fp8stack.fp8_state(model),  # added
                },
                path,
            )
        for micro_step in range(2):
            loss = model(*batch(step, micro_step))[1]
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
    assert model.wte.weight is model.lm_head.weight
    plan = fp8stack.plan_of(model)
    assert [layer.name for layer in plan.layers if not layer.fp8] == ["lm_head"]
    again, resumed_losses = train(tmp_path / "ckpt.pt", recipe, resume=True, compiled=compiled)
    assert resumed_losses == losses[9:]
    assert same(again.state_dict(), model.state_dict())
    assert same(fp8stack.fp8_state(again), fp8stack.fp8_state(model))
