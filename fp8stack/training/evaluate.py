"""Validation loss and text samples. Nothing here changes the model or its FP8 state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fp8stack.model import GPT


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation without gradients; the model's mode is put back after."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def validation_loss(model: nn.Module, windows: Tensor, batch: int, device: torch.device) -> float:
    """The mean loss in nats per token over `windows`, int64 [N, T + 1]."""
    total = 0.0
    with eval_mode(model):
        for start in range(0, len(windows), batch):
            tokens = windows[start : start + batch].to(device)
            total += float(model(tokens[:, :-1], tokens[:, 1:])) * len(tokens)
    return total / len(windows)


def sample(
    model: GPT, prompt: Sequence[int], count: int, *, temperature: float, seed: int
) -> list[int]:
    """`count` tokens that the model continues `prompt` with.

    The draw depends on `seed` alone; the training's random state is not touched. A compiled model
    runs uncompiled: it would be compiled again for each length.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    with eval_mode(model), torch.compiler.set_stance("force_eager"):
        for _ in range(count):
            window = torch.tensor([tokens[-model.config.context :]], device=device)
            logits_V = model(window)[0, -1].cpu() / temperature
            chances_V = logits_V.softmax(dim=-1)
            tokens.append(int(torch.multinomial(chances_V, 1, generator=generator)))
    return tokens[len(prompt) :]
