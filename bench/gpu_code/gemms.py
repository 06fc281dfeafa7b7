"""The scaled GEMMs of the code that inductor generates, checked by torch's meta functions.

A program runs on meta tensors with the shapes, strides and dtypes that they have on the GPU. Its
Triton kernels do nothing; torch checks the operands and scales of each scaled GEMM as it does
before it calls cuBLAS or CUTLASS. GEMM operators of fp8stack run their eager code, so that the
scaled GEMMs in them are checked as well.

Import this module after `pretend`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fp8stack.layers.kernels import fused_casts
from fp8stack.layers.kernels import variants as kernels
from fp8stack.numerics.operators import EAGER

if TYPE_CHECKING:
    from bench.gpu_code.blocks import Program

_NO_KERNEL = SimpleNamespace(run=lambda *args, **options: None)
META = torch.device("meta")
SCALED = ("_scaled_mm", "_scaled_mm_v2", "_scaled_grouped_mm", "_scaled_grouped_mm_v2")


class RefusedGemmError(RuntimeError):
    """A scaled GEMM that torch does not accept."""


@dataclass(frozen=True, kw_only=True)
class ScaledGemm:
    """One call of a scaled GEMM.

    Attributes:
        part: the part of the model, see `blocks.Kernel`.
        operator: the name of torch's operator, without namespace and overload.
        operands: the dtype, shape and strides of each tensor: the matrices, the scales, the bias.
    """

    part: str
    operator: str
    operands: list[str]


def scaled_gemms(programs: Iterable[Program]) -> list[ScaledGemm]:
    """The scaled GEMMs of programs, in the order in which they are called.

    Raises:
        RefusedGemmError: torch's meta function refuses one of them.
    """
    gemms: list[ScaledGemm] = []
    for program in programs:
        with patch.object(AsyncCompile, "triton", lambda *source, **options: _NO_KERNEL):
            module: Any = PyCodeCache.load(program.code)
        module.empty_strided_cuda = _empty
        inputs = tree_map_only(
            Tensor, lambda x: _empty(x.shape, x.stride(), x.dtype), program.inputs
        )
        with (
            # Our fake implementations return what the operator returns on the inputs' device.
            patch.object(fused_casts, "has_kernel", lambda device: True),
            patch.object(kernels, "has_kernel", lambda device: True),
            ScaledGemms(program.model_part) as recorder,
        ):
            module.call(inputs)
        gemms += recorder.gemms
    return gemms


def _empty(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=META)


class ScaledGemms(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records scaled GEMMs that torch's meta function accepts."""

    def __init__(self, model_part: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model_part = model_part
        self.gemms: list[ScaledGemm] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        space, _, name = func.name().partition("::")
        name = name.partition(".")[0]
        if space == "fp8stack" and name.endswith("_gemm"):
            with self:  # the fake implementation would only compute shapes
                return EAGER[name](*args, **options)
        if space != "aten" or name not in SCALED:
            return func(*args, **options)
        out = options.pop("out", None)
        tensors = [x for x in tree_leaves((args, options)) if isinstance(x, Tensor)]
        operands = [f"{x.dtype} {tuple(x.shape)} strides {x.stride()}" for x in tensors]
        call = f"{name} of {'; '.join(operands)}"
        try:
            y = getattr(torch.ops.aten, name).default(*args, **options)
        except (RuntimeError, ValueError) as error:
            raise RefusedGemmError(f"{call}: {str(error).splitlines()[0]}") from error
        if reason := _overlooked(name, tensors):
            raise RefusedGemmError(f"{call}: {reason}")
        if out is not None and (out.shape, out.dtype) != (y.shape, y.dtype):
            raise RefusedGemmError(f"{call} gives {y.dtype} {tuple(y.shape)}, not {out.dtype}")
        self.gemms.append(ScaledGemm(part=self.model_part, operator=name, operands=operands))
        return y if out is None else out


def _overlooked(operator: str, tensors: Sequence[Tensor]) -> str:
    """A reason to refuse a GEMM that torch's meta function accepts, or "". The meta function does
    not check the strides of block scales, which cuBLAS reads in memory order."""
    a, b, *scales_and_bias = tensors
    scales = [x for x in scales_and_bias if x.ndim == 2 and x.dtype == torch.float32]
    rows = {(a.shape[0], 1), (1, b.shape[1])}
    if operator == "_scaled_mm" and any(
        tuple(x.shape) not in rows for x in scales if x.numel() > 1
    ):
        return "float32 scales by block in a GEMM that is not told how they are laid out"
    small = [x for x in scales_and_bias if x.dtype in (torch.float8_e8m0fnu, torch.float8_e4m3fn)]
    if not all(x.is_contiguous() for x in small):
        return "swizzled scales that are not contiguous"
    return ""
