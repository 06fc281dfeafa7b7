"""`fp8stack tune`: chooses a recipe for each layer, at the least cost or for the least gap."""

from __future__ import annotations

import ctypes
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp

from fp8stack.analysis.forecast.forecast import RECIPES
from fp8stack.analysis.forecast.measured import Forecast, ModelLaw
from fp8stack.analysis.forecast.result import GAP, Gap, shares
from fp8stack.analysis.forecast.sensitivity import Sensitivity
from fp8stack.analysis.forecast.severity import PLAIN_BITS, bits_of
from fp8stack.analysis.forecast.times import PLAIN, Pair, Times
from fp8stack.common.errors import UserError, quoted
from fp8stack.common.io import storage_errors, write_atomically
from fp8stack.common.quantizer_table import Quantizers
from fp8stack.common.tables import aligned
from fp8stack.common.terminal import shell_quoted
from fp8stack.planning.run_config import percent, toml_lines
from fp8stack.precision import Hardware, Recipe, load_recipe, resolve
from fp8stack.training.checkpoint.reader import run_of

CANDIDATES = ("nvfp4", "mxfp4", "mxfp6_e2m3", "mxfp8", PLAIN)
_TANGENTS, _EDGE = 24, 1 + 1e-9  # tangents of the law; tolerance of a budget
_TIE = 1e-5  # cost of a severity of 1: decides between assignments of equal cost

MeasureTimes = Callable[[Sequence[str], Mapping[Pair, Recipe]], Times]
"""A function that measures layer times: `time_shares` for a model."""
Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The recipes of each layer, by module path, and their cost."""

    layers: dict[str, Pair]
    bits: float  # mean bits of a GEMM, weighted by multiplications
    time: float | None  # time of the layers as a share of bf16's; None if not measured
    forward: float  # KL in nats per token
    backward: float  # relative squared error, see `Sensitivity`
    severity: float  # see `ModelLaw`
    gap: Gap  # in percent of the loss

    @property
    def cost(self) -> float:
        """The quantity to minimize: the time, or the bits if no time was measured."""
        return self.bits if self.time is None else self.time


class Choices:
    """The bits, time, divergence and backward error of each layer in each candidate. A candidate is
    a pair of recipes, for the forward and the backward pass; with `plain`, layers may stay in bf16.
    The cost is the time if `timed` measures it, else the bits."""

    def __init__(
        self, forecast: Forecast, plain: bool = True, timed: MeasureTimes | None = None
    ) -> None:
        self.measured = forecast.measured
        work = {
            path: multiplications
            for sensitivity in self.measured.values()
            for path, multiplications in sensitivity.work.items()
        }
        self.layers = list(work)
        self.weights = np.array([*work.values()], dtype=float) / max(1, sum(work.values()))
        names = [*self.measured]
        recipes = {pair: _recipe(pair) for pair in product(names, [*names, *[PLAIN] * plain])}
        possible = {pair: recipe for pair, recipe in recipes.items() if recipe}
        self.pairs = [*possible, *[(PLAIN, PLAIN)] * plain]
        self.times = timed(self.layers, possible) if timed else None
        costs = [[self._cost(path, pair) for pair in self.pairs] for path in self.layers]
        self.figures = np.moveaxis(np.array(costs), -1, 0)  # [4, layers, pairs]

    def _cost(self, path: str, pair: Pair) -> tuple[float, float, float, float]:
        """Bits, divergence, backward error and time of a layer. Divergences are scaled so that they
        add up to the model's divergence."""
        forward, backward = (self.measured.get(name) for name in pair)
        forward_bits = bits_of(_table(forward, path))
        backward_bits = bits_of(_table(backward, path))
        divergence = 0.0
        if forward is not None and (total := sum(forward.layers.values())):
            divergence = forward.layers.get(path, 0.0) * forward.forward / total
        return (
            (forward_bits["fprop"] + backward_bits["dgrad"] + backward_bits["wgrad"]) / 3,
            divergence,
            0.0 if backward is None else backward.backward_layers.get(path, 0.0),
            self.times[path][pair] if self.times else 0.0,
        )

    @property
    def cost(self) -> Array:
        """The contribution of each layer in each candidate to the cost, [layers, pairs]."""
        bits, _, _, times = self.figures
        weighted: Array = bits * self.weights[:, None]
        return times if self.times else weighted

    def assigned(self, chosen: Sequence[int], law: ModelLaw) -> Assignment:
        """The assignment that gives each layer the candidate with the index in `chosen`."""
        figures = self.figures[:, range(len(self.layers)), chosen]
        return self._assigned([self.pairs[number] for number in chosen], figures, law)

    def uniform(self, name: str, law: ModelLaw) -> Assignment:
        """The assignment with the same recipe in all layers."""
        pair = (name, name)
        figures = np.array([self._cost(path, pair) for path in self.layers]).T
        return self._assigned([pair] * len(self.layers), figures, law)

    def _assigned(self, pairs: Sequence[Pair], figures: Array, law: ModelLaw) -> Assignment:
        """The assignment of `pairs` to the layers; `figures` [4, layers] are their `_cost`."""
        bits, divergence, error, time = figures
        forward, backward = float(divergence.sum()), float(error @ self.weights)
        severity = law.severity(forward, backward)
        return Assignment(
            layers=dict(zip(self.layers, pairs, strict=True)),
            bits=float(bits @ self.weights),
            time=float(time.sum()) if self.times else None,
            forward=forward,
            backward=backward,
            severity=severity,
            gap=law.gap(severity),
        )

    def cheapest(self, law: ModelLaw, limit: float) -> Assignment | None:
        """The assignment with the least cost, then the least severity, whose severity is at most
        `limit`; None if there is none."""
        affordable = [
            assignment
            for assignment in self._solved(law, limit=limit)
            if assignment.severity <= limit * _EDGE
        ]
        return min(
            affordable,
            key=lambda assignment: (round(assignment.cost, 6), assignment.severity),
            default=None,
        )

    def best(self, law: ModelLaw, cost: float) -> Assignment | None:
        """The assignment with the smallest severity whose cost is at most `cost`; None if there is
        none."""
        return min(
            self._solved(law, cost=cost), key=lambda assignment: assignment.severity, default=None
        )

    def _solved(
        self, law: ModelLaw, limit: float | None = None, cost: float | None = None
    ) -> Iterator[Assignment]:
        """Yield assignments of small cost within a severity, or of small severity within a cost.

        Each assignment solves an integer program (HiGHS, through SciPy). A severity is a concave
        power of the divergence, which a program replaces by its tangent at one of several
        divergences. A concave function lies below its tangents, so an assignment within the
        tangent's limit is also within the law's. The tangent at the divergence of the optimum finds
        the optimum.
        """
        cost_table, (_, forward, backward, _) = self.cost, self.figures
        count, width = cost_table.shape
        least, most = (float(reduce(axis=1).sum()) for reduce in (forward.min, forward.max))
        plain = self.pairs.index((PLAIN, PLAIN)) if (PLAIN, PLAIN) in self.pairs else None
        if plain is not None and limit is not None:  # beyond every tangent's limit
            yield self.assigned([plain] * count, law)
        for divergence in np.geomspace(max(least, most * 1e-4, 1e-12), max(most, 1e-12), _TANGENTS):
            power = law.law.power
            slope = law.forward * power * divergence ** (power - 1)
            constant = law.forward * divergence**power - slope * divergence
            severities = slope * forward + law.backward * backward * self.weights[:, None]
            limits = [LinearConstraint(np.kron(np.eye(count), np.ones(width)), 1, 1)]
            if limit is not None:
                limits.append(LinearConstraint(severities.ravel()[None], -np.inf, limit - constant))
            if cost is not None:
                limits.append(LinearConstraint(cost_table.ravel()[None], -np.inf, cost))
            with _without_stdout():
                solution = milp(
                    (severities if limit is None else cost_table + _TIE * severities).ravel(),
                    constraints=limits,
                    integrality=np.ones(count * width),
                    bounds=Bounds(0, 1),
                )
            if solution.x is not None:
                yield self.assigned(solution.x.reshape(count, width).argmax(axis=1).tolist(), law)


@contextmanager
def _without_stdout() -> Iterator[None]:
    """Discard the text that C code writes to stdout in this context. HiGHS in SciPy 1.17 prints a
    debugging line ("transformNewIntegerFeasibleSolution") with any options; delete this when it no
    longer does."""
    try:
        flush = ctypes.CDLL(None).fflush
    except (AttributeError, OSError, TypeError):  # TypeError: on Windows
        yield
        return
    stdout_copy = os.dup(1)
    flush(None)
    try:
        with open(os.devnull, "wb") as devnull:
            os.dup2(devnull.fileno(), 1)
        yield
    finally:
        flush(None)  # C's buffer still holds text from inside the context
        os.dup2(stdout_copy, 1)
        os.close(stdout_copy)


def _recipe(pair: Pair) -> Recipe | None:
    """The recipe with the forward pass of the first recipe and the backward pass of the second, or
    None if they cannot be combined."""
    try:
        return load_recipe(pair[0], _overrides(pair))
    except UserError:
        return None


def default_candidates(hardware: Hardware) -> list[str]:
    """The default candidates: on a GPU, the recipes that run natively on it, if there are any."""
    if hardware.device == "cpu":
        return list(CANDIDATES)
    native = [name for name in RECIPES if resolve(name, hardware).native]
    return [*native, PLAIN] if native else list(CANDIDATES)


def candidates(names: Sequence[str]) -> list[str]:
    """The quantized recipes among `names`. Raises a UserError if there are none, or for a recipe
    file, because only shipped recipes quantize all layers alike."""
    for name in names:
        load_recipe(name)
        if name.endswith(".toml"):
            raise UserError(
                f"--recipes: {quoted(name)} is a file. A layer's recipe must be a shipped one."
            )
    quantized = list(dict.fromkeys(name for name in names if load_recipe(name).is_fp8))
    if not quantized:
        raise UserError("--recipes names no recipe that is quantized. Example: nvfp4,mxfp8,bf16")
    return quantized


def require_bits(target: Target, names: Sequence[str]) -> None:
    """Raise a UserError, before anything is measured, if every layer in the narrowest of the
    candidates has more bits than the target."""
    if target.bits is None:
        return
    tables = [bits_of(load_recipe(name).quantizers) for name in names]
    least = min(bits["fprop"] for bits in tables)
    least += min(bits["dgrad"] + bits["wgrad"] for bits in tables)
    if target.bits < least / 3:
        raise _too_little(f"--bits {target.bits:g}", f"{least / 3:.2f}")


def _too_little(option: str, needed: str) -> UserError:
    return UserError(
        f"{option}: these recipes need at least {needed}. Give more, or other --recipes."
    )


def _table(measured: Sensitivity | None, path: str) -> Quantizers | None:
    """A layer's quantizers; None if the recipe does not quantize the layer."""
    if measured is None or path not in measured.layers:
        return None
    return measured.plan.layer(path).quantizers


@dataclass(frozen=True, kw_only=True)
class Target:
    """The target of a tuned recipe: a gap as a share of the loss, bits, or a share of bf16's time;
    and the path of its file."""

    budget: float | None = None
    bits: float | None = None
    time: float | None = None
    path: Path

    def __str__(self) -> str:
        if self.budget is not None:
            return f"a loss gap of {100 * self.budget:g} % at most, interval included"
        if self.time is not None:
            return f"{100 * self.time:g} % of bf16's time at most"
        return f"{self.bits:g} bits at most"

    def is_timed(self, hardware: Hardware) -> bool:
        """Whether the target needs measured times: `time`, and `budget` on a GPU, do."""
        on_gpu = hardware.device != "cpu"
        return self.time is not None or (self.budget is not None and on_gpu)


def parse_target(budget: str | None, bits: float | None, time: str | None, out: str) -> Target:
    """Parse the command's target. Raises a UserError unless exactly one of `budget`, `bits` and
    `time` is given, or if `out` is not a TOML file or exists."""
    if sum(value is not None for value in (budget, bits, time)) != 1:
        raise UserError("Give one of --budget, such as 0.2%, --bits, such as 6, and --time 80%.")
    path = Path(out)
    if path.suffix != ".toml":
        raise UserError(f"--out {quoted(out)}: a recipe is a TOML file. Example: tuned.toml")
    if path.exists():
        raise UserError(f"{quoted(out)} exists. Give another --out, or remove it.")
    if bits is not None and not 0 < bits <= PLAIN_BITS:
        raise UserError(f"--bits {bits:g}: a GEMM has more than 0 and at most {PLAIN_BITS:g}.")
    return Target(
        budget=None if budget is None else percent("--budget", budget, "0.2%") / 100,
        bits=bits,
        time=None if time is None else percent("--time", time, "80%") / 100,
        path=path,
    )


def tuned(choices: Choices, forecast: Forecast, target: Target) -> Assignment:
    """The best assignment for a target.

    Raises:
        UserError: no assignment meets the target; the message names the closest one.
    """
    law = forecast.law
    if target.budget is not None:
        assignment = choices.cheapest(law, law.largest_severity(100 * target.budget))
        if assignment is None:
            closest = choices.best(law, math.inf)
            assert closest is not None  # no recipe costs more
            raise UserError(
                f"--budget {100 * target.budget:g}%: the smallest gap of these recipes is "
                f"{closest.gap.mean:.2g} %, at most {closest.gap.high:.2g} %, with "
                f"{closest.bits:.2f} bits. Give more, or bf16 among --recipes."
            )
        return assignment
    limit = target.bits if target.time is None else target.time
    assert limit is not None
    assignment = choices.best(law, limit)
    if assignment is None:
        least = float(choices.cost.min(axis=1).sum())
        option = f"--bits {limit:g}" if target.time is None else f"--time {100 * limit:g}%"
        needed = f"{least:.2f}" if target.time is None else f"{least:.1%} of bf16's time here"
        raise _too_little(option, needed)
    return assignment


def command(run: str, out: str) -> str:
    """The command that trains in the recipe file `out`, with the configuration of `run`, a run or
    one of its checkpoints; a model of transformers trains on, on text that the user names."""
    path = Path(run)
    folder = run_of(path) or path
    file = folder / "run.toml"
    config = ["--config", str(file)] if file.is_file() else ["--init-from", run, "--data", "TEXT"]
    out_option = ["--out", f"{out.removesuffix('.toml')}-run"] if file.is_file() else []
    return " ".join(
        map(shell_quoted, ["fp8stack", "pretrain", *config, "--recipe", out, *out_option])
    )


def as_text(tuned_assignment: Assignment, choices: Choices, forecast: Forecast) -> list[str]:
    """A table that compares the tuned recipe with each uniform one, and the layers by recipe."""
    assignments = [("tuned", tuned_assignment)]
    assignments += [(n, choices.uniform(n, forecast.law)) for n in (*choices.measured, PLAIN)]
    costs = ["bits of a GEMM", *["time, % of bf16"] * (choices.times is not None)]
    rows = []
    for name, assignment in assignments:
        times = [] if assignment.time is None else [f"{100 * assignment.time:.1f}"]
        rows.append([name, f"{assignment.bits:.2f}", *times, *shares(assignment.gap)])
    paths_by_recipe: dict[str, list[str]] = {}
    for path, (forward, backward) in tuned_assignment.layers.items():
        recipe = forward if forward == backward else f"{forward}, backward {backward}"
        paths_by_recipe.setdefault(recipe, []).append(path)
    table = aligned([["recipe", *costs, *GAP], *rows])
    layers = (f"{recipe}: {', '.join(paths)}" for recipe, paths in paths_by_recipe.items())
    note = "gap: by divergences on this model, relative to NVFP4's; a budget is held against the "
    about = forecast.result.about[0]
    return [*table, "", *layers, "", about, f"{note}upper end of the interval"]


def write(assignment: Assignment, forecast: Forecast, target: Target) -> None:
    """Write the recipe file. Raises a StorageError if the disk is full or cannot be written."""
    time = "" if assignment.time is None else f", {assignment.time:.1%} of bf16's time"
    gap, interval = shares(assignment.gap)
    description = (
        f"tuned for {forecast.trained.name}: {target}. {assignment.bits:.2f} bits{time}, a gap of "
        f"{gap} is expected ({interval})"
    )
    with storage_errors(target.path):
        target.path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target.path, as_toml(assignment, description).encode())


def as_toml(assignment: Assignment, description: str) -> str:
    """A recipe file: the most common recipe, and an entry for each layer with another recipe."""
    counts = Counter(pair for pair in assignment.layers.values() if pair[0] != PLAIN)
    base = counts.most_common(1)[0][0] if counts else (PLAIN, PLAIN)
    lines = toml_lines({"description": description} | _keys("like", base))
    for path, pair in assignment.layers.items():
        if pair != base:
            lines += ["", "[[layers]]", *toml_lines({"match": path} | _keys("recipe", pair))]
    return "\n".join(lines) + "\n"


def _keys(key: str, pair: Pair) -> dict[str, str]:
    """The keys of a recipe file for a pair; `key` names the recipe of the forward pass."""
    return {key: pair[0]} | _overrides(pair)


def _overrides(pair: Pair) -> dict[str, str]:
    """The keys that add the second recipe's backward pass to the first recipe."""
    forward, backward = pair
    if forward == backward:
        return {}
    return {"backward": "high_precision" if backward == PLAIN else backward}
