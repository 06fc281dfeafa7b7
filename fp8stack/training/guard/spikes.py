"""Spikes: values far above those before them, by robust statistics."""

import torch
from torch import Tensor

from fp8stack.planning.run_config import GuardConfig

LARGEST = 2.0**64
"""The smallest value whose square float32 cannot hold, nor the norm of a tensor that contains it.
The guard treats such values as infinite."""
_MAD_TO_SIGMA = 1.4826  # for a normal distribution


def spike_limit(window: Tensor, config: GuardConfig, factor: float | Tensor) -> Tensor:
    """The largest value in each column that is not a spike: [n, columns] -> [columns].

    The median and 1.4826 times the median absolute deviation replace mean and standard deviation,
    so that earlier spikes do not hide a new one. Where values fall fast, as losses do at first,
    that deviation measures the trend: `factor` times the largest of the last `config.warmup` values
    is a limit in any case. The newest row is the last; NaN is ignored. The limit is infinite while
    there are fewer than `config.warmup` values.
    """
    if not len(window):
        return window.new_full(window.shape[1:], torch.inf)
    count = window.isfinite().sum(dim=0)
    median = _median(window, count)
    sigma = _MAD_TO_SIGMA * _median((window - median).abs(), count)
    limit = torch.maximum(median + config.deviations * sigma, factor * median)
    largest = window[-config.warmup :].nan_to_num(nan=0.0).amax(dim=0)
    limit = torch.minimum(limit, torch.where(largest > 0, factor * largest, torch.inf))
    return torch.where(count >= config.warmup, limit, torch.inf)


def _median(values: Tensor, count: Tensor) -> Tensor:
    """The lower median of each column's `count` values that are not NaN: [n, columns] -> [columns].
    It sorts, since torch.median is nondeterministic on a GPU."""
    ordered = values.sort(dim=0).values  # NaN comes last
    place = ((count - 1).clamp(min=0) // 2)[None]
    return ordered.gather(0, place)[0]
