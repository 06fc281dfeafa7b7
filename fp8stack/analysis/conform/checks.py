"""The rows of the table: an implementation, an oracle, inputs, and how results have to agree."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fp8stack.analysis.conform import te_casts as te
from fp8stack.layers import Backend, build_backend
from fp8stack.layers.cudnn import load_cudnn
from fp8stack.precision import Hardware, Plan, Recipe, resolve

Facts = dict[str, Any]
Results = Mapping[str, Any]
"""Results by name: tensors, or of an oracle `Bounded` values."""

ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
_SHOWN = 5
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Context:
    """The machine that rows run on, and their options.

    Attributes:
        hardware: the machine; its `device` holds the tensors.
        quick: the short form: smaller inputs, nothing compiled.
        compiler: torch.compile's backend in the rows that compile.
        seed: the seed of all random inputs.
        recipe: check what this recipe uses, in place of everything.
    """

    hardware: Hardware
    quick: bool = False
    compiler: str = "inductor"
    seed: int = 0
    recipe: Recipe | None = None

    @property
    def device(self) -> str:
        """The device of the tensors, see `Hardware.device`."""
        return self.hardware.device

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` compiled as one graph, from scratch."""
        torch._dynamo.reset()
        compiled: Callable[..., Any] = torch.compile(
            function, fullgraph=True, dynamic=False, backend=self.compiler
        )
        return compiled

    def need_te(self, scaling: str) -> None:
        """Skip the row unless TE works here and has a GEMM for this scaling."""
        if not self.hardware.has_te:
            raise Skipped(self.hardware.te_problem or "Transformer Engine is not installed")
        load_cudnn()
        if reason := te.serves(scaling):
            raise Skipped(reason)


class Skipped(Exception):
    """The reason why a row does not apply."""


class Bounded(NamedTuple):
    """An exact result and how far a computed one may be off, elementwise in float64.

    Attributes:
        value: the exact result.
        error: the error of the sum.
        rounded: the magnitudes that are rounded to the dtype of the computed result.
    """

    value: Tensor
    error: Tensor
    rounded: Tensor


class Share(NamedTuple):
    """A result in high precision, and the largest norm of the error as a share of its own norm."""

    value: Tensor
    error: float


def equal(actual: Results, expected: Results, case: Any = None) -> Facts:
    """Compare results bit for bit, but for the bits of a NaN; None is not compared. A difference is
    reported with its element of `case`, if that is a mapping with the name, else with its index."""
    checked = differing = 0
    first: list[str] = []
    for name, result in actual.items():
        if result is None:
            continue
        result, target = _on_cpu(result), _on_cpu(expected[name])
        if result.shape != target.shape or result.dtype != target.dtype:
            differing += target.numel()
            first.append(f"{name}: {_kind(result)} instead of {_kind(target)}")
        else:
            odd = (_bits(result) != _bits(target)).nonzero()
            differing += len(odd)
            for index in odd[: max(0, _SHOWN - len(first))]:
                at = tuple(index.tolist())
                x = case.get(name) if isinstance(case, Mapping) else None
                place = f"{list(at)}" if x is None else f" of {float(x[at]):.9g}"
                first.append(f"{name}{place}: {_shown(result[at])}, not {_shown(target[at])}")
        checked += target.numel()
    assert checked, "nothing was compared"
    facts: Facts = {"holds": differing == 0, "checked": checked, "differing": differing}
    return facts | ({"first": first[:_SHOWN]} if first else {})


def within(actual: Results, expected: Results, case: Any = None) -> Facts:
    """Check that each result is near an exact one, `Bounded` or `Share`. `worst` is the largest
    error as a share of its bound."""
    worst = {}
    for name, target in expected.items():
        result = actual[name].detach()
        value = result.double().cpu()
        if value.shape != target.value.shape:
            worst[name] = np.inf
            continue
        off = (value - target.value).abs()
        if isinstance(target, Share):
            shares = off.norm() / (target.error * target.value.norm())
        else:
            bound = target.error + 1.01 * ROUNDOFF[result.dtype] * target.rounded
            shares = off / bound.clamp_min(1e-300)
        shares = shares.nan_to_num(nan=np.inf)
        worst[name] = float(f"{float(shares.max() if shares.numel() else 0):.3g}")
    holds = max(worst.values()) <= 1.0
    return {"holds": holds, "worst": {k: min(v, 1e9) for k, v in worst.items()}}


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        group: its group, such as "casts".
        name: what is computed, and by what.
        implementation: computes the results of a case.
        oracle: the expected results of a case, by the same names.
        inputs: the cases by name; may raise `Skipped`, as `implementation` may.
        agrees: compares the results of a case with the expected ones: `equal` to the bit, or
            `within` bounds.
    """

    group: str
    name: str
    implementation: Callable[[Any], Results]
    oracle: Callable[[Any], Results]
    inputs: Callable[[], Iterable[tuple[str, Any]]]
    agrees: Callable[[Results, Results, Any], Facts] = equal

    def __str__(self) -> str:
        return f"{self.group}: {self.name}"

    def compare(self) -> Facts:
        """The facts of all cases. Raises `Skipped`, or what the implementation raises."""
        comparisons = {}
        for name, case in self.inputs():
            actual = self.implementation(case)
            comparisons[name] = self.agrees(actual, self.oracle(case), case)
        return merged(comparisons)

    def run(self) -> Facts:
        """The row of the report: `group`, `check`, `verdict`, `why`, `seconds`, and the facts. It
        never raises."""
        start = time.perf_counter()
        verdict, reason, facts = "pass", "", {}
        try:
            facts = self.compare()
        except Skipped as skipped:
            verdict, reason = "skipped", str(skipped)
        except Exception as error:
            text = str(error).strip().partition("\n")[0]
            verdict, reason = "FAIL", f"{type(error).__name__}: {text[:300]}"
            facts = {"traceback": traceback.format_exc()[-3000:]}
        else:
            if not facts["holds"]:
                verdict, reason = "FAIL", _difference(facts)
        seconds = round(time.perf_counter() - start, 3)
        row = {"group": self.group, "check": self.name, "verdict": verdict, "why": reason}
        return row | {"seconds": seconds} | facts


def merged(comparisons: Mapping[str, Facts]) -> Facts:
    """Combine the comparisons of several cases: counts are added, first differences keep the name
    of their case, and of errors the largest stays."""
    facts: Facts = {"holds": all(row["holds"] for row in comparisons.values())}
    for count in ("checked", "differing"):
        if any(count in row for row in comparisons.values()):
            facts[count] = sum(row[count] for row in comparisons.values())
    for row in comparisons.values():
        for name, share in row.get("worst", {}).items():
            worst = facts.setdefault("worst", {})
            worst[name] = max(share, worst.get(name, 0.0))
    first = [
        f"{name}: {line}".removeprefix(": ")
        for name, row in comparisons.items()
        for line in row.get("first", [])
    ]
    return facts | ({"first": first[:_SHOWN]} if first else {})


def _difference(facts: Facts) -> str:
    """The reason why a row does not hold, in a line."""
    if "worst" in facts:
        return f"errors as shares of their bounds: {facts['worst']}"[:400]
    return f"{facts['differing']} of {facts['checked']} differ: {'; '.join(facts['first'])}"[:400]


def _on_cpu(x: Any) -> Tensor:
    """A contiguous tensor on the CPU; eight-bit numbers as bytes."""
    if not isinstance(x, Tensor):
        x = torch.from_numpy(np.ascontiguousarray(x).reshape(np.shape(x)))
    on_cpu: Tensor = x.detach().cpu().contiguous()
    return on_cpu.view(torch.uint8) if on_cpu.element_size() == 1 else on_cpu


def _bits(x: Tensor) -> Tensor:
    if x.is_floating_point():
        x = torch.where(x.isnan(), torch.nan, x)
    return x.contiguous().view(_INTEGERS[x.element_size()])


def _kind(x: Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)}"


def _shown(x: Tensor) -> str:
    """A number with its bits, since different numbers may print alike."""
    size = x.element_size()
    bits = int(x.view(_INTEGERS[size])) & ((1 << 8 * size) - 1)
    value = "" if x.dtype == torch.uint8 else f"{float(x):.9g} "
    return f"{value}(0x{bits:0{2 * size}x})"


def plan_of(recipe: Recipe, context: Context, backend: str) -> Plan:
    """The plan that runs `recipe` on `backend`. Skips the row if another recipe or backend would
    run."""
    plan = resolve(recipe, context.hardware, backend)
    if plan.backend != backend or plan.recipe.quantizers != recipe.quantizers:
        raise Skipped("; ".join(plan.reasons))
    return plan


def backend_for(plan: Plan, shapes: Mapping[str, tuple[int, int]], groups: int = 0) -> Backend:
    """The backend of layers of these shapes, grouped ones if there are `groups`. Skips the row if a
    layer would not be in FP8, or would run on another backend."""
    plan = plan.for_layers(shapes, grouped=dict.fromkeys(shapes, groups) if groups else {})
    for layer in plan.layers:
        if plan.is_fp8 and not layer.fp8:
            raise Skipped(layer.sentence)
        if plan.backend_of(layer) != plan.backend:
            raise Skipped(layer.why)
    return build_backend(plan)


def mark_weights_changed(module: nn.Module) -> None:
    """Make the next pass compute new scales for the weights, also in compiled code: an optimizer
    step without gradients marks them as changed."""
    module.zero_grad(set_to_none=True)
    torch.optim.SGD(module.parameters(), lr=1.0).step()
