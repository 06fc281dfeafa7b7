"""Two recipes of the same model, compared token by token. B windows, T tokens, V vocabulary, N
windows in all."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fp8stack.common.errors import UserError
from fp8stack.common.tables import counted
from fp8stack.common.terminal import warn
from fp8stack.layers.swapped import swapped
from fp8stack.model.gpt import GPT
from fp8stack.precision import Plan
from fp8stack.precision.plan import LayerPlan
from fp8stack.trained.evaluate.divergence import TokenDifferences, compared, divergence_sum
from fp8stack.trained.evaluate.evaluated_run import EvaluatedRun, evaluated_runs
from fp8stack.trained.evaluate.scores import standard_error
from fp8stack.training.dataloader import inputs_of
from fp8stack.training.evaluate import eval_mode


@dataclass(frozen=True, kw_only=True, eq=False)
class Agreement:
    """The agreement of a model in the recipe p, such as the recipe of its training, with the same
    model in the recipe q, such as the scheme of a server.

    Attributes:
        run: as the user named it.
        checkpoint: the folder that was read, or the name of a model of transformers.
        data: the name of the data.
        recipes: p and q, as the user named them.
        plans: the plans that ran.
        losses: the mean losses in nats per token.
        kl: KL(p || q) in nats per token: how much of p's prediction q misses.
        median, percentile_99, maximum: of |log p - log q| of the token that came.
        token_mult_prob_error: the mean of exp |log p - log q| of the token that came; NVIDIA NeMo
            RL computes it for trainer and server, and investigates above 1.05.
        top1: the share of tokens for which p and q have the same likeliest token.
        standard_error: of the difference of the losses, over windows; None for a single window.
        kl_of_layers: KL with the layers in `layers` as in q and all else as in p.
        layers: KL with one layer as in q and all else as in p, by module path, the largest first:
            the layers that p and q quantize differently or that have other weights.
        windows, tokens: how many of them were compared.
    """

    run: str
    checkpoint: Path
    data: str
    recipes: tuple[str, str]
    plans: tuple[Plan, Plan]
    losses: tuple[float, float]
    kl: float
    median: float
    percentile_99: float
    maximum: float
    token_mult_prob_error: float
    top1: float
    standard_error: float | None
    kl_of_layers: float
    layers: dict[str, float]
    windows: int
    tokens: int

    @property
    def loss_difference(self) -> float:
        """The loss in q minus the loss in p, in nats per token."""
        return self.losses[1] - self.losses[0]


def agreements(
    runs: str | Path | Sequence[str | Path],
    *recipes: str,
    data: str | None = None,
    windows: int | None = None,
    context: int | None = None,
    batch: int | None = None,
    tokenizer: str | None = None,
    device: str = "auto",
    backend: str = "auto",
) -> list[Agreement]:
    """Compare trained models in the first recipe with themselves in each other recipe, on the same
    windows. Progress is printed to stderr. For the arguments and errors see `evaluate`.

    Raises:
        UserError: fewer than two recipes.
    """
    if len(recipes) < 2:
        raise UserError(
            "--agree compares two recipes or more. Example: --recipes delayed,served:fp8_dynamic"
        )
    results = []
    for evaluated in evaluated_runs(
        runs,
        recipes,
        data=data,
        windows=windows,
        context=context,
        batch=batch,
        tokenizer=tokenizer,
        device=device,
        backend=backend,
        at_once=2,
    ):
        p_recipe, *q_recipes = evaluated.recipes
        p = evaluated.model(p_recipe)
        for q_recipe in q_recipes:
            count = counted(len(evaluated.windows.tokens), "window")
            warn(f"{evaluated.trained.path} in {p_recipe} and {q_recipe}: {count}")
            pair = p_recipe, q_recipe
            results.append(_agreement(evaluated, pair, p, evaluated.model(q_recipe)))
    return results


def _agreement(evaluated: EvaluatedRun, recipes: tuple[str, str], p: GPT, q: GPT) -> Agreement:
    paths = different_layers(p, q)
    layer_sets = [paths, *([path] for path in paths)]
    tokens = evaluated.windows.tokens
    differences, (kl_of_layers, *kl_of_each) = differences_and_divergences(
        p, q, layer_sets, tokens, evaluated.batch
    )
    by_layer = zip(paths, kl_of_each, strict=True)
    change_R = differences.log_p_R - differences.log_q_R
    distance_R = change_R.abs()
    return Agreement(
        run=evaluated.run,
        checkpoint=evaluated.trained.path,
        data=evaluated.windows.name,
        recipes=recipes,
        plans=(p.backend.plan, q.backend.plan),
        losses=(-differences.log_p_R.mean().item(), -differences.log_q_R.mean().item()),
        kl=differences.kl_R.mean().item(),
        median=_quantile(distance_R, 0.5),
        percentile_99=_quantile(distance_R, 0.99),
        maximum=distance_R.max().item(),
        token_mult_prob_error=distance_R.exp().mean().item(),
        top1=differences.same_top_R.double().mean().item(),
        standard_error=standard_error(change_R.view(len(tokens), -1).mean(1)),
        kl_of_layers=kl_of_layers,
        layers=dict(sorted(by_layer, key=lambda item: -item[1])),
        windows=len(tokens),
        tokens=len(change_R),
    )


def _quantile(x_R: Tensor, share: float) -> float:
    # torch.quantile takes 16 million elements at most.
    return float(np.quantile(x_R.numpy(), share))


def different_layers(p: GPT, q: GPT) -> list[str]:
    """The module paths of the linears that two models of the same shape multiply differently in the
    forward pass, or that have other weights or scales, in order."""
    p_plan, q_plan = p.backend.plan, q.backend.plan
    p_scales, q_scales = _scales(p), _scales(q)
    return [
        layer.name
        for layer, q_layer in zip(p_plan.layers, q_plan.layers, strict=True)
        if _forward_pass(p_plan, layer) != _forward_pass(q_plan, q_layer)
        or not _same_tensors(_tensors(p, p_scales, layer.name), _tensors(q, q_scales, layer.name))
    ]


def _forward_pass(plan: Plan, layer: LayerPlan) -> tuple[object, ...]:
    """The decisions of a plan that affect the forward pass of a layer."""
    table = layer.quantizers
    quantizers = (None, None) if table is None else (table.input, table.weight)
    backend = None if table is None else plan.backend_of(layer)
    return (*quantizers, backend, plan.compute_dtype)


def _scales(model: GPT) -> Mapping[str, Tensor]:
    """The state of a model's delayed scaling."""
    delayed = model.backend.delayed
    return {} if delayed is None else delayed.state_dict()


def _tensors(model: GPT, scales: Mapping[str, Tensor], path: str) -> dict[str, Tensor]:
    """The parameters of a layer, and its scales of delayed scaling in the forward pass."""
    slots = [f"{path}.{operand}.scale" for operand in ("input", "weight")]
    parameters = dict(model.get_submodule(path).named_parameters())
    return parameters | {slot: scales[slot] for slot in slots if slot in scales}


def _same_tensors(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Whether tensors are equal, but for rows that pad the vocabulary."""
    return first.keys() == second.keys() and all(
        torch.equal(x[: len(second[name])], second[name][: len(x)]) if x.ndim else x == second[name]
        for name, x in first.items()
    )


def differences_and_divergences(
    p: GPT, q: GPT, layer_sets: Sequence[Collection[str]], windows: Tensor, batch: int
) -> tuple[TokenDifferences, list[float]]:
    """Compare the predictions of two models, and compute KL(p || p with some layers of q) in nats
    per token for each set of module paths in `layer_sets`. The logits of two passes over `batch`
    windows, float32 [batch, T, V], are in memory at once."""
    of_batches, sums = [], [0.0] * len(layer_sets)
    for batch_windows in torch.split(windows, batch):
        inputs_BT, targets_BT, *documents = inputs_of(batch_windows.to(p.embedding.weight.device))

        def logits(model: GPT, inputs: Sequence[Any] = (inputs_BT, None, *documents)) -> Tensor:
            with eval_mode(model):
                logits_BTV: Tensor = model(*inputs)
            return logits_BTV.flatten(0, 1)

        p_RV = logits(p)
        of_batches.append(compared(p_RV, logits(q), targets_BT.flatten()))
        for index, paths in enumerate(layer_sets):
            if paths:
                with swapped(p, q, paths):
                    sums[index] += divergence_sum(p_RV, logits(p))
    differences = TokenDifferences(*map(torch.cat, zip(*of_batches, strict=True)))
    return differences, [total / len(differences.kl_R) for total in sums]
