"""`fp8stack tune`: chooses the cheapest recipe for each layer within a budget for the loss gap."""

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

from fp8stack.config import percent, toml_lines
from fp8stack.errors import UserError, quoted
from fp8stack.forecast.forecast import RECIPES, Forecast
from fp8stack.forecast.law import Law
from fp8stack.forecast.result import FIRST_QUARTER, GAP, Gap, shares
from fp8stack.forecast.sensitivity import Sensitivity
from fp8stack.forecast.times import PLAIN, Pair, Times
from fp8stack.formats import FORMATS, Quantizer, Quantizers
from fp8stack.io import storage_errors, write_atomically
from fp8stack.precision import Hardware, Recipe, load_recipe, resolve
from fp8stack.tables import aligned
from fp8stack.terminal import shell_quoted

PLAIN_BITS = 16.0
CANDIDATES = ("nvfp4", "mxfp4", "mxfp6_e2m3", "mxfp8", PLAIN)
GEMMS = ("fprop", "dgrad", "wgrad")
_TANGENTS, _EDGE = 24, 1 + 1e-9
_TIE = 1e-4  # of bits, for a nat per token

Timed = Callable[[Sequence[str], Mapping[Pair, Recipe]], Times]
"""What measures the times of layers in recipes: `time_shares` of a model."""
Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The recipes of each layer, by module path, and their cost."""

    layers: dict[str, Pair]
    bits: float  # of a GEMM, the mean weighted by multiplications
    time: float | None  # of the layers, as a share of bf16's; None if it was not measured
    forward: float  # KL in nats per token
    backward: float  # relative squared error, see `Sensitivity`
    gap: Gap

    @property
    def cost(self) -> float:
        """What is kept small: the time, or the bits if that was not measured."""
        return self.bits if self.time is None else self.time


def bits_of(table: Quantizers | None) -> dict[str, float]:
    """The bits of a linear's GEMMs, by name: those of the wider operand, which determines the rate
    of tensor cores. None is a linear that is not quantized."""

    def of(quantizer: Quantizer | None) -> float:
        return PLAIN_BITS if quantizer is None else float(FORMATS[quantizer.format].bits)

    if table is None:
        return dict.fromkeys(GEMMS, PLAIN_BITS)
    forward = {"dgrad": table.weight, "wgrad": table.input}
    return {
        gemm: max(of(one), of(forward[gemm] if other == "forward" else other))
        for gemm, (one, other) in table.gemms.items()
    }


class Choices:
    """The cost of each layer in each candidate: bits or time, divergence and backward error. A
    candidate is a recipe for the forward pass and one for the backward pass; with `plain`, layers
    may stay in bf16. The cost is the time if something measures it (`timed`), else bits."""

    def __init__(self, forecast: Forecast, plain: bool = True, timed: Timed | None = None) -> None:
        self.measured = forecast.measured
        sizes = {path: size for one in self.measured.values() for path, size in one.sizes.items()}
        self.layers = list(sizes)
        self.weights = np.array([*sizes.values()], dtype=float) / max(1, sum(sizes.values()))
        names = [*self.measured]
        recipes = {pair: _recipe(pair) for pair in product(names, [*names, *[PLAIN] * plain])}
        found = {pair: recipe for pair, recipe in recipes.items() if recipe}
        self.pairs = [*found, *[(PLAIN, PLAIN)] * plain]
        self.times = timed(self.layers, found) if timed else None
        costs = [[self._cost(path, pair) for pair in self.pairs] for path in self.layers]
        self.figures = np.moveaxis(np.array(costs), -1, 0)  # [4, layers, pairs]

    def _cost(self, path: str, pair: Pair) -> tuple[float, float, float, float]:
        """Bits, divergence, backward error and time of one layer. Divergences are scaled to add up
        to that of all layers together."""
        one, other = (self.measured.get(name) for name in pair)
        ahead, back = bits_of(_table(one, path)), bits_of(_table(other, path))
        divergence = 0.0
        if one is not None and (alone := sum(one.layers.values())):
            divergence = one.layers.get(path, 0.0) * one.forward / alone
        return (
            (ahead["fprop"] + back["dgrad"] + back["wgrad"]) / 3,
            divergence,
            0.0 if other is None else other.backward_layers.get(path, 0.0),
            self.times[path][pair] if self.times else 0.0,
        )

    @property
    def cost(self) -> Array:
        """What each candidate adds in each layer to an assignment's cost, [layers, pairs]."""
        bits, _, _, times = self.figures
        weighted: Array = bits * self.weights[:, None]
        return times if self.times else weighted

    def assigned(self, chosen: Sequence[int], law: Law) -> Assignment:
        """The assignment of one candidate, by its index, to each layer."""
        figures = self.figures[:, range(len(self.layers)), chosen]
        return self._assigned([self.pairs[number] for number in chosen], figures, law)

    def uniform(self, name: str, law: Law) -> Assignment:
        """The assignment of one recipe to all layers."""
        pair = (name, name)
        figures = np.array([self._cost(path, pair) for path in self.layers]).T
        return self._assigned([pair] * len(self.layers), figures, law)

    def _assigned(self, pairs: Sequence[Pair], figures: Array, law: Law) -> Assignment:
        """The assignment of these pairs; `figures` [4, layers] are their `_cost`."""
        bits, divergence, error, time = figures
        forward, backward = float(divergence.sum()), float(error @ self.weights)
        return Assignment(
            layers=dict(zip(self.layers, pairs, strict=True)),
            bits=float(bits @ self.weights),
            time=float(time.sum()) if self.times else None,
            forward=forward,
            backward=backward,
            gap=law.gap(forward, backward),
        )

    def cheapest(self, law: Law, budget: float) -> Assignment | None:
        """The assignment with the least cost, then the least gap, whose gap is at most `budget`
        nats per token; None if there is none."""
        within = [one for one in self._solved(law, budget=budget) if one.gap.mean <= budget * _EDGE]
        return min(within, key=lambda one: (round(one.cost, 6), one.gap.mean), default=None)

    def best(self, law: Law, cost: float) -> Assignment | None:
        """The assignment with the least gap among those of at most this cost; None if there is
        none."""
        return min(self._solved(law, cost=cost), key=lambda one: one.gap.mean, default=None)

    def _solved(
        self, law: Law, budget: float | None = None, cost: float | None = None
    ) -> Iterator[Assignment]:
        """Yield assignments with a small cost within a budget, or with a small gap within a cost.

        Each solves an integer program (HiGHS, through SciPy). The law is a concave power of the
        divergence, which a program replaces by its tangent at one of several divergences. A concave
        function lies below its tangents, so an assignment within a tangent's budget is within the
        law's; the optimum is found by the tangent at its own divergence.
        """
        each, (_, forward, backward, _) = self.cost, self.figures
        count, width = each.shape
        least, most = (float(of(axis=1).sum()) for of in (forward.min, forward.max))
        for divergence in np.geomspace(max(least, most * 1e-4, 1e-12), max(most, 1e-12), _TANGENTS):
            slope = law.forward * law.power * divergence ** (law.power - 1)
            constant = law.forward * divergence**law.power - slope * divergence
            gaps = slope * forward + law.backward * backward * self.weights[:, None]
            limits = [LinearConstraint(np.kron(np.eye(count), np.ones(width)), 1, 1)]
            if budget is not None:
                limits.append(LinearConstraint(gaps.ravel()[None], -np.inf, budget - constant))
            if cost is not None:
                limits.append(LinearConstraint(each.ravel()[None], -np.inf, cost))
            with _without_stdout():
                found = milp(
                    (gaps if budget is None else each + _TIE * gaps).ravel(),
                    constraints=limits,
                    integrality=np.ones(count * width),
                    bounds=Bounds(0, 1),
                )
            if found.x is not None:
                yield self.assigned(found.x.reshape(count, width).argmax(axis=1).tolist(), law)


@contextmanager
def _without_stdout() -> Iterator[None]:
    """Discard what C code within writes to stdout. HiGHS in SciPy 1.17 prints a line for debugging
    ("transformNewIntegerFeasibleSolution"), whatever its options; to be deleted when it does not.
    """
    try:
        flush = ctypes.CDLL(None).fflush
    except (AttributeError, OSError, TypeError):  # TypeError: on Windows
        yield
        return
    kept = os.dup(1)
    flush(None)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        flush(None)  # what C buffered within
        os.dup2(kept, 1)
        os.close(kept)


def _recipe(pair: Pair) -> Recipe | None:
    """The recipe with the first's forward pass and the second's backward pass; None if there can be
    none."""
    try:
        return load_recipe(pair[0], _overrides(pair))
    except UserError:
        return None


def default_candidates(hardware: Hardware) -> list[str]:
    """The candidates on this machine: on a GPU, the recipes that run natively there, if any do."""
    if hardware.device == "cpu":
        return list(CANDIDATES)
    native = [name for name in RECIPES if resolve(name, hardware).native]
    return [*native, PLAIN] if native else list(CANDIDATES)


def candidates(names: Sequence[str]) -> list[str]:
    """The quantized recipes among `names`. Raises a UserError if there is none, or if one is a
    file: shipped recipes quantize all layers alike."""
    for name in names:
        load_recipe(name)
        if name.endswith(".toml"):
            raise UserError(
                f"--recipes: {quoted(name)} is a file. A layer's recipe must be a shipped one."
            )
    found = list(dict.fromkeys(name for name in names if load_recipe(name).is_fp8))
    if not found:
        raise UserError("--recipes names no recipe that is quantized. Example: nvfp4,mxfp8,bf16")
    return found


def _table(measured: Sensitivity | None, path: str) -> Quantizers | None:
    """A layer's quantizers; None where a recipe leaves it out."""
    if measured is None or path not in measured.layers:
        return None
    return measured.plan.layer(path).quantizers


@dataclass(frozen=True, kw_only=True)
class Target:
    """The target of a tuned recipe: a gap as a share of the loss, bits, or a share of bf16's time;
    and its file."""

    budget: float | None = None
    bits: float | None = None
    time: float | None = None
    path: Path

    def __str__(self) -> str:
        if self.budget is not None:
            return f"a loss gap of {100 * self.budget:g} % at most"
        if self.time is not None:
            return f"{100 * self.time:g} % of bf16's time at most"
        return f"{self.bits:g} bits at most"

    def is_timed(self, hardware: Hardware) -> bool:
        """Whether times are to be measured: for `time`, and for a `budget` on a GPU."""
        on_gpu = hardware.device != "cpu"
        return self.time is not None or (self.budget is not None and on_gpu)


def parse_target(budget: str | None, bits: float | None, time: str | None, out: str) -> Target:
    """Parse the command's target. Raises a UserError unless it is one of a gap, a number of bits
    and a time, and if `out` is no TOML file or exists."""
    if sum(one is not None for one in (budget, bits, time)) != 1:
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
        UserError: the law does not cover a recipe, or no assignment meets the target; it names the
            closest.
    """
    for one in forecast.recipes:
        if one.reason:
            raise UserError(f"{one.recipe}: {one.reason}. Leave it out of --recipes.")
    law, loss = forecast.law, forecast.trained.loss
    if target.budget is not None:
        found = choices.cheapest(law, target.budget * loss)
        if found is None:
            closest = choices.best(law, math.inf)
            assert closest is not None  # no recipe costs more
            raise UserError(
                f"--budget {100 * target.budget:g}%: the smallest gap of these recipes is "
                f"{closest.gap.mean / loss:.2%}, with {closest.bits:.2f} bits. Give more, or bf16 "
                "among --recipes."
            )
        return found
    limit = target.bits if target.time is None else target.time
    assert limit is not None
    found = choices.best(law, limit)
    if found is None:
        least = float(choices.cost.min(axis=1).sum())
        asked = f"--bits {limit:g}" if target.time is None else f"--time {100 * limit:g}%"
        needed = f"{least:.2f}" if target.time is None else f"{least:.1%} of bf16's time here"
        raise UserError(
            f"{asked}: these recipes need at least {needed}. Give more, or other --recipes."
        )
    return found


def command(run: str, out: str) -> str:
    """The command that trains a model like the run's in the recipe."""
    file = Path(run) / "run.toml"
    config = ["--config", str(file)] if file.is_file() else []
    own = ["--out", f"{out.removesuffix('.toml')}-run"] if config else []
    return " ".join(map(shell_quoted, ["fp8stack", "pretrain", *config, "--recipe", out, *own]))


def as_text(found: Assignment, choices: Choices, forecast: Forecast) -> list[str]:
    """A table of the tuned recipe and of each candidate in all layers; the layers by recipe."""
    named = [("tuned", found)]
    named += [(n, choices.uniform(n, forecast.law)) for n in (*choices.measured, PLAIN)]
    loss = forecast.trained.loss
    costs = ["bits of a GEMM", *["time, % of bf16"] * (choices.times is not None)]
    rows = []
    for name, one in named:
        times = [] if one.time is None else [f"{100 * one.time:.1f}"]
        rows.append([name, f"{one.bits:.2f}", *times, *shares(one.gap, loss)])
    of: dict[str, list[str]] = {}
    for path, (forward, backward) in found.layers.items():
        which = forward if forward == backward else f"{forward}, backward {backward}"
        of.setdefault(which, []).append(path)
    table = aligned([["recipe", *costs, *GAP], *rows])
    layers = (f"{which}: {', '.join(paths)}" for which, paths in of.items())
    return [*table, "", *layers, "", f"gap: {FIRST_QUARTER}"]


def write(found: Assignment, forecast: Forecast, target: Target) -> None:
    """Write the recipe file. Raises a StorageError if the disk is full or cannot be written."""
    time = "" if found.time is None else f", {found.time:.1%} of bf16's time"
    description = (
        f"tuned for {forecast.trained.name}: {target}. {found.bits:.2f} bits{time}, a gap of "
        f"{found.gap.mean / forecast.trained.loss:.2%} is expected ({FIRST_QUARTER})"
    )
    with storage_errors(target.path):
        target.path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target.path, as_toml(found, description).encode())


def as_toml(found: Assignment, description: str) -> str:
    """A recipe file: the most common recipe, and an entry for each layer with another."""
    counts = Counter(pair for pair in found.layers.values() if pair[0] != PLAIN)
    base = counts.most_common(1)[0][0] if counts else (PLAIN, PLAIN)
    lines = toml_lines({"description": description} | _keys("like", base))
    for path, pair in found.layers.items():
        if pair != base:
            lines += ["", "[[layers]]", *toml_lines({"match": path} | _keys("recipe", pair))]
    return "\n".join(lines) + "\n"


def _keys(key: str, pair: Pair) -> dict[str, str]:
    """The keys of a recipe file for a pair, the forward pass's recipe under `key`."""
    return {key: pair[0]} | _overrides(pair)


def _overrides(pair: Pair) -> dict[str, str]:
    """What the second's backward pass changes in the first's recipe."""
    forward, backward = pair
    if forward == backward:
        return {}
    return {"backward": "high_precision" if backward == PLAIN else backward}
