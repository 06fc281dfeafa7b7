"""A child process with bounds: what it printed, how it ended. For faults that could hang or eat
memory; a fork, since starting Python and torch takes seconds."""

import contextlib
import io
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile

import torch

from fp8stack import cli
from fp8stack.common.errors import UserError
from tests.faults.processes import Ended

MEMORY_BYTES = 2**29
"""More than the process had before."""
SECONDS = 60
TRACEBACK, TIMEOUT = 70, 71


def bounded(
    work: Callable[[], object], memory_bytes: int = MEMORY_BYTES, seconds: float = SECONDS
) -> Ended:
    """Do `work` in a child that may use so much more memory and so much time.

    A UserError ends it with that error's exit code, any other exception with TRACEBACK; a child
    that takes too long is killed and its code is TIMEOUT.
    """
    with TemporaryFile() as out, TemporaryFile() as error:
        child = os.fork()
        if child == 0:
            _be_child(work, out.fileno(), error.fileno(), memory_bytes)
        code = _wait(child, seconds)
        lines = []
        for stream in (out, error):
            stream.seek(0)
            lines.append(stream.read().decode(errors="replace"))
    return Ended(code=code, stdout=lines[0], stderr=lines[1])


def called(arguments: list[str], folder: Path) -> Ended:
    """`fp8stack` with some arguments, in `folder`, in this process and without bounds."""
    out, error = io.StringIO(), io.StringIO()
    redirected = contextlib.redirect_stdout(out), contextlib.redirect_stderr(error)
    with contextlib.chdir(folder), redirected[0], redirected[1]:
        try:
            cli.main(arguments)
            code = 0
        except SystemExit as exit:
            code = exit.code if isinstance(exit.code, int) else 0
        except Exception:
            traceback.print_exc()
            code = TRACEBACK
    return Ended(code=code, stdout=out.getvalue(), stderr=error.getvalue())


def _be_child(work: Callable[[], object], out: int, error: int, memory_bytes: int) -> None:
    code = TRACEBACK
    try:
        os.dup2(out, 1)
        os.dup2(error, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        torch.set_num_threads(1)  # the threads of the parent are not here
        present = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (present + int(memory_bytes),) * 2)
        work()
        code = 0
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else 0
    except UserError as problem:
        print(problem, file=sys.stderr)
        code = problem.exit_code
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _wait(child: int, seconds: float) -> int:
    """The exit code of `child`, which is killed if it takes longer."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ended_child, status = os.waitpid(child, os.WNOHANG)
        if ended_child:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return TIMEOUT
