"""The command `fp8stack pretrain`."""

from typing import Annotated, Any

import typer

from fp8stack.cli import leave_while_importing, options
from fp8stack.cli.options import option
from fp8stack.common.errors import Interrupted
from fp8stack.common.terminal import say

RESUME = option("auto, a run, or a checkpoint. Bare: auto.")
GUARD = option("Skip bad steps, roll back, leave FP8. On by default.")


@options.takes_keys()
def pretrain(
    flags: dict[str, Any],
    phases: Annotated[str | None, options.PHASES] = None,
    config: Annotated[str | None, options.CONFIG] = None,
    set: Annotated[list[str] | None, options.SET] = None,
    resume: Annotated[str | None, RESUME] = None,
    overwrite: Annotated[bool, option("Delete the run in --out first.", "--overwrite")] = False,
    guard: Annotated[bool | None, GUARD] = None,
) -> None:
    """Train a model; with no flags, a small GPT on Python's own source."""
    flags |= {"phases": phases, "guard": None if guard is None else {"enabled": guard}}
    from fp8stack.training.signals import NOTHING_DONE, stop_requests

    try:
        with stop_requests(leave_while_importing) as stop:
            with stop.at_once(NOTHING_DONE):
                from fp8stack.training.loop import DONE, train
                from fp8stack.training.setup.start import set_up

                run = set_up(flags, config, set or [], resume, overwrite)
            code = train(run, stop)
            if code == DONE and run.ranks.is_main:
                from fp8stack.analysis.forecast.forecast import expected_cost

                say(*filter(None, [expected_cost(run)]))
            raise typer.Exit(code)
    except KeyboardInterrupt:
        raise Interrupted(
            "Interrupted. The last checkpoint, if any, is complete; continue with --resume RUN."
        ) from None
