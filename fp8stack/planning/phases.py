"""Phases: the recipe that each step of a run requests. Pure; no torch here.

A run without phases has one recipe throughout. `warmup`, `stable` and `decay` end with these parts
of the learning rate's schedule, `warmup` after a quarter of the run at the latest; other phases end
at their `until`. `evaluation` is the recipe in which validation losses are computed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator

from fp8stack.common.errors import UserError, unknown
from fp8stack.precision.hardware import Hardware, probe
from fp8stack.precision.plan import Plan
from fp8stack.precision.recipe_file import load_recipe
from fp8stack.precision.rules import resolve

PresetName = Literal["conservative", "default", "aggressive"]
EVALUATION = "evaluation"
LONGEST_WARMUP = 0.25
"""The largest share of a run for the phase `warmup`, so that short runs have other phases too."""

_Value = bool | int | float | str | list[int] | list[str]
_Table = dict[str, _Value | dict[str, _Value | dict[str, _Value]]]
Override = _Value | _Table | list[_Table]
"""Values that a key of a model or a recipe accepts; a recipe's tables are keys too."""


class PhaseConfig(BaseModel):
    """A table `[[phases]]` of a run file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    name: Annotated[str, Field(min_length=1)]
    recipe: str | None = None
    """A recipe's name or path; None is the run's recipe."""
    until: int | float | None = None
    """The last step, or, as a fraction, the share of all steps done at its end. None follows the
    schedule for warmup, stable and decay, and is the run's end for the last phase."""
    recipe_overrides: dict[str, Override] = {}
    """Keys of the recipe that this phase changes."""

    @field_validator("until")
    @classmethod
    def _is_a_place(cls, until: int | float | None) -> int | float | None:
        is_step = isinstance(until, int) and until >= 1
        is_share = isinstance(until, float) and 0 < until <= 1
        if until is None or is_step or is_share:
            return until
        raise ValueError("that is no step (a whole number from 1) and no share (0.1 to 1.0)")


@dataclass(frozen=True, kw_only=True)
class Phase:
    """The steps `first` to `last` (counted from 1, inclusive) and their recipe, with `overrides`
    of its keys."""

    name: str
    recipe: str
    first: int
    last: int
    overrides: Mapping[str, Override] = field(default_factory=dict)

    @property
    def asked(self) -> str:
        """The recipe with its overrides as text, equal for phases that request the same."""
        changed = (f"{key} = {json.dumps(value)}" for key, value in sorted(self.overrides.items()))
        return " with ".join(filter(None, (self.recipe, ", ".join(changed))))


def preset(name: str) -> tuple[PhaseConfig, ...]:
    """The phases called conservative (fp32 everywhere), default (bf16 while the learning rate rises
    and falls, the run's recipe in between) or aggressive (the run's recipe everywhere).

    Raises:
        UserError: there is no such preset.
    """
    if name not in get_args(PresetName):
        raise unknown("preset of phases", name, get_args(PresetName))
    edge = {"conservative": "fp32", "default": "bf16", "aggressive": None}[name]
    middle = "fp32" if name == "conservative" else None
    recipes = {"warmup": edge, "stable": middle, "decay": edge, EVALUATION: edge}
    return tuple(PhaseConfig(name=phase, recipe=recipe) for phase, recipe in recipes.items())


def overridden(
    phases: Sequence[PhaseConfig], overrides: Sequence[PhaseConfig]
) -> tuple[PhaseConfig, ...]:
    """`phases`, changed by the keys that are set in `overrides` for phases of the same name.

    Raises:
        UserError: `overrides` has a phase that `phases` lacks.
    """
    named = {phase.name: phase for phase in phases}
    for phase in overrides:
        if phase.name not in named:
            raise UserError(
                f"phases: the preset has no phase '{phase.name}' ({', '.join(named)}). Use one of "
                "them, or leave the preset out and list all phases."
            )
        named[phase.name] = named[phase.name].model_copy(
            update=phase.model_dump(exclude_unset=True)
        )
    return tuple(named.values())


def phases_of(
    phases: Sequence[PhaseConfig],
    recipe: str,
    *,
    steps: int,
    warmup_steps: int,
    decay_fraction: float,
) -> tuple[Phase, ...]:
    """The training phases in order; together they cover all steps.

    Empty phases are left out. Without configured phases there is a single one in `recipe`.

    Args:
        phases: the configured phases.
        recipe: the run's recipe, for phases without one.
        steps: the number of training steps.
        warmup_steps: the steps in which the learning rate rises.
        decay_fraction: the share of the steps, at the end, in which it falls.

    Raises:
        UserError: a phase has no end or ends before it begins; two have the same name.
    """
    _require_distinct(phases)
    trained = [phase for phase in phases if phase.name != EVALUATION]
    if not trained:
        return (Phase(name="all", recipe=recipe, first=1, last=steps),)
    warm = min(warmup_steps, round(LONGEST_WARMUP * steps))
    ends = {"warmup": warm, "stable": round(steps * (1 - decay_fraction)), "decay": steps}
    training_phases: list[Phase] = []
    first = 1
    for phase in trained:
        if phase.until is not None:
            last = round(phase.until * steps) if isinstance(phase.until, float) else phase.until
        elif phase is trained[-1]:
            last = steps
        elif phase.name in ends:
            last = max(ends[phase.name], first - 1)
        else:
            raise UserError(f"phase '{phase.name}' does not say where it ends. Give it an 'until'.")
        last = min(last, steps)
        if last < first - 1:
            raise UserError(
                f"phase '{phase.name}' ends at step {last}, and the one before it at step "
                f"{first - 1}. Put 'until' in rising order, within the run's {steps} steps."
            )
        if first <= last:
            training_phases.append(_spanning(phase, recipe, first, last))
        first = last + 1
    if first <= steps:
        raise UserError(
            f"the last phase, '{trained[-1].name}', ends at step {first - 1} of {steps}. Leave out "
            "its 'until'."
        )
    return tuple(training_phases)


def evaluation_in(phases: Sequence[PhaseConfig], recipe: str, steps: int) -> Phase | None:
    """The phase of validation losses, for all `steps`; None if they use the training phases."""
    evaluation = next((phase for phase in phases if phase.name == EVALUATION), None)
    return None if evaluation is None else _spanning(evaluation, recipe, 1, steps)


def precision_for_phase(
    phase: str,
    recipe: str = "auto",
    phases: str | Sequence[PhaseConfig] = "default",
    hardware: Hardware | None = None,
) -> Plan:
    """The plan for a phase, for your own training loop; `Plan.precision` names its precision.

    Args:
        phase: the phase's name: warmup, stable, decay, evaluation, or one of `phases`.
        recipe: the run's recipe, for phases without one.
        phases: a preset's name (see `preset`), or your own phases.
        hardware: a machine; by default this one.

    Raises:
        UserError: no such preset, phase or recipe.
    """
    configs = preset(phases) if isinstance(phases, str) else phases
    chosen = next((config for config in configs if config.name == phase), None)
    if chosen is None:
        raise unknown("phase", phase, [config.name for config in configs])
    name, overrides = chosen.recipe or recipe, chosen.recipe_overrides
    return resolve(load_recipe(name, overrides) if overrides else name, hardware or probe())


def _spanning(phase: PhaseConfig, recipe: str, first: int, last: int) -> Phase:
    return Phase(
        name=phase.name,
        recipe=phase.recipe or recipe,
        first=first,
        last=last,
        overrides=phase.recipe_overrides,
    )


def _require_distinct(phases: Sequence[PhaseConfig]) -> None:
    names = [phase.name for phase in phases]
    for phase in phases:
        if names.count(phase.name) > 1:
            raise UserError(f"phases: two are called '{phase.name}'. Give each its own name.")
        if phase.name == EVALUATION and phase.until is not None:
            raise UserError("phase 'evaluation' is no part of training: leave out its 'until'.")
