"""`--overwrite` removes what a run wrote, nothing else, and only for what can be built."""

from pathlib import Path

import pytest

from fp8stack.training.run_folder import RunFolder
from tests.conftest import contents, metrics
from tests.training.conftest import saved

pytestmark = pytest.mark.usefixtures("one_thread")


def test_overwriting_removes_what_a_run_wrote_and_nothing_else(run, new, command, capsys):
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
    found = contents(run)
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


def test_overwriting_where_nothing_is_says_nothing(new, command, capsys):
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
def test_what_cannot_be_built_overwrites_nothing(flags, told, run, new, refused):
    Path("t.txt").write_text("x")
    before = contents(run)
    refused(*new, "--overwrite", *flags, said=told)
    assert contents(run) == before


def test_overwriting_that_is_cut_short_leaves_no_old_checkpoint_to_a_new_run(
    run, new, command, monkeypatch
):
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
    assert not saved(run)
    assert RunFolder(run).holds_run
    assert command(*flags) == 2
    assert command(*flags, "--overwrite") == 0
