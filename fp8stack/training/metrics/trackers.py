"""Experiment trackers through accelerate: TensorBoard, Weights & Biases, Trackio. No other file
imports these packages. The classes here add only what accelerate's trackers cannot do."""

import json
import os
import sys
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, TensorBoardTracker, TrackioTracker, WandBTracker

from fp8stack.common.errors import UserError, require
from fp8stack.common.io import read_json, write_atomically
from fp8stack.planning.run_config import RunConfig, to_toml

PROJECT = "fp8stack"
IDS = "trackers.json"  # in the run folder: the trackers' ids of the run


def build_trackers(config: RunConfig, folder: Path, *, resumed: bool) -> list[GeneralTracker]:
    """Build the trackers that `config` enables, without starting them; their files go into `folder`
    unless the environment sets another. If `resumed`, they continue the
    curves of the run in `folder`. Raises a UserError if a package is not installed."""
    kinds = {"tensorboard": _TensorBoard, "wandb": _WandB, "trackio": _Trackio}
    enabled = [package for package in kinds if getattr(config, package)]
    for package in enabled:
        require(package, f"--{package}")
    return [kinds[package](config, folder, resumed) for package in enabled]


def start_trackers(accelerator: Accelerator, folder: Path, *, resumed: bool) -> None:
    """Start the trackers of `accelerator`, for the run in `folder`. Raises a UserError if one of
    them refuses, such as Weights & Biases without a login."""
    if not resumed and (folder / IDS).exists():  # of an earlier run in this folder
        (folder / IDS).unlink()
    accelerator.init_trackers(PROJECT)


class _TensorBoard(TensorBoardTracker):  # type: ignore[misc]
    """Opens the event file at the first row, and another one after a rollback. The first step in a
    file makes readers drop what they have from there on, because resuming and rolling back repeat
    steps."""

    def __init__(self, config: RunConfig, folder: Path, resumed: bool) -> None:
        super().__init__("tensorboard", folder)
        self.settings = to_toml(config)
        self.last_step: int | None = None

    def start(self) -> None:
        """Nothing yet."""

    def log(self, values: dict[str, Any], step: int | None = None, **more: Any) -> None:
        assert step is not None
        if self.last_step is None or step < self.last_step:
            self.finish()
            self.init_kwargs = {"purge_step": step}
            super().start()
            indented = self.settings.replace("\n", "\n    ")  # a code block in Markdown
            self.writer.add_text("run.toml", f"    {indented}", step)
        self.last_step = step
        super().log(values, step, **more)

    def finish(self) -> None:
        if self.last_step is not None:
            super().finish()


class _WandB(WandBTracker):  # type: ignore[misc]
    """Continues a run by its id, and leaves settings to the environment variables that are set."""

    def __init__(self, config: RunConfig, folder: Path, resumed: bool) -> None:
        self.ids = folder / IDS
        settings: dict[str, tuple[str, Any]] = {
            "WANDB_DIR": ("dir", str(folder.resolve())),  # its service keeps the first folder
            "WANDB_NAME": ("name", folder.name),
            "WANDB_CONSOLE": ("settings", {"console": "off"}),  # the terminal is the bar's
        }
        if resumed and (run_id := _saved_id(self.ids)) is not None:
            settings["WANDB_RUN_ID"] = ("id", run_id)
            # Offline, Weights & Biases only writes files and cannot ask for earlier steps.
            if os.environ.get("WANDB_MODE") not in ("offline", "disabled", "dryrun"):
                settings["WANDB_RESUME"] = ("resume", "allow")
        unset = dict(setting for name, setting in settings.items() if not os.environ.get(name))
        project = os.environ.get("WANDB_PROJECT") or PROJECT
        super().__init__(project, config=config.model_dump(mode="json"), **unset)

    def start(self) -> None:
        """Start the run and save its id. Raises a UserError if Weights & Biases refuses, such as
        without a login."""
        import wandb.errors as wandb_errors

        try:
            super().start()
        except wandb_errors.Error as error:
            message = " ".join(str(error).split())
            raise UserError(
                f"--wandb: {message} Log in by `wandb login`, or set WANDB_MODE=offline."
            ) from error
        write_atomically(self.ids, (json.dumps({"wandb": self.run.id}) + "\n").encode())


class _Trackio(TrackioTracker):  # type: ignore[misc]
    """Keeps its database in the run's folder, unless its environment variables name another place,
    and prints nothing."""

    def __init__(self, config: RunConfig, folder: Path, resumed: bool) -> None:
        settings, resume = config.model_dump(mode="json"), "allow" if resumed else "never"
        super().__init__(PROJECT, name=folder.name, config=settings, embed=False, resume=resume)
        self.folder = folder / "trackio"

    def start(self) -> None:
        """Start a run, or continue the one of this name. Raises a UserError if Trackio refuses,
        such as a server without a token."""
        if "trackio" not in sys.modules and not os.environ.get("TRACKIO_DIR"):
            os.environ["TRACKIO_DIR"] = str(self.folder.resolve())  # read at import only
            try:
                import trackio  # noqa: F401
            finally:
                del os.environ["TRACKIO_DIR"]
        try:
            with redirect_stdout(StringIO()):
                super().start()
        except (ValueError, OSError) as error:
            raise UserError(f"--trackio: {' '.join(str(error).split())}") from error

    def finish(self) -> None:
        with redirect_stdout(StringIO()):
            super().finish()


def _saved_id(ids: Path) -> str | None:
    """The id of the run at Weights & Biases; None if it cannot be read."""
    with suppress(UserError, AttributeError):
        run_id = read_json(ids).get("wandb")
        return run_id if isinstance(run_id, str) else None
    return None
