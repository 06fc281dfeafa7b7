"""What a loop of `--resume auto` finds when it starts a run again, and how a run gives way."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fp8stack import cli, io
from fp8stack.checkpoint import reader
from fp8stack.checkpoint.validation import newest_sound
from fp8stack.training import finalize, loop
from fp8stack.training.run_folder import RunFolder
from fp8stack.training.setup import build, datasets
from fp8stack.training.signals import SIGNALS, Preempted, stop_requests
from tests.conftest import TINY, Command, losses, metrics

pytestmark = pytest.mark.usefixtures("one_thread")

AUTO = ["pretrain", "--resume", "auto", "--out", "r"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text and a run `r` on it, of 12 steps, with checkpoints of steps 8 and 12."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "t.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    flags = ["--recipe", "fp32", "--data", str(folder / "t.txt"), "--out", str(folder / "r")]
    with pytest.raises(SystemExit) as exit:
        cli.main(["pretrain", *flags, *TINY])
    assert exit.value.code == 0
    return folder


@pytest.fixture
def run(finished: Path, command: Command, tmp_path: Path) -> Path:
    """A copy of it, in the folder where the command runs."""
    shutil.copytree(finished / "r", tmp_path / "r")
    return tmp_path / "r"


@pytest.fixture
def new(finished: Path) -> list[str]:
    """The flags that `finished` was made by, but for `--out`."""
    return ["pretrain", "--recipe", "fp32", "--data", str(finished / "t.txt"), *TINY]


def _contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def _saved(run: Path) -> list[str]:
    return [path.name for path in reader.candidates(run / "checkpoints")]


# What is there when it starts again


@pytest.mark.parametrize("left", ["nothing", "a folder", "a claimed folder", "litter"])
def test_where_no_run_was_begun_a_new_one_begins(
    left: str, new: list[str], command: Command, tmp_path: Path, finished: Path
) -> None:
    if left != "nothing":
        (tmp_path / "r").mkdir()
    if left in ("a claimed folder", "litter"):  # killed before there was a run.toml
        (tmp_path / "r/.lock").touch()
        (tmp_path / "r/checkpoints").mkdir()
    if left == "litter":
        (tmp_path / "r/.tmp-run.toml-12").write_text("model = ")
        (tmp_path / "r/checkpoints/.tmp-step-000005").mkdir()
    assert command(*new, "--resume", "auto", "--out", "r") == 0
    assert losses(tmp_path / "r") == losses(finished / "r")
    assert not list((tmp_path / "r").rglob(".tmp-*"))


def test_without_out_a_start_that_was_cut_early_is_made_up_for(
    new: list[str], command: Command, tmp_path: Path
) -> None:
    cut = RunFolder(tmp_path / "runs/gpt-nano-fp32")
    cut.claim()
    cut.release()
    constant = [*new, "--schedule", "constant"]
    assert command(*constant, "--resume", "auto", "--steps", "2") == 0
    assert command(*constant, "--resume", "auto", "--steps", "3") == 0
    assert [path.name for path in cut.path.parent.iterdir()] == [cut.path.name]
    assert len(losses(cut.path)) == 3
    assert command(*constant, "--steps", "1") == 0  # without --resume: beside it
    assert command(*constant, "--resume", "auto", "--steps", "2") == 0  # the last one
    assert len(losses(tmp_path / "runs/gpt-nano-fp32-2")) == 2
    assert len(losses(cut.path)) == 3


def test_a_finished_run_says_so_and_is_not_changed(
    run: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(*AUTO) == 0  # after which run.toml knows that it was copied
    before = _contents(run)
    capsys.readouterr()
    assert command(*AUTO) == 0
    printed = capsys.readouterr().out
    assert "all 12 steps are done" in printed
    assert "done: validation loss" in printed
    assert _contents(run) == before


def test_a_run_that_was_killed_while_it_ended_is_ended(
    run: Path, finished: Path, command: Command
) -> None:
    for name in ("loss.png", "sample.txt"):
        (run / name).unlink()
    assert command(*AUTO) == 0
    for name in ("loss.png", "sample.txt"):
        assert (run / name).read_bytes() == (finished / "r" / name).read_bytes()


@pytest.mark.parametrize("damage", ["cut short", "flipped", "gone", "not json"])
def test_a_damaged_newest_checkpoint_is_passed_over_and_the_reason_told(
    damage: str, run: Path, command: Command, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = run / "checkpoints/step-000012"
    weights = newest / "model.safetensors"
    content = bytearray(weights.read_bytes())
    if damage == "cut short":
        weights.write_bytes(content[:-1])
    elif damage == "flipped":
        content[-1] ^= 1
        weights.write_bytes(content)
    elif damage == "gone":
        weights.unlink()
    else:
        (newest / "checkpoint.json").write_text("{")
    assert command(*AUTO) == 0
    told = "resumed from r/checkpoints/step-000008; passed over: r/checkpoints/step-000012"
    assert told in capsys.readouterr().out
    assert losses(run) == losses(finished / "r")
    assert newest_sound(run / "checkpoints", bool)[1:] == (newest, [])


def test_when_all_are_damaged_nothing_is_changed_and_the_exit_code_is_3(
    run: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    for weights in run.glob("checkpoints/*/model.safetensors"):
        weights.write_bytes(b"")
    before = _contents(run)
    assert command(*AUTO) == 3
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "step-000012" in error
    assert "step-000008" in error
    assert _contents(run) == before


def test_a_run_without_a_checkpoint_begins_again(
    run: Path, command: Command, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run / "checkpoints")
    assert command(*AUTO) == 0
    assert "r has no checkpoint yet: starting again from step 1" in capsys.readouterr().out
    assert losses(run) == losses(finished / "r")


@pytest.mark.parametrize("cut", [b'{"step": 13, "lo', b'{"step"', b"\x00\x00\x00", b"\n"])
def test_a_line_of_metrics_that_was_cut_short_is_made_anew(
    cut: bytes, run: Path, command: Command, finished: Path
) -> None:
    shutil.rmtree(run / "checkpoints/step-000012")
    with (run / "metrics.jsonl").open("ab") as stream:
        stream.write(cut)
    assert command(*AUTO) == 0
    assert losses(run) == losses(finished / "r")


@pytest.mark.parametrize("edit", ["another rate", "not TOML", "gone"])
def test_run_toml_is_not_needed_where_there_is_a_checkpoint(
    edit: str, run: Path, command: Command, finished: Path
) -> None:
    shutil.rmtree(run / "checkpoints/step-000012")
    file = run / "run.toml"
    if edit == "gone":
        file.unlink()
    else:
        text = file.read_text().replace("lr = 0.003", "lr = 0.1")
        file.write_text(text if edit == "another rate" else "lr = ")
    assert command(*AUTO) == 0
    assert losses(run) == losses(finished / "r")
    assert "lr = 0.003" in file.read_text()


def test_an_edited_run_toml_of_a_run_without_a_checkpoint_counts(
    run: Path, command: Command
) -> None:
    shutil.rmtree(run / "checkpoints")
    text = (run / "run.toml").read_text()
    (run / "run.toml").write_text(text.replace("lr = 0.003", "lr = 0.001"))
    assert command(*AUTO) == 0
    assert max(row["lr"] for row in metrics(run)) == 0.001
    shutil.rmtree(run / "checkpoints")
    (run / "run.toml").write_text("lr = ")
    assert command(*AUTO) == 2


def test_a_folder_that_another_process_trains_in_is_left_alone(
    run: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    other = RunFolder(run)
    other.claim()
    before = _contents(run)
    for flags in ([], ["--steps", "14"]):
        assert command(*AUTO, *flags) == 2
        told = "fp8stack: Another process trains in r. Wait for it or give another --out.\n"
        assert capsys.readouterr().err == told
    other.release()
    assert _contents(run) == before
    assert command(*AUTO, "--steps", "14") == 0


def test_a_file_system_without_locks_can_be_trained_on(
    run: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*arguments: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(io.fcntl, "flock", no_locks)
    assert command(*AUTO, "--steps", "13") == 0


@contextmanager
def _as_nobody() -> Iterator[None]:
    """Within, root's rights are given up: they overrule what is forbidden."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def test_a_folder_that_cannot_be_written_ends_with_exit_code_4(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tempfile.TemporaryDirectory() as name:  # unlike pytest's, others may look into it
        folder = Path(name)
        folder.chmod(0o755)
        shutil.copytree(finished / "r", folder / "r")
        shutil.copy(finished / "t.txt", folder)
        flags = ["--data", str(folder / "t.txt"), "--out", str(folder / "r"), "--steps", "14"]
        folders = [folder / "r", *(path for path in (folder / "r").rglob("*") if path.is_dir())]
        for path in (folder / "r").rglob("*"):
            path.chmod(0o555 if path.is_dir() else 0o444)
        (folder / "r").chmod(0o555)
        before = _contents(folder)
        with _as_nobody(), pytest.raises(SystemExit) as exit:
            cli.main(["pretrain", "--resume", "auto", *flags])
        assert exit.value.code == 4
        told = f"Cannot write to {folder / 'r'}: Permission denied. Give a folder that can be"
        error = capsys.readouterr().err
        assert told in error
        assert error.count("\n") == 1
        assert _contents(folder) == before
        for path in folders:
            path.chmod(0o755)


def test_what_torchrun_starts_again_goes_on_by_itself(
    run: Path,
    new: list[str],
    command: Command,
    finished: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(*new, "--out", "r") == 2
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert command(*new, "--out", "r") == 2
    shutil.rmtree(run / "checkpoints/step-000012")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    capsys.readouterr()
    # What was overwritten when it started first is the run that goes on now.
    assert command(*new, "--out", "r", "--overwrite") == 0
    printed = capsys.readouterr().out
    assert "torchrun started this again: going on as with --resume auto" in printed
    assert "resumed from r/checkpoints/step-000008" in printed
    assert losses(run) == losses(finished / "r")
    assert "overwrote" not in printed
    assert _saved(run) == ["step-000012", "step-000008"]


# --overwrite


def test_overwriting_removes_what_a_run_wrote_and_nothing_else(
    run: Path, new: list[str], command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = ["notes.md", "checkpoints/best/x", "report_files/mine.csv", "profile/mine.txt"]
    ours = ["report.html", "report_files/r-loss.png", "profile/profile.md", "telemetry.jsonl"]
    ours += ["tensorboard/events.out.tfevents.1.host"]
    for name in (*theirs, *ours, "checkpoints/.tmp-step-000016/x"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(name)
    short = ["--seed", "1", "--steps", "2"]
    assert command(*new, "--out", "r", "--overwrite", *short) == 0
    printed = capsys.readouterr().out
    told = next(line for line in printed.splitlines() if "overwrote the run in r: removed" in line)
    for name in ("step-000012", "step-000008", "metrics.jsonl", "run.toml", "sample.txt", *ours):
        assert name in told
    found = _contents(run)
    assert all(found.pop(name) == name.encode() for name in theirs)
    assert "seed = 1" in found["run.toml"].decode()
    assert [row["step"] for row in metrics(run)] == [1, 2]
    assert {name for name in found if "/" not in name} == {
        *(".lock", "run.toml", "plan.json", "metrics.jsonl", "loss.png", "sample.txt"),
        *("telemetry.jsonl", "tokenizer.json", "sessions.jsonl"),
    }
    assert "gradient" in found["telemetry.jsonl"].decode()
    assert {Path(name).parent.name for name in found if "/" in name} == {"step-000002"}
    assert not (run / "tensorboard").exists()


def test_overwriting_where_nothing_is_says_nothing(
    new: list[str], command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(*new, "--out", "r", "--overwrite", "--steps", "1") == 0
    assert "overwrote" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--out", "r", "--resume", "auto"], "Give one of them"),
        ([], "--overwrite needs --out"),
        (["--out", "r", "--init-from", "r"], "lies in r, which --overwrite removes"),
        (["--out", "r", "--init-from", "r/checkpoints/step-000012"], "which --overwrite removes"),
        (["--out", "r", "--lr", "-1"], "lr"),
        (["--out", "r", "--data", "none.txt"], "none.txt"),
        (["--out", "r", "--context", "4096"], "--context 4096 is more than"),
        (["--out", "t.txt"], "is a file"),
    ],
)
def test_what_cannot_be_built_overwrites_nothing(
    flags: list[str],
    told: str,
    run: Path,
    new: list[str],
    command: Command,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("t.txt").write_text("x")
    before = _contents(run)
    assert command(*new, "--overwrite", *flags) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    assert _contents(run) == before


def test_a_run_under_way_is_not_overwritten(
    run: Path, new: list[str], command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    other = RunFolder(run)
    other.claim()
    before = _contents(run)
    assert command(*new, "--out", "r", "--overwrite") == 2
    assert "Another process trains in r" in capsys.readouterr().err
    other.release()
    assert _contents(run) == before


def test_overwriting_that_is_cut_short_leaves_no_old_checkpoint_to_a_new_run(
    run: Path, new: list[str], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[Path] = []

    def killed(path: Path, **options: object) -> None:
        removed.append(path)
        if len(removed) == 3:
            raise KeyboardInterrupt
        path.rename(path.with_suffix(".gone"))

    flags = [*new, "--out", "r", "--seed", "1", "--steps", "2"]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        assert command(*flags, "--overwrite") == 130
    assert not _saved(run)
    assert RunFolder(run).holds_run
    assert command(*flags) == 2
    assert command(*flags, "--overwrite") == 0


# How a run gives way


@pytest.fixture
def _terminal() -> Iterator[None]:
    """Whoever runs the tests may have done so by nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("_terminal")
@pytest.mark.parametrize("name", SIGNALS)
def test_every_signal_saves_and_ends_with_exit_code_75(
    name: str,
    new: list[str],
    command: Command,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def advance(self: Any, step: int, tokens: Any, really: Any = loop._Loop.advance) -> None:
        if step == 7:
            os.kill(os.getpid(), getattr(signal, name))
        really(self, step, tokens)

    with monkeypatch.context() as patch:
        patch.setattr(loop._Loop, "advance", advance)
        assert command(*new, "--out", "r") == 75
    assert _saved(tmp_path / "r") == ["step-000007", "step-000004"]
    assert command(*AUTO) == 0
    assert losses(tmp_path / "r") == losses(finished / "r")


@pytest.mark.parametrize("where", ["reading data", "claimed", "timing", "compiling"])
def test_a_signal_before_the_first_step_is_done_ends_at_once(
    where: str,
    new: list[str],
    command: Command,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    after: list[str] = []

    def struck(*arguments: object, **options: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        after.append("went on")

    places: dict[str, tuple[Any, str]] = {
        "reading data": (datasets.data, "load_corpora"),
        "claimed": (RunFolder, "write_plan"),
        "timing": (loop, "peak_rate"),
        "compiling": (loop._Loop, "advance"),
    }
    with monkeypatch.context() as patch:
        if where == "compiling":
            patch.setattr(build, "require_compiler", lambda *_: None)
            patch.setattr("fp8stack.model.gpt.GPT.compile_blocks", lambda *_, **__: None)
            patch.setattr(build, "_be_deterministic", lambda: None)
        patch.setattr(*places[where], struck)
        compiled = ["--compile"] if where == "compiling" else []
        assert command(*new, "--out", "r", *compiled) == 75
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "Stopped before a step was done; nothing is lost." in error
    assert not after
    assert command(*new, "--no-compile", "--resume", "auto", "--out", "r") == 0
    assert losses(tmp_path / "r") == losses(finished / "r")


@pytest.mark.parametrize("where", ["loss_plot", "sample"])
def test_a_signal_at_the_end_is_heeded_at_once_and_the_end_is_made_up_for(
    where: str,
    new: list[str],
    command: Command,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def struck(*arguments: object, **options: object) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        raise AssertionError("went on")

    with monkeypatch.context() as patch:
        patch.setattr(finalize, where, struck)
        assert command(*new, "--out", "r") == 75
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "Stopped at the end, all is saved. Go on with: fp8stack pretrain --resume r" in error
    assert command(*AUTO) == 0
    for name in ("sample.txt", "loss.png"):
        assert (tmp_path / "r" / name).read_bytes() == (finished / "r" / name).read_bytes()


def test_a_second_ctrl_c_quits_at_once_and_a_second_request_does_not(
    new: list[str], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def advance(self: Any, step: int, tokens: Any, really: Any = loop._Loop.advance) -> None:
        if step == 7:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("went on")
        really(self, step, tokens)

    monkeypatch.setattr(loop._Loop, "advance", advance)
    assert command(*new, "--out", "r") == 130
    assert _saved(tmp_path / "r") == ["step-000004"]


@pytest.mark.usefixtures("_terminal")
def test_requests_are_heard_where_the_terminal_is_gone_and_not_by_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gone(*arguments: object) -> int:
        raise OSError(5, "Input/output error")

    with stop_requests() as requested:
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: -1)
            signal.raise_signal(signal.SIGTERM)
        assert not requested()
        with monkeypatch.context() as hangup:
            hangup.setattr(os, "write", gone)
            signal.raise_signal(signal.SIGHUP)
        assert requested()


def test_a_run_started_by_nohup_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_requests() as requested:
            signal.raise_signal(signal.SIGHUP)
            assert not requested()
    finally:
        signal.signal(signal.SIGHUP, before)


def _stopped_before(reached: list[str]) -> Iterator[Callable[[], bool]]:
    with stop_requests() as requested:
        signal.raise_signal(signal.SIGTERM)
        with requested.at_once("why"):
            reached.append("went on")
            yield requested


def test_a_request_that_came_before_counts_where_a_stop_is_at_once() -> None:
    before = signal.getsignal(signal.SIGTERM)
    reached: list[str] = []
    with pytest.raises(Preempted, match="why"):
        next(_stopped_before(reached))
    assert not reached
    assert signal.getsignal(signal.SIGTERM) == before
