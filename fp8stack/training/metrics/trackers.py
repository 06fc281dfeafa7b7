"""Experiment trackers through accelerate: TensorBoard, Weights & Biases, Trackio. No other file
imports these packages."""

import json
import os
import sys
from contextlib import redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, TensorBoardTracker, TrackioTracker, WandBTracker

from fp8stack.config import RunConfig, to_toml
from fp8stack.errors import UserError
from fp8stack.io import read_json, write_atomically

PROJECT = "fp8stack"
IDS = "trackers.json"  # in the run folder: the trackers' ids of the run


def build_trackers(config: RunConfig, folder: Path) -> list[GeneralTracker]:
    """Build the trackers that `config` enables, without starting them; their files go into `folder`
    unless the environment sets another. Raises a UserError if a package is not installed."""
    kinds = {"tensorboard": _TensorBoard, "wandb": _WandB, "trackio": _Trackio}
    enabled = [package for package in kinds if getattr(config, package)]
    for package in enabled:
        if find_spec(package) is None:
            raise UserError(f"--{package} needs the package {package}: pip install {package}")
    return [kinds[package](config, folder) for package in enabled]


def start_trackers(accelerator: Accelerator, folder: Path, resumed: bool = False) -> None:
    """Start the trackers of `accelerator`; if `resumed`, they continue the curves of the run in
    `folder`. Raises a UserError if a tracker refuses, such as Weights & Biases without a login."""
    if not resumed and (folder / IDS).exists():  # of another run, which was here before
        (folder / IDS).unlink()
    if not accelerator.log_with:
        return
    folder.mkdir(parents=True, exist_ok=True)  # else wandb writes to a temporary folder
    for tracker in accelerator.log_with:
        tracker.resumed = resumed
    accelerator.init_trackers(PROJECT)


class _TensorBoard(TensorBoardTracker):  # type: ignore[misc]
    """TensorBoard. The event file is opened at the first row, whose step purges stale rows: after
    resuming or rolling back, some steps are repeated."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        super().__init__("tensorboard", folder)
        self.settings = to_toml(config)
        self.last: int | None = None

    def start(self) -> None:
        """Nothing yet."""

    def log(self, values: dict[str, Any], step: int | None = None, **more: Any) -> None:
        assert step is not None
        if self.last is None or step < self.last:
            self.finish()
            self.init_kwargs = {"purge_step": step}  # readers drop what they have from there on
            super().start()
            indented = self.settings.replace("\n", "\n    ")  # a code block in Markdown
            self.writer.add_text("run.toml", f"    {indented}", step)
        self.last = step
        super().log(values, step, **more)

    def finish(self) -> None:
        if self.last is not None:
            super().finish()


class _WandB(WandBTracker):  # type: ignore[misc]
    """A run at Weights & Biases, or in its offline folder. Its environment variables win."""

    resumed = False

    def __init__(self, config: RunConfig, folder: Path) -> None:
        own: dict[str, tuple[str, Any]] = {
            "WANDB_DIR": ("dir", str(folder.resolve())),  # its service keeps the first folder
            "WANDB_NAME": ("name", folder.name),
            "WANDB_CONSOLE": ("settings", {"console": "off"}),  # the terminal is the bar's
        }
        given = dict(value for key, value in own.items() if not os.environ.get(key))
        project = os.environ.get("WANDB_PROJECT") or PROJECT
        super().__init__(project, config=config.model_dump(mode="json"), **given)
        self.folder = folder

    def start(self) -> None:
        """Start a run, or continue the one with this run's curves. Raises a UserError if Weights &
        Biases refuses."""
        import wandb.errors as wandb_errors

        known = _known(self.folder).get("wandb") if self.resumed else None
        if known and not os.environ.get("WANDB_RUN_ID"):
            self.init_kwargs["id"] = known
        # Offline, Weights & Biases only writes files: there it cannot ask what it has already.
        offline = os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun")
        if known and not os.environ.get("WANDB_RESUME") and not offline:
            self.init_kwargs["resume"] = "allow"
        try:
            super().start()
        except wandb_errors.Error as error:
            what = " ".join(str(error).split())
            raise UserError(
                f"--wandb: {what} Log in by `wandb login`, or set WANDB_MODE=offline."
            ) from error
        known_now = _known(self.folder) | {"wandb": self.run.id}
        write_atomically(self.folder / IDS, (json.dumps(known_now) + "\n").encode())


class _Trackio(TrackioTracker):  # type: ignore[misc]
    """A run in Trackio's database: in the run's folder, or where its environment variables say."""

    resumed = False

    def __init__(self, config: RunConfig, folder: Path) -> None:
        settings = config.model_dump(mode="json")
        super().__init__(PROJECT, name=folder.name, config=settings, embed=False)
        self.folder = folder

    def start(self) -> None:
        """Start a run, or continue the one of this name. Raises a UserError if Trackio refuses,
        such as a server without a token."""
        _import_trackio(self.folder / "trackio")
        self.init_kwargs["resume"] = "allow" if self.resumed else "never"
        try:
            with redirect_stdout(StringIO()):  # it prints how to look at it, in colours
                super().start()
        except (ValueError, OSError) as error:
            raise UserError(f"--trackio: {' '.join(str(error).split())}") from error

    def finish(self) -> None:
        with redirect_stdout(StringIO()):
            super().finish()


def _import_trackio(folder: Path) -> None:
    """Import Trackio so that it keeps its files in `folder`, which it reads at import only."""
    if "trackio" in sys.modules or os.environ.get("TRACKIO_DIR"):
        return
    os.environ["TRACKIO_DIR"] = str(folder.resolve())
    try:
        import trackio  # noqa: F401
    finally:
        del os.environ["TRACKIO_DIR"]


def _known(folder: Path) -> dict[str, str]:
    """The trackers' ids of the run in `folder`; empty if they cannot be read."""
    try:
        known = read_json(folder / IDS)
    except UserError:
        return {}
    return known if isinstance(known, dict) else {}
