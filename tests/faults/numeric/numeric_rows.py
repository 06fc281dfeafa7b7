"""Rows of the matrix about numbers: faults in them, spikes, and resuming the wrong run; and the
expected reaction to a fault, by its effect in the arithmetic."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fp8stack.common.errors import NumericFailure
from fp8stack.common.io import json_lines
from fp8stack.training.checkpoint import reader as checkpoints
from fp8stack.training.run import Run
from tests.faults.case import Case, Outcome, judged
from tests.faults.numeric.numeric_faults import AT_REST, VALUES, Fault, places
from tests.faults.numeric.other_runs import OTHERS, refusal, saved_run
from tests.faults.numeric.small_runs import Digest, Recorder, events, is_sound, small_run, trained

FP8 = ("delayed", "current", "block", "mxfp8", "nvfp4")
RECIPES = ("fp32", "bf16", "fp16", *FP8)
FIRST = 6  # the first step with a fault
SPIKES = 20  # in a run
APART = 2  # steps from one fault of a run to the next; it is saved as often


def expected(place: str, value: str, recipe: str) -> str:
    """The expected reaction to a fault that happens once.

    "skip": the step is skipped, to the bit. "back": the state itself is broken, so the run rolls
    back to its newest checkpoint and continues. "mend": the amax history or its scale is repaired,
    and no step is lost. "either": the step may be taken, if the value's effect is finite in the
    arithmetic of the recipe; then the run's state must be finite, too.
    """
    if place in ("weight", "moment"):
        return "back"
    if place in ("history", "scale"):
        return "mend"
    if place == "amax" and value == "-inf":  # no amax is negative, no scale follows from it
        return "mend"
    if place == "activation" and value == "1e38":  # a norm divides by it, and 1e38 / 1e38 is 1
        return "either"
    if place == "input" and value == "1e38" and recipe not in ("fp16", "delayed"):
        return "either"  # 1e38 times a weight is finite; fp16 has no 1e38, and a history knows it
    if place in ("input", "grad_output") and "inf" in value and recipe in FP8[1:]:
        return "either"  # a cast to FP8 saturates, by its definition, and keeps no history
    return "skip"


def transient(
    folder: Path,
    recipe: str,
    chosen: Sequence[tuple[str, str]],
    sets: Sequence[str] = (),
    **keys: Any,
) -> Outcome:
    """Put the chosen values into the chosen places, once each, in one run."""
    steps = FIRST + APART * len(chosen)
    guard = {"calm_steps": 1, "patience": 20}  # so that faults do not add up to an incident
    run = small_run(folder, f"{recipe}-transient", recipe, sets, steps=steps, guard=guard, **keys)
    recorder = Recorder(run)
    faults = {}
    for number, (place, value) in enumerate(chosen):
        step = FIRST + APART * number
        faults[step] = Fault(place=place, value=VALUES[value], steps={step})
        faults[step].put(run)
    reason = ""
    try:
        trained(run)
    except NumericFailure as error:
        reason = str(error)
    outcome = Outcome()
    for (step, fault), (place, value) in zip(faults.items(), chosen, strict=True):
        if fault.injected:
            wrong = reason or _wrong_end(expected(place, value, recipe), place, step, run, recorder)
            outcome += judged([f"{recipe}, {value} into {place}, step {step}"], wrong)
        elif not reason:
            outcome += Outcome(lost=(f"{recipe}, {value} into {place} did not happen",))
    return outcome


def _wrong_end(expected: str, place: str, step: int, run: Run, recorder: Recorder) -> str:
    """The problem with the reaction to a fault in a place, "" if none."""
    rows = [row for row in json_lines(run.folder.metrics) if row["step"] == step]
    skipped = any(row.get("event") == "skip" or row.get("skipped") for row in rows)
    if expected == "skip" or (expected == "either" and skipped):
        wrong = "" if skipped else "the step was taken"
        return wrong or _differing(recorder.at(step), recorder.at(step + 1), "after the step")
    if expected == "back":  # seen by the look after the step before it, which went back to a save
        back = [row for row in events(run) if row["event"] == "rollback"]
        mine = [row["to_step"] for row in back if row["step"] == step - 1]
        if not mine:
            return "the run did not go back at once"
        # The steps in between are left out or done again; what began after the save did so alike.
        saved, again = recorder.at(mine[0] + 1), recorder.after(mine[0], step - 1)
        return _differing(saved, again, "after going back")
    if expected == "mend":
        late = place == "amax"  # recorded in the step, and seen by the next one
        mended = [row["step"] for row in events(run) if row["event"] == "clear_amax"]
        if step + late not in mended:
            return "nobody said that it was mended"
        if not late:
            return _differing(recorder.ends.get(step - 1), recorder.at(step), "after mending")
    return "" if is_sound(run) else "the step was taken and something is not finite"


def _differing(a: Digest | None, b: Digest | None, when: str) -> str:
    if a is None or b is None:
        return f"there was no step {when}"
    names = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
    return f"{names[0]} differs {when}, of {len(names)} things" if names else ""


# The diagnosis's name for a place with NaN in every step.
SHOWN = {
    "activation": "final_norm, input is not finite",
    "input": "blocks.0.mlp.down, input is not finite",
    "grad_output": "blocks.0.mlp.down, grad_output is not finite",
    "dgrad": "blocks.0.mlp.down, grad_output is not finite",
    "wgrad": "blocks.0.mlp.down, weight gradient is not finite",
    "weight": "blocks.0.mlp.down.weight contains nan",
    "moment": "the moment exp_avg of blocks.0.mlp.down.weight contains nan",
    "loss": "the loss is nan",
}


def ladder(place: str, recipe: str) -> list[str]:
    """The expected actions of the guard, rung by rung, if a place has NaN in every step."""
    if place in ("weight", "moment"):  # no precision mends them
        return ["rollback", "stop"]
    if recipe == "fp16":
        # A gradient that is not finite counts as an overflow there, as long as it is fp16.
        overflows = place in ("grad_output", "dgrad", "wgrad")
        return ["precision", "rollback", "stop"] if overflows else ["rollback", "precision", "stop"]
    if recipe not in FP8:
        return ["rollback", "stop"]
    of_layer = place not in ("activation", "loss")
    return ["rollback", *(["demote blocks.0.mlp.down"] if of_layer else []), "demote *", "stop"]


def persistent(folder: Path, recipe: str, place: str) -> str:
    """NaN in a place in every step from one on, in FP8 and out of it: what is wrong with what the
    guard did; empty if nothing is."""
    run = small_run(folder, f"{recipe}-{place}-persistent", recipe, steps=80)
    Fault(place=place, value=VALUES["nan"], steps=range(FIRST, 100), most=float("inf")).put(run)
    try:
        trained(run)
    except NumericFailure as error:
        wrong = _wrong_rungs(run, ladder(place, recipe))
        pieces = [SHOWN[place], "went back to step", "The last checkpoint is step-", "Lower --lr"]
        pieces += ["ran the whole model in"] if recipe in FP8 and place not in AT_REST else []
        if missing := [piece for piece in pieces if piece not in str(error)]:
            wrong = wrong or f"the diagnosis does not say {missing}: {error}"
        if events(run)[-1]["why"] != str(error):
            wrong = wrong or "the last event does not say why"
        return wrong or ("" if _is_saved(run) else "no checkpoint is left that is finite")
    return "the run did not stop"


def only_in_fp8(folder: Path, recipe: str, place: str = "input") -> str:
    """NaN in an FP8 layer's place in every step from one on: what is wrong with what the guard did;
    empty if the run went on with that layer out of FP8, and ended."""
    run = small_run(folder, f"{recipe}-{place}-layer", recipe, steps=24)
    steps = range(FIRST, 100)
    value = VALUES["inf" if place == "amax" else "nan"]
    Fault(place=place, value=value, steps=steps, only_in_fp8=True, most=float("inf")).put(run)
    try:
        trained(run)
    except NumericFailure as error:
        return f"the run stopped: {error}"
    return _wrong_rungs(run, ["rollback", "demote blocks.0.mlp.down"])


def _is_saved(run: Run) -> bool:
    """Whether there are checkpoints, all of them finite."""
    groups = [
        group
        for path in checkpoints.candidates(run.folder.checkpoints)
        for name, group in checkpoints.load(path).tensors.items()
        if name in ("model", "optimizer")
    ]
    return bool(groups) and all(
        bool(t.isfinite().all()) for group in groups for t in group.values()
    )


def _wrong_rungs(run: Run, expected: list[str]) -> str:
    rungs = ("rollback", "demote", "precision", "stop")
    rung_events = [row for row in events(run) if row["event"] in rungs]
    named = [" ".join(filter(None, (row["event"], row.get("layer")))) for row in rung_events]
    return "" if named == expected else f"the guard did {named}, not {expected}"


# The rows


def numeric_faults(folder: Path, count: int) -> Outcome:
    """Inject `count` faults, spread evenly over all recipes, places and values: most happen once,
    some in every step."""
    once = [(r, p, v) for r in RECIPES for p in places(r) for v in VALUES]
    for_good = [(persistent, r, p) for r in RECIPES for p in SHOWN]
    for_good += [(only_in_fp8, r, "input") for r in FP8] + [(only_in_fp8, "delayed", "amax")]
    repeated = max(1, round(count * len(for_good) / (len(once) + len(for_good))))
    chosen = evenly(once, count - repeated)
    outcome = Outcome()
    for recipe in RECIPES:
        if mine := [(place, value) for r, place, value in chosen if r == recipe]:
            outcome += transient(folder, recipe, mine)
    for check, recipe, place in evenly(for_good, repeated):
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
    """Tenfold losses, `count` in all, of runs in several recipes, and false alarms in 500 clean
    steps to a spike."""
    recipes = ("fp32", "delayed", "current", "fp16")
    outcome = Outcome()
    for number, recipe in enumerate(recipes):
        if share := len(range(number, count, len(recipes))):
            outcome += spiked(folder, recipe, share) + clean(folder, recipe, 500 * share)
    return outcome


def spiked(folder: Path, recipe: str, count: int, steps: int = 300) -> Outcome:
    """The first `count` of the tenfold losses in a run of so many steps."""
    run = small_run(folder, f"{recipe}-spikes", recipe, steps=steps, save_every=1000)
    loss_spikes(run)
    trained(run)
    # The spike may overflow in fp16, which skips the step as well.
    rows = json_lines(run.folder.metrics)
    skipped = {row["step"] for row in rows if row.get("event") == "skip" or row.get("skipped")}
    at = spiked_steps(steps)[:count]
    missed = [f"{recipe}: the spike of step {n} was taken" for n in at if n not in skipped]
    return Outcome(injected=len(at), survived=len(at) - len(missed), lost=tuple(missed))


def loss_spikes(run: Run) -> None:
    """Multiply the loss by ten in some steps."""
    at = set(spiked_steps(run.config.steps))

    def hook(model: nn.Module, args: object, loss: Tensor) -> Tensor | None:
        return loss * 10 if model.training and run.step + 1 in at else None

    run.model.register_forward_hook(hook)


def spiked_steps(steps: int) -> list[int]:
    """The steps with a spike: after the guard's warm-up, no two in a row."""
    return sorted(2 * n for n in random.Random(0).sample(range(25, steps // 2), SPIKES))


def clean(folder: Path, recipe: str, steps: int) -> Outcome:
    """A run of `steps` without injected faults, lost if the guard skips more than
    `MOST_FALSE_PERCENT` of them; overflows of fp16 are no skipped steps."""
    run = small_run(folder, f"{recipe}-clean", recipe, steps=steps, log_every=10, save_every=2000)
    skipped = len({row["step"] for row in trained(run) if row["event"] == "skip"})
    percent = 100 * skipped / steps
    line = f"{recipe}: {skipped} of {steps:,} clean steps were skipped ({percent:.2g} %)"
    return Outcome(injected=0, survived=0, lost=(line,) if percent > MOST_FALSE_PERCENT else ())


def other_runs(folder: Path, count: int) -> Outcome:
    """Resume a run `count` times, each time with one difference from the saved run."""
    saved = saved_run(folder)
    chosen = OTHERS[:count] if count > len(OTHERS) else evenly(OTHERS, count)
    outcomes = (judged([str(change.keys)], refusal(saved, change)) for change in chosen)
    return sum(outcomes, Outcome())


def evenly(items: Sequence[Any], count: int) -> list[Any]:
    """`count` of the things, or all there are, from the whole range of them."""
    count = min(count, len(items))
    return [items[n * len(items) // count] for n in range(count)]


CASES: dict[str, Case] = {
    "R10": Case(
        description="NaN, inf, -inf and 1e38 into activations, gradients, weights, loss, amaxes, "
        "moments and scales, in every recipe; once, and NaN in every step",
        passes="the step is skipped to the bit, or broken state goes back to the last checkpoint, "
        "or an amax history is mended; what comes in every step climbs the ladder and is named",
        run=numeric_faults,
        short=70,
        long=ALL_FAULTS,
    ),
    "R11": Case(
        description="losses ten times themselves; for each, 500 clean steps",
        passes="every spike is skipped, and at most 0.1 % of the clean steps",
        run=spikes,
        short=4,
        long=20,
    ),
    "R15": Case(
        description="a run resumed with another recipe, model, data, seed or setting",
        passes="exit code 2, one line that names the difference, and no file changed",
        run=other_runs,
        short=12,
        long=len(OTHERS),
    ),
}
