"""Load a trained model and its tokenizer: of a run, a checkpoint, or Hugging Face."""

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fp8stack.common import hub, presets
from fp8stack.common.errors import UnservedAttention, UserError, described, quoted
from fp8stack.common.terminal import printable
from fp8stack.data.tokenizer import (
    NAMED,
    TOKENIZER_FILE,
    Tokenizer,
    TokenizerIdentity,
    load_tokenizer,
)
from fp8stack.layers import build_backend, fp8_state, load_fp8_state
from fp8stack.model import hf
from fp8stack.model.config import GPTConfig, plan_for
from fp8stack.model.gpt import GPT
from fp8stack.planning.run_config import RunConfig, at_home
from fp8stack.precision import Hardware, Plan, Recipe, probe, recipe_from_json
from fp8stack.precision.recipe import ComputeDtype
from fp8stack.training.checkpoint.reader import Checkpoint, recorded_tokenizer, run_of
from fp8stack.training.checkpoint.state import restore_weights
from fp8stack.training.checkpoint.validation import (
    has_weights,
    layers_left_out,
    load_sound,
    model_of,
    newest_sound,
)
from fp8stack.training.run_plans import by_request, phases_in


def load(run_or_checkpoint: str | Path, recipe: str = "fp32") -> GPT:
    """Load the model of a run's newest usable checkpoint, of one checkpoint, or of transformers, in
    eval mode.

    Args:
        run_or_checkpoint: a run's folder, `.../checkpoints/step-000200`, `hf:` and a folder that
            transformers saved, or `hf:owner/name[@revision]` on the Hub.
        recipe: the recipe to run it in, which need not be the recipe of its training.

    Returns:
        A GPT on this machine's device: `model(tokens [B, T]) -> logits [B, T, vocabulary]`.

    Raises:
        UserError: there is no run, or `recipe` needs scales that the checkpoint does not have.
        NoUsableCheckpoint: the checkpoint is damaged, or all of the run's are.
    """
    if isinstance(run_or_checkpoint, str) and run_or_checkpoint.startswith(hub.HF):
        return find_source(run_or_checkpoint).model(recipe, probe())
    checkpoint, path, passed_over = find_checkpoint(run_or_checkpoint)
    for reason in passed_over:
        warnings.warn(printable(f"{path} is used, an older checkpoint. {reason}"), stacklevel=2)
    return trained_run(checkpoint, path).model(recipe, probe())


def name_of_run(run_or_checkpoint: str | Path) -> str:
    """A run, a checkpoint or `hf:...` as text. Raises a UserError for a value of another type."""
    if not isinstance(run_or_checkpoint, str | Path):
        raise UserError(
            f"A run is given by the path of its folder, not by {described(run_or_checkpoint)}."
        )
    return str(run_or_checkpoint)


def find_checkpoint(run_or_checkpoint: str | Path) -> tuple[Checkpoint, Path, list[str]]:
    """Return a run's newest usable checkpoint, or the given checkpoint, with its path and the
    reasons why newer ones were skipped. Raises a UserError if there is no run or checkpoint, and a
    NoUsableCheckpoint if the checkpoint, or every checkpoint of the run, is damaged."""
    path = Path(name_of_run(run_or_checkpoint))
    try:
        if (path / "checkpoints").is_dir():
            return newest_sound(path / "checkpoints", has_weights)
        if (run_of(path) and path.is_dir()) or (path / "checkpoint.json").exists():
            return load_sound(path, has_weights), path, []
    except (OSError, ValueError) as error:  # such as a name that is too long, or holds a NUL
        if isinstance(error, UserError):
            raise
        reason = getattr(error, "strerror", None) or "that is no path"
        raise UserError(f"Cannot read '{quoted(str(path))}': {reason}.") from error
    raise UserError(
        f"No run and no checkpoint at '{quoted(str(path))}'. Give the folder of one, or hf: and "
        "that of a model of transformers."
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """A trained model, to run in any recipe."""

    path: Path  # a checkpoint, or `hf:` and a folder's path, or `hf:owner/name@commit`
    shape: GPTConfig
    weights: Mapping[str, Tensor]  # float32, by parameter name
    checkpoint: Checkpoint | None = None  # None for a model of transformers: no recipe, no scales
    notes: tuple[str, ...] = ()  # for the user: lines to print
    tokenizer: Path | None = None  # its `tokenizer.json`, if it has one

    @property
    def name(self) -> str:
        """The name that a run records for the model it starts from: the absolute path."""
        return str(self.path.resolve() if self.checkpoint else self.path)

    @property
    def config(self) -> RunConfig | None:
        """The configuration of the run that trained it, if any."""
        if self.checkpoint is None:
            return None
        table = at_home(self.checkpoint.info["config"], _folder_of(self.path))
        where = f"config in {self.path / 'checkpoint.json'}"
        config: RunConfig = presets.parse(RunConfig, table, where)
        return config

    @property
    def recipe(self) -> str:
        """The recipe of the last training step; fp32 for a model of transformers."""
        return "fp32" if self.checkpoint is None else str(self._last_plan["recipe"]["name"])

    @property
    def left_fp8(self) -> tuple[str, ...]:
        """The layers, and attention, that the guard had taken out of FP8 at the last step."""
        guard = None if self.checkpoint is None else self.checkpoint.info["guard"]
        return tuple(guard["demoted"]) if guard else ()

    @property
    def has_outdated_scales(self) -> bool:
        """Whether its delayed scaling factors belong to an earlier phase than the last one."""
        if self.checkpoint is None or not any(map(is_scale, self._fp8_state)):
            return False
        return bool(self._last_plan != self.checkpoint.info["plan"])

    @property
    def _last_plan(self) -> Mapping[str, Any]:
        """The plan of the last training step. `plan` in checkpoint.json is the plan of the phase
        whose FP8 state is saved."""
        config, checkpoint = self.config, self.checkpoint
        assert checkpoint is not None
        assert config is not None
        saved: Mapping[str, Any] = checkpoint.info["plan"]
        plans: list[Mapping[str, Any]] = checkpoint.info["plans"]
        if (state := checkpoint.info["phases"]) is None or len(plans) < 2:
            return saved
        if state["ended_at"] is not None and checkpoint.step > state["ended_at"]:
            request = "fp32"  # the reference that the guard went on with
        else:
            phases = phases_in(config)
            request = next(p.asked for p in phases if checkpoint.step <= p.last or p is phases[-1])
        index = by_request(state["places"], request)
        return saved if index is None or index >= len(plans) else plans[index]

    def _plan_of(self, recipe: str) -> Mapping[str, Any] | None:
        """The last plan in `recipe` that the run had; None if it had none."""
        if self.checkpoint is None:
            return None
        plans = (self._last_plan, self.checkpoint.info["plan"], *self.checkpoint.info["plans"])
        return next((plan for plan in plans if plan["recipe"]["name"] == recipe), None)

    @property
    def recorded_tokenizer(self) -> TokenizerIdentity | None:
        """The tokenizer that its checkpoint records, if any."""
        return None if self.checkpoint is None else recorded_tokenizer(self.checkpoint.info)

    @property
    def data(self) -> Mapping[str, str] | None:
        """The fingerprints of the data that it was trained on, see `RunData`; None if unknown."""
        return None if self.checkpoint is None else self.checkpoint.info["identity"]["data"]

    @property
    def own_tokenizer(self) -> str | None:
        """The path of the tokenizer of a model without a checkpoint, which `tokenizer_of_run`
        cannot know."""
        return None if self.checkpoint or self.tokenizer is None else str(self.tokenizer)

    def plan(self, recipe: str, hardware: Hardware, backend: str) -> Plan:
        """The plan that runs the model in `recipe` on `hardware`. If the model was trained in that
        recipe with FP8 attention, which is not possible here, attention runs in the compute dtype.
        Raises what `resolve` raises, and a UserError if `recipe` needs scales that the checkpoint
        does not have."""
        recipe_to_run: str | Recipe = recipe
        notes: tuple[str, ...] = ()
        info = {} if self.checkpoint is None else self.checkpoint.info
        run_plan = self._plan_of(recipe)
        if run_plan is not None:  # keep its overrides: E5M2's scales do not fit E4M3
            where = f"recipe in {self.path / 'checkpoint.json'}"
            recipe_to_run = recipe_from_json(run_plan["recipe"], where)
        try:
            plan = plan_for(self.shape, recipe_to_run, hardware, backend)
        except UnservedAttention as error:
            if isinstance(recipe_to_run, str):
                raise
            recipe_to_run = recipe_to_run.model_copy(update={"attention": "compute"})
            notes = (f"{error.reason}: attention runs in the compute dtype",)
            plan = plan_for(self.shape, recipe_to_run, hardware, backend)
        if info:
            saved_plan = run_plan or info["plan"]
            trained_in = recipe_from_json(saved_plan["recipe"], f"recipe in {self.path}")
            # The checkpoint has FP8 state for the layers that trained in FP8, and no others.
            if plan.recipe.quantizers == trained_in.quantizers:
                requested = plan
                needs_state = run_plan is not None or plan.delayed
                plan = plan_for(
                    self.shape,
                    recipe_to_run,
                    hardware,
                    backend,
                    left_out=layers_left_out(saved_plan) if needs_state else None,
                    compute_dtype=emulation_dtype(saved_plan),
                )
                lost = _in_fp8(requested) - _in_fp8(plan)
                if lost and run_plan is None:
                    names = ", ".join(sorted(lost))
                    notes += (f"the checkpoint has no scales for {names}: not in FP8",)
            if plan.delayed and self.has_outdated_scales:
                notes += (f"the last steps, in {self.recipe}, set no scales",)
            linears = self.shape.linear_shapes()
            taken_out = [
                name
                for name in self.left_fp8
                if name in _in_fp8(plan) or (plan.recipe.fp8_attention and name not in linears)
            ]
            if run_plan is not None and taken_out:
                notes += (f"the guard took these out of FP8: {', '.join(taken_out)}",)
        if plan.delayed and not any(map(is_scale, self._fp8_state)):
            of = f": it is the checkpoint of a run in {self.recipe}" if info else ""
            raise UserError(
                f"{quoted(str(self.path))} holds no scales for recipe '{recipe}'{of}. Use recipe "
                "'current'."
            )
        return replace(plan, reasons=(*plan.reasons, *notes))

    def model(self, recipe: str, hardware: Hardware, backend: str = "auto") -> GPT:
        """The model in eval mode, on the device of `hardware`. Raises what `plan` raises, and a
        UserError if the checkpoint's scales are not for the layers that `recipe` runs in FP8."""
        plan = self.plan(recipe, hardware, backend)
        model = GPT(self.shape, build_backend(plan))
        restore_weights(model, self.weights)
        saved, state = self._fp8_state, fp8_state(model)
        scales = _scales_for(plan, state, saved)
        # Layers that did not round stochastically in the run start at their initial counters.
        draws = {n: saved.get(n, t) for n, t in state.items() if not is_scale(n)}
        try:
            load_fp8_state(model, scales | draws)
        except UserError as error:
            raise UserError(
                f"{self.path} holds scales that do not fit recipe '{recipe}': it is the checkpoint "
                f"of a run in {self.recipe}. Use that recipe, or one without delayed scaling."
            ) from error
        if self._plan_of(recipe) is not None:
            for layer in self.left_fp8:
                model.leave_fp8(layer)
        return model.to(hardware.device).eval()

    @property
    def _fp8_state(self) -> Mapping[str, Tensor]:
        return {} if self.checkpoint is None else self.checkpoint.tensors.get("fp8", {})


def trained_run(checkpoint: Checkpoint, path: Path, passed_over: Sequence[str] = ()) -> Trained:
    """The model of the checkpoint that `find_checkpoint` returned."""
    tokenizer = _folder_of(path) / TOKENIZER_FILE
    return Trained(
        path=path,
        shape=model_of(checkpoint),
        weights=checkpoint.tensors.get("model", {}),
        checkpoint=checkpoint,
        notes=tuple(f"passed over: {reason}" for reason in passed_over),
        tokenizer=tokenizer if run_of(path) and tokenizer.is_file() else None,
    )


def find_source(init_from: str) -> Trained:
    """The model of a checkpoint, a run (its newest usable checkpoint), `hf:` and a folder that
    transformers saved, or `hf:owner/name[@revision]` on the Hub, as `--init-from` names it. Raises
    what `fetch` raises, a UserError if it does not exist or our GPT cannot represent the model, and
    a NoUsableCheckpoint if the checkpoint is damaged, or all of the run's are."""
    repository, folder = hub.repository_in(init_from), hub.path_in(init_from)
    if repository is not None:
        path, fetched = hub.fetch(repository)
        return _of_folder(path, str(fetched))
    if folder is not None:
        return _of_folder(folder, absolute_source(init_from))
    return trained_run(*find_checkpoint(init_from))


def absolute_source(init_from: str) -> str:
    """`--init-from` as an absolute path, so that a run can be resumed from any directory."""
    if (folder := hub.path_in(init_from)) is None:
        return os.path.realpath(init_from)
    return init_from if hub.repository_in(init_from) else f"{hub.HF}{os.path.realpath(folder)}"


def _of_folder(path: Path, name: str) -> Trained:
    """The model in a folder that transformers saved; `name` is the source's."""
    folder = hf.open_folder(path)
    model = hf.model_from_config(folder.config, str(path / "config.json"))
    return Trained(
        path=Path(name),
        shape=model.config,
        weights=hf.from_hf(model.config, model.layout, folder.tensors, str(path)),
        notes=(*model.notes, *folder.tensors.notes()),
        tokenizer=folder.tokenizer,
    )


def _folder_of(path: Path) -> Path:
    """The folder of the run that the checkpoint at `path` belongs to; `path` if it is in no run."""
    return run_of(path) or path


def _in_fp8(plan: Plan) -> set[str]:
    """The layers that a plan has in FP8."""
    return {layer.name for layer in plan.layers if layer.fp8}


def is_scale(name: str) -> bool:
    """Whether a tensor of an FP8 state belongs to delayed scaling, not to stochastic rounding."""
    return not name.endswith(".draws")


def _scales_for(
    plan: Plan, state: Mapping[str, Tensor], saved: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The scales and histories in `saved`, a checkpoint's FP8 state, of the operands that `plan`
    quantizes by such scales. A history of another length than in the model's `state` stays empty:
    evaluation takes the scales alone."""
    places = {place for table in plan.tables for place, q in table.each.items() if q.delayed}
    operands = tuple(f".{place}" for place in (*places, *plan.recipe.attention_slots))
    scales = {
        name: tensor
        for name, tensor in saved.items()
        if is_scale(name) and name.rpartition(".")[0].endswith(operands)
    }
    for name in scales.keys() & state.keys():
        if name.endswith(".amax_history") and len(scales[name]) != len(state[name]):
            scales[name] = state[name]
    return scales


def emulation_dtype(plan: Mapping[str, Any]) -> ComputeDtype | None:
    """The compute dtype of a checkpoint's plan, if that emulates FP8 on a CPU; else None. A run
    keeps it on other CPUs."""
    dtype: ComputeDtype | None = plan["compute_dtype"]
    return dtype if plan["backend"] == "emulate" and plan["device"] == "cpu" else None


def tokenizer_of_run(
    run_or_checkpoint: str | Path, name: str | None, recorded: TokenizerIdentity | None
) -> Tokenizer | None:
    """The tokenizer of a run or checkpoint; None if it is unknown.

    Args:
        name: the tokenizer to use, a name or path; None: the run's own.
        recorded: the tokenizer that its checkpoint records; older ones record none.

    Raises:
        UserError: it cannot be loaded, or is not the tokenizer that the run was trained with.
    """
    path = Path(run_or_checkpoint)
    file = _folder_of(path) / TOKENIZER_FILE
    if name is None:
        return own_tokenizer(file, recorded)
    named = load_tokenizer(name)
    trained_with = recorded
    if recorded is None and file.is_file():
        trained_with = load_tokenizer(str(file)).identity
    if trained_with is not None and not trained_with.is_alike(named.identity):
        raise UserError(
            f"{quoted(str(path))} was trained on tokens of {quoted(trained_with.name)}, not of "
            f"--tokenizer {quoted(name)}. Leave that out."
        )
    return named


def own_tokenizer(file: Path, recorded: TokenizerIdentity | None) -> Tokenizer | None:
    """The tokenizer in `file`, a run's `tokenizer.json`. None if there is no file and none is
    recorded. A tokenizer with a name needs no file. Raises a UserError if it is not the one
    `recorded`."""
    tokenizer = load_tokenizer(str(file)) if file.is_file() else None
    if recorded is None:
        return tokenizer
    if tokenizer is None and recorded.name in NAMED:
        tokenizer = load_tokenizer(recorded.name)
    if tokenizer is not None and tokenizer.sha256 == recorded.sha256:
        return tokenizer
    problem = "is missing" if tokenizer is None else f"is another one ({tokenizer.sha256[:8]})"
    raise UserError(
        f"{quoted(str(file))} {problem}: the run was trained on tokens of "
        f"{quoted(recorded.name)} ({recorded.sha256[:8]}). Put that file back, or name it by "
        "--tokenizer."
    )
