"""`fp8stack.cli.child` with a run that stops itself after its fifth step (SIGSTOP), until a test
continues it. A script: it imports this package by no name."""

import os
import runpy
import signal

from torch import Tensor

from fp8stack.training.loop import _Loop

STEP = 5
_advance = _Loop.advance


def _halting(loop: _Loop, step: int, tokens_BT: Tensor) -> bool:
    rolled_back = _advance(loop, step, tokens_BT)
    if step == STEP:
        os.kill(os.getpid(), signal.SIGSTOP)
    return rolled_back


if __name__ == "__main__":
    _Loop.advance = _halting  # type: ignore[method-assign, assignment]
    runpy.run_module("fp8stack.cli.child", run_name="__main__")
