"""The variants of a model: one for each recipe of the phases, all with the same parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from fp8stack import presets
from fp8stack.backends import Draws, build_backend
from fp8stack.backends.compiler import TE_COMPILED, is_compiled
from fp8stack.backends.linear import CastLinear
from fp8stack.config import RunConfig
from fp8stack.distributed.parallelize import TE_SHARDED
from fp8stack.errors import UserError
from fp8stack.model.config import GPTConfig, plan_for
from fp8stack.model.gpt import GPT, Attention, Block
from fp8stack.precision import Hardware, Plan, Recipe, load_recipe
from fp8stack.precision.attention import SEQUENCE_MULTIPLE
from fp8stack.precision.phases import Override, Phase, evaluation_in, phases_of
from fp8stack.precision.recipe import plain
from fp8stack.training.run import Run, Schedule, Variant

ANY = ""


@dataclass(frozen=True, kw_only=True)
class Decided:
    """Decisions of a run that it keeps when it is resumed."""

    # By requested recipe, the layers that are not in FP8, with the reasons; `ANY`: other recipes.
    left_out: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    needs_reference: bool = False  # whether the quality guard ended the phases: float32 trains
    # The recipes of the checkpoint by name; those that do not ship any more are read from here.
    recipes: Mapping[str, Recipe] = field(default_factory=dict)

    def recipe(self, name: str, overrides: Mapping[str, Override] | None = None) -> Recipe:
        """`load_recipe`; a recipe that no longer ships is the checkpoint's, overrides included."""
        if name in self.recipes and name not in presets.names("recipes"):
            return self.recipes[name]
        return load_recipe(name, overrides)


def plan_phases(
    config: RunConfig, model: GPTConfig, hardware: Hardware, decided: Decided, tokens: int
) -> tuple[list[Plan], Schedule]:
    """The distinct plans of a run, and which of them runs when. `decided` holds the decisions of a
    resumed run; a micro-batch has `tokens` tokens on each rank.

    Raises what `plan_for` and `phases_of` raise, and a UserError for two phases in different
    delayed scaling, validation losses in scales that nothing sets, or phases with --parallel fsdp.
    """
    for name in {config.recipe, *(one.recipe for one in config.phases if one.recipe)}:
        if name != "auto":  # whether or not a phase has steps
            decided.recipe(name)
    phases = phases_in(config)
    evaluation = evaluation_in(config.phases, config.recipe, config.steps)
    guarded = bool(config.phases and config.guard.enabled and config.guard.quality)
    compares = guarded or decided.needs_reference
    reference = Phase(name="reference", recipe="fp32", first=1, last=config.steps)
    wanted = [*phases, *([evaluation] if evaluation else []), *([reference] if compares else [])]

    def made(multiple: int) -> tuple[list[Plan], dict[str, int]]:
        plans: list[Plan] = []
        places: dict[str, int] = {}
        for name, phase in {phase.asked: phase for phase in wanted}.items():
            left_out = decided.left_out.get(name, decided.left_out.get(ANY))
            how = (left_out, multiple, phase.overrides, decided)
            plan = plan_recipe(phase.recipe, config, model, hardware, tokens, *how)
            alike = (n for n, other in enumerate(plans) if _runs_alike(plan, other))
            places[name] = next(alike, len(plans))
            plans += [plan] * (places[name] == len(plans))
        return plans, places

    plans, places = made(1)
    if len(plans) > 1:
        _require_possible(plans, places, phases, evaluation, config)
        plans, places = made(max(plan.vocabulary_multiple for plan in plans))
    return plans, Schedule(
        phases=phases,
        variants=tuple(places[phase.asked] for phase in phases),
        places=places,
        evaluation=None if evaluation is None else places[evaluation.asked],
        reference=places[reference.asked] if compares else None,
    )


def never_asked_for(config: RunConfig, phases: Sequence[Phase]) -> str:
    """A warning that no phase uses the run's own recipe; "" if one does, or the recipe is auto."""
    if config.recipe in ("auto", *(phase.recipe for phase in phases)):
        return ""
    spans = (f"{one.name} {one.first} to {one.last} in {one.recipe}" for one in phases)
    return f"recipe '{config.recipe}' runs in no step: phases {', '.join(spans)}"


def phases_in(config: RunConfig) -> tuple[Phase, ...]:
    """The phases of a run, in order. Raises what `phases_of` raises, and under `strict` a UserError
    if no phase uses the run's own recipe."""
    limits = {"steps": config.steps, "warmup_steps": config.warmup_steps}
    phases = phases_of(config.phases, config.recipe, **limits, decay_fraction=config.decay_fraction)
    if config.strict and (why := never_asked_for(config, phases)):
        raise UserError(f"--strict: {why}. Give more --steps, or phases that leave it some.")
    return phases


def build_variants(
    plans: Sequence[Plan], model: GPTConfig, config: RunConfig, compiled: Sequence[bool]
) -> tuple[Variant, ...]:
    """Build a variant for each of `plans`, all sharing their parameters. `compiled` marks those to
    be compiled, which happens later, on the device."""
    multiple = max(plan.vocabulary_multiple for plan in plans)
    variants: list[Variant] = []
    draws = Draws(config.seed)  # shared: each phase continues the counters of the one before
    for plan, compiles in zip(plans, compiled, strict=True):
        backend = build_backend(plan, save_fp8=config.save_fp8, draws=draws)
        backend.weights.only_told = True  # the run's optimizers change them, and nobody else
        backend.vocabulary_multiple = multiple
        made = GPT(model, backend, seed=config.seed)
        made.recompute = config.activation_checkpointing
        if variants:
            share_parameters(variants[0].model, made)
        variants.append(Variant(plan=plan, backend=backend, model=made, compiled=compiles))
    return tuple(variants)


def share_parameters(source: nn.Module, model: nn.Module) -> None:
    """Replace the parameters of `model` by those of `source`, which have the same names."""
    parameters = dict(source.named_parameters(remove_duplicate=False))
    for path, part in model.named_modules():
        for name in part._parameters:
            if part._parameters[name] is not None:
                part._parameters[name] = parameters[f"{path}.{name}" if path else name]


def leave_fp16(run: Run) -> None:
    """Replace each fp16 variant of the run by one in bf16, without a loss scale."""
    old = run.variants
    run.state.variants = tuple(in_bf16(one) if one.plan.loss_scaling else one for one in old)
    run.use(run.state.active)


def in_bf16(variant: Variant) -> Variant:
    """The bf16 variant that replaces an fp16 one: its plan in bf16 and a backend for it. The
    modules stay the same, with their hooks, DDP, FSDP2 and compiled code, and use the new
    backend."""
    old = variant.plan
    layers = (replace(one, precision=one.precision.replace("fp16", "bf16")) for one in old.layers)
    plan = replace(
        old,
        recipe=plain("bf16", old.recipe),
        compute_dtype="bf16",
        reasons=(*old.reasons, "the guard left fp16 for bf16"),
        layers=tuple(layers),
    )
    backend = build_backend(plan)
    backend.vocabulary_multiple = variant.backend.vocabulary_multiple
    for part in variant.model.modules():
        if isinstance(part, GPT | Block | Attention):
            part.backend = backend
        elif isinstance(part, CastLinear):
            part.compute_dtype = backend.compute_dtype
    return replace(variant, plan=plan, backend=backend)


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
    changed = {**(config.recipe_overrides if is_own else {}), **(overrides or {})}
    if changed and recipe == "auto":
        raise UserError("recipe_overrides needs a recipe by name: auto chooses one by itself.")
    asked = recipe if recipe == "auto" else (decided or Decided()).recipe(recipe, changed)
    # --backend is for FP8: a phase without FP8 must not count as a substitution.
    backend = config.backend if is_own or isinstance(asked, str) or asked.is_fp8 else "auto"
    plan = plan_for(
        model,
        asked,
        hardware,
        backend,
        config.strict,
        tokens=None if left_out is not None else tokens,
        left_out=left_out,
        vocabulary_multiple=vocabulary_multiple,
        without=unwanted_backends(config),
    )
    if plan.recipe.fp8_attention:
        _require_whole_sequences(plan.recipe.attention, config, model)
    _, note = is_compiled(config.compile, plan, hardware, config.activation_checkpointing)
    return replace(plan, reasons=(*plan.reasons, note)) if note else plan


def _require_whole_sequences(attention: str, config: RunConfig, model: GPTConfig) -> None:
    """Raise a UserError if sequences are not what attention in FP8 takes."""
    what = f"attention = '{attention}'"
    if config.document_mask:
        raise UserError(f"{what} takes no --document-mask. Leave one of the two out.")
    context = config.context or model.context
    if context % SEQUENCE_MULTIPLE:
        raise UserError(
            f"{what} needs a --context divisible by {SEQUENCE_MULTIPLE}, not {context}."
        )


def unwanted_backends(config: RunConfig) -> dict[str, str]:
    """The backends that do not support something the run uses, with the reason."""
    if config.parallel == "fsdp":
        return {"te": TE_SHARDED}
    return {"te": TE_COMPILED} if config.compile else {}


def _runs_alike(plan: Plan, other: Plan) -> bool:
    """Whether two plans differ in names and reasons only."""

    def without_words(plan: Plan) -> Plan:
        recipe = plan.recipe.model_copy(update={"name": "", "description": ""})
        layers = tuple(replace(layer, precision="", reason="", doubt="") for layer in plan.layers)
        plan = replace(plan, asked="", reasons=(), native=True)
        return replace(plan, recipe=recipe, layers=layers)

    return without_words(plan) == without_words(other)


def _require_possible(
    plans: Sequence[Plan],
    places: Mapping[str, int],
    phases: Sequence[Phase],
    evaluation: Phase | None,
    config: RunConfig,
) -> None:
    begins_with = plans[places[phases[0].asked]]
    evaluates = begins_with if evaluation is None else plans[places[evaluation.asked]]
    if evaluates.delayed and not begins_with.delayed and not config.calibration_steps:
        raise UserError(
            "phases: validation losses in delayed scaling before a phase trains in it need the "
            "amaxes of a calibration. Set calibration_steps to 1 or more."
        )
    if evaluates.recipe.attention_slots and evaluates is not begins_with:
        raise UserError(
            f"phases: validation losses with attention = '{evaluates.recipe.attention}' need a "
            "first phase that trains with it: calibration gives its scales no amaxes. Evaluate "
            "in another recipe, or begin in this one."
        )
    if sum(plan.delayed for plan in plans) > 1:
        raise UserError(
            "phases: two of them are in delayed scaling of different settings, and a run keeps one "
            "amax history. Use one delayed recipe."
        )
    if config.parallel == "fsdp":
        raise UserError("phases in several recipes need --parallel ddp; fsdp is not possible.")


def plan_of(run: Run) -> dict[str, Any]:
    """The main variant's plan as JSON data, with the requested recipe, and the phases if any."""
    made = run.main.plan.to_json() | {"asked": Path(run.config.recipe).stem}
    # Of the saved configuration, which names the run's copies of recipe files.
    if why := never_asked_for(run.config, phases_in(run.config)):
        made["reasons"] = [why, *made["reasons"]]
    if run.config.phases:
        made["phases"] = [
            asdict(phase) | {"precision": run.variants[place].plan.precision}
            for phase, place in zip(run.schedule.phases, run.schedule.variants, strict=True)
        ]
    return made
