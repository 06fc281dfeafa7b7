"""Rows of the matrix about numbers: faults in them, spikes, and the wrong run resumed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.guard import loss_spikes, spiked_steps
from tests.faults.case import Case, Outcome, judged
from tests.faults.numeric_ends import FP8, RECIPES, SHOWN, only_in_fp8, persistent, transient
from tests.faults.numeric_faults import VALUES, places
from tests.faults.other_runs import OTHERS, refusal, saved_run
from tests.faults.small_runs import small_run, trained


def numeric_faults(folder: Path, count: int) -> Outcome:
    """`count` faults of all recipes, places and values, evenly: each once, and some for good."""
    once = [(r, p, v) for r in RECIPES for p in places(r) for v in VALUES]
    for_good = [(persistent, r, p) for r in RECIPES for p in SHOWN]
    for_good += [(only_in_fp8, r, "input") for r in FP8] + [(only_in_fp8, "delayed", "amax")]
    kept = max(1, round(count * len(for_good) / (len(once) + len(for_good))))
    chosen = evenly(once, count - kept)
    outcome = Outcome()
    for recipe in RECIPES:
        if mine := [(place, value) for r, place, value in chosen if r == recipe]:
            outcome += transient(folder, recipe, mine)
    for check, recipe, place in evenly(for_good, kept):
        wrong = check(folder, recipe, place)
        outcome += judged([f"{recipe}, nan into {place} in every step"], wrong)
    return outcome


ALL_FAULTS = sum(len(places(r)) * len(VALUES) + len(SHOWN) for r in RECIPES) + len(FP8) + 1


def cuda_faults(folder: Path, count: int) -> Outcome:
    """`count` faults in Transformer Engine on a GPU, each once, in delayed and current scaling."""
    # Layers that FP8 pays in; TE fuses the norms, and gives no place within what it fuses.
    sets = ["model_overrides.layers=2", "model_overrides.heads=8", "model_overrides.width=1024"]
    keys = {"backend": "te", "device": "cuda", "batch": 16, "context": 256, "eval_windows": 16}
    sets += ["model_overrides.context=256"]
    within = ("input", "grad_output")
    outcome = Outcome()
    for recipe, share in (("delayed", (count + 1) // 2), ("current", count // 2)):
        chosen = [(p, v) for p in places(recipe) if p not in within for v in VALUES]
        if share:
            outcome += transient(folder, recipe, evenly(chosen, share), sets, **keys)
    return outcome


MOST_FALSE_PERCENT = 0.1


def spikes(folder: Path, count: int) -> Outcome:
    """Tenfold losses, `count` in all, of runs in several recipes, and false alarms in clean ones.

    There are 500 clean steps to a spike, 10,000 to 20, spread over the recipes.
    """
    recipes = ("fp32", "delayed", "current", "fp16")
    outcome = Outcome()
    for number, recipe in enumerate(recipes):
        if share := len(range(number, count, len(recipes))):
            outcome += spiked(folder, recipe, share) + clean(folder, recipe, 500 * share)
    return outcome


def spiked(folder: Path, recipe: str, count: int) -> Outcome:
    """The first `count` of the spikes that `bench guard` puts into a run."""
    run = small_run(folder, f"{recipe}-spikes", recipe, steps=300, save_every=1000)
    loss_spikes(run)
    trained(run)
    # In fp16 the spike may overflow, which skips the step as well.
    rows = run.folder.read_metrics()
    told = {row["step"] for row in rows if row.get("event") == "skip" or row.get("skipped")}
    at = spiked_steps(300)[:count]
    missed = [f"{recipe}: the spike of step {step} was taken" for step in at if step not in told]
    return Outcome(injected=len(at), survived=len(at) - len(missed), lost=tuple(missed))


def clean(folder: Path, recipe: str, steps: int) -> Outcome:
    """A run without faults, of `steps`: nothing injected, and lost if too many were skipped."""
    skipped = falsely_skipped(folder, recipe, steps)
    percent = 100 * skipped / steps
    line = f"{recipe}: {skipped} of {steps:,} clean steps were skipped ({percent:.2g} %)"
    return Outcome(injected=0, survived=0, lost=(line,) if percent > MOST_FALSE_PERCENT else ())


def falsely_skipped(folder: Path, recipe: str, steps: int) -> int:
    """How many steps of a clean run the guard skips; overflows of fp16 are not counted."""
    run = small_run(folder, f"{recipe}-clean", recipe, steps=steps, log_every=10, save_every=2000)
    return len({row["step"] for row in trained(run) if row["event"] == "skip"})


def other_runs(folder: Path, count: int) -> Outcome:
    """`count` resumptions, each of which differs in one thing from the run that was saved."""
    saved = saved_run(folder)
    chosen = OTHERS[:count] if count > len(OTHERS) else evenly(OTHERS, count)
    outcomes = (judged([str(other.keys)], refusal(saved, other)) for other in chosen)
    return sum(outcomes, Outcome())


def evenly(things: Sequence[Any], count: int) -> list[Any]:
    """`count` of the things, or all there are, from the whole range of them."""
    count = min(count, len(things))
    return [things[n * len(things) // count] for n in range(count)]


CASES: dict[str, Case] = {
    "R10": Case(
        what="NaN, inf, -inf and 1e38 into activations, gradients, weights, loss, amaxes, moments "
        "and scales, in every recipe; once, and NaN in every step",
        passes="the step is skipped to the bit, or broken state goes back to the last checkpoint, "
        "or an amax history is mended; what comes in every step climbs the ladder and is named",
        run=numeric_faults,
        short=70,
        long=ALL_FAULTS,
    ),
    "R11": Case(
        what="losses ten times themselves; for each, 500 clean steps",
        passes="every spike is skipped, and at most 0.1 % of the clean steps",
        run=spikes,
        short=4,
        long=20,
    ),
    "R15": Case(
        what="a run resumed with another recipe, model, data, seed or setting",
        passes="exit code 2, one line that names the difference, and no file changed",
        run=other_runs,
        short=12,
        long=len(OTHERS),
    ),
}
