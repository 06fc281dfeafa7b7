"""Branches: new runs that begin with a checkpoint of another run. What they take over equals the
run that trained all steps itself, and the other run is left as it was."""

from pathlib import Path
from typing import Any

import pytest

from fp8stack.common.errors import UserError
from fp8stack.training import run_folder
from fp8stack.training.checkpoint.saver import Saver
from fp8stack.training.run_folder import RunFolder
from tests.conftest import contents, metrics
from tests.support.small_loop import SmallLoop, changed
from tests.training.conftest import saved

STEPS, AT = 8, 4
EVERY: dict[str, Any] = {"steps": STEPS, "save_every": AT, "eval_every": AT, "telemetry_every": 0}


def shared(until: int) -> tuple[dict, dict]:
    """Phases whose first one is in fp32."""
    return {"name": "shared", "recipe": "fp32", "until": until}, {"name": "compared"}


def trained(folder: Path, recipe: str, **flags: Any) -> SmallLoop:
    loop = SmallLoop(folder, recipe, **EVERY | flags)
    loop.go()
    return loop


def checkpoint(run: Path, step: int = AT) -> str:
    return str(run / f"checkpoints/step-{step:06d}")


def numbers(run: Path) -> list[tuple]:
    keys = ("step", "loss", "grad_norm", "lr", "val_loss")
    return [tuple(row.get(key) for key in keys) for row in metrics(run) if "loss" in row]


def branch_events(run: Path) -> list[tuple[int, str]]:
    rows = metrics(run)
    return [(row["step"], row["why"]) for row in rows if row.get("event") == "branch"]


@pytest.mark.parametrize("recipe", ["fp32", "nvfp4"])
def test_in_the_same_recipe_it_is_the_run_itself(recipe, tmp_path):
    uninterrupted = trained(tmp_path / "a", recipe)
    before = contents(tmp_path / "a")
    branched = trained(tmp_path / "b", recipe, resume=checkpoint(tmp_path / "a"))
    assert changed(uninterrupted.everything(), branched.everything()) == []
    assert numbers(tmp_path / "b") == numbers(tmp_path / "a")
    assert contents(tmp_path / "a") == before
    assert branch_events(tmp_path / "b") == [(AT, f"begun with {checkpoint(tmp_path / 'a')}")]


@pytest.mark.capability("C1")
@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
@pytest.mark.full
def test_with_phases_that_agree_on_the_steps_done_it_is_the_run_that_trained_them(recipe, tmp_path):
    flags = {"phases": shared(until=AT + 1)}
    uninterrupted = trained(tmp_path / "uninterrupted", recipe, **flags)
    trained(tmp_path / "fp32", "fp32")
    branched = trained(tmp_path / "branched", recipe, resume=checkpoint(tmp_path / "fp32"), **flags)
    assert changed(uninterrupted.everything(), branched.everything()) == []
    assert numbers(tmp_path / "branched") == numbers(tmp_path / "uninterrupted")
    assert [
        row["phase"] for row in metrics(tmp_path / "branched") if row.get("event") == "phase"
    ] == ["compared"]


CHANGES: list[tuple[str, str, dict[str, Any]]] = [
    ("fp32", "delayed", {}),
    ("delayed", "delayed", {"recipe_overrides": {"history_length": 16}}),
    ("bf16", "fp16", {}),
    ("bf16", "nvfp4", {"phases": shared(until=AT)}),
]


@pytest.mark.capability("C1")
@pytest.mark.parametrize(("first", "second", "flags"), CHANGES)
@pytest.mark.full
def test_it_goes_on_in_another_recipe(first, second, flags, tmp_path):
    before = trained(tmp_path / "a", first, steps=AT)
    branched = SmallLoop(
        tmp_path / "b", second, resume=str(tmp_path / "a"), **EVERY | {"save_every": 2} | flags
    )
    assert branched.run.step == AT
    assert changed(before.state(), branched.state()) == []
    branched.advance(2)
    again = branched.resumed()
    assert again.run.step == AT + 2
    assert changed(branched.everything(), again.everything()) == []
    assert again.go() == 0
    assert again.run.main_plan.recipe.name == second
    rows = [row for row in metrics(tmp_path / "b") if "loss" in row]
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    assert all(row["loss"] is not None for row in rows)
    precisions = [row["precision"] for row in rows]
    assert precisions[:AT] == [row["precision"] for row in metrics(tmp_path / "a") if "loss" in row]
    assert set(precisions[AT:]) == {again.run.plan.precision}


def test_overrides_belong_to_the_recipe_that_they_were_given_for(tmp_path):
    trained(tmp_path / "a", "delayed", steps=AT, recipe_overrides={"history_length": 16})
    flags = EVERY | {"resume": str(tmp_path / "a")}
    assert SmallLoop(tmp_path / "b", "current", **flags).run.config.recipe_overrides == {}
    same_recipe = SmallLoop(tmp_path / "c", "delayed", **flags)
    assert same_recipe.run.config.recipe_overrides == {"history_length": 16}
    for step in (AT, AT + 1):  # and the same command goes on
        more = SmallLoop(tmp_path / "d", "delayed", recipe_overrides={"margin": 1}, **flags)
        assert more.run.config.recipe_overrides == {"history_length": 16, "margin": 1}
        assert more.run.step == step
        more.advance(1)
        more.loop.stop()
        more.run.folder.release()


@pytest.mark.parametrize(
    ("when", "place"),
    [
        ("take_over_metrics", RunFolder),
        ("write_plan", RunFolder),
        ("save_tokenizer", run_folder),
        ("save", Saver),
    ],
)
@pytest.mark.full
def test_killed_as_it_begins_it_begins_again_by_the_same_command(
    when, place, tmp_path, monkeypatch
):
    uninterrupted = trained(tmp_path / "a", "fp32")
    at = checkpoint(tmp_path / "a")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(place, when, killed)
        with pytest.raises(KeyboardInterrupt):
            trained(tmp_path / "b", "fp32", resume=at)
    if when != "take_over_metrics":
        with pytest.raises(UserError, match=rf"b was stopped before it took over {at}\. Begin it"):
            SmallLoop(tmp_path / "b", "fp32", resume="auto", **EVERY)
    branched = trained(tmp_path / "b", "fp32", resume=at)
    assert changed(uninterrupted.everything(), branched.everything()) == []
    assert numbers(tmp_path / "b") == numbers(tmp_path / "a")
    assert len(branch_events(tmp_path / "b")) == 1


# tests/faults/numeric/test_other_run.py has more keys.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"batch": 8}, "Cannot begin {new} with {at}: batch is 8 here and 4 in the checkpoint."),
    ({"model": "gpt2-124m"}, "Cannot begin {new} with {at}: model is 'gpt2-124m' here"),
    ({"steps": AT}, f"--steps {AT} leaves nothing to train: {{at}} has done {AT}. Give more."),
]


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in fp32 of the first steps."""
    folder = tmp_path_factory.mktemp("short")
    trained(folder / "a", "fp32", steps=AT)
    return folder / "a"


@pytest.mark.parametrize(("flags", "text"), REFUSED)
def test_what_must_not_change_is_refused(flags, text, short, tmp_path):
    at, new = checkpoint(short), tmp_path / "new"
    with pytest.raises(UserError) as refused:
        SmallLoop(new, "fp32", resume=at, **EVERY | flags)
    assert str(refused.value).startswith(text.format(new=new, at=at))
    assert not new.exists()


@pytest.mark.parametrize("named", [True, False])
def test_the_same_command_goes_on_with_it(named, tmp_path):
    uninterrupted = trained(tmp_path / "a", "fp32")
    source = checkpoint(tmp_path / "a") if named else str(tmp_path / "a")
    flags = EVERY | {"resume": source, "steps": STEPS + 4}
    branched = SmallLoop(tmp_path / "b", "current", **flags)
    branched.advance(2)
    branched.loop.stop()
    branched.run.folder.release()
    with pytest.raises(UserError, match=r"Cannot resume .*: recipe is 'bf16' here and 'current'"):
        SmallLoop(tmp_path / "b", "bf16", **flags)
    for path in (tmp_path / "a/checkpoints").iterdir():  # its run has newer ones
        path.rename(path.with_name(f"step-{int(path.name[5:]) + 100:06d}"))
    again = SmallLoop(tmp_path / "b", "current", **flags)
    assert again.run.step == branched.run.step
    again.go()
    assert len(branch_events(tmp_path / "b")) == 1
    done = SmallLoop(tmp_path / "b", "current", **flags)
    assert (done.run.step, uninterrupted.run.step) == (STEPS + 4, STEPS)


def test_a_run_without_a_checkpoint_begins_nothing(tmp_path):
    SmallLoop(tmp_path / "a", "fp32", **EVERY)
    with pytest.raises(UserError, match=r"a has no checkpoint yet to begin \S+new with\."):
        SmallLoop(tmp_path / "new", "fp32", resume=str(tmp_path / "a"), **EVERY)


def test_the_error_of_a_changed_recipe_says_how_to_branch(run, new, command, tmp_path, capsys):
    assert command(*new, "--recipe", "current", "--resume", "auto", "--out", "r") == 2
    error = capsys.readouterr().err
    assert "or begin a new run with its checkpoint: --resume r --out NEW" in error
    words = ["--resume", "r", "--out", "NEW", "--recipe", "current", "--steps", "14"]
    assert command("pretrain", *words) == 0
    printed = capsys.readouterr().out
    assert "a new run that begins with r/checkpoints/step-000012" in printed
    assert saved(tmp_path / "NEW")[0] == "step-000014"
    assert saved(tmp_path / "r")[0] == "step-000012"
