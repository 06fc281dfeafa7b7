"""From what is asked to what runs: `resolve(recipe, hardware) -> Plan`. Pure; no torch here.

A recipe that the hardware cannot serve is replaced, never silently: every substitution, every
recipe that is not native and every layer that is not in FP8 adds a sentence to the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import get_args

from fp8stack import presets
from fp8stack.errors import UnservedAttention, UserError, described, unknown
from fp8stack.formats import FORMATS, Quantizer, Quantizers
from fp8stack.precision.attention import FP8_ATTENTION
from fp8stack.precision.hardware import TE_REMEDY, Hardware, version_pair
from fp8stack.precision.kernels import BLACKWELL, KERNELS, SCALED_AFTERWARDS, kernel_of
from fp8stack.precision.plan import BackendName, OfBackend, Plan
from fp8stack.precision.recipe import ComputeDtype, Recipe, load_recipe

# Who runs FP8 where several can and none was named, first choice first. Source: none measured yet;
# Transformer Engine is the longest in use. Put the figures of `python -m bench gpu` here.
PREFERENCE: tuple[BackendName, ...] = ("te", "torch")
TORCH_MINIMUM = (2, 10)  # torch.nn.functional.scaled_mm
ROWS_ON_CPU = (2, 12)  # 2.11 asserts that there is one scale


def resolve(
    recipe: str | Recipe,
    hardware: Hardware,
    backend: str = "auto",
    strict: bool = False,
    *,
    without: Mapping[str, str] | None = None,
) -> Plan:
    """What runs when `recipe` is asked for on `hardware`.

    Args:
        recipe: a recipe, its name or path, or "auto".
        hardware: a machine, this one (`probe()`) or any other.
        backend: "auto", or who is to run it: te, torch, emulate, reference.
        strict: refuse to run another recipe or backend than asked, instead of saying so.
        without: backends that run only where they are named, since they cannot do something else
            that is asked, with the reason.

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
    asked = recipe if isinstance(recipe, str) else recipe.name
    notes: tuple[str, ...] = ()
    if recipe == "auto":
        recipe = auto_recipe(hardware)
        if recipe == "fp32" and hardware.capability is not None:
            notes = (
                f"auto needs compute capability 7.0 for more, this is {_kind(hardware)}: fp32",
            )
    chosen = load_recipe(recipe) if isinstance(recipe, str) else recipe
    if chosen.quantizers is None:
        plan, substitution = _resolve_plain(asked, chosen, hardware, backend)
    else:
        unwanted = {name: why for name, why in (without or {}).items() if name != backend}
        plan, substitution = _resolve_fp8(asked, chosen, hardware, backend, unwanted)
    if hardware.gpu_problem:
        substitution = f"{hardware.gpu_problem}; until then the CPU runs"
        notes = (substitution, *notes)
    if strict and substitution:
        raise UserError(f"--strict: '{asked}' does not run as asked: {substitution}.")
    kind = FP8_ATTENTION.get(chosen.attention)
    if kind and not (plan.backend == "te" and kind.gpus.have(hardware.capability)):
        raise UnservedAttention(
            f"attention = '{chosen.attention}' needs Transformer Engine on compute capability "
            f"{kind.gpus.words}",
            f" This is {_kind(hardware)}, with {plan.recipe.name} run by {plan.backend}. Give "
            "another --recipe, or attention = 'compute' (--set recipe.attention=compute).",
        )
    # Whatever runs instead, attention and the residual stream stay what was asked for.
    runs = plan.recipe.model_copy(update=chosen.beside_linears)
    gpu = hardware.name if hardware.device == "cuda" else ""
    return replace(plan, recipe=runs, strict=strict, gpu=gpu, reasons=notes + plan.reasons)


def shipped() -> list[str]:
    """The recipes that ship, by name: those that some hardware multiplies as they are, as `KERNELS`
    has them, then other ones with quantizers, the most bits first, then those without."""

    def place(name: str) -> tuple[int, int, str]:
        recipe = load_recipe(name)
        if recipe.quantizers is None:
            return len(KERNELS) + 1, FORMATS[str(recipe.compute_dtype)].bits, name
        kernel = kernel_of(recipe.quantizers)
        return [*KERNELS, kernel].index(kernel), -recipe.quantizers.bits, name

    return sorted(presets.names("recipes"), key=place)


def auto_recipe(hardware: Hardware) -> str:
    """The name of the recipe that "auto" stands for on `hardware`."""
    if hardware.capability is None or hardware.capability < (8, 9):
        return best_plain_dtype(hardware)
    return (
        "mxfp8"
        if BLACKWELL.have(hardware.capability) and not _older(hardware.cuda_version, (12, 8))
        else "delayed"
    )


def best_plain_dtype(hardware: Hardware) -> ComputeDtype:
    """The fastest precision without FP8 that `hardware` has in hardware and trains well in."""
    if hardware.capability is None:
        return "bf16" if hardware.cpu_bf16 else "fp32"
    if hardware.capability >= (8, 0):
        return "bf16"
    return "fp16" if hardware.capability >= (7, 0) else "fp32"


def _resolve_plain(
    asked: str, recipe: Recipe, hardware: Hardware, backend: str
) -> tuple[Plan, str]:
    """The plan for a recipe without FP8, and what was substituted or ""."""
    wanted = recipe.compute_dtype
    assert wanted is not None
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
        recipe = load_recipe(runs)
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
    return plan, next(iter(substitutions), "")


_NEEDS = {"bf16": "compute capability 8.0", "tf32": "a GPU of compute capability 8.0"}


def _resolve_fp8(
    asked: str, recipe: Recipe, hardware: Hardware, backend: str, without: Mapping[str, str]
) -> tuple[Plan, str]:
    """The plan for an FP8 recipe: native, emulated, or without FP8; and what was substituted or
    ""."""
    capability = hardware.capability
    quantizers = recipe.quantizers
    assert quantizers is not None

    def planned(backend: BackendName, why: str = "", *, instead: bool = True) -> tuple[Plan, str]:
        """`backend` runs it, `why` says; `instead` of what was asked for."""
        native = backend != "emulate" and capability is not None
        reasons = [OfBackend(why)] if why else []
        if backend == "emulate" and hardware.device == "cpu" and hardware.numba_problem:
            slow = f"its casts are slower than they could be: {hardware.numba_problem}"
            reasons.append(OfBackend(slow))
        half = native or (capability is not None and capability >= (8, 0))
        plan = Plan(
            asked=asked,
            recipe=recipe,
            backend=backend,
            native=native,
            device=hardware.device,
            compute_dtype="bf16" if half else "fp32",
            reasons=tuple(reasons),
            others=_others(recipe, backend, hardware),
        )
        return plan, why if instead else ""

    if backend == "emulate":
        return planned("emulate", "emulated, as --backend emulate asks", instead=False)
    if not quantizers.each:
        return planned("emulate", f"{recipe.name} quantizes no operand: emulated")
    if backend == "reference":
        reason = f"the reference backend has no FP8, which {recipe.name} asks for"
        return _without_fp8(asked, reason, hardware)
    unable: dict[str, str] = {n: _unable(n, quantizers, hardware) for n in PREFERENCE}
    if capability is None:
        lacking = f"{recipe.name} needs an FP{quantizers.bits} GPU and this is a CPU"
        problem = unable.get(backend, lacking)
        if not problem:
            reason = "torch's scaled_mm on a CPU, as --backend torch asks"
            return planned("torch", reason, instead=False)
        return planned("emulate", f"{problem}: emulated, same bytes and scales")
    unable = {name: why or without.get(name, "") for name, why in unable.items()}
    able = [name for name in PREFERENCE if not unable[name]]
    if not able:
        problem = "; ".join(dict.fromkeys(unable.values()))
        # Emulation on other hardware is near bf16's speed: worth it where nothing else is exact.
        special = capability >= (8, 9) and _too_special(quantizers)
        if special or (kernel_of(quantizers) not in _OR_BF16 and capability >= (8, 0)):
            return planned("emulate", f"{problem}: emulated by bf16 GEMMs on the exact operands")
        return _without_fp8(asked, problem, hardware)
    chosen = next((name for name in able if name == backend), able[0])
    if backend not in ("auto", chosen):
        return planned(chosen, f"{unable[backend]}; {chosen} runs instead")
    # One that auto would have preferred, and that is there, but does not work or may not be used.
    mended = replace(hardware, has_te=True, te_problem="")
    better = PREFERENCE.index("te") < PREFERENCE.index(chosen) and not _unable(
        "te", quantizers, mended
    )
    why = ""
    if backend == "auto" and better:
        if hardware.has_te:
            why = f"{without['te']}: {chosen} runs"
        elif hardware.te_problem and "te" not in without:
            why = f"{hardware.te_problem}; until then {chosen} runs"
    return planned(chosen, why, instead=False)


def _without_fp8(asked: str, reason: str, hardware: Hardware) -> tuple[Plan, str]:
    dtype = best_plain_dtype(hardware)
    scaled = " with loss scaling" if dtype == "fp16" else ""
    plan, _ = _resolve_plain(asked, load_recipe(dtype), hardware, "auto")
    sentence = f"{reason}: {dtype}{scaled}"
    return replace(plan, native=False, reasons=(sentence, *plan.reasons)), sentence


_OR_BF16 = ("delayed", "current", "block")
"""What runs in bf16 on GPUs that lack it; other kinds of quantizers are for study, and emulated."""


def _others(
    recipe: Recipe, backend: BackendName, hardware: Hardware
) -> tuple[tuple[Quantizers, BackendName, str], ...]:
    """The tables of a recipe's layers that `backend`, which runs the recipe's own, does not serve:
    who does, and why."""
    found: list[tuple[Quantizers, BackendName, str]] = []
    if backend in ("te", "torch"):
        for table in recipe.tables[1:]:
            why = _unable("torch", table, hardware)
            if not why and backend == "te":
                found.append((table, "torch", "Transformer Engine runs one recipe in a model"))
            elif why:
                found.append((table, "emulate", f"{why}: emulated"))
    return tuple(found)


def _lacking_hardware(quantizers: Quantizers, hardware: Hardware) -> str:
    """Why the GPU, or CUDA on it, has no GEMM for these operands; "" if it has one."""
    assert hardware.capability is not None
    name = kernel_of(quantizers)
    if name is None:
        return "no GEMM of the GPU backends takes these operands"
    kernel = KERNELS[name]
    if not kernel.gpus.have(hardware.capability):
        return f"{name} needs compute capability {kernel.gpus.words}, this is {_kind(hardware)}"
    if kernel.cuda is not None and _older(hardware.cuda_version, kernel.cuda):
        return "{} needs CUDA {}.{}".format(name, *kernel.cuda)
    return ""


def _unable(backend: BackendName, quantizers: Quantizers, hardware: Hardware) -> str:
    """Why `backend`, te or torch, cannot run these operands on this machine; "" if it can."""
    if hardware.capability is None:
        return _unable_on_cpu(backend, quantizers, hardware)
    if lacking := _lacking_hardware(quantizers, hardware):
        return lacking
    if special := _too_special(quantizers):
        return special
    kernel, x = kernel_of(quantizers), quantizers.input
    assert x is not None
    if backend == "te":
        if kernel == "rowwise":
            return "Transformer Engine has no scale per row"
        if kernel == "nvfp4" and not BLACKWELL.have(hardware.capability):
            # TE's check takes 12.x too, where its casts at random gave gradients of 0 and its
            # Hadamard transforms fail (TransformerEngine issue 3062, pull request 3281).
            return "Transformer Engine's NVFP4 works on 10.x alone"
        if not hardware.has_te:
            return hardware.te_problem or f"Transformer Engine is not installed ({TE_REMEDY})"
        if kernel == "mxfp8" and x.scale_rounding != "rceil":
            return f"Transformer Engine rounds MXFP8's scales by rceil, not {x.scale_rounding}"
        if kernel == "block" and BLACKWELL.have(hardware.capability) and x.scale != "power_of_two":
            return "Transformer Engine's block scaling on 10.x needs power_of_two = true"
        if kernel in ("delayed", "current"):
            # The operands may differ in nothing but a gradient of E5M2.
            settings = {replace(each, format="e4m3") for each in quantizers.each.values()}
            w = quantizers.weight
            if len(settings) > 1 or w is None or w.format != x.format:
                return "Transformer Engine has one setting for all operands, E4M3 or HYBRID"
        return ""
    if old := _old_torch(hardware):
        return old
    if kernel == "block" and BLACKWELL.have(hardware.capability):
        # There it runs as MXFP8 with the block recipe's scales, which only TE does.
        return "the torch backend has no block scaling on 10.x"
    return ""


def _unable_on_cpu(backend: BackendName, quantizers: Quantizers, hardware: Hardware) -> str:
    if backend == "te":
        return "Transformer Engine needs a CUDA GPU"
    if old := _old_torch(hardware):
        return old
    kernel = kernel_of(quantizers)
    if kernel not in SCALED_AFTERWARDS:
        return f"torch's scaled_mm on a CPU has no {kernel or 'such'} scaling"
    if kernel == "rowwise" and _older(version_pair(hardware.torch_version), ROWS_ON_CPU):
        least = ".".join(map(str, ROWS_ON_CPU))
        return f"torch's scaled_mm on a CPU has no rowwise scaling before torch {least}"
    return _too_special(quantizers)


def _old_torch(hardware: Hardware) -> str:
    """That torch is older than its backend needs; "" if it is not."""
    if not _older(version_pair(hardware.torch_version), TORCH_MINIMUM):
        return ""
    needed = ".".join(map(str, TORCH_MINIMUM))
    return (
        f"the torch backend needs torch {needed} or later, this is {hardware.torch_version} "
        f"(pip install --upgrade 'torch>={needed}')"
    )


def _too_special(quantizers: Quantizers) -> str:
    """Why no FP8 unit multiplies these operands; "" if some do."""
    for pair in quantizers.gemms.values():
        if [q.format for q in pair if isinstance(q, Quantizer)] == ["e5m2", "e5m2"]:
            return "FP8 units take one E5M2 operand at most, and forward_format = e5m2 makes it two"
    return ""


def _kind(hardware: Hardware) -> str:
    if hardware.capability is None:
        return "a CPU"
    return "compute capability {}.{}".format(*hardware.capability)


def _older(version: tuple[int, int] | None, least: tuple[int, int]) -> bool:
    """Whether a version is older than `least`; one that is not known counts as current."""
    return version is not None and version < least
