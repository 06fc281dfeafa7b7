"""Validation loss, computed without changing the model or its FP8 state."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8stack.training.dataloader import inputs_of
from fp8stack.training.distributed.process_group import ALONE, Ranks, losing_ranks


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """A context in which `model` is in eval mode without gradients; restores its mode at the
    end."""
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
    """The mean loss in nats per token over `windows`, which are divided among the ranks.

    Args:
        model: the model in training, or its DDP or FSDP2 wrapper; all ranks call it equally often.
        windows: int64 [N, T + 1], or with documents [N, 2, T + 1]; the same on all ranks.
        batch: windows per forward pass, over all ranks; a multiple of the number of ranks.
        device: the model's device.
        ranks: the ranks of the run.
        stops: called before each batch; if it returns True on any rank, the result is None.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    with eval_mode(model):
        for start in range(0, len(windows), batch):
            if ranks.any(stops()):
                return None
            mine = windows[start : start + batch][ranks.index :: ranks.count]
            # A rank without windows runs the model too: others may wait for its shard.
            tokens = (mine if len(mine) else windows[:1]).to(device)
            total += model(*inputs_of(tokens)).double() * len(mine)
    if ranks.count > 1:
        with losing_ranks():
            dist.all_reduce(total)
    return float(total) / len(windows)
