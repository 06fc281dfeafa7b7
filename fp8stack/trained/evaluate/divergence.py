"""Two models' predictions of the same tokens, compared. R tokens, V vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 2**21
"""Logits of one model that are compared at a time: 16 MiB in float64."""


class TokenDifferences(NamedTuple):
    """The differences between two models' predictions p and q, token by token, on the CPU.

    Attributes:
        kl_R: KL(p || q), in nats: float64.
        log_p_R: log p of the token that came: float64.
        log_q_R: log q of it: float64.
        same_top_R: whether the likeliest token is the same: bool.
    """

    kl_R: Tensor
    log_p_R: Tensor
    log_q_R: Tensor
    same_top_R: Tensor


def compared(p_RV: Tensor, q_RV: Tensor, targets_R: Tensor) -> TokenDifferences:
    """Compare two models' predictions.

    Args:
        p_RV, q_RV: logits of both models, [R, V]. Probabilities are computed from them in float64,
            for `CHUNK` logits at a time.
        targets_R: the tokens that came, int64 [R].
    """
    rows = max(1, CHUNK // p_RV.shape[-1])
    chunks = zip(*(torch.split(x, rows) for x in (p_RV, q_RV, targets_R)), strict=True)
    of_chunks = [_compared(*chunk) for chunk in chunks]
    return TokenDifferences(*(torch.cat(tensors).cpu() for tensors in zip(*of_chunks, strict=True)))


def divergence_sum(p_RV: Tensor, q_RV: Tensor) -> float:
    """KL(p || q) in nats, summed over tokens; for the arguments see `compared`."""
    rows = max(1, CHUNK // p_RV.shape[-1])
    chunks = zip(torch.split(p_RV, rows), torch.split(q_RV, rows), strict=True)
    return sum(float(_divergence(*map(_log_softmax, chunk)).sum()) for chunk in chunks)


def _compared(p_RV: Tensor, q_RV: Tensor, targets_R: Tensor) -> TokenDifferences:
    log_p_RV, log_q_RV = _log_softmax(p_RV), _log_softmax(q_RV)
    of_target_R1 = targets_R[:, None]
    return TokenDifferences(
        _divergence(log_p_RV, log_q_RV),
        log_p_RV.gather(1, of_target_R1).squeeze(1),
        log_q_RV.gather(1, of_target_R1).squeeze(1),
        p_RV.argmax(-1) == q_RV.argmax(-1),
    )


def _log_softmax(logits_RV: Tensor) -> Tensor:
    return logits_RV.double().log_softmax(-1)


def _divergence(log_p_RV: Tensor, log_q_RV: Tensor) -> Tensor:
    return (log_p_RV.exp() * (log_p_RV - log_q_RV)).sum(-1)
