"""The command as a process: closed streams, full disks behind them, and Ctrl-C from the start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import TINY
from tests.faults.processes import run_ranks

SHORT = [*TINY, "--steps", "2", "--recipe", "fp32", "--device", "cpu"]


def assert_trained(run: Path) -> None:
    assert (run / "checkpoints" / "step-000002").is_dir()
    for name in ("metrics.jsonl", "sessions.jsonl"):  # nothing that was printed is in them
        rows = (run / name).read_text().splitlines()
        assert all(row.startswith("{") for row in rows), rows
    assert len([row for row in (run / "metrics.jsonl").open() if '"loss"' in row]) == 2


@contextmanager
def full_stdout(rank: int) -> Iterator[None]:
    """A change: nothing can be written to stdout."""
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    yield


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
def test_training_goes_on_with_a_full_disk_behind_stdout(tmp_path):
    words = ["pretrain", *SHORT, "--out", "r"]
    assert run_ranks(words, tmp_path, 1, change=full_stdout)[0].code == 0
    assert_trained(tmp_path / "r")


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("list recipes >/dev/full", 4, "fp8stack: output: No space left on device\n"),
        ("list recipes >&-", 0, ""),
        ("list nonsense 2>&-", 2, ""),
        ("list recipes 2>&- | cat", 0, "mxfp8"),
        ("list models | (exec <&-; sleep 1; true)", 1, ""),
        (f"pretrain {' '.join(SHORT)} --out r >&- 2>&- <&-", 0, ""),
        (f"pretrain {' '.join(SHORT)} --out r | head -1", 0, ""),
    ],
)
@pytest.mark.full
def test_a_result_that_cannot_be_printed_is_one_line(command, code, message, tmp_path):
    script = f'fp8stack() {{ "{sys.executable}" -m fp8stack "$@"; }}; set -o pipefail; fp8stack '
    words = ["bash", "-c", script + command]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert done.returncode == code
    assert message in done.stdout + done.stderr
    if command.startswith("pretrain"):
        assert_trained(tmp_path / "r")


SCRIPT = """
import os, signal, sys, warnings
signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest's may ignore it
class Strike:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), {number})
sys.meta_path.insert(0, Strike())
sys.argv = ["fp8stack", *{words}]
{work}
from fp8stack.cli import main; sys.exit(main())
"""


def ended(
    folder: Path, *words: str, module: str = "", number: int = signal.SIGINT, work: str = ""
) -> tuple[int, str, str]:
    """The exit code, stdout and stderr of `fp8stack` in a process that signals itself when it
    imports `module`, in the middle of the imports; it does `work` before."""
    code = SCRIPT.format(module=module, number=int(number), words=list(words), work=work)
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("fp8stack.cli.app", ["list", "recipes"]),
        ("fp8stack.cli.pretrain", ["pretrain", "--out", "r"]),
        ("torch", ["eval", "r"]),
        ("numpy._core.multiarray", ["report", "r"]),
    ],
)
@pytest.mark.full
def test_ctrl_c_while_modules_are_imported_is_a_quiet_130(module, words, tmp_path):
    assert ended(tmp_path, *words, module=module) == (130, "", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.full
def test_a_signal_while_training_is_imported_is_heeded_at_once(number, tmp_path):
    code, _, errors = ended(tmp_path, "pretrain", "--out", "r", module="torch", number=number)
    (line,) = errors.strip().splitlines()
    assert code == 75
    assert line.startswith("fp8stack: Stopped before a step was done; nothing is lost.")


LISTING = "from fp8stack.analysis.report import listing; models = listing.models\n"


@pytest.mark.full
def test_ctrl_c_during_a_commands_work_is_one_line_or_ignored_as_it_was(tmp_path):
    work = f"{LISTING}listing.models = lambda: os.kill(os.getpid(), signal.SIGINT) or models()"
    assert ended(tmp_path, "list", "models", work=work) == (130, "", "fp8stack: Interrupted.\n")
    ignored = f"signal.signal(signal.SIGINT, signal.SIG_IGN)\n{work}"
    code, printed, _ = ended(tmp_path, "list", "models", work=ignored)
    assert (code, "gpt-nano" in printed) == (0, True)


@pytest.mark.full
def test_a_warning_and_a_traceback_of_another_library_are_escaped(tmp_path):
    text = r"'Glyph \x1b[2J missing'"
    work = f"{LISTING}listing.models = lambda: warnings.warn({text}) or {{}}[{text}]"
    code, _, errors = ended(tmp_path, "list", "models", work=work)
    assert code == 1
    assert "Traceback" in errors
    assert errors.count("Glyph \\x1b[2J missing") >= 2
    assert "\x1b" not in errors
