"""Load a trained model from its run or checkpoint, for inference."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8stack import presets
from fp8stack.backends import build_backend, fp8_state, load_fp8_state
from fp8stack.checkpoint.reader import Checkpoint
from fp8stack.checkpoint.state import restore_weights
from fp8stack.checkpoint.validation import has_weights, load_sound, model_of, newest_sound
from fp8stack.config import RunConfig
from fp8stack.errors import UserError, quoted
from fp8stack.model.config import plan_for
from fp8stack.model.gpt import GPT
from fp8stack.precision import Hardware, Plan, Recipe, probe, recipe_from_json


def load(run_or_checkpoint: str | Path, recipe: str = "fp32") -> GPT:
    """Load the model of a run's newest usable checkpoint, or of one checkpoint, in eval mode.

    Args:
        run_or_checkpoint: a run's folder, or `.../checkpoints/step-000200`.
        recipe: the recipe to run it in, whichever it was trained in.

    Returns:
        A GPT on this machine's device: `model(tokens [B, T]) -> logits [B, T, vocabulary]`.

    Raises:
        UserError: there is no run, or `recipe` needs scales that the checkpoint does not have.
        NoUsableCheckpoint: the checkpoint is damaged, or all of the run's are.
    """
    checkpoint, path, passed_over = find_checkpoint(run_or_checkpoint)
    for reason in passed_over:
        warnings.warn(f"{path} is used, an older checkpoint. {reason}", stacklevel=2)
    return TrainedRun(path=path, checkpoint=checkpoint).model(recipe, probe())


def find_checkpoint(run_or_checkpoint: str | Path) -> tuple[Checkpoint, Path, list[str]]:
    """Return a run's newest usable checkpoint, or one checkpoint, with its path and why newer ones
    were skipped. Raises a UserError if there is no run or checkpoint, and a NoUsableCheckpoint if
    the checkpoint is damaged, or all of the run's are."""
    path = Path(run_or_checkpoint)
    try:
        if (path / "checkpoints").is_dir():
            return newest_sound(path / "checkpoints", has_weights)
        in_run = path.parent.name == "checkpoints" and path.is_dir()
        if in_run or (path / "checkpoint.json").exists():
            return load_sound(path, has_weights), path, []
    except (OSError, ValueError) as error:  # such as a name that is too long, or holds a NUL
        if isinstance(error, UserError):
            raise
        reason = getattr(error, "strerror", None) or "that is no path"
        raise UserError(f"Cannot read '{quoted(str(path))}': {reason}.") from error
    raise UserError(
        f"No run and no checkpoint at '{quoted(str(path))}'. Give a run's folder or a checkpoint's."
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedRun:
    """A checkpoint of a run, to run its model in any recipe."""

    path: Path
    checkpoint: Checkpoint
    notes: tuple[str, ...] = ()  # to be printed
    tokenizer: None = None  # the run's folder has it

    @property
    def config(self) -> RunConfig:
        """The run's configuration."""
        where = f"config in {self.path / 'checkpoint.json'}"
        config: RunConfig = presets.parse(RunConfig, self.checkpoint.info["config"], where)
        return config

    @property
    def recipe(self) -> str:
        """The recipe of its last training step."""
        return str(self.checkpoint.info["plan"]["recipe"]["name"])

    def plan(self, recipe: str, hardware: Hardware, backend: str) -> Plan:
        """The plan that runs the model in `recipe` on `hardware`, whichever recipe it was trained
        in. Raises what `resolve` raises, and a UserError if `recipe` needs scales that the
        checkpoint does not have."""
        identity, ran = self.checkpoint.info["identity"], self.checkpoint.info["plan"]
        config = model_of(self.checkpoint)
        asked: str | Recipe = recipe
        if recipe == self.recipe:  # with its overrides: E5M2's scales do not fit E4M3
            asked = recipe_from_json(ran["recipe"], f"recipe in {self.path / 'checkpoint.json'}")
        plan = plan_for(config, asked, hardware, backend)
        trained_in = recipe_from_json(identity["recipe"], f"identity.recipe in {self.path}")
        if plan.recipe.quantizers == trained_in.quantizers:  # the FP8 state has these layers only
            left_out = layers_left_out(ran)
            plan = plan_for(config, asked, hardware, backend, left_out=left_out)
        if plan.delayed and not any(map(_is_scale, self.checkpoint.tensors.get("fp8", {}))):
            raise UserError(
                f"{self.path} holds no scales for recipe '{recipe}': it is the checkpoint of a run "
                f"in {self.recipe}. Use recipe 'current'."
            )
        return plan

    def model(self, recipe: str, hardware: Hardware, backend: str = "auto") -> GPT:
        """The model in eval mode, on the device of `hardware`. Raises what `plan` raises, and a
        UserError if the checkpoint has scales of other layers than `recipe`."""
        plan = self.plan(recipe, hardware, backend)
        model = GPT(model_of(self.checkpoint), build_backend(plan))
        restore_weights(model, self.checkpoint.tensors.get("model", {}))
        saved = self.checkpoint.tensors.get("fp8", {})
        scales = {name: of for name, of in saved.items() if plan.delayed and _is_scale(name)}
        # Layers that did not round stochastically in the run start at their initial counters.
        draws = {n: saved.get(n, t) for n, t in fp8_state(model).items() if not _is_scale(n)}
        try:
            load_fp8_state(model, scales | draws)
        except UserError as error:
            raise UserError(
                f"{self.path} holds scales that do not fit recipe '{recipe}': it is the checkpoint "
                f"of a run in {self.recipe}. Use that recipe, or one without delayed scaling."
            ) from error
        return model.to(hardware.device).eval()


def _is_scale(name: str) -> bool:
    """Whether a tensor of an FP8 state belongs to delayed scaling, not to stochastic rounding."""
    return not name.endswith(".draws")


def layers_left_out(plan: Mapping[str, Any]) -> dict[str, str]:
    """The layers that are not in FP8 in a checkpoint's plan, with the reasons. A resumed run keeps
    them, since FP8 state and losses depend on them."""
    return {layer["name"]: layer["reason"] for layer in plan["layers"] if layer["reason"]}
