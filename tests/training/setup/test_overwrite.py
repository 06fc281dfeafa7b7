"""`--overwrite` removes what a run wrote, nothing else, and only for what can be built."""

import os
import shutil
from pathlib import Path

import pytest

from tests.conftest import contents, metrics
from tests.training.conftest import saved


def test_overwriting_removes_what_a_run_wrote_and_nothing_else(run, new, command, capsys):
    users_files = ["notes.md", "checkpoints/best/x", "report_files/mine.csv", "profile/mine.txt"]
    run_files = ["report.html", "report_files/r-loss.png", "profile/profile.md", "telemetry.jsonl"]
    run_files += ["tensorboard/events.out.tfevents.1.host"]
    for name in (*users_files, *run_files, "checkpoints/.tmp-step-000016/x"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(name)
    short = ["--seed", "1", "--steps", "2"]
    assert command(*new, "--out", "r", "--overwrite", *short) == 0
    printed = capsys.readouterr().out
    message = next(
        line for line in printed.splitlines() if "overwrote the run in r: removed" in line
    )
    removed = ("step-000012", "step-000008", "metrics.jsonl", "run.toml", "sample.txt")
    assert [name for name in (*removed, *run_files) if name not in message] == []
    remaining = contents(run)
    assert all(remaining.pop(name) == name.encode() for name in users_files)
    assert "seed = 1" in remaining["run.toml"].decode()
    assert [row["step"] for row in metrics(run)] == [1, 2]
    assert {name for name in remaining if "/" not in name} == {
        *(".lock", "run.toml", "plan.json", "metrics.jsonl", "loss.png", "sample.txt"),
        *("telemetry.jsonl", "tokenizer.json", "sessions.jsonl"),
    }
    assert "gradient" in remaining["telemetry.jsonl"].decode()
    assert {Path(name).parent.name for name in remaining if "/" in name} == {"step-000002"}
    assert not (run / "tensorboard").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--out", "r", "--resume", "auto"], "Give one of them"),
        ([], "--overwrite needs --out"),
        (["--out", "r", "--init-from", "r/checkpoints/step-000012"], "which --overwrite removes"),
        (["--out", "r", "--model", "r/presets/a.toml"], "a.toml lies in r, which --overwrite"),
        (["--out", "r", "--lr", "-1"], "lr"),
        (["--out", "r", "--context", "4096"], "--context 4096 is more than"),
        (["--out", "t.txt"], "is a file"),
    ],
)
def test_what_cannot_be_built_overwrites_nothing(flags, message, run, new, refused):
    Path("t.txt").write_text("x")
    (run / "presets").mkdir()
    (run / "presets/a.toml").write_text('like = "gpt-nano"\n')
    before = contents(run)
    refused(*new, "--overwrite", *flags, message=message)
    assert contents(run) == before


OVERWRITE, RESUME = ["--overwrite"], ["--resume", "auto", "--steps", "14"]


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        *(("presets", OVERWRITE), ("metrics.jsonl", OVERWRITE), ("checkpoints", OVERWRITE)),
        *(("tensorboard", RESUME), ("checkpoints", RESUME), ("metrics.jsonl", RESUME)),
    ],
)
def test_nothing_is_written_or_removed_through_a_link_in_a_run(
    name, flags, run, new, refused, tmp_path
):
    mine = tmp_path / "mine"
    if name == "checkpoints":  # a run needs one to be resumed
        shutil.copytree(run / "checkpoints", mine)
    for file in ("a.toml", "loss.png", ".tmp-x", "metrics.jsonl"):
        mine.mkdir(exist_ok=True)
        (mine / file).write_text(file)
    before = contents(mine)
    if (run / name).exists():
        (run / name).rename(run / f"{name}-before")
    (run / name).symlink_to(mine / name if "." in name else mine)
    message = f"r/{name} is a symbolic link, and a run writes and"
    refused(*new, "--out", "r", *flags, message=message)
    assert contents(mine) == before


def test_a_run_that_is_a_link_is_gone_on_with_and_not_overwritten(
    run, new, command, refused, tmp_path
):
    (tmp_path / "link").symlink_to("r")
    before = contents(run)
    message = refused(*new, "--out", "link", "--overwrite", "--steps", "1")
    assert (
        f"link is a symbolic link, and --overwrite removes nothing through one. Give --out {run}"
        in message
    )
    assert contents(run) == before
    assert command(*new, "--out", "link", "--resume", "auto", "--steps", "14") == 0
    assert saved(run) == ["step-000014", "step-000012"]


def _modes(folder: Path) -> dict[str, str]:
    modes = {str(p.relative_to(folder)): oct(p.stat().st_mode & 0o777) for p in folder.rglob("*")}
    return modes | {".": oct(folder.stat().st_mode & 0o777)}


@pytest.mark.skipif(os.name != "posix", reason="no modes")
def test_a_run_that_is_gone_on_with_stays_private(run, new, command):
    for path in (run, *run.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    assert command(*new, "--out", "r", "--resume", "auto", "--steps", "14") == 0
    assert saved(run) == ["step-000014", "step-000012"]
    assert set(_modes(run).values()) == {"0o700", "0o600"}


def test_links_among_checkpoints_are_removed_and_not_what_they_lead_to(run, new, command, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "x").write_text("x")
    (run / "checkpoints/step-000001").symlink_to(mine)
    (run / "checkpoints/.tmp-step-000003").symlink_to(mine)
    (run / "presets").mkdir(exist_ok=True)
    (run / "presets/a.toml").symlink_to(mine / "x")
    assert command(*new, "--out", "r", "--overwrite", "--steps", "2") == 0
    assert contents(mine) == {"x": b"x"}
    assert not [path for path in run.rglob("*") if path.is_symlink()]
