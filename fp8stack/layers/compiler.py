"""The requirements of torch.compile, and the choices of inductor."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from fp8stack.common.errors import UserError
from fp8stack.precision import Hardware, Plan
from fp8stack.precision.hardware import find_compiler_problem, missing_headers

Function = TypeVar("Function", bound=Callable[..., Any])
CompileBackend = str | Callable[..., Any]
"""The type of torch.compile's `backend`."""
# TE 2.20.2: LayerNormLinear, LayerNormMLP and GroupedLinear are no_torch_dynamo; Linear runs
# eagerly where weights are cached (is_first_microbatch), and autocast raises in delayed scaling.
TE_COMPILED = "--compile: Transformer Engine's modules stay outside of compiled code"


def require_compiler(plan: Plan, recompute: str = "none") -> None:
    """Check that a model with this plan and this activation checkpointing can be compiled.

    Raises:
        UserError: it cannot, or a compiler or its headers are missing.
    """
    require_compilable(plan, recompute)
    require_tools(plan.device, "--compile", "leave --compile out")


def is_compiled(
    requested: bool | None, plan: Plan, hardware: Hardware, recompute: str = "none"
) -> tuple[bool, str]:
    """Whether to compile a model with this plan and this activation checkpointing for training, and
    a note on that decision or "". By default (`requested` is None), it is compiled on a GPU of
    NVIDIA if possible.

    Raises:
        UserError: it was requested, and torch does not compile it for this GPU.
    """
    # Inductor refuses graphs with bfloat16 inputs or outputs there (torch 2.13).
    old = hardware.capability is not None and hardware.capability < (8, 0)
    no_bf16 = ""
    if old and plan.recipe.residual == "bf16":
        no_bf16 = "torch compiles no residual stream in bf16 below compute capability 8.0"
    if requested and no_bf16:
        raise _refusal(no_bf16, "choose residual = 'fp32'")
    around_te = (
        "training is compiled (torch.compile) around Transformer Engine's modules; --backend torch "
        "compiles linears as well"
    )
    if requested is not None or hardware.device == "cpu":
        return bool(requested), around_te if requested and plan.backend == "te" else ""
    if hardware.other_gpu:
        untried = f"no compiled code of fp8stack has run on an {hardware.other_gpu}"
        return False, f"training is not compiled: {untried}; --compile turns it on"
    if problem := no_bf16 or _obstacle(plan, recompute)[0] or hardware.compiler_problem:
        return False, f"training is not compiled: {problem}"
    if plan.backend == "te":
        return True, f"{around_te}, and --no-compile turns compilation off"
    return True, "training is compiled (torch.compile); --no-compile turns that off"


def require_compilable(plan: Plan, recompute: str = "none") -> None:
    """Check that this version of torch can compile this backend with this activation checkpointing.

    Raises:
        UserError: it cannot.
    """
    if (obstacle := _obstacle(plan, recompute))[0]:
        raise _refusal(*obstacle)


def _obstacle(plan: Plan, recompute: str) -> tuple[str, str]:
    """The reason why a model cannot be compiled, and the remedy; both "" if it can be."""
    if recompute == "selective" and plan.backend == "te":
        reason = (
            "activation_checkpointing selective has no say in what Transformer Engine's modules, "
            "which stay outside of compiled code, keep"
        )
        return reason, "choose none, block for less memory, or --backend torch"
    # Scales of gradients would never change. Observed with torch 2.11, not with 2.13; 2.12 is not
    # tested.
    emulates = plan.backend == "emulate" or plan.emulated_layers
    if torch.__version__ < "2.13" and plan.delayed and emulates:
        lost = "loses the amaxes of gradients in emulated delayed scaling"
        return f"torch {torch.__version__} {lost}", "pip install 'torch>=2.13'"
    return "", ""


def _refusal(reason: str, instead: str) -> UserError:
    return UserError(f"--compile: {reason}. Leave --compile out, or {instead}.")


def require_tools(device: str, feature: str, instead: str) -> None:
    """Check that the tools that torch.compile needs for `device`, see `Hardware.device`, are
    installed.

    Raises:
        UserError: a compiler or its headers are missing. The message names the `feature` that needs
            them and what to do `instead`.
    """
    if device == "cpu":
        # A private function, the only one that returns torch.compile's compiler (torch 2.13).
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except RuntimeError as error:
            raise UserError(
                f"{feature} needs a C++ compiler and none was found. Install g++, name one by the "
                f"environment's CXX, or {instead}."
            ) from error
    # Both build Python extensions.
    if problem := missing_headers() if device == "cpu" else find_compiler_problem():
        raise UserError(f"{feature}: {problem}, or {instead}.")


def compiled(
    function: Function, backend: CompileBackend, mode: str = "default", *, fullgraph: bool = True
) -> Function:
    """`function` compiled by torch.compile, for each shape: as one graph, or without `fullgraph`
    around the functions that torch.compile does not trace. Inductor rounds intermediate results
    like eager code, so that casts to FP8 have the same inputs."""
    options: dict[str, Any] = {"backend": backend, "fullgraph": fullgraph, "dynamic": False}
    options["options"] = {"guard_filter_fn": needed_guards}
    if backend == "inductor":  # others take no options
        from torch._inductor import config, list_mode_options

        fuse_norms_with_their_own_gradients()
        # With this option, torch 2.10 cannot compile bfloat16 on a CPU. It has no effect on a CPU
        # before 2.13.
        rounds = torch.__version__ >= "2.11" or torch.cuda.is_available()
        options["options"] |= list_mode_options(mode) | {"emulate_precision_casts": rounds}
        # Inductor (torch 2.10 to 2.14) pads rows of FP8 codes, such as 1,600 bytes to 1,664, and
        # writes the codes again for GEMMs. Delete when it pads no buffer that a GEMM reads.
        if hasattr(config, "comprehensive_padding"):
            options["options"]["comprehensive_padding"] = False
    by_torch: Any = torch.compile
    optimized: Function = by_torch(function, **options)
    return optimized


def without_compiled_code() -> AbstractContextManager[object]:
    """A context in which compiled modules and functions run as eager code, which calls hooks."""
    # Importing the compiler takes a second; if it is not imported, nothing is compiled.
    imported = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if imported else nullcontext()


def needed_guards(guards: Sequence[Any]) -> list[bool]:
    """Select the guards of dynamo that compiled code checks at every call: all except those on
    functions, classes, modules and constants of Python files, which never change. They would take
    half of the time of the checks. A `guard_filter_fn` of torch.compile."""
    return [
        not guard.is_global
        or isinstance(guard.value, Tensor)
        or (isinstance(guard.value, bool | int | str) and bool(_OF_TORCH.search(guard.name)))
        for guard in guards
    ]


_OF_TORCH = re.compile(r"[.']torch\b|__import_torch_")  # whose switches are attributes of modules


@cache
def fuse_norms_with_their_own_gradients() -> None:
    """Patch inductor to compute the gradients of a norm's weight and input in one kernel, for all
    code that this process compiles for GPUs.

    torch 2.13 first fuses the weight gradients of a block's two norms, because both read the
    residual stream, in a kernel that reads one norm's operands a second time (see pytorch pull
    request 168209). The patch prevents the fusion of reductions with a GEMM in between. Delete it
    when torch no longer needs it.
    """
    from torch._inductor import scheduler as inductor
    from torch._inductor.choices import InductorChoices

    if not hasattr(inductor, "MixOrderReduction"):  # torch 2.10 may lack it
        return
    plain: Any = InductorChoices.can_fuse_horizontal

    def can_fuse(scheduler: Any, node: Any, second: Any, shared: int) -> bool:
        pair = (node, second)
        if all(reduction.is_gpu() and reduction.is_reduction() for reduction in pair):
            start, end = sorted(reduction.min_order for reduction in pair)
            apart = any(
                isinstance(step, inductor.ExternKernelSchedulerNode)
                and start < step.min_order < end
                for step in scheduler.nodes
            )
            if apart and not any(map(reads_rows, pair)):
                return False
        fuses: bool = plain(scheduler, node, second, shared)
        return fuses

    choices: Any = InductorChoices
    choices.can_fuse_horizontal = staticmethod(can_fuse)


def reads_rows(node: Any) -> bool:
    """Whether the last loop of a reduction, a node of inductor's scheduler, reads memory element by
    element: it reduces rows and not columns.

    `MixOrderReduction.is_contiguous_node` (torch 2.13) computes this too, but raises an IndexError
    if a scalar, which has no loop, is fused with the reduction, and an AssertionError for kernels
    that inductor does not generate. Both are left out here.
    """
    from torch._inductor.loop_body import MemoryUsageType
    from torch._inductor.virtualized import V

    read = {dependency.name for dependency in node.read_writes.reads}
    for member in node.get_nodes():
        body: Any = getattr(member, "_body", None)
        loops = [] if body is None else list(body.var_ranges)
        for entry in body.memory_usage[MemoryUsageType.LOAD] if loops else ():
            index = body.indexing_exprs[entry.index_name]
            *_, stride = V.graph.sizevars.stride_vars(index, loops, loops)
            if entry.buffer_name in read and stride not in (0, 1):
                return False
    return True


def allow_many_compilations() -> None:
    """Raise torch.compile's limit of 8 compilations per function: several kinds of blocks, training
    and evaluation, or several models in one process need more."""
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
