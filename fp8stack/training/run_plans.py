"""The plans of a run: what each of its recipes runs in, and which plan trains which steps."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fp8stack.common import presets
from fp8stack.common.errors import UserError, quoted
from fp8stack.layers.compiler import (
    TE_COMPILED,
    is_compiled,
    require_compilable,
    require_compiler,
)
from fp8stack.model.config import GPTConfig, load_config, plan_for, workload
from fp8stack.planning.phases import Override, Phase, evaluation_in, phases_of
from fp8stack.planning.run_config import RunConfig, for_ranks, merged
from fp8stack.precision import Hardware, Plan, Recipe, load_recipe
from fp8stack.precision.fp8_attention import SEQUENCE_MULTIPLE
from fp8stack.precision.recipe import ComputeDtype
from fp8stack.precision.step_time import Workload
from fp8stack.training.memory_check import Footprint, require_memory
from fp8stack.training.optim.optimizer import require_optimizer

TE_SHARDED = "--parallel fsdp cannot share out Transformer Engine's layers"
Value = TypeVar("Value")
ANY = ""
BEGAN_WITHOUT_FP8 = "the run began without FP8"


@dataclass(frozen=True, kw_only=True)
class Decided:
    """Decisions of a run that it keeps when it is resumed."""

    # The layers that are not in FP8, with the reasons, by requested recipe; `ANY`: other recipes.
    left_out: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    needs_reference: bool = False  # whether the quality guard ended the phases: float32 trains
    # The compute dtype of the recipes that are emulated on a CPU; None if there is no such recipe.
    compute_dtype: ComputeDtype | None = None
    auto_in_fp8: bool = True  # whether the plan of the recipe "auto" had layers in FP8
    # The recipes of the checkpoint by name; those that do not ship any more are read from here.
    recipes: Mapping[str, Recipe] = field(default_factory=dict)

    def layers_left_out(self, request: str) -> Mapping[str, str] | None:
        """The layers that are not in FP8 in the phases with this request (`Phase.asked`), if that
        was decided."""
        left_out = by_request(self.left_out, request)
        return self.left_out.get(ANY) if left_out is None else left_out

    def recipe(self, name: str, overrides: Mapping[str, Override] | None = None) -> Recipe:
        """`load_recipe`; a recipe that no longer ships is the checkpoint's, overrides included."""
        if name in self.recipes and name not in presets.names("recipes"):
            return self.recipes[name]
        return load_recipe(name, overrides)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The phases of a run, and the plan of each, as an index into the run's plans."""

    phases: tuple[Phase, ...]  # of training, in order, from the first step to the last
    indices: tuple[int, ...]  # of each phase
    places: dict[str, int]  # by the recipe that was requested
    evaluation: int | None = None  # for validation losses; None: the one that trains
    reference: int | None = None  # float32 without FP8, for the quality guard, if that is on

    def at(self, step: int) -> tuple[Phase, int]:
        """The phase of `step`, and the index of its plan."""
        number = next(n for n, phase in enumerate(self.phases) if step <= phase.last)
        return self.phases[number], self.indices[number]


@dataclass(frozen=True, kw_only=True)
class RunPlans:
    """The model of a run, and the plans of its recipes. All plans are possible on this machine."""

    config: RunConfig  # see `for_ranks`
    model: GPTConfig
    context: int
    plans: list[Plan]
    compiled: list[bool]  # for each plan
    schedule: Schedule
    in_fp16: bool  # whether a phase needs a loss scale

    @property
    def trained(self) -> list[Plan]:
        """The plan of each phase of training."""
        return [self.plans[index] for index in self.schedule.indices]


def plan_run(
    config: RunConfig,
    hardware: Hardware,
    ranks: int,
    decided: Decided | None = None,
    *,
    will_train: bool = True,
) -> RunPlans:
    """Plan a run on `ranks` processes with `hardware`. This is the one check of whether it is
    possible, before anything is built or written.

    Args:
        decided: the decisions of a resumed run.
        will_train: whether this machine runs it, which then needs a compiler and the memory.

    Raises:
        UserError: the run is not possible.
    """
    config = for_ranks(config, ranks)
    model = load_config(config.model, config.model_overrides)
    context = context_of(config, model)
    _require_divisible(config, ranks)
    tokens = config.batch // (config.accumulate * ranks) * context
    plans, schedule = plan_phases(config, model, hardware, decided or Decided(), tokens)
    if ranks > 1:
        _require_parallel(config, plans)
    kind = config.activation_checkpointing
    for plan in plans if config.compile else ():
        (require_compiler if will_train else require_compilable)(plan, kind)
    require_optimizer(config, hardware, ranks, will_train=will_train)
    planned = RunPlans(
        config=config,
        model=model,
        context=context,
        plans=plans,
        compiled=[is_compiled(config.compile, plan, hardware, kind)[0] for plan in plans],
        schedule=schedule,
        in_fp16=any(plan.loss_scaling for plan in plans),
    )
    if will_train:
        footprint = Footprint(config, model, context, ranks)
        require_memory(footprint, planned.trained, hardware, compiled=any(planned.compiled))
    return planned


def by_request(table: Mapping[str, Value], request: str) -> Value | None:
    """The value that `table` has for `request`, a `Phase.asked`; None if it has none. A resumed run
    names its own copy of a recipe's file: the folder may differ if only one value fits."""
    if request in table:
        return table[request]
    name = _without_folder(request)
    values = [value for key, value in table.items() if _without_folder(key) == name]
    return values[0] if values and all(value == values[0] for value in values) else None


def _without_folder(request: str) -> str:
    recipe, word, changes = request.partition(" with ")
    return (os.path.basename(recipe) if recipe.endswith(".toml") else recipe) + word + changes


def plan_phases(
    config: RunConfig, model: GPTConfig, hardware: Hardware, decided: Decided, tokens: int
) -> tuple[list[Plan], Schedule]:
    """The distinct plans of a run, and which of them runs when. `decided` holds the decisions of a
    resumed run; a micro-batch has `tokens` tokens on each rank.

    Raises what `plan_for` and `phases_of` raise, and a UserError for two phases in different
    delayed scaling, or validation losses in scales that nothing sets.
    """
    for name in {config.recipe, *(phase.recipe for phase in config.phases if phase.recipe)}:
        if name != "auto":  # whether or not a phase has steps
            decided.recipe(name)
    phases = phases_in(config)
    evaluation = evaluation_in(config.phases, config.recipe, config.steps)
    guarded = bool(config.phases and config.guard.enabled and config.guard.quality)
    compares = guarded or decided.needs_reference
    reference = Phase(name="reference", recipe="fp32", first=1, last=config.steps)
    to_plan = [*phases, *([evaluation] if evaluation else []), *([reference] if compares else [])]

    def plan_each(multiple: int) -> tuple[list[Plan], dict[str, int]]:
        plans: list[Plan] = []
        places: dict[str, int] = {}
        for name, phase in {phase.asked: phase for phase in to_plan}.items():
            left_out = decided.layers_left_out(name)
            settings = (left_out, multiple, phase.overrides, decided)
            plan = plan_recipe(phase.recipe, config, model, hardware, tokens, *settings)
            equals = (place for place, earlier in enumerate(plans) if _runs_alike(plan, earlier))
            places[name] = next(equals, len(plans))
            plans += [plan] * (places[name] == len(plans))
        return plans, places

    plans, places = plan_each(1)
    if len(plans) > 1:
        _require_possible(plans, places, phases, evaluation)
        plans, places = plan_each(max(plan.vocabulary_multiple for plan in plans))
    return plans, Schedule(
        phases=phases,
        indices=tuple(places[phase.asked] for phase in phases),
        places=places,
        evaluation=None if evaluation is None else places[evaluation.asked],
        reference=places[reference.asked] if compares else None,
    )


def never_asked_for(config: RunConfig, phases: Sequence[Phase]) -> str:
    """A warning that no phase uses the run's own recipe; "" if one does, or the recipe is auto."""
    if config.recipe in ("auto", *(phase.recipe for phase in phases)):
        return ""
    spans = (f"{phase.name} {phase.first} to {phase.last} in {phase.recipe}" for phase in phases)
    return f"recipe '{config.recipe}' runs in no step: phases {', '.join(spans)}"


def phases_in(config: RunConfig) -> tuple[Phase, ...]:
    """The phases of a run, in order. Raises what `phases_of` raises, and under `strict` a UserError
    if no phase uses the run's own recipe."""
    limits = {"steps": config.steps, "warmup_steps": config.warmup_steps}
    phases = phases_of(config.phases, config.recipe, **limits, decay_fraction=config.decay_fraction)
    if config.strict and (warning := never_asked_for(config, phases)):
        raise UserError(f"--strict: {warning}. Give more --steps, or phases that leave it some.")
    return phases


def plan_recipe(
    recipe: str,
    config: RunConfig,
    model: GPTConfig,
    hardware: Hardware,
    tokens: int,
    left_out: Mapping[str, str] | None = None,
    vocabulary_multiple: int = 1,
    overrides: Mapping[str, Override] | None = None,
    decided: Decided | None = None,
) -> Plan:
    """The plan of a recipe, given by name or path. `overrides` are a phase's; the run's own recipe
    has the run's overrides too. A micro-batch has `tokens` tokens on each rank; `left_out` are the
    layers that are not in FP8, if that was decided before. Raises what `plan_for` raises."""
    is_own = recipe == config.recipe
    changes = merged(config.recipe_overrides if is_own else {}, overrides or {})
    if changes and recipe == "auto":
        key, value = next(iter(changes.items()))
        raise UserError(
            f"recipe.{quoted(key)} = {quoted(str(value))} needs a recipe by name, since auto "
            "chooses one by itself. Give --recipe."
        )
    decided = decided or Decided()
    requested = recipe if recipe == "auto" else decided.recipe(recipe, changes)
    # --backend is for FP8: a phase without FP8 must not count as a substitution.
    for_fp8 = is_own or isinstance(requested, str) or requested.is_fp8
    settings: dict[str, Any] = {
        "backend": config.backend if for_fp8 else "auto",
        "strict": config.strict,
        "vocabulary_multiple": vocabulary_multiple,
        "without": unwanted_backends(config),
        "compute_dtype": decided.compute_dtype,
    }
    work = None if left_out is not None else workload_of(config, model, tokens, hardware)
    plan = plan_for(model, requested, hardware, work=work, left_out=left_out, **settings)
    if recipe == "auto" and plan.is_fp8 and not decided.auto_in_fp8:
        left_out = dict.fromkeys((layer.name for layer in plan.layers), BEGAN_WITHOUT_FP8)
        plan = plan_for(model, requested, hardware, left_out=left_out, **settings)
    if plan.recipe.fp8_attention:
        _require_whole_sequences(plan.recipe.attention, config, model)
    _, note = is_compiled(config.compile, plan, hardware, config.activation_checkpointing)
    return replace(plan, reasons=(*plan.reasons, note)) if note else plan


def workload_of(config: RunConfig, model: GPTConfig, tokens: int, hardware: Hardware) -> Workload:
    """A training step of a run on one rank, whose micro-batches have `tokens` tokens."""
    context = context_of(config, model)
    ranks = max(1, config.batch * context // (config.accumulate * tokens))
    compiles = config.compile or (config.compile is None and not hardware.compiler_problem)
    work = workload(
        model,
        tokens,
        context=context,
        accumulate=config.accumulate,
        recompute=config.activation_checkpointing,
        shards=ranks if config.parallel == "fsdp" else 1,
    )
    return replace(work, graphed=compiles and not graph_obstacle(config, model, ranks))


def graph_obstacle(config: RunConfig, model: GPTConfig, ranks: int) -> str:
    """The reason that no passes of such a run are recorded as CUDA graphs; "" if there is none."""
    reasons = {
        "cuda_graphs is false": not config.cuda_graphs,
        "there are several ranks, and their collectives are not recorded": ranks > 1,
        "the host reads the load of experts": model.experts is not None,
        "dropout draws new masks": model.dropout > 0,
        "attention within documents makes new masks": config.document_mask,
        "blocks are recomputed": config.activation_checkpointing != "none",
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def unwanted_backends(config: RunConfig) -> dict[str, str]:
    """The backends that do not support something the run uses, with the reason."""
    if config.parallel == "fsdp":
        return {"te": TE_SHARDED}
    return {"te": TE_COMPILED} if config.compile else {}


def context_of(config: RunConfig, model: GPTConfig) -> int:
    """Tokens per sequence. Raises a UserError if the model's context is shorter."""
    context = config.context or model.context
    if context > model.context:
        raise UserError(
            f"--context {context} is more than the {model.context} of model {config.model}. "
            f"Lower it, or --set model.context={context}"
        )
    return context


def _require_divisible(config: RunConfig, ranks: int) -> None:
    """Raise a UserError unless the batch can be divided equally among the ranks."""
    if config.batch % (config.accumulate * ranks):
        micro = f" in {config.accumulate} micro-batches" if config.accumulate > 1 else ""
        raise UserError(
            f"batch {config.batch}{micro} cannot be shared equally by {ranks} ranks. Choose a "
            f"multiple of {config.accumulate * ranks}."
        )


def _require_parallel(config: RunConfig, plans: Sequence[Plan]) -> None:
    """Raise a UserError if several ranks cannot train by these plans and this configuration."""
    if config.parallel == "fsdp" and any(plan.backend == "te" for plan in plans):
        raise UserError(f"{TE_SHARDED}. Choose --parallel ddp, or --backend torch.")
    if config.grad_compression != "none" and config.parallel != "ddp":
        raise UserError(
            f"--grad-compression {config.grad_compression} with --parallel {config.parallel} is "
            "not possible: DDP alone has it. Choose --parallel ddp, or leave it out."
        )


def _require_whole_sequences(attention: str, config: RunConfig, model: GPTConfig) -> None:
    """Raise a UserError if sequences are not what attention in FP8 takes."""
    setting = f"attention = '{attention}'"
    if config.document_mask:
        raise UserError(f"{setting} takes no --document-mask. Leave one of the two out.")
    context = config.context or model.context
    if context % SEQUENCE_MULTIPLE:
        raise UserError(
            f"{setting} needs a --context divisible by {SEQUENCE_MULTIPLE}, not {context}."
        )


def _runs_alike(first: Plan, second: Plan) -> bool:
    """Whether two plans differ in names and reasons only."""

    def without_words(plan: Plan) -> Plan:
        recipe = plan.recipe.model_copy(update={"name": "", "description": ""})
        layers = tuple(replace(layer, precision="", reason="", doubt="") for layer in plan.layers)
        plan = replace(plan, asked="", reasons=(), native=True, times=())
        return replace(plan, recipe=recipe, layers=layers)

    return without_words(first) == without_words(second)


def _require_possible(
    plans: Sequence[Plan],
    places: Mapping[str, int],
    phases: Sequence[Phase],
    evaluation: Phase | None,
) -> None:
    """Raise a UserError if one run cannot have all these plans."""
    begins_with = plans[places[phases[0].asked]]
    evaluates = begins_with if evaluation is None else plans[places[evaluation.asked]]
    if evaluates.delayed and evaluates is not begins_with:
        raise UserError(
            "phases: validation losses in delayed scaling need a first phase that trains in it and "
            "so sets its scales. Evaluate in another recipe, or begin in this one."
        )
    if sum(plan.delayed for plan in plans) > 1:
        raise UserError(
            "phases: two of them are in delayed scaling of different settings, and a run keeps one "
            "amax history. Use one delayed recipe."
        )
