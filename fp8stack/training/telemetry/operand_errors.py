"""The quantization error of each operand, measured in sampled steps.

A sample measures the first micro-batch of a step: each operand's amax, its scale, the fractions
that were clipped and that became zero, and the signal-to-noise ratio. It measures other recipes on
the same operands as well ("what if"), and, in any recipe, the gradients of the full step. For FP8
attention, whose operands exist only inside cuDNN's kernels, it has the amaxes that the kernels
record, and the scales. The figures stay on the device until `finish` reads them all at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fp8stack.common.errors import UserError, described
from fp8stack.common.formats import Quantizer
from fp8stack.common.quantizer_table import Operand, Quantizers
from fp8stack.layers.backend import DTYPES
from fp8stack.layers.delayed import DelayedScaling
from fp8stack.layers.linear import LowPrecisionLayer
from fp8stack.layers.observe import (
    Place,
    all_linears,
    fp8_linears,
    fp8_parts,
    observing,
    scale_of,
)
from fp8stack.numerics import RandomBits
from fp8stack.numerics.error import (
    FIGURES,
    cast_error,
    headroom_bits,
    joint_error,
    quantization_error,
    sqnr_db,
)
from fp8stack.precision import Plan, Recipe, load_recipe
from fp8stack.precision.plan import block_indices
from fp8stack.precision.recipe import BlockIndex, ComputeDtype
from fp8stack.training.telemetry import gradients

Row = dict[str, Any]
_OF_BLOCKS = ("zero_blocks", "least_scale", "largest_scale")
_TRACKED = ("amax", "scale", "headroom_bits", "saturated", "underflow", "sqnr_db")


class Sample(NamedTuple):
    """The figures of one sampled step, as in `telemetry.jsonl`.

    Attributes:
        rows: one row for the model (`step`, `fp8_gemms`, `fp8_layers`, `layers`, `not_fp8`,
            `scale_changes`), then one per operand and recipe (`step`, `layer`, `operand`, `recipe`,
            `what_if`, `format`, `amax`, `scale`, `headroom_bits`, `saturated`, `underflow`,
            `nonfinite`, `sqnr_db`), then one per part with a gradient (`step`, `gradient`, `norm`,
            `ratio`, `zeros`). A figure that is unknown or not finite is None.
        numbers: the same figures by name, for trackers: `fp8/sqnr_db/blocks.0.mlp.up.input`,
            `gradient/norm/blocks.0.mlp.up`.
    """

    rows: list[Row]
    numbers: dict[str, float]


class _Measured(NamedTuple):
    """One operand in one recipe, of a grouped linear in all its groups. `figures` holds `FIGURES`
    and the scale, which is NaN if there are several; `format` is the format that it was cast to;
    `blocks` is whether it has a scale per block."""

    layer: str
    operand: str
    recipe: str
    what_if: bool
    format: str
    blocks: bool
    figures: Tensor


_Label = tuple[str, str, str, bool]
"""The layer, the operand and the recipe of a `_Measured`."""


class _OfGroups(NamedTuple):
    """The figures and the numbers of elements of the groups of a grouped linear so far."""

    figures: list[Tensor]
    elements: list[int]


class Telemetry:
    """Samples the steps of a training loop.

        with telemetry.sampling(model) if telemetry.due(step) else nullcontext():
            loss(model(x)).backward()
        if telemetry.due(step):
            telemetry.gradients(model)
            sample = telemetry.finish(step)

    Args:
        plan: the plan that runs. Without FP8, operands are measured only in the `what_if` recipes.
        every: the interval of sampled steps; the first and the last step are sampled, too. 0 for no
            samples.
        what_if: one or several recipes, by name or path, to try on the same operands.
        operands: whether this process measures operands. Of several ranks, one does; all ranks
            measure gradients, which may be sharded.

    Raises:
        UserError: an argument has the wrong type; a recipe does not exist or cannot be tried, or
            two have the same name.
    """

    def __init__(
        self,
        plan: Plan,
        every: int = 50,
        what_if: str | Sequence[str] = (),
        *,
        operands: bool = True,
    ) -> None:
        if not isinstance(plan, Plan):
            raise UserError(
                f"Telemetry needs a plan, such as fp8stack.plan_of(model), not {described(plan)}."
            )
        if type(every) is not int or every < 0:
            raise UserError(f"every {every!r} is no number of steps. Use 1 or more, or 0 for none.")
        if not isinstance(what_if, str | Sequence):
            raise UserError(f"what_if takes names of recipes, not {described(what_if)}.")
        self.plan = plan
        self.every = every
        self.what_if = _recipes_to_try([what_if] if isinstance(what_if, str) else what_if)
        self.operands = operands
        self._flow: gradients.Flow | None = None
        self._seen: list[_Measured] = []
        self._groups: dict[_Label, _OfGroups] = {}
        self._blocks: dict[str, BlockIndex | None] = {}  # of the plan's layers
        self._routers: list[str] = []
        self._changes: Tensor | None = None
        self._scales: Tensor | None = None  # of the previous sample, [slots]

    def due(self, step: int, first_step: int = 1, last_step: int | None = None) -> bool:
        """Whether to sample `step` in a run from `first_step` to `last_step` (None: not known)."""
        if not self.every:
            return False
        return step in (first_step, last_step) or step % self.every == 0

    @property
    def sees_operands(self) -> bool:
        """Whether `sampling` measures any operands."""
        return self.operands and (self.plan.is_fp8 or bool(self.what_if))

    @contextmanager
    def sampling(self, model: nn.Module) -> Iterator[None]:
        """A context that measures the forward and backward pass of `model` in it. If a layer is
        called several times, the first call counts. A compiled model runs eagerly within it; in
        delayed scaling, begin with the first micro-batch of a step, because an eager one after
        compiled ones casts the weights anew.

        Args:
            model: the model that was built or converted, not its wrapper.

        Raises:
            UserError: `model` is another one.
        """
        layers = self._layers(model)
        self._seen.clear()
        self._groups.clear()
        done: set[tuple[str, str]] = set()

        def see(path: str, layer: nn.Module, operand: Place, x: Tensor) -> None:
            if not done and self.plan.runs_fp8 and self.plan.delayed:
                self._compare_scales(layer)
            if (path, operand) not in done:
                done.add((path, operand))
                self._measure(path, layer, cast(Operand, operand), x)

        try:
            with (
                self._amaxes_of_attention(model),
                observing(model, see, layers=layers if self.sees_operands else {}),
            ):
                yield
        except BaseException:
            self._seen.clear()  # discard an incomplete pass
            self._changes = None
            raise

    def gradients(self, model: nn.Module) -> None:
        """Measure the gradients of a step, after all its micro-batches, unscaled and before
        clipping. On several ranks, see `gradients.look`."""
        self._flow = gradients.look(model)

    def finish(self, step: int, fp8_gemms: int | None = None, plan: Plan | None = None) -> Sample:
        """The figures of the last `sampling` and `gradients`; reads the device once. `fp8_gemms` is
        the number of FP8 GEMMs that ran, None if they were not counted; `plan` is the current plan,
        if it changed."""
        self.plan = plan or self.plan
        operands, flow, changes = self._seen, self._flow, self._changes
        tensors = [measured.figures for measured in operands]
        if changes is not None:
            tensors.append(changes.to(torch.float64).view(1))
        if flow is not None:
            tensors.append(flow.sums.flatten())
        numbers = iter(torch.cat(tensors).tolist() if tensors else [])
        width = len(FIGURES) + 1
        rows = [_operand_row(step, measured, list(islice(numbers, width))) for measured in operands]
        count = None if changes is None else int(next(numbers))
        if flow is not None:
            rows += _gradient_rows(step, flow, list(numbers))
        self._seen, self._flow, self._changes = [], None, None
        return Sample([self._model_row(step, fp8_gemms, count), *rows], _tracked(rows))

    def _layers(self, model: nn.Module) -> Mapping[str, nn.Module]:
        """The linears to measure: the FP8 linears, or, in a run without FP8, all but the head."""
        if not isinstance(model, nn.Module):
            raise UserError(f"sampling takes a model (torch.nn.Module), not {described(model)}.")
        planned = {layer.name for layer in self.plan.layers}
        linears, in_fp8 = all_linears(model), self.plan.runs_fp8
        kind = LowPrecisionLayer if in_fp8 else nn.Module  # the guard may have taken it out of FP8
        if planned and not any(isinstance(linears.get(name), kind) for name in planned):
            raise UserError(
                f"sampling: {described(model)} has no layer '{min(planned)}' as the plan has it. "
                "Give the model that was converted or built, such as the `module` of DDP."
            )
        if in_fp8:
            return fp8_linears(model)
        return {
            path: module
            for path, module in linears.items()
            if path in planned and path.rpartition(".")[2] != "lm_head"
        }

    def _measure(self, path: str, layer: nn.Module, operand: Operand, x: Tensor) -> None:
        tables: list[tuple[str, bool, Quantizers | ComputeDtype | None]] = []
        layer_plan = self.plan.layer(path)
        if self.plan.runs_fp8:
            tables.append((self.plan.recipe.name, False, layer_plan.quantizers))
        name = layer_plan.name
        tables += [(recipe.name, True, self._table(recipe, name)) for recipe in self.what_if]
        for recipe, what_if, table in tables:
            if isinstance(table, Quantizers):
                for place, quantizer, dim in _copies(table, operand):
                    scale = scale_of(path, layer, place, x, quantizer)
                    figures = _with_scale(_error(x, quantizer, scale, dim), scale)
                    kind = quantizer.format, quantizer.blocks is not None
                    measured = _Measured(layer_plan.name, place, recipe, what_if, *kind, figures)
                    self._add(measured, x.numel(), layer_plan.groups)
            elif table is not None:
                figures = _with_scale(cast_error(x, DTYPES[table]), None)
                label = layer_plan.name, operand, recipe, what_if
                measured = _Measured(*label, table, False, figures)
                self._add(measured, x.numel(), layer_plan.groups)

    def _table(self, recipe: Recipe, layer: str) -> Quantizers | ComputeDtype | None:
        """The quantizers or compute dtype that a recipe to try sets for a layer; None if it leaves
        the layer as it is."""
        if recipe.quantizers is None:
            return recipe.compute_dtype
        if layer not in self._blocks:
            names = [planned.name for planned in self.plan.layers]
            self._blocks = dict.fromkeys(names) | block_indices(names)
            self._routers = [name for name in names if name.endswith(".router")]
        is_head, is_router = layer.rpartition(".")[2] == "lm_head", layer in self._routers
        rules = recipe.rules_of_routers(self._blocks, self._routers)
        return recipe.for_layer(layer, self._blocks[layer], is_head, is_router, rules)[0]

    def _add(self, measured: _Measured, elements: int, groups: int) -> None:
        """Add the figures of a linear, or collect the figures of one of `groups` groups; after the
        last group, the figures of all groups are added as one."""
        if not groups:
            self._seen.append(measured)
            return
        label = measured.layer, measured.operand, measured.recipe, measured.what_if
        figures, counts = self._groups.setdefault(label, _OfGroups([], []))
        figures.append(measured.figures[:-1])
        counts.append(elements)
        if len(figures) == groups:
            joint = _with_scale(joint_error(figures, counts), None)
            self._seen.append(measured._replace(figures=joint))

    @contextmanager
    def _amaxes_of_attention(self, model: nn.Module) -> Iterator[None]:
        """A context that notes the amaxes that FP8 attention records in the last pass within it."""
        delayed: DelayedScaling | None = getattr(model, "delayed_scaling", None)
        quantizers = self.plan.recipe.attention_slots
        if delayed is None or not quantizers:
            yield
            return
        slots = [
            (path, operand, quantizer, f"{path}.{operand}")
            for path in fp8_parts(model)
            for operand, quantizer in quantizers.items()
            if f"{path}.{operand}" in delayed.slots
        ]
        yield
        delayed.copy_amaxes_in()
        for path, operand, quantizer, name in slots:
            amax, scale = delayed.history.recorded(name), delayed.scale(name)
            recorded = {"amax": amax, "largest": amax * scale}
            unknown = torch.full_like(amax, math.nan)
            figures = torch.stack([recorded.get(figure, unknown) for figure in FIGURES])
            labels = (path, operand, self.plan.recipe.name, False, quantizer.format, False)
            self._seen.append(_Measured(*labels, _with_scale(figures.double(), scale)))

    def _compare_scales(self, layer: nn.Module) -> None:
        """Count the scales that changed since the previous sample."""
        delayed: Any = layer.delayed
        scales = delayed.history.scales.clone()
        if self._scales is not None:
            self._changes = (scales != self._scales.to(scales.device)).sum()
        self._scales = scales

    def _model_row(self, step: int, fp8_gemms: int | None, changes: int | None) -> Row:
        layers = self.plan.layers
        return {
            "step": step,
            "fp8_gemms": fp8_gemms,
            "fp8_layers": sum(layer.fp8 for layer in layers),
            "layers": len(layers),
            "not_fp8": {
                layer.name: ", ".join(filter(None, (layer.precision, layer.reason)))
                for layer in layers
                if not layer.fp8
            },
            "scale_changes": changes,
        }


def _recipes_to_try(names: Sequence[str]) -> tuple[Recipe, ...]:
    recipes = {}
    for name in names:
        recipe = load_recipe(name)
        if recipe.delayed:
            raise UserError(
                f"what_if: '{name}' is delayed scaling, whose scales come from the amaxes of every "
                "step; telemetry looks at some only. Try current, which has no such delay."
            )
        if recipe.compute_dtype == "tf32":
            raise UserError(
                "what_if: tf32 rounds within the tensor cores, which telemetry cannot see. "
                "Leave it out, or try bf16 or fp16."
            )
        if recipe.name in recipes:
            raise UserError(f"what_if: two recipes are called '{recipe.name}'. Name one of them.")
        recipes[recipe.name] = recipe
    return tuple(recipes.values())


def _copies(table: Quantizers, operand: Operand) -> Iterator[tuple[str, Quantizer, int]]:
    """Yield the quantizers of an operand's copies: the place, the quantizer, and the dimension that
    the copy's GEMM reduces. A second copy has its own quantizer only if its rules differ."""
    for place, quantizer in table.casts.items():
        if place.partition(".")[0] == operand:
            yield place, quantizer, int("." not in place)


def _error(x: Tensor, quantizer: Quantizer, scale: Tensor | None, dim: int) -> Tensor:
    """The quantization error of `x`. Stochastic rounding draws the same bits each time, so that
    recipes can be compared."""
    bits = RandomBits(0, 0, torch.zeros((), dtype=torch.int64, device=x.device))
    generator = bits if quantizer.stochastic else None
    return quantization_error(x, quantizer, scale=scale, dim=dim, generator=generator)


def _with_scale(figures: Tensor, scale: Tensor | None) -> Tensor:
    scale_figure = figures.new_full((1,), math.nan) if scale is None else scale.to(figures).view(1)
    return torch.cat([figures, scale_figure])


def _operand_row(step: int, measured: _Measured, values: Sequence[float]) -> Row:
    """The figures of one operand in one recipe; None if a figure is not finite."""
    figures = dict(zip((*FIGURES, "scale"), values, strict=True))
    row = {
        "step": step,
        "layer": measured.layer,
        "operand": measured.operand,
        "recipe": measured.recipe,
        "what_if": measured.what_if,
        "format": measured.format,
        "amax": _number(figures["amax"], 9),
        "scale": _number(figures["scale"], 9),
        "headroom_bits": _number(headroom_bits(figures["largest"], measured.format)),
        **{key: _number(figures[key]) for key in ("saturated", "underflow", "nonfinite")},
        "sqnr_db": _number(sqnr_db(figures["signal"], figures["noise"])),
    }
    if measured.blocks:
        row |= {key: _number(figures[key], 9) for key in _OF_BLOCKS}
    return row


def _gradient_rows(step: int, flow: gradients.Flow, numbers: Sequence[float]) -> list[Row]:
    """The figures of the gradients, from three sums per part."""
    sums = [numbers[at : at + 3] for at in range(0, len(numbers), 3)]
    return [
        {"step": step, "gradient": gradient["part"]}
        | {key: _number(gradient[key]) for key in gradients.FIGURES}
        for gradient in gradients.figures(flow, sums)
    ]


def _number(value: float | None, digits: int = 6) -> float | None:
    """`value` rounded to `digits` significant digits (9 are exact for a float32); None if it is not
    finite."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


def _tracked(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The figures of rows by name, without missing ones."""
    numbers: dict[str, Any] = {}
    for row in rows:
        if "gradient" in row:
            path = row["gradient"]
            numbers |= {f"gradient/{key}/{path}": row[key] for key in gradients.FIGURES}
            continue
        place = f"{row['layer']}.{row['operand']}"
        if row["what_if"]:
            numbers[f"what_if/{row['recipe']}/sqnr_db/{place}"] = row["sqnr_db"]
        else:
            numbers |= {f"fp8/{key}/{place}": row[key] for key in _TRACKED}
    return {name: value for name, value in numbers.items() if value is not None}
