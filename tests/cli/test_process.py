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
SCRIPT = "import sys; from fp8stack.cli import main; sys.exit(main())"


def in_shell(command: str, folder: Path) -> tuple[int, str]:
    """The exit code of the command `fp8stack` in a bash line, and what the line prints."""
    script = f'fp8stack() {{ "{sys.executable}" -m fp8stack "$@"; }}; set -o pipefail; {command}'
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    return done.returncode, done.stdout + done.stderr


def assert_trained(run: Path) -> None:
    assert (run / "checkpoints" / "step-000002").is_dir()
    rows = (run / "metrics.jsonl").read_text().splitlines()
    assert len([row for row in rows if '"loss"' in row]) == 2


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
    ended, printed = in_shell(f"fp8stack {command}", tmp_path)
    assert ended == code
    assert message in printed
    if command.startswith("pretrain"):  # no file took the place of a closed stdout
        assert_trained(tmp_path / "r")
        for name in ("metrics.jsonl", "sessions.jsonl"):
            text = (tmp_path / "r" / name).read_text()
            assert all(line.startswith("{") for line in text.splitlines()), text


# Ctrl-C. A module that is imported sends the signal: in the middle of the imports, however fast the
# machine is.

STRIKE = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest's may ignore it
class Strike:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), {signal})
sys.meta_path.insert(0, Strike())
sys.argv = ["fp8stack", *{words}]
"""


def struck(module: str, number: int, *words: str, folder: Path) -> tuple[int, str]:
    code = STRIKE.format(module=module, signal=number, words=list(words)) + SCRIPT
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("fp8stack.cli.app", ["list", "recipes"]),
        ("fp8stack.cli.pretrain", ["pretrain", "--out", "r"]),
        ("torch", ["eval", "r"]),
        ("numpy._core.multiarray", ["report", "r"]),
    ],
)
def test_ctrl_c_while_modules_are_imported_is_a_quiet_130(module, words, tmp_path):
    assert struck(module, signal.SIGINT, *words, folder=tmp_path) == (130, "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_training_is_imported_is_heeded_at_once(number, tmp_path):
    code, errors = struck("torch", number, "pretrain", "--out", "r", folder=tmp_path)
    assert code == 75
    assert errors.strip().startswith("fp8stack: Stopped before a step was done; nothing is lost.")
    assert len(errors.strip().splitlines()) == 1


def test_ctrl_c_during_a_commands_work_is_one_line(tmp_path):
    work = (
        "from fp8stack.analysis.report import listing\n"
        "listing.models = lambda: os.kill(os.getpid(), signal.SIGINT)\n"
    )
    code = STRIKE.format(module="-", signal=2, words=["list", "models"]) + work + SCRIPT
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "fp8stack: Interrupted.\n")


def test_a_warning_and_a_traceback_of_another_library_are_escaped():
    work = (
        "import warnings\n"
        "from fp8stack.analysis.report import listing\n"
        "def models():\n"
        "    warnings.warn('Glyph \\x1b[2J missing')\n"
        "    raise RuntimeError('\\x1b[2J')\n"
        "listing.models = models\n"
    )
    code = STRIKE.format(module="-", signal=2, words=["list", "models"]) + work + SCRIPT
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("\\x1b[2J") == 2
    assert "\x1b" not in done.stderr
    assert "Traceback" in done.stderr


def test_an_ignored_ctrl_c_stays_ignored():
    code = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from fp8stack.analysis.report import listing; models = listing.models\n"
        "listing.models = lambda: os.kill(os.getpid(), signal.SIGINT) or models()\n"
        f"sys.argv = ['fp8stack', 'list', 'models']; {SCRIPT}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    assert "gpt-nano" in done.stdout
