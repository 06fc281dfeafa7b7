"""From what is asked to what runs: `resolve(recipe, hardware) -> Plan`. Pure; no torch here.

A recipe that the hardware cannot serve is replaced, never silently: every substitution, every
recipe that is not native and every layer that is not in FP8 adds a sentence to the plan.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from fp8stack.errors import UserError, unknown
from fp8stack.precision.hardware import Hardware
from fp8stack.precision.plan import BackendName, Plan
from fp8stack.precision.recipe import ComputeDtype, PlainRecipe, Recipe, load_recipe, plain

# The backends that this version can build. A cell of the table that needs another one is emulated.
BUILT: frozenset[str] = frozenset({"reference", "emulate"})


def resolve(
    recipe: str | Recipe, hardware: Hardware, backend: str = "auto", strict: bool = False
) -> Plan:
    """What runs when `recipe` is asked for on `hardware`.

    Args:
        recipe: a recipe, its name or path, or "auto".
        hardware: a machine, this one (`probe()`) or any other.
        backend: "auto", or who is to run it: te, torch, emulate, reference.
        strict: refuse to run another recipe or backend than asked, instead of saying so.

    Raises:
        UserError: an unknown recipe or backend; under `strict`, a substitution.
    """
    if backend != "auto" and backend not in get_args(BackendName):
        raise unknown("backend", backend, ["auto", *get_args(BackendName)])
    asked = recipe if isinstance(recipe, str) else recipe.name
    notes: tuple[str, ...] = ()
    if recipe == "auto":
        recipe = auto_recipe(hardware)
        if recipe == "fp32" and hardware.capability is not None:
            notes = (
                f"auto needs compute capability 7.0 for more, this is {_kind(hardware)}: fp32",
            )
    chosen = load_recipe(recipe) if isinstance(recipe, str) else recipe
    if isinstance(chosen, PlainRecipe):
        plan, substitutions = _resolve_plain(asked, chosen, hardware, backend)
    else:
        plan, substitutions = _resolve_fp8(asked, chosen, hardware, backend)
    if strict and substitutions:
        raise UserError(f"--strict: '{asked}' does not run as asked: {substitutions[0]}.")
    return replace(plan, strict=strict, reasons=notes + plan.reasons)


def auto_recipe(hardware: Hardware) -> str:
    """The name of the recipe that "auto" stands for on `hardware`."""
    if hardware.capability is None:
        return "bf16" if hardware.cpu_bf16 else "fp32"
    if hardware.capability[0] == 10 and _has_cuda(hardware, (12, 8)):
        return "mxfp8"
    return "delayed" if hardware.capability >= (8, 9) else best_plain_dtype(hardware)


def best_plain_dtype(hardware: Hardware) -> ComputeDtype:
    """The fastest precision without FP8 that `hardware` has in hardware and trains well in."""
    if hardware.capability is None:
        return "bf16" if hardware.cpu_bf16 else "fp32"
    if hardware.capability >= (8, 0):
        return "bf16"
    return "fp16" if hardware.capability >= (7, 0) else "fp32"


def _resolve_plain(
    asked: str, recipe: PlainRecipe, hardware: Hardware, backend: str
) -> tuple[Plan, list[str]]:
    wanted = recipe.compute_dtype
    capability = hardware.capability
    runs: ComputeDtype = wanted
    notes: list[str] = []
    substitutions: list[str] = []
    if capability is None:
        if wanted == "tf32":
            runs = "fp32"
        elif wanted == "bf16" and not hardware.cpu_bf16:
            notes.append("this CPU has no bf16 instructions: bf16 runs, slower than fp32")
        elif wanted == "fp16":
            notes.append("float16 on a CPU is for study: it runs slower than fp32")
    elif wanted == "bf16":
        runs = best_plain_dtype(hardware)
    elif wanted == "tf32" and capability < (8, 0):
        runs = "fp32"
    if runs != wanted:
        scaled = " with loss scaling" if runs == "fp16" else ""
        substitutions.append(
            f"{wanted} needs {_NEEDS[wanted]}, this is {_kind(hardware)}: {runs}{scaled}"
        )
        recipe = plain(runs)
    if backend not in ("auto", "reference"):
        substitutions.append(f"{recipe.name} has no FP8 GEMM: the reference backend runs it")
    plan = Plan(
        asked=asked,
        recipe=recipe,
        backend="reference",
        native=not notes and runs == wanted,
        device=hardware.device,
        compute_dtype=runs,
        reasons=tuple(substitutions + notes),
    )
    return plan, substitutions


_NEEDS = {
    "bf16": "compute capability 8.0",
    "tf32": "a GPU of compute capability 8.0",
    "delayed": "compute capability 8.9",
    "current": "compute capability 8.9",
    "block": "compute capability 9.0 or 10.x",
    "mxfp8": "compute capability 10.x",
}


def _resolve_fp8(
    asked: str, recipe: Recipe, hardware: Hardware, backend: str
) -> tuple[Plan, list[str]]:
    """The plan for an FP8 recipe: native, emulated, or without FP8; and what was substituted."""
    capability = hardware.capability

    def planned(backend: BackendName, native: bool, *reasons: str) -> Plan:
        if native:
            dtype: ComputeDtype = "bf16"
        else:
            dtype = "bf16" if capability is not None and capability >= (8, 0) else "fp32"
        return Plan(
            asked=asked,
            recipe=recipe,
            backend=backend,
            native=native,
            device=hardware.device,
            compute_dtype=dtype,
            reasons=reasons,
        )

    if backend == "emulate":
        return planned("emulate", False, "emulated, as --backend emulate asks"), []
    if backend == "reference":
        reason = f"the reference backend has no FP8, which {recipe.name} asks for"
        return _without_fp8(asked, reason, hardware)
    if capability is None:
        reason = (
            f"{recipe.name} needs an FP8 GPU and this is a CPU: emulated, same bytes and scales"
        )
        return planned("emulate", False, reason), [reason]
    able, problem = _native_backends(recipe.scaling, hardware)
    if problem:
        if recipe.scaling == "mxfp8" and capability >= (8, 0):
            reason = f"{problem}: emulated by bf16 GEMMs on the exact operands"
            return planned("emulate", False, reason), [reason]
        return _without_fp8(asked, problem, hardware)
    # A backend passed over is a substitution only if it was asked for by name.
    passed_over = []
    order: list[BackendName] = [*able]
    if backend != "auto":
        if backend not in able:
            passed_over.append(_unable(backend))
        order.sort(key=lambda name: name != backend)
    for candidate in order:
        if candidate in BUILT:
            reasons = [f"{problem}, {candidate} runs instead" for problem in passed_over]
            return planned(candidate, True, *reasons), [] if backend == "auto" else reasons
        passed_over.append(f"{candidate}: backend not built yet")
    reason = "; ".join(passed_over) + ": FP8 is emulated by bf16 GEMMs on the exact operands"
    return planned("emulate", False, reason), [reason]


def _without_fp8(asked: str, reason: str, hardware: Hardware) -> tuple[Plan, list[str]]:
    dtype = best_plain_dtype(hardware)
    scaled = " with loss scaling" if dtype == "fp16" else ""
    plan, _ = _resolve_plain(asked, plain(dtype), hardware, "auto")
    sentence = f"{reason}: {dtype}{scaled}"
    return replace(plan, native=False, reasons=(sentence, *plan.reasons)), [sentence]


def _native_backends(scaling: str, hardware: Hardware) -> tuple[list[BackendName], str]:
    """Who could run `scaling` on this GPU's own FP8 units, or why nobody can."""
    assert hardware.capability is not None
    capability = hardware.capability
    lacking = f"{scaling} needs {_NEEDS[scaling]}, this is {_kind(hardware)}"
    able: list[BackendName] = ["te", "torch"] if hardware.has_te else ["torch"]
    if scaling in ("delayed", "current"):
        return (able, "") if capability >= (8, 9) else ([], lacking)
    if scaling == "mxfp8":
        if capability[0] != 10:
            return [], lacking
        return (able, "") if _has_cuda(hardware, (12, 8)) else ([], "mxfp8 needs CUDA 12.8")
    if capability[0] == 10:  # run as MXFP8 with the block recipe's scales, which only TE does
        return (
            (["te"], "") if hardware.has_te else ([], f"{scaling} on 10.x needs TE, not installed")
        )
    if capability != (9, 0):
        return [], lacking
    return (able, "") if _has_cuda(hardware, (12, 9)) else ([], "block needs CUDA 12.9")


def _kind(hardware: Hardware) -> str:
    if hardware.capability is None:
        return "a CPU"
    return "compute capability {}.{}".format(*hardware.capability)


def _has_cuda(hardware: Hardware, least: tuple[int, int]) -> bool:
    """Whether torch was built for CUDA `least` or later; a version not known counts as current."""
    return hardware.cuda_version is None or hardware.cuda_version >= least


def _unable(backend: str) -> str:
    if backend == "te":
        return "Transformer Engine is not installed or cannot run this recipe here"
    return f"the {backend} backend cannot run this recipe here"
