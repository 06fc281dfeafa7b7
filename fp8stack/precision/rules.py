"""`resolve(recipe, hardware) -> Plan`. Pure; no torch here.

Every substitute for a recipe that the hardware cannot run, every recipe that is not native and
every layer that is not in FP8 adds a sentence to the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import get_args

from fp8stack.common import presets
from fp8stack.common.errors import UnservedAttention, UserError, described, unknown
from fp8stack.common.formats import FORMATS
from fp8stack.precision.fp8_attention import FP8_ATTENTION
from fp8stack.precision.hardware import Hardware
from fp8stack.precision.native_gemms import (
    BLACKWELL,
    KERNELS,
    NO_KERNEL,
    NO_TE,
    TWO_E5M2,
    is_older,
    kernel_of,
    kernels_of,
    kind_of,
    no_hardware,
    plain_gemms,
    plain_in_words,
    unable,
)
from fp8stack.precision.plan import BackendName, Plan
from fp8stack.precision.recipe import ComputeDtype, Recipe
from fp8stack.precision.recipe_file import load_recipe

# The order in which "auto" tries the backends for FP8. Not measured yet; Transformer Engine has
# been in use longest. Put results of `python -m bench gpu` here.
PREFERENCE: tuple[BackendName, ...] = ("te", "torch")


def resolve(
    recipe: str | Recipe,
    hardware: Hardware,
    backend: str = "auto",
    strict: bool = False,
    *,
    without: Mapping[str, str] | None = None,
) -> Plan:
    """Decide the precision and backend in which `recipe` runs on `hardware`.

    Args:
        recipe: a recipe, its name or path, or "auto".
        hardware: a machine, this one (`probe()`) or any other.
        backend: "auto", "te", "torch", "emulate" or "reference".
        strict: raise an error for a substitution, instead of adding a reason to the plan.
        without: backends that run only if `backend` names them, with the reason, such as a feature
            that the run needs and the backend lacks.

    Raises:
        UserError: an unknown recipe or backend; under `strict`, a substitution.
    """
    if not isinstance(recipe, str | Recipe):
        raise UserError(f"A recipe is a name, a path or a Recipe, not {described(recipe)}.")
    if not isinstance(hardware, Hardware):
        raise UserError(f"resolve needs hardware, such as probe(), not {described(hardware)}.")
    if not isinstance(backend, str):
        raise UserError(f"A backend is given by its name, not by {described(backend)}.")
    if backend != "auto" and backend not in get_args(BackendName):
        raise unknown("backend", backend, ["auto", *get_args(BackendName)])
    requested = recipe if isinstance(recipe, str) else recipe.name
    notes: tuple[str, ...] = ()
    if recipe == "auto":
        recipe = auto_recipe(hardware)
        if recipe == "fp32" and hardware.capability is not None:
            notes = (
                f"auto needs compute capability 7.0 for more, this is {kind_of(hardware)}: fp32",
            )
    chosen = load_recipe(recipe) if isinstance(recipe, str) else recipe
    if chosen.quantizers is None:
        plan, substitution = _resolve_plain(requested, chosen, hardware, backend)
    else:
        avoided = {name: reason for name, reason in (without or {}).items() if name != backend}
        plan, substitution = _resolve_fp8(requested, chosen, hardware, backend, avoided)
    if hardware.gpu_problem:
        substitution = f"{hardware.gpu_problem}; the CPU runs"
        notes = (substitution, *notes)
    if strict and substitution:
        way_out = " Use --device cpu to choose it." if hardware.gpu_problem else ""
        raise UserError(f"--strict: '{requested}' does not run as asked: {substitution}.{way_out}")
    kind = FP8_ATTENTION.get(chosen.attention)
    if kind and not (plan.backend == "te" and kind.gpus.have(hardware.capability)):
        raise UnservedAttention(
            f"attention = '{chosen.attention}' needs Transformer Engine on compute capability "
            f"{kind.gpus.words}",
            f" This is {kind_of(hardware)}, with {plan.recipe.name} run by {plan.backend}. Give "
            "another --recipe, or attention = 'compute' (--set recipe.attention=compute).",
        )
    # A substitute recipe keeps the requested attention and residual stream.
    final_recipe = plan.recipe.model_copy(update=chosen.beside_linears)
    return replace(plan, recipe=final_recipe, strict=strict, reasons=notes + plan.reasons)


def shipped() -> list[str]:
    """The names of the shipped recipes: recipes with a kernel in the order of `KERNELS`, then other
    recipes with quantizers by falling bits, then recipes without quantizers, then the schemes of
    inference servers."""
    training = presets.training_recipes()

    def order(name: str) -> tuple[bool, int, int, str]:
        recipe, is_for_serving = load_recipe(name), name not in training
        if recipe.quantizers is None:
            return is_for_serving, len(KERNELS) + 1, FORMATS[str(recipe.compute_dtype)].bits, name
        kernel = kernel_of(recipe.quantizers)
        return is_for_serving, [*KERNELS, kernel].index(kernel), -recipe.quantizers.bits, name

    return sorted(presets.names("recipes"), key=order)


def auto_recipe(hardware: Hardware) -> str:
    """The recipe that "auto" selects on `hardware`."""
    if hardware.capability is None or hardware.capability < (8, 9):
        return best_plain_dtype(hardware)
    return (
        "mxfp8"
        if BLACKWELL.have(hardware.capability) and not is_older(hardware.cuda_version, (12, 8))
        else "delayed"
    )


def best_plain_dtype(hardware: Hardware) -> ComputeDtype:
    """The fastest precision without FP8 that `hardware` supports and that trains well."""
    if hardware.capability is None:
        return "bf16" if hardware.other_gpu or hardware.cpu_bf16 else "fp32"
    if hardware.capability >= (8, 0):
        return "bf16"
    return "fp16" if hardware.capability >= (7, 0) else "fp32"


def _resolve_plain(
    requested: str, recipe: Recipe, hardware: Hardware, backend: str
) -> tuple[Plan, str]:
    """The plan for a recipe without FP8, and the reason for a substitution or ""."""
    dtype, capability = recipe.compute_dtype, hardware.capability
    assert dtype is not None
    runs: ComputeDtype = dtype
    least, substitutions = _LEAST.get(dtype), []
    if least is not None and (dtype == "tf32" if capability is None else capability < least):
        runs = best_plain_dtype(hardware) if dtype == "bf16" else "fp32"
        scaled = " with loss scaling" * (runs == "fp16")
        substitutions = [f"{_lacking(dtype, hardware)}: {runs}{scaled}"]
        recipe = load_recipe(runs)
    if backend not in ("auto", "reference"):
        no_gpu = backend == "te" and capability is None
        lacking = "Transformer Engine needs a CUDA GPU, and " if no_gpu else ""
        reason = f"{lacking}{recipe.name} has no FP8 GEMM: the reference backend runs it"
        substitutions.append(reason)
    lacks_instructions = dtype == "fp16" or (dtype == "bf16" and not hardware.cpu_bf16)
    is_slow = hardware.device == "cpu" and lacks_instructions
    plan = Plan(
        asked=requested,
        recipe=recipe,
        backend="reference",
        native=not is_slow and runs == dtype,
        hardware=hardware,
        device=hardware.device,
        compute_dtype=runs,
        reasons=(*substitutions, *[f"{dtype} is slower than fp32 on this CPU"] * is_slow),
    )
    return plan, next(iter(substitutions), "")


_LEAST: dict[str, tuple[int, int]] = {"bf16": (8, 0), "fp16": (7, 0), "tf32": (8, 0)}
"""The lowest compute capability of NVIDIA GPUs that compute in a dtype."""


def _lacking(dtype: str, hardware: Hardware) -> str:
    return "{} needs compute capability {}.{}, this is {}".format(
        dtype, *_LEAST[dtype], kind_of(hardware)
    )


def _resolve_fp8(
    requested: str, recipe: Recipe, hardware: Hardware, backend: str, without: Mapping[str, str]
) -> tuple[Plan, str]:
    """The plan for an FP8 recipe (native, emulated, or without FP8), and the reason for a
    substitution or ""."""
    assert recipe.quantizers is not None
    chosen, reason, substitutes = _choose_backend(recipe, hardware, backend, without)
    if chosen == "reference":
        return _without_fp8(requested, reason, hardware)
    dtype, wide_dtype, refused = _compute_dtypes(recipe, chosen, hardware)
    high_precision = plain_gemms(recipe.quantizers, hardware) if chosen == "torch" else {}
    gemm_reason = plain_in_words(high_precision) if high_precision else ""
    slow_casts = slow_gemms = ""
    if chosen == "emulate" and hardware.device == "cpu" and hardware.numba_problem:
        slow_casts = f"its casts are slower than they could be: {hardware.numba_problem}"
    kernels = kernels_of(recipe.quantizers).values()
    if chosen == "torch" and hardware.slow_scaled_mm and {"delayed", "current"} & {*kernels}:
        slow_gemms = "fp32 GEMMs multiply operands of one format, for which scaled_mm is slow here"
    gemm_substitution = gemm_reason if any(high_precision.values()) else ""
    substitutions = [reason if substitutes else "", gemm_substitution, refused]
    plan = Plan(
        asked=requested,
        recipe=recipe,
        backend=chosen,
        native=chosen != "emulate" and hardware.capability is not None,
        hardware=hardware,
        device=hardware.device,
        compute_dtype=dtype,
        wide_dtype=wide_dtype,
        reasons=tuple(filter(None, (reason, slow_casts, refused, gemm_reason, slow_gemms))),
    )
    return plan, "; ".join(filter(None, substitutions))


def _choose_backend(
    recipe: Recipe, hardware: Hardware, backend: str, without: Mapping[str, str]
) -> tuple[BackendName, str, bool]:
    """The backend for an FP8 recipe, "reference" if no backend runs it; the reason or ""; and
    whether it is a substitution."""
    quantizers, capability = recipe.quantizers, hardware.capability
    assert quantizers is not None
    if backend == "emulate":
        return "emulate", "emulated, as --backend emulate asks", False
    if backend == "reference":
        return "reference", f"the reference backend has no FP8, which {recipe.name} asks for", True
    if capability is None:
        nvidia = " of NVIDIA" * bool(hardware.other_gpu)
        needs = f"{recipe.name} needs an FP{quantizers.bits} GPU{nvidia}"
        problem = f"{needs} and this is {kind_of(hardware)}"
        if not any(kernels_of(quantizers).values()):
            problem = NO_KERNEL
        problem = no_hardware(quantizers) or problem
        if backend == "torch" and not hardware.other_gpu:
            problem = unable("torch", quantizers, hardware)
            if not problem:
                return "torch", "torch's scaled_mm on a CPU, as --backend torch asks", False
        return "emulate", f"{problem}: emulated, same bytes and scales", True
    problems: dict[str, str] = {
        name: unable(name, quantizers, hardware) or without.get(name, "") for name in PREFERENCE
    }
    able = [name for name in PREFERENCE if not problems[name]]
    te, te_problem = problems["te"], without.get("te") or hardware.te_problem
    if not able:
        # Give the reason that the user can remedy by installing software.
        newer_torch = unable("torch", quantizers, replace(hardware, torch_version=""))
        is_mended_by_te = newer_torch and te in (te_problem, hardware.te_problem, NO_TE)
        problem = te if is_mended_by_te else problems["torch"]
        # On GPUs with bf16, emulation is nearly as fast as bf16, and exact. Custom formats are for
        # study and emulated on every GPU.
        special = capability >= (8, 9) and TWO_E5M2 in problems.values()
        is_for_study = kernel_of(quantizers) not in _ELSE_BF16 and capability >= (8, 0)
        if special or is_for_study or quantizers.own_formats:
            return "emulate", f"{problem}: emulated, same bytes and scales", True
        return "reference", problem, True
    if backend in able:
        return next(name for name in able if name == backend), "", False
    if backend != "auto":
        return able[0], f"{problems[backend]}; {able[0]} runs instead", True
    # Give the reason if an installed TE, which "auto" prefers, does not work or is avoided.
    return able[0], f"{te}: {able[0]} runs" if te and te == te_problem else "", False


def _compute_dtypes(
    recipe: Recipe, backend: BackendName, hardware: Hardware
) -> tuple[ComputeDtype, ComputeDtype | None, str]:
    """`Plan.compute_dtype` and `Plan.wide_dtype` for an FP8 recipe, and the reason if the dtype is
    not the recipe's, or ""."""
    capability, requested = hardware.capability, recipe.compute_dtype
    if backend != "emulate":
        runs: ComputeDtype = "fp32" if capability is None else "bf16"
        reason = f"{backend} computes in {runs}, emulation in {requested} as well"
        return runs, None, reason if requested not in (None, runs) else ""
    if capability is None and not hardware.other_gpu:
        assert recipe.quantizers is not None
        multiplies_bf16 = hardware.cpu_bf16 and recipe.quantizers.by_bf16_gemms
        return requested or "fp32", "bf16" if multiplies_bf16 and not requested else None, ""
    if capability is None or capability >= (8, 0):
        return requested or "bf16", None, ""
    lacking = f"{_lacking('bf16', hardware)}: fp32"
    return "fp32", None, lacking if requested == "bf16" else ""


def _without_fp8(requested: str, reason: str, hardware: Hardware) -> tuple[Plan, str]:
    dtype = best_plain_dtype(hardware)
    scaled = " with loss scaling" if dtype == "fp16" else ""
    plan, _ = _resolve_plain(requested, load_recipe(dtype), hardware, "auto")
    sentence = f"{reason}: {dtype}{scaled}"
    return replace(plan, native=False, reasons=(sentence, *plan.reasons)), sentence


_ELSE_BF16 = ("delayed", "current", "block")
"""Kernels whose recipes run in bf16 on GPUs without them. Other quantizers are for study: they are
emulated."""
