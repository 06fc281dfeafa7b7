"""`fp8stack tune`: the cheapest recipe for each layer whose forecast stays within a budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp

from fp8stack.config import percent
from fp8stack.errors import UserError, quoted
from fp8stack.forecast.forecast import Forecast
from fp8stack.forecast.law import Gap, Law
from fp8stack.forecast.sensitivity import Sensitivity
from fp8stack.formats import FORMATS, Quantizer, Quantizers
from fp8stack.io import write_atomically

PLAIN, PLAIN_BITS = "bf16", 16.0
"""What a layer that is not quantized runs in."""
CANDIDATES = ("nvfp4", "mxfp4", "mxfp6_e2m3", "mxfp8", PLAIN)
GEMMS = ("fprop", "dgrad", "wgrad")
_ROUNDS = 30

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The recipes of each layer's forward and backward pass, by module path, and what they come
    to."""

    layers: dict[str, tuple[str, str]]
    bits: float  # of a GEMM, the mean over all by their multiplications
    forward: float  # KL in nats per token
    backward: float  # relative squared error, see `Sensitivity`
    gap: Gap


def bits_of(table: Quantizers | None) -> dict[str, float]:
    """The bits of a linear's GEMMs by their names: those of the wider operand, at whose rate tensor
    cores multiply; None is not quantized."""

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
    """What each layer costs in each candidate: bits, divergence and error of the backward pass. A
    candidate is a recipe for the forward pass and one for the backward pass."""

    def __init__(self, forecast: Forecast, plain: bool = True) -> None:
        self.measured = {one.recipe: one.sensitivity for one in forecast.recipes}
        sizes = {path: size for one in self.measured.values() for path, size in one.sizes.items()}
        self.layers = list(sizes)
        self.weights = np.array([*sizes.values()], dtype=float) / max(1, sum(sizes.values()))
        names = [*self.measured]
        self.pairs = [(one, other) for one in names for other in names]
        if plain:
            self.pairs += [(PLAIN, PLAIN), *((name, PLAIN) for name in names)]
        figures = np.array([[self._cost(path, *p) for p in self.pairs] for path in self.layers])
        self.bits, self.forward, self.backward = np.moveaxis(figures, -1, 0)

    def _cost(self, path: str, forward: str, backward: str) -> tuple[float, float, float]:
        """Bits, divergence and error of one layer. Divergences are such that those of all layers
        add up to what they come to together."""
        one, other = self.measured.get(forward), self.measured.get(backward)
        ahead, back = bits_of(_table(one, path)), bits_of(_table(other, path))
        divergence = 0.0
        if one is not None and (alone := sum(one.layers.values())):
            divergence = one.layers.get(path, 0.0) * one.forward / alone
        return (
            (ahead["fprop"] + back["dgrad"] + back["wgrad"]) / 3,
            divergence,
            0.0 if other is None else other.backward_layers.get(path, 0.0),
        )

    def assigned(self, chosen: Sequence[int], law: Law) -> Assignment:
        """The assignment that takes these candidates, one for each layer."""
        rows = np.arange(len(self.layers))
        forward = float(self.forward[rows, chosen].sum())
        backward = float((self.backward[rows, chosen] * self.weights).sum())
        return Assignment(
            layers={path: self.pairs[n] for path, n in zip(self.layers, chosen, strict=True)},
            bits=float((self.bits[rows, chosen] * self.weights).sum()),
            forward=forward,
            backward=backward,
            gap=law.gap(forward, backward),
        )

    def uniform(self, name: str, law: Law) -> Assignment:
        """The assignment that takes one recipe everywhere."""
        return self.assigned([self.pairs.index((name, name))] * len(self.layers), law)

    def cheapest(self, law: Law, budget: float) -> Assignment | None:
        """The assignment with the fewest bits whose gap is at most `budget` nats per token; None if
        there is none.

        An integer program, for HiGHS by way of SciPy. The law is a power of the divergence, so it
        is solved with the law's slope at a divergence, and again at the one found, until that
        stays.
        """
        return self._solved(law, self.bits * self.weights[:, None], budget=budget)

    def best(self, law: Law, bits: float) -> Assignment | None:
        """The assignment with the least gap whose GEMMs have at most so many bits."""
        return self._solved(law, None, bits=bits)

    def _solved(
        self,
        law: Law,
        cost: Array | None,
        budget: float | None = None,
        bits: float | None = None,
    ) -> Assignment | None:
        count, width = self.bits.shape
        one_each = LinearConstraint(np.kron(np.eye(count), np.ones(width)), 1, 1)
        divergence, best = float(self.forward.max(axis=1).sum()) or 1e-9, None
        for _ in range(_ROUNDS):
            slope = law.forward * divergence ** (law.power - 1)
            gaps = slope * self.forward + law.backward * self.backward * self.weights[:, None]
            limits = [one_each]
            if budget is not None:
                limits.append(LinearConstraint(gaps.ravel()[None], -np.inf, budget))
            if bits is not None:
                each = (self.bits * self.weights[:, None]).ravel()[None]
                limits.append(LinearConstraint(each, -np.inf, bits))
            found = milp(
                (gaps if cost is None else cost).ravel(),
                constraints=limits,
                integrality=np.ones(count * width),
                bounds=Bounds(0, 1),
            )
            if found.x is None:
                divergence *= 2 if law.power < 1 else 0.5
                continue
            made = self.assigned(found.x.reshape(count, width).argmax(axis=1).tolist(), law)
            within = budget is None or made.gap.mean <= budget * (1 + 1e-6)
            if within and (best is None or _better(made, best, cost is None)):
                best = made
            if abs(made.forward - divergence) <= 1e-3 * divergence:
                break
            divergence = max(made.forward, 1e-12)
        return best


def _better(one: Assignment, other: Assignment, by_gap: bool) -> bool:
    return one.gap.mean < other.gap.mean if by_gap else one.bits < other.bits


def _table(measured: Sensitivity | None, path: str) -> Quantizers | None:
    """A layer's quantizers; None where a recipe leaves it out."""
    if measured is None or path not in measured.layers:
        return None
    return measured.plan.layer(path).quantizers


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a tuned recipe is to keep to: a gap as a share of the loss, or bits; and its file."""

    budget: float | None
    bits: float | None
    path: Path

    def __str__(self) -> str:
        if self.budget is not None:
            return f"a loss gap of {100 * self.budget:g} % at most"
        return f"{self.bits:g} bits at most"


def ask(budget: str | None, bits: float | None, out: str) -> Asked:
    """What the command asks for. Raises a UserError unless it is a share or a number of bits, and
    for a file that is no TOML file or is there."""
    if (budget is None) == (bits is None):
        raise UserError("Give either --budget, such as 0.2%, or --bits, such as 6.")
    path = Path(out)
    if path.suffix != ".toml":
        raise UserError(f"--out {quoted(out)}: a recipe is a TOML file. Example: tuned.toml")
    if path.exists():
        raise UserError(f"{quoted(out)} is there. Give another --out, or remove it.")
    share = None if budget is None else percent("--budget", budget, "0.2%") / 100
    if bits is not None and not 0 < bits <= PLAIN_BITS:
        raise UserError(f"--bits {bits:g}: a GEMM has more than 0 and at most {PLAIN_BITS:g}.")
    return Asked(budget=share, bits=bits, path=path)


def tuned(forecast: Forecast, asked: Asked, *, plain: bool = True) -> Assignment:
    """The assignment that is asked for; with `plain` layers may stay in bf16.

    Raises:
        UserError: the law cannot tell of a recipe, or nothing meets what is asked; it names the
            closest.
    """
    for one in forecast.recipes:
        if one.reason:
            raise UserError(f"{one.recipe}: {one.reason}. Leave it out of --recipes.")
    choices, law, loss = Choices(forecast, plain), forecast.law, forecast.trained.loss
    if asked.budget is not None:
        found = choices.cheapest(law, asked.budget * loss)
        if found is None:
            closest = choices.best(law, PLAIN_BITS)
            assert closest is not None  # no recipe has more bits
            raise UserError(
                f"--budget {100 * asked.budget:g}%: the closest that these recipes come to is "
                f"{closest.gap.mean / loss:.2%}, with {closest.bits:.2f} bits. Give more, or bf16 "
                "among --recipes."
            )
        return found
    assert asked.bits is not None
    found = choices.best(law, asked.bits)
    if found is None:
        least = float(choices.bits.min(axis=1) @ choices.weights)
        raise UserError(
            f"--bits {asked.bits:g}: the fewest that these recipes have is {least:.2f}. Give more, "
            "or --recipes with fewer."
        )
    return found


def beside(forecast: Forecast) -> dict[str, Assignment]:
    """Each candidate in every layer, to compare with."""
    choices = Choices(forecast)
    return {name: choices.uniform(name, forecast.law) for name in (*choices.measured, PLAIN)}


def write(found: Assignment, forecast: Forecast, asked: Asked) -> None:
    """Write the recipe file. Raises a StorageError if the disk is full or cannot be written."""
    told = (
        f"tuned for {forecast.trained.name}: {asked}. {found.bits:.2f} bits, a gap of "
        f"{found.gap.mean / forecast.trained.loss:.2%} is expected"
    )
    asked.path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(asked.path, as_toml(found, told).encode())


def as_toml(found: Assignment, description: str) -> str:
    """A recipe file: the recipe that most layers have, and an entry for each of the others."""
    counts = Counter(pair for pair in found.layers.values() if pair[0] != PLAIN)
    base = counts.most_common(1)[0][0] if counts else (PLAIN, PLAIN)
    lines = [f"description = {_quoted(description)}", f'like = "{base[0]}"', *_backward(base)]
    for path, pair in found.layers.items():
        if pair != base:
            lines += ["", "[[layers]]", f"match = {_quoted(path)}", f'recipe = "{pair[0]}"']
            lines += _backward(pair)
    return "\n".join(lines) + "\n"


def _backward(pair: tuple[str, str]) -> list[str]:
    forward, backward = pair
    if forward == backward:
        return []
    return [f'backward = "{"high_precision" if backward == PLAIN else backward}"']


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
