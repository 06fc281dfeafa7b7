"""A mixture of experts in place of a block's MLP. B sequences, T tokens, N = B T tokens in all,
D width, X experts, K experts per token.

A router chooses K experts for each token and weights their outputs, in float32 under every recipe.
No token is dropped. Rows are moved by gathers alone, so that results do not depend on the order in
which a GPU adds, and all shapes are the same in every step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8stack.layers import Backend
from fp8stack.layers.grouped import gather, sort_by_group
from fp8stack.layers.kernels.activations import ACTIVATIONS
from fp8stack.layers.linear import no_autocast
from fp8stack.model.config import Experts, GPTConfig


class Routing(NamedTuple):
    """Losses and token counts of one router in one pass.

    Attributes:
        loss: the load balancing loss and the router z-loss, times their coefficients: float32,
            0-dim, with gradients.
        balance: the load balancing loss alone, without its coefficient: float32, 0-dim; 1 if all
            experts get as many tokens.
        counts: the number of tokens that each expert gets: int64 [X].
    """

    loss: Tensor
    balance: Tensor
    counts: Tensor


class Choice(NamedTuple):
    """The experts of each token: int64 [B, T, K], and their routing weights, float32 [B, T, K]."""

    experts: Tensor
    weights: Tensor


class Router(nn.Linear):
    """The linear that scores experts: parameter `weight` [X, D], float32 under every recipe."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__(width, count, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """[..., D] in any floating dtype -> logits [..., X], float32."""
        with no_autocast(input.device.type):
            return F.linear(input.float(), self.weight.float())


class _Chosen(torch.autograd.Function):
    """The scores of the chosen experts, [B, T, K]. The experts of a token differ, so that the
    gradient writes each element once; torch's `gather` would add atomically on a GPU."""

    @staticmethod
    def forward(ctx: Any, scores_BTX: Tensor, experts_BTK: Tensor) -> Tensor:
        ctx.save_for_backward(experts_BTK)
        ctx.shape = scores_BTX.shape
        return scores_BTX.gather(-1, experts_BTK)

    @staticmethod
    def backward(ctx: Any, dy_BTK: Tensor) -> tuple[Tensor, None]:
        (experts_BTK,) = ctx.saved_tensors
        return dy_BTK.new_zeros(ctx.shape).scatter(-1, experts_BTK, dy_BTK), None


def choose(logits_BTX: Tensor, config: Experts, bias: Tensor | None) -> tuple[Choice, Routing]:
    """Choose the experts of tokens.

    The K experts with the largest scores are chosen, of equal ones those of lower index. The scores
    are the softmax over the logits. Every token counts for the losses, whatever its target and its
    document. The load balancing loss of a sequence is sum_i f_i P_i, with f_i the share of choices
    that expert i gets, times X, and P_i its mean score (arXiv 2401.06066, equation 12); it is
    averaged over the sequences.

    Args:
        logits_BTX: the router's output, float32.
        config: the table `[experts]`.
        bias: float32 [X], added to the scores when experts are chosen, and only then.
    """
    scores_BTX = logits_BTX.softmax(-1)
    ranked_BTX = scores_BTX.detach()
    if bias is not None:
        ranked_BTX = ranked_BTX + bias
    order_BTX = torch.sort(ranked_BTX, dim=-1, descending=True, stable=True).indices
    experts_BTK = order_BTX[..., : config.per_token]
    weights_BTK: Tensor = _Chosen.apply(scores_BTX, experts_BTK)  # type: ignore[no-untyped-call]
    if config.normalize:
        weights_BTK = weights_BTK / weights_BTK.sum(-1, keepdim=True)
    every_expert = torch.arange(config.count, device=logits_BTX.device)
    counts_BX = (experts_BTK[..., None] == every_expert).sum((1, 2))
    shares_BX = counts_BX * (config.count / (config.per_token * logits_BTX.shape[1]))
    balance = (shares_BX * scores_BTX.mean(1)).sum(-1).mean()
    loss = config.balance_coefficient * balance
    if config.router_z:
        loss = loss + config.router_z * logits_BTX.logsumexp(-1).square().mean()
    return Choice(experts_BTK, weights_BTK), Routing(loss, balance.detach(), counts_BX.sum(0))


class ExpertsMLP(nn.Module):
    """The experts: grouped linears `up` [X, 2 F or F, D] and `down` [X, D, F] around an activation,
    with inner width F; SwiGLU's gate comes first."""

    def __init__(self, config: GPTConfig, experts: Experts, backend: Backend, path: str) -> None:
        super().__init__()
        self.activation = config.activation
        shapes = config.linear_shapes()
        up, down = f"{path}.up", f"{path}.down"
        self.up = backend.grouped_linear(up, experts.count, *shapes[up], config.bias)
        self.down = backend.grouped_linear(down, experts.count, *shapes[down], config.bias)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """[rows, D] sorted by expert, and the ends of the experts' rows, int32 [X] -> [rows, D] in
        the compute dtype."""
        y: Tensor = self.down(ACTIVATIONS[self.activation](self.up(x, offsets)), offsets)
        return y


class MixtureMLP(nn.Module):
    """A router, the experts that it chooses from, and the shared experts, if there are any.

    With `bias`, the buffer `balance_bias`, float32 [X], is added to the scores that choose experts
    (see `update_bias`).
    """

    balance_bias: Tensor | None

    def __init__(self, config: GPTConfig, backend: Backend, path: str, shared: nn.Module | None):
        super().__init__()
        experts = config.experts
        assert experts is not None
        self.config, self.backend = experts, backend
        self.router = Router(config.width, experts.count)
        self.experts = ExpertsMLP(config, experts, backend, f"{path}.experts")
        self.shared = shared
        bias = None if experts.bias is None else torch.zeros(experts.count)
        self.register_buffer("balance_bias", bias)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Routing]:
        """[B, T, D] float32 -> [B, T, D] float32: the sum of the chosen experts' outputs times
        their routing weights, and of the shared experts' output."""
        choice, routing = choose(self.router(x_BTD), self.config, self.balance_bias)
        y_BTD = self._mixed(x_BTD, choice)
        if self.shared is not None:
            y_BTD = y_BTD + self.backend.mlp(x_BTD, self.shared).float()
        return y_BTD, routing

    def _mixed(self, x_BTD: Tensor, choice: Choice) -> Tensor:
        per_token = self.config.per_token
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1]).to(self.experts.up.compute_dtype)
        # Copy n K + k of a token is the one of token n for its expert k.
        order, offsets = sort_by_group(choice.experts, self.config.count)
        inverse_NK = torch.argsort(order).view(-1, per_token)
        rows = gather(x_ND, order // per_token, inverse_NK)
        outputs = self.experts(rows, offsets)
        y = gather(outputs, inverse_NK.flatten(), order[:, None])
        y_BTKD = y.view(*choice.weights.shape, -1).float()
        return (y_BTKD * choice.weights[..., None]).sum(2)

    @torch.no_grad()
    def update_bias(self, counts: Tensor, skips: Tensor) -> None:
        """Raise the biases of experts that got fewer tokens than the mean and lower the others', by
        the rate `bias` (arXiv 2408.15664, algorithm 1).

        Args:
            counts: the tokens of each expert in a step, over all micro-batches and ranks: [X].
            skips: bool, 0-dim: whether the step changes nothing.
        """
        if self.balance_bias is not None and self.config.bias is not None:
            counts = counts.double()
            change = self.config.bias * torch.sign(counts.mean() - counts)
            self.balance_bias += torch.where(skips, 0.0, change).float()


class RoutingRecord:
    """The routings of a model in the micro-batches of a training step.

    Attributes:
        counts: the number of tokens of each expert, by layer: int64 [layers, X].
        balance: the load balancing loss of each layer, summed over the micro-batches: [layers].
        passes: the number of micro-batches.
    """

    def __init__(self) -> None:
        self.counts: Tensor | None = None
        self.balance: Tensor | None = None
        self.passes = 0

    def begin(self) -> None:
        """Begin a step."""
        self.counts = self.balance = None
        self.passes = 0

    @torch.no_grad()
    def add(self, routings: list[Routing]) -> None:
        """Add the routings of all layers in one micro-batch."""
        counts = torch.stack([routing.counts for routing in routings])
        balance = torch.stack([routing.balance for routing in routings])
        self.counts = counts if self.counts is None else self.counts + counts
        self.balance = balance if self.balance is None else self.balance + balance
        self.passes += 1
