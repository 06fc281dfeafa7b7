"""`fp8stack pretrain` as a function, for scripts and notebooks."""

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from fp8stack.planning.run_config import RunConfig
from fp8stack.training.loop import PREEMPTED, train
from fp8stack.training.setup.start import set_up
from fp8stack.training.signals import Preempted, StopRequests, stop_requests


def pretrain(
    config: RunConfig | str | Path | None = None,
    *,
    resume: str | Path | None = None,
    overwrite: bool = False,
    **keys: Any,
) -> Path:
    """Train a model like the command `fp8stack pretrain`, and return the run's folder.

    Args:
        config: a configuration, or a run file (TOML).
        resume: a run or checkpoint to go on with, or "auto": the run in `out`, if there is one.
        overwrite: first remove the run in `out`.
        keys: keys of a run, over those in `config`: `recipe="delayed"`, `steps=200`,
            `model_overrides={"layers": 2}`; docs/configuration.md lists all of them. Type checkers
            know them as those of `RunConfig`.

    Raises:
        UserError: the command's one-line error; `exit_code` is the command's exit code.
        Preempted: a signal stopped the run, which is saved and can be resumed.
    """
    if isinstance(config, RunConfig):
        keys, config = config.given | keys, None
    config, resume = (None if path is None else str(path) for path in (config, resume))
    flags = {key: str(value) if isinstance(value, Path) else value for key, value in keys.items()}
    is_main = threading.current_thread() is threading.main_thread()  # others get no signals
    with stop_requests() if is_main else nullcontext(StopRequests()) as stop:
        run = set_up(flags, config, [], resume, overwrite)
        if train(run, stop) == PREEMPTED:
            raise Preempted(f"Stopped after step {run.step}, saved. Go on with resume='auto'.")
    return run.folder.path
