"""`fp8stack compare`: its statistics, what it says of runs, and whole comparisons.

Where it is not the point that each run is a process of its own, runs are made in this one.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO, TextIOWrapper
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch

from fp8stack.analysis.compare import comparison, runs
from fp8stack.analysis.compare.comparison_plot import comparison_plot
from fp8stack.analysis.compare.gaps import (
    Judging,
    RecipeFigures,
    gap_note,
    judged,
    paired_gap,
    summarize,
)
from fp8stack.analysis.compare.intervals import Interval, pairs_needed, student_factor
from fp8stack.analysis.compare.run_results import RunFigures, read_run
from fp8stack.analysis.compare.runs import Ended
from fp8stack.analysis.compare.settings import Comparison, Options, comparison_of
from fp8stack.planning.run_config import RunConfig, parse_config
from fp8stack.training.run_folder import RunFolder
from tests.conftest import TINY, contents, exit_code, losses, metrics
from tests.support.run_folders import write_lines

SETS = [word for word in TINY[10:] if word != "--set"]
SMALL = ["--steps", "12", "--batch", "4", "--context", "32", "--set", "save_every=4"]
SMALL += [word for item in SETS for word in ("--set", item)]

# Verdicts


def run(recipe: str, seed: int, loss: float | None, **more: Any) -> RunFigures:
    plan = {"backend": "emulate", "fp8_layers": 16, "layers": 17, "reasons": [], "not_fp8": {}}
    plan["compute_dtype"] = "fp32"
    usual: dict[str, Any]
    usual = {"status": "done" if loss else "diverged", "exit": 0, "plan": plan, "val_loss": loss}
    usual |= {"precisions": (recipe,), "curve": ((1, 5.0), (2, loss or 9.0))}
    return RunFigures(recipe=recipe, seed=seed, **usual | more)


BASE = [run("fp32", 0, 2.0), run("fp32", 1, 3.0), run("fp32", 2, 2.5)]


def of(*runs: RunFigures, base: list[RunFigures] = BASE) -> RecipeFigures:
    return summarize([*base, *runs], ["fp32", "mxfp8"], "fp32")[1]


def mxfp8(*factors: float) -> list[RunFigures]:
    pairs = zip(BASE, factors, strict=False)
    return [run("mxfp8", base.seed, (base.val_loss or 0) * factor) for base, factor in pairs]


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ((1.010, 1.011, 1.009), "worse by 1.00 ± 0.25 %"),
        ((0.990, 0.989, 0.991), "better by 1.00 ± 0.25 %"),
        ((1.0010, 1.0011, 1.0009), "worse by 0.10 ± 0.02 %, within 0.25 % of fp32"),
        ((1.0002, 0.9999, 1.0), "within 0.25 % of fp32"),
        ((1.010, 0.990, 1.003), "not known yet: ± 2.52 %, about 90 more pairs for ± 0.25 %"),
        ((1.0, 1.0, 1.0), "within 0.25 % of fp32"),
        ((1.2,), "not known yet: 1 pair"),
    ],
)
def test_verdicts_are_of_gaps_that_are_paired_by_seed(factors, expected):
    """Seeds differ by half, and a recipe 1 % above in each seed is still found to be worse."""
    base = BASE[: len(factors)]
    assert of(*mxfp8(*factors), base=base).verdict == expected
    assert summarize(base, ["fp32"], "fp32")[0].verdict == "baseline"


def test_a_note_beside_gaps_names_shared_steps_and_compute_dtypes():
    names = ["fp32", "bf16", "mxfp8"]
    base, plain, mx = (run(name, 0, 2.0) for name in names)
    shared = "the first 25% of the steps are in fp32"
    rows = summarize([base, plain, mx], names, "fp32")
    assert gap_note(rows, "fp32", shared) == f"{shared}; the baseline, fp32, computes in fp32"
    low = [x.model_copy(update={"plan": x.plan | {"compute_dtype": "bf16"}}) for x in (plain, mx)]
    rows = summarize([base, *low], names, "fp32")
    note = "the baseline, fp32, computes in fp32, but mxfp8 in bf16, whose rounding is part of"
    assert gap_note(rows, "fp32", "") == f"{note} the gap"
    assert gap_note(rows, "bf16", "") == "the baseline, bf16, computes in bf16"
    assert gap_note(summarize([], names, "fp32"), "fp32", shared) == shared  # before the first run


def test_what_went_wrong_comes_before_any_figure():
    good = mxfp8(1.0, 1.0)
    row = of(*good, run("mxfp8", 2, None, status="diverged", exit=5, diverged_at=42))
    assert row.verdict == "diverged at step 42 (seed 2)"
    assert (row.done, row.val_loss) == (2, 2.5)  # of the two that were done
    row = of(*good, run("mxfp8", 2, None, status="failed", exit=1, error="out of memory"))
    assert row.verdict == "failed (seed 2), within 0.25 % of fp32"
    assert row.errors == ("seed 2: out of memory",)
    cut = run("mxfp8", 2, None, status="unfinished", exit=None)
    assert of(*good, cut).verdict == "within 0.25 % of fp32, 1 of 3 seeds to do"
    assert of(cut).verdict == "1 of 1 seeds to do"
    gap = paired_gap([run("x", 1, 3.3), run("x", 2, None), run("x", 5, 9.0)], BASE)
    assert (gap.samples, round(gap.mean, 6)) == (1, 10.0)  # of the seed that both have done
    lost = [run("fp32", seed, None, diverged_at=7) for seed in range(2)]
    assert of(*good, base=lost).verdict == "no seed in common with the baseline"
    verdict = summarize(lost, ["fp32"], "fp32")[0].verdict
    assert verdict == "diverged at step 7 (seed 0), 7 (seed 1), baseline"


def test_speed_memory_and_skips_are_gathered_over_seeds():
    runs = [
        run("mxfp8", seed, 2.0, tokens_per_s=speed, peak_memory_gib=gib, skips=skips,
            events={"skip": skips}, fp8_gemms=48)
        for seed, speed, gib, skips in [(0, 50.0, 1.0, 2), (1, 60.0, 3.0, 1), (2, 90.0, 2.0, 0)]
    ]  # fmt: skip
    row = of(*runs, base=[figures.model_copy(update={"tokens_per_s": 120.0}) for figures in BASE])
    assert (row.tokens_per_s, row.relative_speed, row.peak_memory_gib) == (60.0, 0.5, 3.0)
    assert (row.skips, row.events, row.fp8_gemms) == (3, {"skip": 3}, 48)


def test_the_plot_has_the_gaps_or_says_that_none_is_known(monkeypatch):
    from matplotlib.figure import Figure

    drawn: list[Any] = []
    save = Figure.savefig

    def saved(figure: Any, *arguments: Any, **options: Any) -> None:
        drawn.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", saved)
    names = ["fp32", "mxfp8", "$_{$"]
    figures = [run(name, seed, 2 + 0.01 * seed) for name in names for seed in range(3)]
    pngs = [comparison_plot(summarize(figures, names, "fp32"), "fp32", "title") for _ in range(2)]
    assert pngs[0].startswith(b"\x89PNG")
    assert pngs[0] == pngs[1]
    assert [label.get_text() for label in drawn[0].axes[0].get_yticklabels()] == names[1:]
    figures = [run(name, 0, None, diverged_at=2) for name in names]
    comparison_plot(summarize(figures, names, "fp32"), "fp32", "title")
    (message,) = drawn[-1].axes[0].texts
    assert "no gap to fp32 is known" in message.get_text()
    assert "mxfp8: diverged at step 2 (seed 0)" in message.get_text()


def test_a_verdict_names_the_time_that_is_expected():
    gap = Interval(mean=0.1, half_width=0.6, samples=3, deviation=0.4)
    judging = Judging(margin=0.5, adding=True)
    more = pairs_needed(0.4, 0.5) - 3
    text = judged(gap, "fp32", judging, pair_s=1200)
    assert (text, more) == ("not known yet: ± 0.60 %, about 4 more pairs (80 min) for ± 0.5 %", 4)


# Reading a run folder


def folder(path: Path, rows: list[dict]) -> RunFolder:
    path.mkdir(parents=True, exist_ok=True)
    write_lines(path / "metrics.jsonl", rows)
    (path / "telemetry.jsonl").touch()
    return RunFolder(path)


def step(number: int, loss: float | None = 3.0, **more: Any) -> dict:
    figures = {"tokens_per_s": 1000.0 * number, "memory_gib": 0.1 * number, "precision": "mxfp8"}
    return {"step": number, "loss": loss, "fp8_gemms": 48} | figures | more


def read(rows: RunFolder, steps: int, exit: int | None = 0, **more: Any) -> RunFigures:
    usual: dict[str, Any] = {"recipe": "mxfp8", "seed": 0, "vocabulary": 256}
    return read_run(rows, steps=steps, exit=exit, **usual | more)


def test_figures_are_read_from_a_run_folder(tmp_path):
    rows = [step(n) for n in range(1, 9)]
    rows[3] |= {"val_loss": 3.5}
    rows[7] |= {"val_loss": 2.5, "precision": "bf16"}
    rows.insert(5, {"step": 6, "event": "skip", "why": "nan", "loss": None, "grad_norm": None})
    rows.insert(3, {"step": 3, "event": "something new", "what": {"is": "this"}})
    rows[0] |= {"skipped": True, "loss_scale": 2.0}
    figures = read(folder(tmp_path, rows), 8)
    assert (figures.status, figures.val_loss, figures.curve) == ("done", 2.5, ((4, 3.5), (8, 2.5)))
    assert figures.tokens_per_s == 7000.0  # of steps 6, 7 and 8
    assert figures.peak_memory_gib == pytest.approx(0.8)
    assert (figures.skips, figures.events) == (2, {"skip": 1, "something new": 1})
    assert (figures.precisions, figures.fp8_gemms) == (("mxfp8", "bf16"), 48)
    # The last row counts of steps that were trained twice.
    rows = [step(n, val_loss=n + 0.5) for n in range(1, 5)]
    rows += [{"step": 5, "event": "rollback", "why": "", "to_step": 2}, step(3, val_loss=1.5)]
    figures = read(folder(tmp_path, rows), 3)
    assert figures.curve == ((1, 1.5), (2, 2.5), (3, 1.5))
    assert (figures.status, figures.val_loss) == ("done", 1.5)


def test_how_a_run_ended(tmp_path):
    rows = [step(1), step(2), {"step": 3, "event": "stop", "why": "nan"}]
    stopped = folder(tmp_path / "a", rows)
    figures = read(stopped, 9, exit=5, error="Step 3: nan")
    assert (figures.status, figures.diverged_at, figures.error) == ("diverged", 3, "Step 3: nan")
    assert read(stopped, 9, exit=None).status == "unfinished"
    assert read(stopped, 9, exit=-9).status == "failed"
    assert read(RunFolder(tmp_path / "none"), 9, exit=None).status == "unfinished"
    # A uniform guess among 256 has a loss of 5.55.
    grows = [step(n, loss) for n, loss in enumerate([5.5, 7.0, 5.4, 6.5, 6.2, 300.0], start=1)]
    grows[-1] |= {"val_loss": 300.0}
    figures = read(folder(tmp_path / "b", grows), 6)
    assert (figures.status, figures.diverged_at, figures.val_loss) == ("diverged", 4, None)
    grows[-1] |= {"val_loss": 5.6}
    assert read(folder(tmp_path / "c", grows), 6).status == "done"


# Bad input: more of it in tests/faults/inputs/input_flags.py

BAD = {
    "one": (["--recipes", "fp32"], "fp32 is one recipe, and a gap is the difference of two"),
    "two files of a name": (["--recipes", "a/d.toml,b/d.toml"], "one of the two another file na"),
    "margin": (["--margin", "-1"], "--margin '-1' is no share in percent. Example: --margin 0.25%"),
    "run": (["--out", "run"], "run/run.toml is in the way"),
    "in the way": (["--out", "other"], "other/runs is in the way"),
    "damaged": (["--out", "damaged"], "compare.json is no comparison's, or is damaged"),
    "recipe": (["--set", "recipe=bf16"], "Give --recipes instead"),
    "context": (["--context", "4096"], "--context 4096 is more than the 128"),
    "data": (["--data", "none.txt"], "none.txt"),
    "strict": (
        ["--set", "strict=true", "--recipes", "fp32,delayed"],
        "--strict: 'delayed' does not run as asked",
    ),
    "all shared": (["--shared", "100%"], "no step is left to compare. Example: --shared 25%"),
    "no share": (["--shared", "some"], "--shared 'some' is no share in percent"),
    "phases": (["--shared", "10%", "--set", "phases=default"], "--shared makes phases of its own"),
    "none shared": (["--shared", "1%"], "--shared 1%: of 12 steps that is none. Give more --steps"),
    "no step": (["--shared", "97%"], "recipe 'bf16' runs in no step: phases shared 1 to 12"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_before_anything_is_trained(case, refused, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.toml").write_text("")
    (tmp_path / "other" / "runs").mkdir(parents=True)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "compare.json").write_text('{"asked": {}}')
    flags, expected = BAD[case]
    assert expected in refused("compare", "--recipes", "fp32,bf16", "--out", "c", *SMALL, *flags)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("name", ["compare", "bench step"])
def test_without_scipy_a_line_says_what_to_install(name, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    refused(*name.split(), message=f"fp8stack {name} needs scipy: pip install scipy")


# Whole comparisons


class InProcess:
    """Stands in for `subprocess.Popen`: the command runs here, at once."""

    def __init__(self, words: list[str], stdout: BinaryIO, **options: Any) -> None:
        log = TextIOWrapper(stdout, write_through=True)
        with redirect_stdout(log), redirect_stderr(log):
            self.returncode = exit_code(*words[3:])
        log.detach()

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self, timeout: float) -> int:
        return self.returncode


def stand_in(popen: type) -> SimpleNamespace:
    """The module `subprocess` with other processes."""
    return SimpleNamespace(**vars(subprocess) | {"Popen": popen})


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "subprocess", stand_in(InProcess))


AGAIN = ["--recipes", "fp32,delayed", "--seeds", "2", "--set", "telemetry_every=4", *SMALL]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str]:
    """A finished comparison of two recipes with two seeds, and what it printed."""
    out, printed = tmp_path_factory.mktemp("compare") / "c", StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setattr(runs, "subprocess", stand_in(InProcess))
        patch.setattr(comparison, "comparison_plot", comparison_plot)
        assert exit_code("compare", "--out", str(out), *AGAIN) == 0
    return out, printed.getvalue()


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished[0], tmp_path / "c"))


def report(path: Path) -> dict[str, Any]:
    return dict(json.loads((path / "compare.json").read_text()))


def test_a_comparison_leaves_runs_figures_a_table_and_a_plot(finished):
    path, printed = finished
    saved = report(path)
    order = [f"{row['recipe']}-seed{row['seed']}" for row in saved["runs"]]
    assert order == ["fp32-seed0", "delayed-seed0", "fp32-seed1", "delayed-seed1"]
    assert sorted(p.name for p in (path / "runs").iterdir()) == sorted(order)
    for row, name in zip(saved["runs"], order, strict=True):
        assert row["val_loss"] == metrics(path / "runs" / name)[-1]["val_loss"]
        assert (row["status"], row["skips"], row["events"]) == ("done", 0, {})
        assert row["seconds"] > 0
    recipe = saved["recipes"][1]
    fp32, delayed = np.array([row["val_loss"] for row in saved["runs"]]).reshape(2, 2).T
    gaps = 100 * (delayed - fp32) / fp32
    half_width = 12.7062047 * np.std(gaps, ddof=1) / np.sqrt(2)
    expected = {"mean": gaps.mean(), "half_width": half_width, "samples": 2}
    assert recipe["gap_percent"] == pytest.approx(expected | {"deviation": np.std(gaps, ddof=1)})
    assert recipe["val_loss"] == pytest.approx(delayed.mean())
    assert recipe["standard_error"] == pytest.approx(np.std(delayed, ddof=1) / np.sqrt(2))
    assert (recipe["recipe"], recipe["fp8_gemms"]) == ("delayed", 12)
    assert (recipe["plan"]["fp8_layers"], recipe["plan"]["layers"]) == (4, 5)
    assert recipe["tokens_per_s"] > 0
    assert recipe["peak_memory_gib"] > 0
    assert saved["machine"]["torch"] == torch.__version__
    assert saved["command"].startswith("fp8stack compare --recipes fp32,delayed --out /")
    assert (path / "compare.png").read_bytes().startswith(b"\x89PNG")
    page = (path / "compare.md").read_text()
    assert page.startswith(f"`{saved['command']}`")
    note = "the first 25% of the steps are in fp32 in all runs of a seed; "
    note += "the baseline, fp32, computes in fp32"  # as narrow layers do on every CPU
    assert saved["gap_note"] == note
    for piece in (
        "| delayed | delayed-emulated (emulate) | 4/5 | 12 |", "| baseline |", note,
        f"torch {torch.__version__}", "on at most 16 held-out windows",
    ):  # fmt: skip
        assert piece in page
    assert len({line.count("|") for line in page.splitlines() if line.startswith("|")}) == 1
    assert printed.startswith("[1/4] fp32, seed 0: validation loss ")
    for piece in (
        f"\ngap: {note}\n", "\n[4/4] delayed, seed 1: validation loss ",
        f"{gaps.mean():+.2f} ± {half_width:.2f} %  within 0.25 % of fp32",
        "\ndelayed: delayed needs an FP8 GPU",
    ):  # fmt: skip
        assert piece in printed


class StepByStep(InProcess):
    """A run whose metrics come one row each time that it is waited for, 2 s after one another; in
    "delayed" it is 4 s."""

    now_s = 0.0

    def __init__(self, words: list[str], stdout: BinaryIO, **options: Any) -> None:
        super().__init__(words, stdout, **options)
        self.metrics = Path(words[words.index("--out") + 1], "metrics.jsonl")
        self.rows = self.metrics.read_text().splitlines(keepends=True)
        self.step_s = 4.0 if "delayed" in words else 2.0
        self.metrics.write_text("")

    def wait(self, timeout: float) -> int:
        if not self.rows:
            return self.returncode
        StepByStep.now_s += self.step_s
        with self.metrics.open("a") as stream:
            stream.write(self.rows.pop(0))
        raise subprocess.TimeoutExpired("", timeout)


@pytest.mark.full
def test_a_line_says_about_how_long_all_runs_take_that_are_left(command, monkeypatch, capsys):
    monkeypatch.setattr(runs, "subprocess", stand_in(StepByStep))
    monkeypatch.setattr(runs, "time", SimpleNamespace(monotonic=lambda: StepByStep.now_s))
    ask = ["--recipes", "fp32,delayed", "--seeds", "2", *SMALL, "--steps", "10", "--shared", "0%"]
    assert command("compare", *ask, "--out", "c") == 0
    printed = capsys.readouterr().out.splitlines()
    lines = [line for line in printed if " | step " in line]
    assert len(lines) == 40  # one for each tenth of a run
    time_left = {line.partition(" | loss")[0]: line.partition(" | all runs: ")[2] for line in lines}
    # A run takes 20 s or 40 s; one in a recipe that was not seen is taken for one like those seen.
    assert time_left["[1/4] fp32, seed 0 | step 1/10"] == "n/a"
    assert time_left["[1/4] fp32, seed 0 | step 2/10"] == "about 76 s"  # 16, and 3 times 20
    assert time_left["[2/4] delayed, seed 0 | step 5/10"] == "about 80 s"  # 20, 20 and 40
    assert time_left["[3/4] fp32, seed 1 | step 9/10"] == "about 42 s"  # 2, and 40
    assert time_left["[4/4] delayed, seed 1 | step 10/10"] == "about 0 s"


@pytest.mark.full
def test_the_runs_of_a_comparison_are_those_of_pretrain(finished, command, tmp_path):
    flags = ["--config", str(finished[0] / "base.toml"), "--seed", "1", "--out", "r"]
    assert command("pretrain", "--recipe", "delayed", *flags) == 0
    assert losses(tmp_path / "r") == losses(finished[0] / "runs" / "delayed-seed1")


def test_recipes_share_the_first_steps_of_a_seed(finished):
    """A quarter of 12 steps in the baseline's recipe, to the bit; then each goes its own way."""
    folders = [finished[0] / "runs" / f"{name}-seed0" for name in ("fp32", "delayed")]
    fp32, delayed = map(losses, folders)
    assert fp32[:3] == delayed[:3]
    assert not any(a[1] == b[1] for a, b in zip(fp32[3:], delayed[3:], strict=True))
    phases = [row["phase"] for row in metrics(folders[1]) if "loss" in row]
    assert phases == 3 * ["shared"] + 9 * ["compared"]
    assert report(finished[0])["config"]["guard"]["quality"] == 0


@pytest.mark.parametrize(
    ("shared", "steps", "phases"),
    [(None, 12, 2), ("0%", 12, 0), (None, 1, 0)],  # of one step, a quarter is none
)
def test_the_shared_steps_have_the_overrides_of_all_runs(shared, steps, phases, tmp_path):
    flags = {"steps": steps, "batch": 4, "context": 32, "out": str(tmp_path / "c")}
    run_config = parse_config(None, flags, [*SETS, "recipe.residual=bf16"])
    options = Options(recipes="fp32,delayed", seeds=2, shared=shared)
    config = comparison_of(run_config, options).config
    assert len(config.phases) == phases
    for phase in config.phases[:1]:
        assert (phase.recipe, phase.recipe_overrides) == ("fp32", {"residual": "bf16"})


def test_a_comparison_goes_on_with_its_settings_where_none_are_given(
    copy, command, trained, refused
):
    """Also under another baseline, and one that shared no steps."""
    again = ["--recipes", "fp32,delayed", "--seeds", "2"]
    before = report(copy)["config"]
    assert command("compare", "--out", "c", *again, "--baseline", "delayed") == 0
    assert report(copy)["config"] == before
    assert before["phases"][0]["recipe"] == "fp32"
    error = refused("compare", "--out", "c", *again, "--shared", "50%")
    assert "--shared is 50% here and 25% there" in error
    assert command("compare", "--out", "c", *again, "--shared", "25%") == 0
    saved = report(copy)
    del saved["config"]["phases"]
    (copy / "compare.json").write_text(json.dumps(saved))
    assert command("compare", "--out", "c", *AGAIN, "--seeds", "3") == 0
    assert report(copy)["config"]["phases"] == []
    assert trained == ["fp32-seed2", "delayed-seed2"]


def test_what_is_done_is_not_done_again(copy, command, capsys):
    files = [*copy.glob("runs/*/metrics.jsonl"), *copy.glob("runs/*/checkpoints/*/*")]
    before = {path: path.stat().st_mtime_ns for path in files}
    assert len(before) > 20
    first = report(copy)
    assert command("compare", "--out", "c", *AGAIN) == 0
    assert capsys.readouterr().out.count("done before") == 4
    assert {path: path.stat().st_mtime_ns for path in files} == before
    assert all(report(copy)[key] == first[key] for key in ("runs", "recipes"))
    # Nor with another baseline.
    gap = first["recipes"][1]["gap_percent"]["mean"]
    assert command("compare", "--out", "c", *AGAIN, "--baseline", "delayed") == 0
    rows = report(copy)["recipes"]
    assert rows[1]["verdict"] == "baseline"
    assert rows[0]["gap_percent"]["mean"] == pytest.approx(-gap, abs=1e-3)


def train_nothing(patch: pytest.MonkeyPatch, failing: Collection[str] = ()) -> list[str]:
    """Replace training by writing metrics. Returns the names of the runs, as they are trained."""
    names: list[str] = []

    def pretend(run: RunConfig, *arguments: object) -> Ended:
        path = Path(run.out or "")
        names.append(path.name)
        folder(path, [step(12, 3.0, val_loss=4.9)])
        return Ended(exit=1, error="Killed") if path.name in failing else Ended(exit=0, error="")

    patch.setattr(comparison, "train", pretend)
    return names


@pytest.fixture
def trained(monkeypatch) -> list[str]:
    """The names of the runs that a comparison trains, by a stand-in that only writes metrics."""
    return train_nothing(monkeypatch)


def test_a_run_that_fails_beside_others_gives_exit_code_1_and_is_trained_again(
    command, monkeypatch, capsys
):
    failing = {"delayed-seed1"}
    names = train_nothing(monkeypatch, failing)
    assert command("compare", "--out", "c", *AGAIN) == 1
    printed = capsys.readouterr().out
    assert "1 of 4 runs failed. delayed-seed1: Killed. All that the runs printed is in " in printed
    assert "failed (seed 1)" in printed
    failing.clear()
    names.clear()
    assert command("compare", "--out", "c", *AGAIN) == 0
    assert names == ["delayed-seed1"]


def test_recipes_are_added_by_name_or_file(copy, command, trained, refused):
    (copy.parent / "mine.toml").write_text('like = "current"\n')
    more = ["--recipes", "fp32,mine.toml,delayed", "--baseline", "mine.toml"]
    assert command("compare", "--out", "c", *AGAIN, *more) == 0
    assert trained == ["mine-seed0", "mine-seed1"]
    done_by_recipe = [(row["recipe"], row["done"]) for row in report(copy)["recipes"]]
    assert done_by_recipe == [("fp32", 2), ("mine", 2), ("delayed", 2)]
    assert report(copy)["asked"]["baseline"] == "mine"
    # The file's contents are part of what is compared.
    (copy.parent / "mine.toml").write_text('like = "block"\n')
    error = refused("compare", "--out", "c", *AGAIN, *more)
    assert "recipes.mine.quantizers." in error


OTHERS: list[tuple[dict[str, Any], list[str], str]] = [
    ({"asked": {"seeds": 2}}, [], "compare.json is no comparison's, or is damaged"),
    ({"runs": [5]}, [], "compare.json is no comparison's, or is damaged"),
    ({"config": {}}, [], "batch is 4 here and None there"),
    ({"asked": {"recipes": {"bf16": "bf16"}, "seeds": 2}}, [], "recipe 'bf16' is missing here"),
    ({"machine": {"machine": "an H100"}}, [], "c was begun on an H100, and this is "),
    ({}, ["--steps", "13"], "c holds another comparison: steps is 13 here and 12 there"),
    ({}, ["--seeds", "1"], "seeds is 1 here and 2 there"),
    ({}, ["--recipes", "fp32,bf16"], "recipe 'delayed' is missing here"),
    ({}, ["--data", "other.txt"], "data is "),
    ({}, ["--set", "model_overrides.layers=2"], "model_overrides.layers is 2 here and 1 there"),
]


@pytest.mark.parametrize(("change", "flags", "message"), OTHERS)
def test_a_report_that_does_not_fit_is_refused(change, flags, message, copy, refused):
    (copy.parent / "other.txt").write_text("some other text\n" * 500)
    saved = report(copy)
    change = {"machine": saved["machine"] | change["machine"]} if "machine" in change else change
    (copy / "compare.json").write_text(json.dumps(saved | change))
    before = contents(copy)
    assert message in refused("compare", "--out", "c", *AGAIN, *flags)
    assert contents(copy) == before


def test_a_comparison_begun_by_an_older_version_goes_on(copy, command, trained, refused, capsys):
    """Its report lacks a key that came later, and has one that is gone."""
    saved = report(copy)
    del saved["config"]["final_eval_windows"], saved["asked"]["adding"]
    saved["config"]["debug_steps"] = 0
    (copy / "compare.json").write_text(json.dumps(saved))
    more = ["--seeds", "3", "--set", "final_eval_windows=8"]
    error = refused("compare", "--out", "c", *AGAIN, *more)
    assert "final_eval_windows is 8 here and None there" in error
    assert command("compare", "--out", "c", *AGAIN, "--seeds", "3") == 0
    assert trained == ["fp32-seed2", "delayed-seed2"]
    assert report(copy)["config"]["final_eval_windows"] is None  # alike in all its runs
    # Its recipes must still be the same.
    saved["contents"]["recipes"]["delayed"]["attention"] = "delayed"
    (copy / "compare.json").write_text(json.dumps(saved))
    assert "recipes.delayed.attention is " in refused("compare", "--out", "c", *AGAIN)


@pytest.mark.capability("D11")
def test_added_seeds_are_all_that_is_trained_and_intervals_are_wider_then(copy, command, trained):
    assert report(copy)["asked"]["adding"] is False
    for seeds in ("4", "4"):  # and they stay so
        assert command("compare", "--out", "c", *AGAIN, "--seeds", seeds) == 0
        assert report(copy)["asked"]["adding"] is True
        assert "as seeds were added after a look at it" in (copy / "compare.md").read_text()
    assert trained == ["fp32-seed2", "delayed-seed2", "fp32-seed3", "delayed-seed3"]
    row = report(copy)["recipes"][1]
    gap = row["gap_percent"]
    assert (row["done"], gap["samples"]) == (4, 4)
    assert gap["half_width"] == pytest.approx(student_factor(4, adding=True) * gap["deviation"])


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(("lr", "exit"), [("10.0", 0), ("1e6", 5)], ids=["hopeless", "not finite"])
def test_a_run_that_diverges_is_a_result(lr, exit, command, tmp_path, capsys):
    flags = ["--recipes", "fp32,bf16", "--seeds", "1", "--lr", lr]
    flags += ["--set", "guard.enabled=false"]
    flags += ["--set", "schedule=constant", "--set", "clip=0.0"]
    assert command("compare", "--out", "c", *SMALL, *flags) == 0
    printed = capsys.readouterr().out
    saved = report(tmp_path / "c")
    assert [row["exit"] for row in saved["runs"]] == [exit, exit]
    diverged_at = saved["runs"][0]["diverged_at"]
    assert 1 <= diverged_at <= 12
    assert saved["recipes"][0]["verdict"] == f"diverged at step {diverged_at} (seed 0), baseline"
    assert f"diverged at step {diverged_at}" in printed
    assert saved["recipes"][0]["val_loss"] is None
    # It would diverge again: it is not trained again.
    assert command("compare", "--out", "c", *SMALL, *flags) == 0
    assert capsys.readouterr().out.count("done before") == 2


@pytest.mark.usefixtures("in_process")
@pytest.mark.full
def test_runs_that_all_fail_end_in_one_line_and_a_table(command, tmp_path, capsys):
    tokens = np.tile(np.arange(200, dtype="<u2"), 40)
    tokens[3000] = 999  # seen only once a batch holds it
    tokens.tofile(tmp_path / "t.bin")
    flags = ["--recipes", "fp32,bf16", "--seeds", "1", "--data", "t.bin", "--steps", "400"]
    assert command("compare", "--out", "c", *SMALL, *flags, "--set", "eval_every=400") == 2
    error = capsys.readouterr().err
    assert "No run came to its end. fp32-seed0: " in error
    assert "t.bin" in error
    assert error.count("\n") == 1
    assert "failed (seed 0)" in (tmp_path / "c" / "compare.md").read_text()
    assert "t.bin" in (tmp_path / "c" / "logs" / "fp32-seed0.txt").read_text()


@pytest.mark.usefixtures("in_process")
def test_all_runs_begin_with_the_weights_of_a_checkpoint(command, tmp_path, refused):
    assert command("pretrain", "--recipe", "fp32", "--out", "source", *TINY) == 0
    fork = ["--recipes", "fp32,mxfp8", "--seeds", "1", "--from", "source", "--lr", "1e-9"]
    fork += ["--steps", "2", "--batch", "4", "--context", "32", "--set", "eval_windows=4"]
    fork += ["--set", "final_eval_windows=4"]  # as the source has
    assert command("compare", "--out", "c", *fork) == 0
    saved = report(tmp_path / "c")
    end = metrics(tmp_path / "source")[-1]["val_loss"]
    fp32, mxfp8 = (row["val_loss"] for row in saved["runs"])
    assert fp32 == pytest.approx(end, rel=1e-6)  # the weights do not move
    assert mxfp8 == pytest.approx(end, rel=1e-2)
    assert mxfp8 != fp32
    assert saved["contents"]["model"]["width"] == 32
    source = str((tmp_path / "source").resolve() / "checkpoints" / "step-000012")
    assert saved["config"]["init_from"] == source
    assert f"begun with the weights of {source}" in (tmp_path / "c" / "compare.md").read_text()
    again = ["--recipes", "fp32,mxfp8", "--seeds", "1", "--baseline", "mxfp8"]
    assert command("compare", "--out", "c", *again) == 0
    assert report(tmp_path / "c")["runs"] == saved["runs"]
    error = refused("compare", "--out", "d", *fork, "--set", "model_overrides.width=64")
    assert "width is 64 here and 32" in error


def test_the_command_that_is_told_asks_for_the_same(command, monkeypatch):
    flags = ["--recipes", "fp32,bf16", "--out", "a folder", "--lr", "0.001", "--no-compile", *SMALL]
    flags += ["--baseline", "bf16", "--seeds", "4", "--margin", "1%", "--shared", "10%"]
    calls: list[Comparison] = []
    monkeypatch.setattr(comparison, "compare", calls.append)
    assert command("compare", *flags) == 0
    assert command(*shlex.split(calls[0].command)[1:]) == 0
    assert calls[0] == calls[1]
    assert (calls[0].config.compile, calls[0].judging.margin) == (False, 1.0)
    assert calls[0].shared.startswith("the first 10% of the steps are in bf16")
