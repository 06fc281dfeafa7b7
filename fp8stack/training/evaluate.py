"""Validation loss. Nothing here changes the model or its FP8 state."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8stack.distributed.process_group import ALONE, Ranks, losing_ranks
from fp8stack.training.dataloader import inputs_of


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


def validation_loss(
    model: nn.Module,
    windows: Tensor,
    batch: int,
    device: torch.device,
    ranks: Ranks = ALONE,
    stops: Callable[[], bool] = lambda: False,
) -> float | None:
    """The mean loss in nats per token over `windows`, which ranks share out.

    Args:
        model: as it is trained; all ranks call it equally often.
        windows: int64 [N, T + 1], or with documents [N, 2, T + 1]; the same on all ranks.
        batch: windows at a time, over all ranks; a multiple of their number.
        device: the model's.
        ranks: who takes part.
        stops: asked before each batch whether to leave early; then None is returned.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    with eval_mode(model):
        for start in range(0, len(windows), batch):
            if ranks.any(stops()):
                return None
            mine = windows[start : start + batch][ranks.index :: ranks.count]
            # A rank that has none left computes along: others may wait for its part of the model.
            tokens = (mine if len(mine) else windows[:1]).to(device)
            total += model(*inputs_of(tokens)).double() * len(mine)
    if ranks.count > 1:
        with losing_ranks():
            dist.all_reduce(total)
    return float(total) / len(windows)
