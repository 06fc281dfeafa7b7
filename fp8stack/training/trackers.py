"""Where metrics go besides `metrics.jsonl`: TensorBoard and Weights & Biases, by accelerate.

The only file that knows wandb. It must not know the training loop.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, TensorBoardTracker, WandBTracker

from fp8stack.errors import UserError
from fp8stack.training.config import RunConfig


def build_trackers(config: RunConfig, folder: Path) -> list[GeneralTracker]:
    """The trackers that `config` asks for; their files go into `folder`.

    Raises:
        UserError: a package is not installed.
    """
    found: list[GeneralTracker] = []
    if config.tensorboard:
        _require("tensorboard")
        found.append(TensorBoardTracker("tensorboard", folder))
    if config.wandb:
        _require("wandb")
        found.append(
            WandBTracker(
                "fp8stack",
                dir=str(folder),
                name=folder.name,
                config=config.model_dump(mode="json"),
                settings={"console": "off"},  # the terminal is the progress bar's
            )
        )
    return found


def start_trackers(accelerator: Accelerator, folder: Path) -> None:
    """Start the trackers that `accelerator` was made with.

    Raises:
        UserError: Weights & Biases refuses, such as without a login.
    """
    if not accelerator.log_with:
        return
    wandb = any(tracker.name == "wandb" for tracker in accelerator.log_with)
    if not wandb:
        accelerator.init_trackers("fp8stack")
        return
    import wandb.errors as wandb_errors

    folder.mkdir(parents=True, exist_ok=True)  # else wandb writes to a temporary folder
    try:
        accelerator.init_trackers("fp8stack")
    except wandb_errors.Error as error:
        what = " ".join(str(error).split())
        raise UserError(
            f"--wandb: {what} Log in by `wandb login`, or set WANDB_MODE=offline."
        ) from error


def _require(package: str) -> None:
    if find_spec(package) is None:
        raise UserError(f"--{package} needs the package {package}: pip install {package}")
