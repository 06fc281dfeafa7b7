"""What the linears of all backends share: parameters, shapes, dtypes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor

from fp8stack.backends.delayed import DelayedScaling
from fp8stack.backends.reminder import StateReminder
from fp8stack.errors import UserError


class Size(NamedTuple):
    """What `nn.Linear` is made of."""

    in_features: int
    out_features: int
    bias: bool


class LowPrecisionLinear(nn.Linear):
    """A linear that multiplies in less precision than its weight and bias, the masters, have.

    `transposed` says that the weight is stored as [in, out], as transformers' Conv1D does.
    `keeps_dtype` says that the output has the dtype that `nn.Linear` would give, for models that
    are not ours; else it has the compute dtype.
    `in_fp8` may be switched at any step: without it, the GEMMs take operands of the compute dtype.
    `reminder` is told when a weight is loaded that FP8 state belongs to.
    """

    transposed = False
    keeps_dtype = False
    in_fp8 = True
    ran = False  # whether it was called yet, by code that is not compiled, with this weight
    reminder: StateReminder | None = None

    def __init__(
        self, size: Size, compute_dtype: torch.dtype, delayed: DelayedScaling | None = None
    ) -> None:
        super().__init__(*size)
        self.compute_dtype = compute_dtype
        self.delayed = delayed

    @property
    def matrix(self) -> Tensor:
        """The weight as [out, in], however it is stored."""
        return self.weight.t() if self.transposed else self.weight

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] in any floating dtype -> [..., out], see `keeps_dtype`.

        Raises:
            RuntimeError: an input of integers or of another width, as `nn.Linear` has it.
            UserError: under torch.fx; in FP8, see `require_plain`.
        """
        if isinstance(input, torch.fx.Proxy):
            raise UserError(
                "Converted layers cannot be traced by torch.fx: trace the model first and convert "
                "what symbolic_trace gives, or use torch.compile or torch.export."
            )
        if not input.is_floating_point():
            return F.linear(input, self.matrix, self.bias)  # torch says what is wrong
        if input.shape[-1:] != (self.in_features,):
            return F.linear(input.to(self.matrix.dtype), self.matrix, self.bias)  # so here
        if not torch.compiler.is_compiling() and not self.ran:
            self.ran = True
            if self.reminder is not None:
                self.reminder.remind()
        if self.in_fp8:
            require_plain(input, self._parameters.get("weight"))
        dtype = _dtype_of_linear(input) if self.keeps_dtype else self.compute_dtype
        with no_autocast(input.device.type):
            rows = input.to(self.compute_dtype).reshape(-1, self.in_features)
            y = self.multiply(rows) if self.in_fp8 else self.multiply_plain(rows)
            return y.to(dtype).view(*input.shape[:-1], self.out_features)

    def _apply(self, fn: Any, recurse: bool = True) -> LowPrecisionLinear:
        """As `nn.Module.to` calls it: delayed scaling's state moves along, before code is compiled
        that could not move it."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        weight = self._parameters.get("weight")
        if self.delayed is not None and weight is not None and weight.device.type != "meta":
            self.delayed.move(weight.device)
        return self

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Note that the weight was replaced; `nn.Module.load_state_dict` calls this."""
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if self.reminder is not None:
            names = (name for name, _ in self.named_parameters() if name != "bias")
            if any(prefix + name in state_dict for name in names):
                self.ran = False
                self.reminder.weights_loaded()

    def __prepare_scriptable__(self) -> nn.Module:
        """As torch.jit.script calls it.

        Raises:
            UserError: always.
        """
        raise UserError(f"Converted layers cannot be compiled by torch.jit: {_INSTEAD_OF_JIT}.")

    def records(self) -> bool:
        """Whether amaxes of this call are to be recorded. Raises what `DelayedScaling` raises."""
        if self.delayed is None:
            return False
        return self.delayed.records(self.training and torch.is_grad_enabled())

    @abstractmethod
    def multiply(self, x: Tensor) -> Tensor:
        """[rows, in] in the compute dtype -> [rows, out] in the compute dtype."""

    def multiply_plain(self, x: Tensor) -> Tensor:
        """`multiply` without FP8."""
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        return F.linear(x, self.matrix.to(self.compute_dtype), bias)


def require_plain(x: Tensor, weight: Tensor | None) -> None:
    """See that an FP8 linear can take this input and weight.

    Raises:
        UserError: it cannot: under tensor parallelism, or see `require_no_transform`.
    """
    if isinstance(x, DTensor) or isinstance(weight, DTensor):
        raise UserError(
            "FP8 layers do not take the DTensors of tensor parallelism: leave the layers that it "
            "shards out of FP8 (convert(..., exclude=...)), or use FSDP2 or DDP."
        )
    require_no_transform()
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if forward_ad.unpack_dual(x).tangent is not None:  # type: ignore[no-untyped-call]
        raise UserError("FP8 layers have no forward-mode derivatives: call backward().")


def require_no_transform() -> None:
    """See that nothing transforms or traces the code that runs.

    Raises:
        UserError: torch.func or torch.jit.trace does.
    """
    if torch._C._are_functorch_transforms_active():
        raise UserError(
            "FP8 layers cannot run under torch.func's grad, vmap or jacrev: call backward(), which "
            "torch.func.functional_call serves as well."
        )
    if not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None:
        raise UserError(f"FP8 layers cannot be traced by torch.jit: {_INSTEAD_OF_JIT}.")


_INSTEAD_OF_JIT = "use torch.compile or torch.export, or a model that is not converted"


def _dtype_of_linear(x: Tensor) -> torch.dtype:
    """The dtype that `nn.Linear` gives for `x`: autocast's, if it is on and takes part."""
    device = x.device.type
    if _autocasts(device) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return x.dtype


def _autocasts(device: str) -> bool:
    return device != "meta" and torch.is_autocast_enabled(device)


class CastLinear(LowPrecisionLinear):
    """A linear whose GEMM takes `compute_dtype` operands and returns `compute_dtype`."""

    in_fp8 = False
    multiply = LowPrecisionLinear.multiply_plain


def plain_linear(size: Size, compute_dtype: torch.dtype) -> nn.Linear:
    """A linear without FP8: torch's own where no cast is needed."""
    plain = compute_dtype == torch.float32
    return nn.Linear(*size) if plain else CastLinear(size, compute_dtype)


def no_autocast(device: str) -> AbstractContextManager[Any]:
    """Keep an autocast around a model from rounding what is inside."""
    return torch.autocast(device, enabled=False) if _autocasts(device) else _NOTHING


_NOTHING = nullcontext()
