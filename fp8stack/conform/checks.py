"""What a check is, how it is run, and how what it found is compared."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8stack.backends import Backend, build_backend
from fp8stack.conform import te
from fp8stack.precision import Hardware, Plan, Recipe, resolve

Facts = dict[str, Any]
Pairs = Mapping[str, tuple[Tensor, Tensor]]

EXACT_DB = 200.0  # what an error of nothing is called, infinity being no JSON
_SHOWN = 5
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Context:
    """Where checks run, and on what.

    Attributes:
        hardware: the machine; its `device` is where tensors live.
        quick: the short form: smaller inputs, nothing compiled.
        compiler: torch.compile's backend in the checks that compile.
        seed: of all inputs that are random.
    """

    hardware: Hardware
    quick: bool = False
    compiler: str = "inductor"
    seed: int = 0

    @property
    def device(self) -> str:
        """Where tensors live: "cuda" or "cpu"."""
        return self.hardware.device

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` compiled as one graph, from scratch."""
        torch._dynamo.reset()
        made: Callable[..., Any] = torch.compile(
            function, fullgraph=True, dynamic=False, backend=self.compiler
        )
        return made

    def need_te(self, scaling: str) -> None:
        """Skip the check unless TE can be used here and has a GEMM for this scaling."""
        if not self.hardware.has_te:
            raise Skipped(self.hardware.te_problem or "Transformer Engine is not installed")
        if reason := te.serves(scaling):
            raise Skipped(reason)


class Skipped(Exception):
    """Why a check does not apply here."""


@dataclass(frozen=True)
class Check:
    """One thing to find out. `run` returns facts; "holds" among them is the verdict, if any."""

    name: str
    run: Callable[[], Facts]

    def __str__(self) -> str:
        return self.name


def run_check(check: Check) -> Facts:
    """What the check found, or why it was skipped or failed; it never raises."""
    start = time.perf_counter()
    try:
        facts = check.run()
    except Skipped as reason:
        facts = {"skipped": str(reason)}
    except Exception as error:
        said = str(error).strip().partition("\n")[0]
        trace = traceback.format_exc()[-3000:]
        facts = {"failed": f"{type(error).__name__}: {said[:300]}", "traceback": trace}
    return {"check": check.name, "seconds": round(time.perf_counter() - start, 3), **facts}


def broken(row: Facts) -> bool:
    """Whether a row is of a check that failed, or does not hold."""
    return "failed" in row or row.get("holds") is False


def brief(row: Facts) -> str:
    """What is wrong with a row, or why it was skipped, in a line; "" if it holds."""
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


def same_bits(pairs: Pairs) -> Facts:
    """Whether each tensor equals its expected one to the bit: `{name: (found, expected)}`."""
    return _compared(pairs, _bits)


def same_values(pairs: Pairs) -> Facts:
    """Like `same_bits`, for numbers: zeros are equal whatever their signs, and so are all NaN."""
    return _compared(pairs, lambda x: _bits(torch.where(x.isnan(), torch.nan, x) + 0.0))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(_INTEGERS[x.element_size()])


def _compared(pairs: Pairs, bits: Callable[[Tensor], Tensor]) -> Facts:
    checked = differing = 0
    first: list[str] = []
    for name, (found, expected) in pairs.items():
        found, expected = _plain(found), _plain(expected)
        if found.shape != expected.shape or found.dtype != expected.dtype:
            differing += expected.numel()
            first.append(f"{name}: {_kind(found)} instead of {_kind(expected)}")
        else:
            odd = (bits(found) != bits(expected)).nonzero()
            differing += len(odd)
            for index in odd[: max(0, _SHOWN - len(first))]:
                at = tuple(index.tolist())
                first.append(f"{name}{list(at)}: {_shown(found[at])}, not {_shown(expected[at])}")
        checked += expected.numel()
    facts: Facts = {"holds": differing == 0, "checked": checked, "differing": differing}
    return facts | ({"first": first[:_SHOWN]} if first else {})


def _plain(x: Tensor) -> Tensor:
    """On the CPU, numbers of eight bits as bytes."""
    x = x.detach().cpu().contiguous()
    return x.view(torch.uint8) if x.element_size() == 1 else x


def _kind(x: Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)}"


def _shown(x: Tensor) -> str:
    """A number with its bits, since two that differ may print alike."""
    size = x.element_size()
    bits = int(x.view(_INTEGERS[size])) & ((1 << 8 * size) - 1)
    value = "" if x.dtype == torch.uint8 else f"{float(x):.9g} "
    return f"{value}(0x{bits:0{2 * size}x})"


def merged(parts: Mapping[str, Facts]) -> Facts:
    """Several comparisons as one: counts are added, first differences keep their part's name."""
    facts: Facts = {
        "holds": all(part["holds"] for part in parts.values()),
        "checked": sum(part["checked"] for part in parts.values()),
        "differing": sum(part["differing"] for part in parts.values()),
    }
    first = [f"{name}: {line}" for name, part in parts.items() for line in part.get("first", [])]
    return facts | ({"first": first[:_SHOWN]} if first else {})


def sqnr_db(found: Tensor, expected: Tensor) -> float:
    """How far the error of `found` is below `expected`, in dB; NaN if one is not finite."""
    reference = expected.double()
    error = float((found.double() - reference).square().sum())
    power = float(reference.square().sum())
    if not math.isfinite(error) or not math.isfinite(power) or power == 0:
        return EXACT_DB if error == 0 else math.nan
    return min(EXACT_DB, round(10 * math.log10(power / error), 2)) if error else EXACT_DB


def plan_of(recipe: Recipe, context: Context, backend: str) -> Plan:
    """The plan that runs `recipe` on `backend`; skips the case where something else would run."""
    plan = resolve(recipe, context.hardware, backend)
    if plan.backend != backend or plan.recipe.quantizers != recipe.quantizers:
        raise Skipped("; ".join(plan.reasons))
    return plan


def backend_for(plan: Plan, shapes: Mapping[str, tuple[int, int]]) -> Backend:
    """The backend of layers of these shapes; skips the case where one would not be in FP8."""
    plan = plan.for_layers(shapes)
    unserved = [layer.sentence for layer in plan.layers if plan.is_fp8 and not layer.fp8]
    if unserved:
        raise Skipped("; ".join(unserved))
    return build_backend(plan)


def gradients(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The gradient of each parameter that has one, by name."""
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            yield name, parameter.grad


def mark_weights_changed(module: nn.Module) -> None:
    """Let the next pass take new scales for the weights, in compiled code too: an optimizer's step
    says that they changed, and this one finds no gradient."""
    module.zero_grad(set_to_none=True)
    torch.optim.SGD(module.parameters(), lr=1.0).step()
