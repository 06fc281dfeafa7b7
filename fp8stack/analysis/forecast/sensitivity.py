"""The sensitivity of a trained model to a recipe, measured without training. B windows, T tokens, V
vocabulary.

Forward: the Kullback-Leibler divergence KL(p || q), in nats per token, of the quantized model's
predictions q from the model's own, p. It equals the added loss if labels are distributed as p. A
few thousand tokens distinguish 8-bit recipes, where the difference of two losses needs millions,
because KL has no first-order term.

Backward: the relative squared error of the operands of the backward pass's two GEMMs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8stack.common.formats import Quantizer
from fp8stack.common.quantizer_table import Operand, Quantizers
from fp8stack.layers import build_backend
from fp8stack.layers.grouped import GroupedLinear
from fp8stack.layers.observe import Place, all_linears, fp8_linears, observing
from fp8stack.model.config import plan_for
from fp8stack.model.gpt import GPT
from fp8stack.numerics import RandomBits
from fp8stack.numerics.error import FIGURES, quantization_error
from fp8stack.precision import Hardware, Plan, Recipe
from fp8stack.trained.evaluate.agreement import differences_and_divergences
from fp8stack.training.dataloader import inputs_of

SIGNAL, NOISE = FIGURES.index("signal"), FIGURES.index("noise")


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """A model's sensitivity to a recipe.

    Attributes:
        plan: the plan that runs the recipe.
        forward: KL in nats per token with every layer of the recipe quantized.
        layers: KL with only this layer quantized, by module path.
        backward: the sum of the relative squared errors of a backward GEMM's two operands,
            averaged over both GEMMs and over all layers of `work`, weighted by it; 0 in those that
            the recipe does not quantize.
        backward_layers: the same for each layer, by module path.
        work: multiplications per token in a GEMM of each layer that one of the recipes quantizes,
            by module path; of the head only if this recipe does.
    """

    plan: Plan
    forward: float
    layers: dict[str, float]
    backward: float
    backward_layers: dict[str, float]
    work: dict[str, float]

    def without(self, left_out: Collection[str]) -> Sensitivity:
        """The sensitivity with the layers in `left_out` not quantized. Layer divergences add up to
        the model's divergence within a few percent."""
        remaining = [path for path in self.layers if path not in left_out]
        total = sum(self.layers.values())
        share = sum(self.layers[path] for path in remaining) / total if total else 0.0
        weights = sum(self.work.values())
        noise = sum(self.backward_layers[path] * self.work[path] for path in remaining)
        return replace(
            self,
            forward=self.forward * share,
            layers={path: self.layers[path] for path in remaining},
            backward=noise / weights if weights else 0.0,
        )


def sensitivities(
    model: GPT, recipes: Mapping[str, Recipe], windows: Tensor, hardware: Hardware, batch: int = 32
) -> Iterator[tuple[str, Sensitivity]]:
    """Measure the sensitivity of a model to each recipe, and yield each with the recipe's name.

    Args:
        model: the model, in float32 without FP8.
        recipes: recipes by name. Delayed scaling is measured as current scaling, because there are
            no earlier passes to take scales from. Attention and the residual stream stay in
            float32.
        windows: held-out text, int64 [B, T + 1], or with documents [B, 2, T + 1].
        hardware: the machine that the recipes are planned for.
        batch: windows per forward pass.
    """
    defaults = Recipe(name="").beside_linears
    plans = {
        name: plan_for(model.config, without_delay(recipe).model_copy(update=defaults), hardware)
        for name, recipe in recipes.items()
    }
    quantized = {layer.name for plan in plans.values() for layer in plan.layers if layer.fp8}
    operands = OperandRecorder.of(model, windows[:batch], quantized)
    forward: dict[object, tuple[float, dict[str, float]]] = {}
    tables_of = {
        name: {la.name: la.quantizers for la in plan.layers if la.fp8 and la.quantizers}
        for name, plan in plans.items()
    }
    linears = {path for tables in tables_of.values() for path in tables} - {"lm_head"}
    for name, plan in plans.items():
        tables = tables_of[name]
        # Recipes that differ only in the backward pass share the forward measurement.
        key = tuple((path, table.input, table.weight) for path, table in tables.items())
        if key not in forward:
            forward[key] = _forward(model, plan, windows, batch)
        total, layers = forward[key]
        backward = {path: operands.backward_error(path, table) for path, table in tables.items()}
        work = {la.name: la.work for la in plan.layers if la.name in linears | tables.keys()}
        mean = sum(backward[path] * work[path] for path in tables) / max(1, sum(work.values()))
        yield (
            name,
            Sensitivity(
                plan=plan,
                forward=total,
                layers=layers,
                backward=mean,
                backward_layers=backward,
                work=work,
            ),
        )


def without_delay(recipe: Recipe) -> Recipe:
    """The recipe with current scaling in place of delayed scaling."""

    def current(table: Quantizers | None) -> Quantizers | None:
        if table is None:
            return None
        changed = {
            name: replace(quantizer, amax="current")
            for name, quantizer in vars(table).items()
            if isinstance(quantizer, Quantizer) and quantizer.delayed
        }
        return replace(table, **changed)

    rules = tuple(
        rule.model_copy(update={"quantizers": current(rule.quantizers)}) for rule in recipe.layers
    )
    return recipe.model_copy(update={"quantizers": current(recipe.quantizers), "layers": rules})


def _forward(model: GPT, plan: Plan, windows: Tensor, batch: int) -> tuple[float, dict[str, float]]:
    """KL in nats per token with all layers of a plan quantized, and with each layer alone."""
    backend = build_backend(plan)
    backend.vocabulary_multiple = model.backend.vocabulary_multiple  # sets the weights' shapes
    quantized = GPT(model.config, backend)
    quantized.load_state_dict(model.state_dict(), strict=False)
    quantized.to(next(model.parameters()).device)
    linears = fp8_linears(quantized)
    exact = all(
        (table := plan.layer(path).quantizers) is None or table.input is table.weight is None
        for path in linears
    )
    if exact or not linears:
        return 0.0, dict.fromkeys(linears, 0.0)
    layer_sets = [[path] for path in linears]
    differences, divergences = differences_and_divergences(
        model, quantized, layer_sets, windows, batch
    )
    layers = {path: max(0.0, kl) for path, kl in zip(linears, divergences, strict=True)}
    return max(0.0, differences.kl_R.mean().item()), layers


class OperandRecorder:
    """The operands of a model's linears in one forward and backward pass; each group of a
    grouped linear counts as a linear."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, Place], list[Tensor]] = {}
        self._errors: dict[tuple[str, Place, Quantizer, int], float] = {}

    @classmethod
    def of(cls, model: GPT, windows: Tensor, paths: Collection[str]) -> OperandRecorder:
        """Record the operands of the linears at `paths` for the loss on `windows`. The model's
        gradients stay unchanged."""
        operands = cls()
        layers = {path: layer for path, layer in all_linears(model).items() if path in paths}

        def observe(path: str, layer: nn.Module, place: Place, x: Tensor) -> None:
            of_layer = path.rpartition(".")[0] if isinstance(layer, GroupedLinear) else path
            operands._tensors.setdefault((of_layer, place), []).append(x.clone())

        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        with torch.enable_grad(), observing(model, observe, layers=layers):
            inputs_BT, targets_BT, *documents = inputs_of(
                windows.to(next(model.parameters()).device)
            )
            # The model's own loss may compute the head in chunks, which is not observed.
            logits_BTV = model(inputs_BT, None, *documents).float()
            loss = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
            torch.autograd.backward(loss)
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name]
        return operands

    def backward_error(self, path: str, table: Quantizers) -> float:
        """The sum of the relative squared errors of a backward GEMM's two operands, averaged over
        dgrad and wgrad."""
        forward = {"input": table.input, "weight": table.weight}
        total = self._error(path, "grad_output", table.grad_output, 1)
        total += self._error(path, "grad_output", table.grad_output_wgrad, 0)
        for operand in ("weight", "input"):
            quantizer = table.columnwise(operand)
            if quantizer == "forward":
                total += self._error(path, operand, forward[operand], 1)
            elif quantizer is not None:
                total += self._error(path, operand, quantizer, 0)
        return total / 2

    def _error(self, path: str, operand: Operand, quantizer: Quantizer | None, dim: int) -> float:
        if quantizer is None:
            return 0.0
        key = (path, operand, quantizer, dim)
        if key not in self._errors:
            signal = noise = 0.0
            for x in self._tensors[path, operand]:
                bits = RandomBits(0, 0, torch.zeros((), dtype=torch.int64, device=x.device))
                figures = quantization_error(
                    x, quantizer, dim=dim, generator=bits if quantizer.stochastic else None
                )
                signal, noise = signal + float(figures[SIGNAL]), noise + float(figures[NOISE])
            self._errors[key] = noise / signal if signal else 0.0
        return self._errors[key]
