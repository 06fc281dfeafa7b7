"""Whether torch.compile has what it needs here."""

from __future__ import annotations

from fp8stack.errors import UserError
from fp8stack.precision import Hardware, Plan
from fp8stack.precision.hardware import find_compiler_problem, missing_headers

SELECTIVE_COMPILED = (
    "activation_checkpointing selective does not work with --compile: compiled code chooses by "
    "itself what it keeps. Use none, block for less memory, or --no-compile."
)
TE_COMPILED = "--compile: Transformer Engine's layers cannot be compiled into one graph"


def require_compiler(plan: Plan, recompute: str = "none") -> None:
    """See that a model with this plan can be compiled, before anything is built or written.

    Args:
        plan: what is to run.
        recompute: its activation checkpointing, see `GPT`.

    Raises:
        UserError: the backend or the checkpointing cannot be compiled, or a compiler or its headers
            are missing.
    """
    require_compilable(plan, recompute)
    require_tools(plan.device, "--compile", "leave --compile out")


def is_compiled(
    asked: bool | None, plan: Plan, hardware: Hardware, recompute: str = "none"
) -> tuple[bool, str]:
    """Whether a model with this plan trains as compiled code, and a note on it or "".

    On a GPU it does, where that works, unless it was refused; on a CPU where it was asked for.

    Args:
        asked: whether it is to be compiled; None if nothing was said.
        plan: what is to run.
        hardware: where.
        recompute: its activation checkpointing, see `GPT`.
    """
    if asked is not None or hardware.device != "cuda":
        return bool(asked), ""
    why = hardware.compiler_problem
    if plan.backend == "te":
        why = "Transformer Engine's layers cannot be compiled into one graph"
    elif recompute == "selective":
        why = "activation_checkpointing selective would not choose what compiled code keeps"
    if why:
        return False, f"training is not compiled: {why}"
    return True, "training is compiled (torch.compile); --no-compile refuses that"


def require_compilable(plan: Plan, recompute: str = "none") -> None:
    """See that this backend and this activation checkpointing work in compiled code.

    Raises:
        UserError: one does not.
    """
    if plan.backend == "te":
        raise UserError(f"{TE_COMPILED}. Leave --compile out, or choose --backend torch.")
    if recompute == "selective":
        raise UserError(SELECTIVE_COMPILED)


def require_tools(device: str, what: str, instead: str) -> None:
    """See that torch.compile works for `device`, "cpu" or "cuda", before anything is built.

    Args:
        device: where the compiled code is to run.
        what: needs it, and
        instead: what to do without it, for the error.

    Raises:
        UserError: a compiler or its headers are missing.
    """
    if device != "cuda":
        _require_cpp_compiler(what, instead)
    # Both build Python extensions.
    if problem := find_compiler_problem() if device == "cuda" else missing_headers():
        raise UserError(f"{what}: {problem}, or {instead}.")


def _require_cpp_compiler(what: str, instead: str) -> None:
    # Private, and the only way to ask for the compiler that torch.compile will call (torch 2.13).
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except RuntimeError as error:
        raise UserError(
            f"{what} needs a C++ compiler and none was found. Install g++, name one by the "
            f"environment's CXX, or {instead}."
        ) from error
