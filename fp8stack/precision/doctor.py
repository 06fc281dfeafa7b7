"""The answer of `fp8stack doctor`: how each recipe runs on a machine, and the number formats."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fp8stack.common.formats import FORMATS, Format
from fp8stack.common.tables import rich_table
from fp8stack.common.terminal import printable
from fp8stack.precision import Hardware, Plan, resolve
from fp8stack.precision.hardware import TE_REMEDY
from fp8stack.precision.native_gemms import kind_of
from fp8stack.precision.rules import shipped

if TYPE_CHECKING:
    from rich.console import Console


def plans(hardware: Hardware) -> dict[str, Plan]:
    """The plan of every recipe on `hardware`, "auto" first."""
    return {name: resolve(name, hardware) for name in ["auto", *shipped()]}


def as_json(hardware: Hardware) -> dict[str, Any]:
    """The answer as JSON data: `hardware`, `recipes` by name, `formats` by name."""
    keys = ("backend", "compute_dtype", "native", "loss_scaling")
    recipes = {
        name: {"recipe": plan.recipe.name}
        | {key: getattr(plan, key) for key in keys}
        | {"reasons": list(plan.reasons)}
        for name, plan in plans(hardware).items()
    }
    facts = asdict(hardware)
    for key in ("capability", "cuda_version"):
        if facts[key] is not None:
            facts[key] = ".".join(map(str, facts[key]))
    names = (
        *("bits", "sign_bits", "exponent_bits", "mantissa_bits", "bias", "max"),
        *("min_normal", "min_subnormal", "epsilon", "has_inf", "hardware"),
    )
    formats = {
        name: {key.removesuffix("_bits"): getattr(format, key) for key in names}
        for name, format in FORMATS.items()
    }
    return {"hardware": facts, "recipes": recipes, "formats": formats}


def show(hardware: Hardware, console: Console) -> None:
    """Print the answer for people."""
    from rich.text import Text

    def write(line: str) -> None:
        console.print(Text(printable(line)), soft_wrap=True)

    write(f"machine: {hardware}")
    software = [f"torch {hardware.torch_version}"]
    if hardware.cuda_version:
        software.append("CUDA {}.{}".format(*hardware.cuda_version))
    unused = ""
    if hardware.te_version and hardware.capability is None:
        unused = f" (of no use on {kind_of(hardware)})"
    software.append(f"Transformer Engine {hardware.te_version or 'not installed'}{unused}")
    kind = "assumed software" if hardware.name.startswith("assumed") else "software"
    write(f"{kind}: {', '.join(software)}")
    compiles = f"no torch.compile: {hardware.compiler_problem}" * bool(hardware.compiler_problem)
    for remedy in filter(None, (hardware.gpu_problem, _te_remedy(hardware), compiles)):
        write(remedy)
    console.print()
    every_plan = plans(hardware)
    headings = ["recipe", "runs", "backend", "dtype"]
    rows = []
    for name, plan in every_plan.items():
        suffix = " (emulated)" if plan.backend == "emulate" else " (native)"
        runs = plan.recipe.name + (suffix if plan.is_fp8 else "")
        dtypes = " or ".join(filter(None, (plan.compute_dtype, plan.wide_dtype)))
        rows.append([name, runs, plan.backend, dtypes])
    console.print(rich_table("What each recipe does on it", headings, rows))
    reasons: dict[str, list[str]] = {}
    for name, plan in every_plan.items():
        for reason in plan.reasons:
            if not hardware.gpu_problem or not reason.startswith(hardware.gpu_problem):
                # Else it is printed above, once.
                reasons.setdefault(reason.replace(f"{name} needs", "it needs"), []).append(name)
    for reason, names in reasons.items():
        write(f"{', '.join(names)}: {reason}")
    console.print()
    headings = ["format", "s/e/m", "max", "min", "subnormal", "epsilon", "inf", "GPU"]
    console.print(rich_table("Number formats", headings, map(_format_row, FORMATS.values())))


def _te_remedy(hardware: Hardware) -> str:
    """The remedy that makes Transformer Engine usable; "" if it is usable, or never can be."""
    if hardware.capability is None or hardware.capability < (8, 9) or hardware.has_te:
        return ""
    return hardware.te_problem or f"Transformer Engine is optional; to add it: {TE_REMEDY}"


def _format_row(format: Format) -> list[str]:
    return [
        format.name,
        f"{format.sign_bits}/{format.exponent_bits}/{format.mantissa_bits}",
        f"{format.max:.5g}" if format.max < 1e5 else f"{format.max:.1e}",
        _power(format.min_normal),
        "-" if format.min_subnormal is None else _power(format.min_subnormal),
        _power(format.epsilon),
        "yes" if format.has_inf else "no",
        format.hardware,
    ]


def _power(value: float) -> str:
    exponent = int(math.log2(value))
    assert 2.0**exponent == value
    return f"2^{exponent}"
