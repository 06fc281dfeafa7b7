"""Defines checks, runs them, and compares their results."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fp8stack.analysis.conform import te_casts as te
from fp8stack.layers import Backend, build_backend
from fp8stack.layers.cudnn import load_cudnn
from fp8stack.numerics.error import sqnr_db
from fp8stack.precision import Hardware, Plan, Recipe, resolve

Facts = dict[str, Any]
Pairs = Mapping[str, tuple[Tensor, Tensor]]

EXACT_DB = 200.0  # the SQNR of an exact result, since JSON has neither infinity nor NaN
_SHOWN = 5
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Context:
    """The machine that checks run on, and their options.

    Attributes:
        hardware: the machine; its `device` holds the tensors.
        quick: the short form: smaller inputs, nothing compiled.
        compiler: torch.compile's backend in the checks that compile.
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
        """Skip the check unless TE works here and has a GEMM for this scaling."""
        if not self.hardware.has_te:
            raise Skipped(self.hardware.te_problem or "Transformer Engine is not installed")
        load_cudnn()
        if reason := te.serves(scaling):
            raise Skipped(reason)


class Skipped(Exception):
    """The reason why a check does not apply."""


@dataclass(frozen=True)
class Check:
    """A check. `run` returns facts; "holds" among them is the verdict, if any."""

    name: str
    run: Callable[[], Facts]

    def __str__(self) -> str:
        return self.name


def run_check(check: Check) -> Facts:
    """The result of a check, or why it was skipped or failed. It never raises."""
    start = time.perf_counter()
    try:
        facts = check.run()
    except Skipped as reason:
        facts = {"skipped": str(reason)}
    except Exception as error:
        text = str(error).strip().partition("\n")[0]
        trace = traceback.format_exc()[-3000:]
        facts = {"failed": f"{type(error).__name__}: {text[:300]}", "traceback": trace}
    return {"check": check.name, "seconds": round(time.perf_counter() - start, 3), **facts}


def broken(row: Facts) -> bool:
    """Whether a check failed or does not hold, by its row."""
    return "failed" in row or row.get("holds") is False


def brief(row: Facts) -> str:
    """The reason why a row does not hold or was skipped, in a line; "" if it holds."""
    if "skipped" in row:
        return str(row["skipped"])
    if "failed" in row:
        return str(row["failed"])
    if not broken(row):
        return ""
    if "differing" in row:
        first = "; ".join(row.get("first", []))
        return f"{row['differing']} of {row['checked']} differ: {first}"[:400]
    facts = {k: v for k, v in row.items() if k not in ("check", "group", "seconds", "holds")}
    return f"does not hold: {facts}"[:400]


def same_bits(pairs: Pairs, **inputs: Tensor) -> Facts:
    """Compare tensors with the expected ones bit for bit: `{name: (actual, expected)}`. A
    difference is reported with its element of the `inputs`, if one has that name, else with its
    place."""
    return _compared(pairs, _bits, inputs)


def same_values(pairs: Pairs) -> Facts:
    """Like `same_bits`, but for numbers: zeros are equal whatever their signs, and so are all
    NaN."""
    return _compared(pairs, lambda x: _bits(torch.where(x.isnan(), torch.nan, x) + 0.0), {})


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(_INTEGERS[x.element_size()])


def _compared(
    pairs: Pairs, bits: Callable[[Tensor], Tensor], inputs: Mapping[str, Tensor]
) -> Facts:
    checked = differing = 0
    first: list[str] = []
    for name, (actual, expected) in pairs.items():
        actual, expected = _plain(actual), _plain(expected)
        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            differing += expected.numel()
            first.append(f"{name}: {_kind(actual)} instead of {_kind(expected)}")
        else:
            odd = (bits(actual) != bits(expected)).nonzero()
            differing += len(odd)
            for index in odd[: max(0, _SHOWN - len(first))]:
                at = tuple(index.tolist())
                place = f" = {float(inputs[name][at]):.9g}" if name in inputs else list(at)
                first.append(f"{name}{place}: {_shown(actual[at])}, not {_shown(expected[at])}")
        checked += expected.numel()
    facts: Facts = {"holds": differing == 0, "checked": checked, "differing": differing}
    return facts | ({"first": first[:_SHOWN]} if first else {})


def _plain(x: Tensor) -> Tensor:
    """Eight-bit numbers as bytes on the CPU."""
    x = x.detach().cpu().contiguous()
    return x.view(torch.uint8) if x.element_size() == 1 else x


def _kind(x: Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)}"


def _shown(x: Tensor) -> str:
    """A number with its bits, since different numbers may print alike."""
    size = x.element_size()
    bits = int(x.view(_INTEGERS[size])) & ((1 << 8 * size) - 1)
    value = "" if x.dtype == torch.uint8 else f"{float(x):.9g} "
    return f"{value}(0x{bits:0{2 * size}x})"


def merged(comparisons: Mapping[str, Facts]) -> Facts:
    """Combine several comparisons: counts are added, first differences keep their part's name."""
    facts: Facts = {
        "holds": all(row["holds"] for row in comparisons.values()),
        "checked": sum(row["checked"] for row in comparisons.values()),
        "differing": sum(row["differing"] for row in comparisons.values()),
    }
    first = [
        f"{name}: {line}" for name, row in comparisons.items() for line in row.get("first", [])
    ]
    return facts | ({"first": first[:_SHOWN]} if first else {})


def agreement_db(result: Tensor, expected: Tensor) -> float:
    """The signal-to-noise ratio of a result to the expected one in dB, within `EXACT_DB` of 0; the
    lowest if one is not finite."""
    reference = expected.double()
    noise = float((result.double() - reference).square().sum())
    if noise == 0:
        return EXACT_DB
    ratio = sqnr_db(float(reference.square().sum()), noise)
    return -EXACT_DB if ratio is None else max(-EXACT_DB, min(EXACT_DB, round(ratio, 2)))


def as_tensor(array: Any) -> Tensor:
    """A NumPy array or number as a contiguous tensor of its shape."""
    return torch.from_numpy(np.ascontiguousarray(array).reshape(np.shape(array)))


def plan_of(recipe: Recipe, context: Context, backend: str) -> Plan:
    """The plan that runs `recipe` on `backend`. Skips the check if another recipe or backend would
    run."""
    plan = resolve(recipe, context.hardware, backend)
    if plan.backend != backend or plan.recipe.quantizers != recipe.quantizers:
        raise Skipped("; ".join(plan.reasons))
    return plan


def backend_for(plan: Plan, shapes: Mapping[str, tuple[int, int]]) -> Backend:
    """The backend of layers of these shapes. Skips the check if one would not be in FP8."""
    plan = plan.for_layers(shapes)
    unserved = [layer.sentence for layer in plan.layers if plan.is_fp8 and not layer.fp8]
    if unserved:
        raise Skipped("; ".join(unserved))
    return build_backend(plan)


def mark_weights_changed(module: nn.Module) -> None:
    """Make the next pass compute new scales for the weights, also in compiled code: an optimizer
    step without gradients marks them as changed."""
    module.zero_grad(set_to_none=True)
    torch.optim.SGD(module.parameters(), lr=1.0).step()
