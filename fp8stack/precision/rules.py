"""`resolve(recipe, hardware) -> Plan`. Pure; no torch here.

A recipe that the hardware cannot run is replaced, never silently: every substitution, every recipe
that is not native and every layer that is not in FP8 adds a sentence to the plan.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import get_args

from fp8stack.common import presets
from fp8stack.common.errors import UnservedAttention, UserError, described, unknown
from fp8stack.common.formats import FORMATS
from fp8stack.common.quantizer_table import Quantizers
from fp8stack.precision.fp8_attention import FP8_ATTENTION
from fp8stack.precision.hardware import TE_REMEDY, Hardware, version_pair
from fp8stack.precision.native_gemms import (
    ALL_BLACKWELL,
    BLACKWELL,
    KERNELS,
    RTX_BLACKWELL,
    kernel_of,
    kernels_of,
    lacking_grouped_gemm,
    te_has,
)
from fp8stack.precision.other_gpus import no_fp8_units
from fp8stack.precision.plan import BackendName, OfBackend, Plan
from fp8stack.precision.recipe import ComputeDtype, Recipe
from fp8stack.precision.recipe_file import load_recipe
from fp8stack.precision.torch_gemms import (
    NO_GEMM,
    SLOW_GEMM,
    gemms_in_words,
    is_older,
    kind_of,
    lacking_hardware,
    plain_gemms,
    slow_gemms,
    too_special,
    unable_in_all_gemms,
    without_hardware,
)

# The order in which "auto" tries the backends for FP8. Nothing is measured yet; Transformer Engine
# has been in use longest. Put the figures of `python -m bench gpu` here.
PREFERENCE: tuple[BackendName, ...] = ("te", "torch")
NO_CUDA = "Transformer Engine needs a CUDA GPU"
TORCH_MINIMUM = (2, 10)  # torch.nn.functional.scaled_mm


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
        strict: raise an error for a substitution, which else adds a reason to the plan.
        without: backends that run only if `backend` names them, with the reason: they lack a
            feature that the run needs.

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
    gpu = "" if hardware.device == "cpu" else hardware.name
    return replace(plan, recipe=final_recipe, strict=strict, gpu=gpu, reasons=notes + plan.reasons)


def shipped() -> list[str]:
    """The names of the shipped recipes: recipes with a kernel in the order of `KERNELS`, then other
    recipes with quantizers by falling bits, then recipes without quantizers, then the schemes of
    inference servers."""
    training = presets.training_recipes()

    def order(name: str) -> tuple[bool, int, int, str]:
        recipe, served = load_recipe(name), name not in training
        if recipe.quantizers is None:
            return served, len(KERNELS) + 1, FORMATS[str(recipe.compute_dtype)].bits, name
        kernel = kernel_of(recipe.quantizers)
        return served, [*KERNELS, kernel].index(kernel), -recipe.quantizers.bits, name

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
    """The plan for a recipe without FP8, and a sentence about the substitution or ""."""
    dtype = recipe.compute_dtype
    assert dtype is not None
    capability = hardware.capability
    runs: ComputeDtype = dtype
    notes: list[str] = []
    substitutions: list[str] = []
    if capability is None:
        if dtype == "tf32":
            runs = "fp32"
        elif hardware.other_gpu:
            pass
        elif dtype == "bf16" and not hardware.cpu_bf16:
            notes.append("this CPU has no bf16 instructions: bf16 runs, slower than fp32")
        elif dtype == "fp16":
            notes.append("float16 on a CPU is for study: it runs slower than fp32")
    elif dtype == "bf16":
        runs = best_plain_dtype(hardware)
    elif (dtype == "tf32" and capability < (8, 0)) or (dtype == "fp16" and capability < (7, 0)):
        runs = "fp32"
    if runs != dtype:
        scaled = " with loss scaling" if runs == "fp16" else ""
        substitutions.append(
            f"{dtype} needs {_NEEDS[dtype]}, this is {kind_of(hardware)}: {runs}{scaled}"
        )
        recipe = load_recipe(runs)
    if backend not in ("auto", "reference"):
        lacking = f"{NO_CUDA}, and " if backend == "te" and capability is None else ""
        reason = f"{lacking}{recipe.name} has no FP8 GEMM: the reference backend runs it"
        substitutions.append(reason)
    plan = Plan(
        asked=requested,
        recipe=recipe,
        backend="reference",
        native=not notes and runs == dtype,
        device=hardware.device,
        compute_dtype=runs,
        reasons=tuple(substitutions + notes),
    )
    return plan, next(iter(substitutions), "")


_NEEDS = {
    "bf16": "compute capability 8.0",
    "fp16": "compute capability 7.0",
    "tf32": "an NVIDIA GPU of compute capability 8.0",
}


def _resolve_fp8(
    requested: str, recipe: Recipe, hardware: Hardware, backend: str, without: Mapping[str, str]
) -> tuple[Plan, str]:
    """The plan for an FP8 recipe (native, emulated, or without FP8), and a sentence about the
    substitution or ""."""
    capability = hardware.capability
    quantizers = recipe.quantizers
    assert quantizers is not None

    def planned(
        backend: BackendName, reason: str = "", *, substitutes: bool = True
    ) -> tuple[Plan, str]:
        """The plan with `backend`, and `reason` if the backend substitutes the requested one."""
        native = backend != "emulate" and capability is not None
        dtype, wide_dtype, refused = _compute_dtypes(recipe, backend, hardware)
        reasons = [OfBackend(reason)] if reason else []
        if backend == "emulate" and hardware.device == "cpu" and hardware.numba_problem:
            slow = f"its casts are slower than they could be: {hardware.numba_problem}"
            reasons.append(OfBackend(slow))
        delegated = _delegated(recipe, backend, hardware)
        reasons += [OfBackend(refused)] * bool(refused)
        plain = {} if backend != "torch" else plain_gemms(quantizers, hardware)
        if plain:
            sentence = gemms_in_words(quantizers, plain, dtype)
            reasons.append(OfBackend(sentence))
            if any(plain.values()):  # quantized operands, but no GEMM for them
                reason, substitutes = "; ".join(filter(None, (reason, sentence))), True
        replaced = slow_gemms(recipe.tables, hardware) if backend == "torch" else []
        if replaced:
            gemms = " and ".join(replaced)
            reasons.append(OfBackend(f"{gemms} by fp32 GEMMs on the same bytes: {SLOW_GEMM}"))
        plan = Plan(
            asked=requested,
            recipe=recipe,
            backend=backend,
            native=native,
            device=hardware.device,
            compute_dtype=dtype,
            wide_dtype=wide_dtype,
            reasons=tuple(reasons),
            delegated=delegated,
            ungrouped=_ungrouped(recipe, backend, delegated, hardware),
            plain_gemms=_plain_by_table(recipe, backend, delegated, hardware),
            slow_scaled_mm=bool(replaced),
            float32_gemms=bool(hardware.other_gpu),
        )
        return plan, (reason if substitutes else "") or refused

    if backend == "emulate":
        return planned("emulate", "emulated, as --backend emulate asks", substitutes=False)
    if not quantizers.each:
        return planned("emulate", f"{recipe.name} quantizes no operand: emulated")
    if backend == "reference":
        reason = f"the reference backend has no FP8, which {recipe.name} asks for"
        return _without_fp8(requested, reason, hardware)
    unable: dict[str, str] = {name: _unable(name, quantizers, hardware) for name in PREFERENCE}
    if capability is None:
        lacking = f"{recipe.name} needs an FP{quantizers.bits} GPU and this is a CPU"
        if hardware.other_gpu:
            bits, kind = quantizers.bits, hardware.other_gpu
            this = no_fp8_units(kind) if bits == 8 else f"this is {kind}"
            lacking = f"{recipe.name} needs an FP{bits} GPU of NVIDIA, {this}"
        if not any(kernels_of(quantizers).values()):
            lacking = NO_GEMM
        problem = unable.get(backend, without_hardware(quantizers) or lacking)
        if not problem:
            reason = "torch's scaled_mm on a CPU, as --backend torch asks"
            return planned("torch", reason, substitutes=False)
        return planned("emulate", f"{problem}: emulated, same bytes and scales")
    unable = {name: problem or without.get(name, "") for name, problem in unable.items()}
    able = [name for name in PREFERENCE if not unable[name]]
    if not able:
        problem = "; ".join(dict.fromkeys(unable.values()))
        # On GPUs with bf16, emulation is nearly as fast as bf16: worth it where nothing else is
        # exact. A format of one's own is for study: it is emulated on every GPU.
        special = capability >= (8, 9) and too_special(quantizers)
        is_for_study = kernel_of(quantizers) not in _OR_BF16 and capability >= (8, 0)
        if special or is_for_study or quantizers.own_formats:
            dtype = _compute_dtypes(recipe, "emulate", hardware)[0]
            return planned("emulate", f"{problem}: emulated by {dtype} GEMMs on the exact operands")
        return _without_fp8(requested, problem, hardware)
    chosen = next((name for name in able if name == backend), able[0])
    if backend not in ("auto", chosen):
        return planned(chosen, f"{unable[backend]}; {chosen} runs instead")
    # Give the reason if "auto" would prefer an installed TE that does not work or is avoided.
    mended = replace(hardware, has_te=True, te_problem="")
    better = PREFERENCE.index("te") < PREFERENCE.index(chosen) and not _unable(
        "te", quantizers, mended
    )
    reason = ""
    if backend == "auto" and better:
        if hardware.has_te:
            reason = f"{without['te']}: {chosen} runs"
        elif hardware.te_problem and "te" not in without:
            reason = f"{hardware.te_problem}; until then {chosen} runs"
    return planned(chosen, reason, substitutes=False)


def _compute_dtypes(
    recipe: Recipe, backend: BackendName, hardware: Hardware
) -> tuple[ComputeDtype, ComputeDtype | None, str]:
    """`Plan.compute_dtype` and `Plan.wide_dtype` of an FP8 recipe, and the reason if that is not
    the recipe's `compute_dtype`, else ""."""
    capability, requested = hardware.capability, recipe.compute_dtype
    if backend != "emulate":
        runs: ComputeDtype = "fp32" if capability is None else "bf16"
        fixed = f"{backend} computes in {runs}, emulation in {requested} as well"
        return runs, None, fixed if requested not in (None, runs) else ""
    if capability is None and not hardware.other_gpu:
        assert recipe.quantizers is not None
        multiplies_bf16 = hardware.cpu_bf16 and recipe.quantizers.by_bf16_gemms
        return requested or "fp32", "bf16" if multiplies_bf16 and not requested else None, ""
    if capability is None or capability >= (8, 0):
        return requested or "bf16", None, ""
    lacking = f"bf16 needs {_NEEDS['bf16']}, this is {kind_of(hardware)}: fp32"
    return "fp32", None, lacking if requested == "bf16" else ""


def _without_fp8(requested: str, reason: str, hardware: Hardware) -> tuple[Plan, str]:
    dtype = best_plain_dtype(hardware)
    scaled = " with loss scaling" if dtype == "fp16" else ""
    plan, _ = _resolve_plain(requested, load_recipe(dtype), hardware, "auto")
    sentence = f"{reason}: {dtype}{scaled}"
    return replace(plan, native=False, reasons=(sentence, *plan.reasons)), sentence


_OR_BF16 = ("delayed", "current", "block")
"""Kernels whose recipes run in bf16 on GPUs without them. Other quantizers are for study: they are
emulated."""


def _delegated(
    recipe: Recipe, backend: BackendName, hardware: Hardware
) -> tuple[tuple[Quantizers, BackendName, str], ...]:
    """The quantizers of layers that `backend`, which runs the recipe's quantizers, cannot run, each
    with the backend that runs them and the reason."""
    delegated: list[tuple[Quantizers, BackendName, str]] = []
    if backend in ("te", "torch"):
        for table in recipe.tables[1:]:
            problem = _unable("torch", table, hardware)
            if not problem and backend == "te":
                reason = "Transformer Engine runs one recipe in a model"
                delegated.append((table, "torch", reason))
            elif problem:
                delegated.append((table, "emulate", f"{problem}: emulated"))
    return tuple(delegated)


def _ungrouped(
    recipe: Recipe,
    backend: BackendName,
    delegated: Collection[tuple[Quantizers, BackendName, str]],
    hardware: Hardware,
) -> tuple[tuple[Quantizers, str], ...]:
    """The quantizers whose backend has no GEMMs for groups of rows, each with the reason."""
    backends = {table: of_table for table, of_table, _ in delegated}
    reasons = {
        table: lacking_grouped_gemm(backends.get(table, backend), table, hardware.capability)
        for table in recipe.tables
    }
    return tuple((table, reason) for table, reason in reasons.items() if reason)


def _plain_by_table(
    recipe: Recipe,
    backend: BackendName,
    delegated: Collection[tuple[Quantizers, BackendName, str]],
    hardware: Hardware,
) -> tuple[tuple[Quantizers, tuple[tuple[str, str], ...]], ...]:
    """`Plan.plain_gemms` of the quantizers that torch runs."""
    backends = {table: of_table for table, of_table, _ in delegated}
    plain = {
        table: tuple(plain_gemms(table, hardware).items())
        for table in recipe.tables
        if backends.get(table, backend) == "torch"
    }
    return tuple((table, gemms) for table, gemms in plain.items() if gemms)


def _unable(backend: BackendName, quantizers: Quantizers, hardware: Hardware) -> str:
    """The reason that `backend`, te or torch, cannot run these operands here; "" if it can."""
    if backend == "te":
        return _unable_by_te(quantizers, hardware)
    if hardware.capability is None and (old := _old_torch(hardware)):
        return old
    if problem := unable_in_all_gemms(quantizers, hardware) or _old_torch(hardware):
        return problem
    if any(q.stochastic for place, q in quantizers.each.items() if place.startswith("weight")):
        return "the torch backend casts a weight once a step, and not at random"
    return ""


def _unable_by_te(quantizers: Quantizers, hardware: Hardware) -> str:
    """`_unable` for Transformer Engine."""
    if hardware.capability is None:
        return NO_CUDA
    kernel, x = kernel_of(quantizers), quantizers.input
    if kernel is None:
        # Not by its `backward_override` either: in high precision, TE 2.20.2 multiplies bfloat16
        # gradients by the float32 weight itself, which no GEMM of cuBLAS does; dequantized, it
        # rounds forward values to bfloat16.
        problem = unable_in_all_gemms(quantizers, hardware)
        return problem or "Transformer Engine has no recipe with these operands"
    if lacking := lacking_hardware(kernel, hardware) or too_special(quantizers):
        return lacking
    assert x is not None
    if kernel == "rowwise":
        return "Transformer Engine has no scale per row"
    if kernel == "nvfp4" and not BLACKWELL.have(hardware.capability):
        # TE accepts 12.x too, where its stochastic casts gave gradients of 0 and its Hadamard
        # transforms fail (TransformerEngine issue 3062, pull request 3281).
        return "Transformer Engine's NVFP4 works on 10.x alone"
    if kernel == "mxfp8" and RTX_BLACKWELL.have(hardware.capability):
        return "Transformer Engine has no MXFP8 on 12.x"
    if not hardware.has_te:
        return hardware.te_problem or f"Transformer Engine is not installed ({TE_REMEDY})"
    if kernel == "mxfp8" and x.scale_rounding != "rceil":
        return f"Transformer Engine rounds MXFP8's scales by rceil, not {x.scale_rounding}"
    if kernel == "block" and ALL_BLACKWELL.have(hardware.capability) and x.scale != "power_of_two":
        needed = "needs power_of_two = true"
        return f"Transformer Engine's block scaling on {ALL_BLACKWELL.words} {needed}"
    if not te_has(quantizers):
        return "Transformer Engine has one setting for all operands, E4M3 or HYBRID"
    return ""


def _old_torch(hardware: Hardware) -> str:
    """The message that torch is older than its backend requires; "" if it is not."""
    if not is_older(version_pair(hardware.torch_version), TORCH_MINIMUM):
        return ""
    needed = ".".join(map(str, TORCH_MINIMUM))
    return (
        f"the torch backend needs torch {needed} or later, this is {hardware.torch_version} "
        f"(pip install --upgrade 'torch>={needed}')"
    )
