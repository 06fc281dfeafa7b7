"""`LowPrecisionLinear`, the base class of linears, and `QuantizedLinear`, with quantized operands.

A `QuantizedLinear` computes three GEMMs: y = x w^T + b in the forward pass (`multiply_forward`),
dx = dy w and dw = dy^T x in the backward pass (`multiply_backward`). Its backend casts the operands
and multiplies them, see `GemmOperand` and `GemmBackend`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from fp8stack.common.errors import UserError
from fp8stack.common.quantizer_table import Operand
from fp8stack.layers.delayed import DelayedScaling
from fp8stack.layers.fsdp import FullWeight, WeightTensors, tensors_of
from fp8stack.layers.kernels.grouped_gemm import Groups
from fp8stack.layers.operands import LayerOperands
from fp8stack.layers.reminder import StateReminder
from fp8stack.layers.weight_changes import CachedWeight, WeightChanges, version_of


class Size(NamedTuple):
    """The arguments of `nn.Linear`."""

    in_features: int
    out_features: int
    bias: bool


class _Cast(torch.autograd.Function):
    """Returns an existing copy of a parameter in another dtype, with the gradient of a cast."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = parameter.dtype
        return copy.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None


class LowPrecisionLayer(nn.Module):
    """A layer with float32 master weights whose GEMMs run in a lower precision.

    Attributes:
        keeps_dtype: whether the output has the dtype that `nn.Linear` would return, for converted
            models; else it has the compute dtype.
        in_fp8: whether the GEMMs take FP8 operands, else operands of the compute dtype; may change
            between steps.
        was_called: whether eager code called the layer since the weight was loaded.
        reminder: warns if a weight is loaded without the FP8 state that belongs to it.
        transposed: whether the weight is stored as [in, out], as transformers' Conv1D does.
        cast_names: the names of the parameters that `Backend.cast_parameters` casts.
        casts: parameters in the compute dtype, by name.
        weight_changes: whether `casts` may be used; None: each copy while its version is current.
    """

    keeps_dtype = False
    in_fp8 = True
    was_called = False
    reminder: StateReminder | None = None
    compute_dtype: torch.dtype
    delayed: DelayedScaling | None = None
    transposed = False
    cast_names: tuple[str, ...] = ()
    casts: Mapping[str, CachedWeight] = MappingProxyType({})
    weight_changes: WeightChanges | None = None

    @property
    def stored_weight(self) -> Tensor | None:
        """The parameter `weight`; None where the weight is computed at each call."""
        return self._parameters.get("weight")

    def in_compute_dtype(self, name: str) -> Tensor:
        """The parameter `name` in the compute dtype: the copy of `casts`, or a new one."""
        parameter: Tensor = getattr(self, name)
        copy = self.existing_cast(name)
        if copy is None:
            return parameter.to(self.compute_dtype)
        with_gradient: Tensor = _Cast.apply(parameter, copy)  # type: ignore[no-untyped-call]
        return with_gradient

    def existing_cast(self, name: str) -> Tensor | None:
        """The copy that `casts` has of the parameter `name` as it is, without a gradient."""
        cast, changes = self.casts.get(name), self.weight_changes
        if cast is None or not (changes is None or changes.copied):
            return None
        copy: Tensor = cast.copies
        if torch.compiler.is_compiling():  # where versions cannot be read
            return copy
        return copy if cast.version == version_of(self._parameters.get(name)) else None

    def stale_casts(self, changed: bool) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters, by name, that `casts` has no copy of as they are; with `changed`, all."""
        for name in self.cast_names:
            parameter = self._parameters.get(name)
            if parameter is not None and parameter.dtype != self.compute_dtype:
                cached = None if changed else self.casts.get(name)
                if cached is None or cached.version != version_of(parameter):
                    yield name, parameter

    def name_at(self, path: str) -> str:
        """The layer's name in the plan and in the FP8 state, from its module path."""
        return path

    def _apply(self, fn: Any, recurse: bool = True) -> LowPrecisionLayer:
        """Also move the state of delayed scaling, which compiled code could not move; called by
        `nn.Module.to`."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        weight = self.stored_weight
        if self.delayed is not None and weight is not None and weight.device.type != "meta":
            self.delayed.move(weight.device)
        return self

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Also note that the weight was replaced; called by `nn.Module.load_state_dict`."""
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if self.reminder is not None:
            names = (name for name, _ in self.named_parameters() if name != "bias")
            if any(prefix + name in state_dict for name in names):
                self.was_called = False
                self.reminder.weights_loaded()

    def __prepare_scriptable__(self) -> nn.Module:
        """Called by torch.jit.script.

        Raises:
            UserError: always, since converted layers do not support torch.jit.
        """
        raise UserError(f"Converted layers cannot be compiled by torch.jit: {_INSTEAD_OF_JIT}.")

    def _replicate_for_data_parallel(self) -> nn.Module:
        """Called by nn.DataParallel, whose replicas would share FP8 state and cached weights.

        Raises:
            UserError: the layer is in FP8.
        """
        if self.in_fp8:
            raise UserError(
                "FP8 layers do not run under nn.DataParallel: use DistributedDataParallel."
            )
        return super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call,no-any-return]


class LowPrecisionLinear(LowPrecisionLayer, nn.Linear):
    """A linear that is a `LowPrecisionLayer`."""

    def __init__(
        self, size: Size, compute_dtype: torch.dtype, delayed: DelayedScaling | None = None
    ) -> None:
        super().__init__(*size)
        self.compute_dtype = compute_dtype
        self.delayed = delayed

    @property
    def matrix(self) -> Tensor:
        """The weight as [out, in], also if it is stored transposed."""
        return self.weight.t() if self.transposed else self.weight

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] in any floating dtype -> [..., out], see `keeps_dtype`.

        Raises:
            RuntimeError: the input is of integers or of another width, as in `nn.Linear`.
            UserError: under torch.fx; in FP8, see `require_supported_input`.
        """
        if isinstance(input, torch.fx.Proxy):
            raise UserError(NO_FX)
        if not isinstance(input, Tensor) or not input.is_floating_point():
            return F.linear(input, self.matrix, self.bias)  # raises torch's error
        if input.shape[-1:] != (self.in_features,):
            return F.linear(input.to(self.matrix.dtype), self.matrix, self.bias)  # likewise
        if not torch.compiler.is_compiling() and not self.was_called:
            self.was_called = True
            if self.reminder is not None:
                self.reminder.remind()
        if self.in_fp8:
            require_supported_input(input, self._parameters.get("weight"))
        dtype = dtype_of_linear(input) if self.keeps_dtype else self.compute_dtype
        with no_autocast(input.device.type):
            rows = input.to(self.compute_dtype).reshape(-1, self.in_features)
            y = self.multiply(rows) if self.in_fp8 else self.multiply_plain(rows)
            return y.to(dtype).view(*input.shape[:-1], self.out_features)

    @abstractmethod
    def multiply(self, x: Tensor) -> Tensor:
        """Apply the linear in FP8: [rows, in] -> [rows, out], both in the compute dtype."""

    def cast_shard(self, rows: Tensor) -> WeightTensors:
        """See `GatheredLayer.cast_shard`."""
        return WeightTensors([rows.to(self.compute_dtype)], [])

    def multiply_plain(self, x: Tensor) -> Tensor:
        """Apply the linear in the compute dtype: [rows, in] -> [rows, out]."""
        bias = None if self.bias is None else self.in_compute_dtype("bias")
        weight = self.in_compute_dtype("weight")
        return F.linear(x, weight.t() if self.transposed else weight, bias)


def require_supported_input(x: Tensor, weight: Tensor | None) -> None:
    """Check that an FP8 linear supports this input and weight.

    Raises:
        UserError: they are DTensors of tensor parallelism, carry forward-mode derivatives, or see
            `require_no_transform`.
    """
    # `is_dtensor`, without two more calls in each forward pass.
    if hasattr(x, "device_mesh") or hasattr(weight, "device_mesh"):
        raise UserError(
            "FP8 layers do not take the DTensors of tensor parallelism: leave the layers that it "
            "shards out of FP8 (convert(..., exclude=...)), or use FSDP2 or DDP."
        )
    compiling = torch.compiler.is_compiling()
    jit_traces = not compiling and torch._C._get_tracing_state() is not None
    if jit_traces or torch._C._are_functorch_transforms_active():
        require_no_transform()
    if compiling or forward_ad._current_level < 0:
        return
    if forward_ad.unpack_dual(x).tangent is not None:  # type: ignore[no-untyped-call]
        raise UserError("FP8 layers have no forward-mode derivatives: call backward().")


def require_no_transform() -> None:
    """Check that neither torch.func nor torch.jit.trace is active.

    Raises:
        UserError: one of them is.
    """
    if torch._C._are_functorch_transforms_active():
        raise UserError(
            "FP8 layers cannot run under torch.func's grad, vmap or jacrev: call backward(), which "
            "torch.func.functional_call serves as well."
        )
    if not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None:
        raise UserError(f"FP8 layers cannot be traced by torch.jit: {_INSTEAD_OF_JIT}.")


NO_FX = (
    "Converted layers cannot be traced by torch.fx: trace the model first and convert what "
    "symbolic_trace gives, or use torch.compile or torch.export."
)
_INSTEAD_OF_JIT = "use torch.compile or torch.export, or a model that is not converted"


def dtype_of_linear(x: Tensor) -> torch.dtype:
    """The dtype of `nn.Linear`'s output for `x`: autocast's if autocast applies to `x`."""
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return x.dtype


class CastLinear(LowPrecisionLinear):
    """A linear that casts its operands to the compute dtype; no FP8."""

    in_fp8 = False
    cast_names = ("weight", "bias")
    multiply = LowPrecisionLinear.multiply_plain


def plain_linear(size: Size, compute_dtype: torch.dtype) -> nn.Linear:
    """A linear without FP8: `nn.Linear` for float32, else a `CastLinear`."""
    is_fp32 = compute_dtype == torch.float32
    return nn.Linear(*size) if is_fp32 else CastLinear(size, compute_dtype)


def no_autocast(device: str) -> AbstractContextManager[Any]:
    """A context that disables autocast, which would round tensors within our layers."""
    if device == "meta" or not torch.is_autocast_enabled(device):
        return _NOTHING
    return torch.autocast(device, enabled=False)


_NOTHING = nullcontext()


class Call(NamedTuple):
    """The properties of one call of a linear that its casts read, in both passes.

    Attributes:
        record: whether amaxes are recorded.
        rows: the number of rows of x before padding; determines the rank's random bits.
        has_bias: whether the bias gradient, the sum of dy over its rows, is needed.
        after_norm: whether x is the output of a norm. If so, dy comes from attention, otherwise
            from the backward pass of the next norm, which is a reduction.
    """

    record: bool
    rows: int
    has_bias: bool
    after_norm: bool = False


class GemmOperand(Protocol):
    """The quantizers of one operand of a backend's linear.

    A copy of an operand for a GEMM is a NamedTuple: two tensors, a description of their layout, and
    further tensors or None. In the rowwise copy of dy, `sums` holds the sums of dy over its rows in
    float32 if the cast computes them, else None.
    """

    def cast(self, x: Any, with_columnwise: bool, call: Call) -> tuple[Any, Any | None]:
        """Cast the operand.

        Args:
            x: [rows, columns]; for groups, a `Groups`, or a weight [groups, rows, columns].
            with_columnwise: whether the columnwise copy is needed.
            call: the call of the linear.

        Returns:
            The rowwise copy, for a GEMM that reduces over the columns of `x`, and the columnwise
            copy or None, for a GEMM that reduces over the rows of `x`. `matmul` treats a columnwise
            copy as a matrix [columns, rows].
        """


class GemmBackend(Protocol):
    """The GEMMs of a backend's linears, on copies of operands."""

    def matmul(
        self,
        a: Any,
        b: Any,
        out_dtype: torch.dtype,
        *,
        bias: Tensor | None = None,
        fast_accumulation: bool = False,
    ) -> Tensor:
        """a b^T + bias: [M, K], [N, K], [N] -> [M, N] in `out_dtype`. `fast_accumulation` allows
        hardware to accumulate in fewer bits."""

    def cast_shard(self, layer: Any, rows: Tensor) -> WeightTensors:
        """See `GatheredLayer.cast_shard`; called for weights that `prepare_sharding` prepared."""

    def gathered_copies(
        self, tensors: list[Tensor], quantizers: Any, with_columnwise: bool
    ) -> tuple[Any, Any | None]:
        """The rowwise and, if needed, the columnwise copy of a weight, from the tensors that
        `tensors_of` returns for it."""


Saved = tuple[Tensor | None, ...]
CopyLayout = tuple[type, Any]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class ForwardPass(NamedTuple):
    """The data of a linear's forward pass that its backward pass needs, except saved tensors.

    Attributes:
        layer: the linear.
        call: the call.
        layouts: the class and the layout of the columnwise copies of x and w; None without one.
        gathers: whether the tensors of a gathered weight were saved instead of its columnwise copy.
        weight_dtype: the dtype of the weight's gradient.
    """

    layer: QuantizedLayer
    call: Call
    layouts: tuple[CopyLayout | None, CopyLayout | None]
    gathers: bool
    weight_dtype: torch.dtype


def multiply_forward(
    layer: QuantizedLayer,
    x: Any,
    weight: Tensor,
    bias: Tensor | None,
    needs: tuple[bool, bool],
    call: Call,
) -> tuple[Tensor, Saved, ForwardPass]:
    """Compute y = x w^T + b, of a matrix or of each group. x and w are cast once: their rowwise
    copies are multiplied, their columnwise copies saved.

    Args:
        needs: whether the gradients of x and of w are needed.

    Returns:
        y, the tensors to save for the backward pass, and its other data.
    """
    backend, (needs_dx, needs_dw) = layer.backend, needs
    gathered = tensors_of(weight) if isinstance(weight, FullWeight) else None
    quantizers = layer.quantizers
    x_rowwise, x_columnwise = quantizers["input"].cast(x, needs_dw, call)
    if gathered is not None:
        w_rowwise, w_columnwise = backend.gathered_copies(gathered, quantizers["weight"], False)
    else:
        w_rowwise, w_columnwise = quantizers["weight"].cast(weight, needs_dx, call)
    if bias is not None and layer.casts:
        copy = layer.existing_cast("bias")
        bias = bias if copy is None else copy
    y = backend.matmul(x_rowwise, w_rowwise, layer.compute_dtype, bias=bias, fast_accumulation=True)
    if not torch.compiler.is_compiling():
        backend.gemm_count += 1
    saved: Saved = ()
    layouts: list[CopyLayout | None] = []
    for copy in (x_columnwise, w_columnwise):
        layouts.append(None if copy is None else (type(copy), copy[2]))
        saved += () if copy is None else (*copy[:2], *copy[3:])
    gathers = needs_dx and gathered is not None
    if gathered is not None and gathers:
        # FSDP2 frees this memory and gathers the weight again for the backward pass. A columnwise
        # copy would stay.
        saved += (*gathered,)
    return y, saved, ForwardPass(layer, call, (layouts[0], layouts[1]), gathers, weight.dtype)


def restored(layout: CopyLayout, saved: Saved) -> Any:
    """A copy of this class and layout, with its saved tensors."""
    return layout[0](*saved[:2], layout[1], *saved[2:])


def multiply_backward(forward_pass: ForwardPass, dy: Any, saved: Saved) -> Gradients:
    """The gradients of x, w and b, or None for each that is not needed: dx = dy w, dw = dy^T x,
    db = the sum of dy over its rows."""
    layer, call, (x_layout, w_layout) = forward_pass[:3]
    backend, quantizers, weight_dtype = layer.backend, layer.quantizers, forward_pass.weight_dtype
    dx = dw = db = w_columnwise = None
    x_tensors = 0 if x_layout is None else len(x_layout[0]._fields) - 1  # type: ignore[attr-defined]
    dy_rowwise, dy_columnwise = quantizers["grad_output"].cast(dy, x_layout is not None, call)
    if w_layout is not None:
        w_columnwise = restored(w_layout, saved[x_tensors:])
    elif forward_pass.gathers:
        tensors = list(saved[x_tensors:])
        w_columnwise = backend.gathered_copies(tensors, quantizers["weight"], True)[1]
    if w_columnwise is not None:
        dx = backend.matmul(dy_rowwise, w_columnwise, layer.compute_dtype)
    if x_layout is not None:
        x_columnwise = restored(x_layout, saved[:x_tensors])
        dw = backend.matmul(dy_columnwise, x_columnwise, torch.float32).to(weight_dtype)
    if call.has_bias and dy_rowwise.sums is not None:
        db = dy_rowwise.sums.to(weight_dtype)
    elif call.has_bias:
        db = dy.sum(0, dtype=weight_dtype)
    if not torch.compiler.is_compiling():
        backend.gemm_count += (dx is not None) + (dw is not None)
    layer.operands.backward_ran()
    if backend.caches_weights:
        backend.weights.backward_ran()
    return dx, dw, db


class _Multiply(torch.autograd.Function):
    """y = x w^T + b with quantized operands: for a matrix or, with `offs`, for groups of rows."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        offs: Tensor | None,
        layer: QuantizedLayer,
        needs: tuple[bool, bool],
        record: bool,
        rows: int,
        after_norm: bool,
    ) -> Tensor:
        call = Call(record, rows, bias is not None, after_norm)
        operand = x if offs is None else Groups(x, offs)
        y, saved, ctx.forward_pass = multiply_forward(layer, operand, weight, bias, needs, call)
        ctx.save_for_backward(offs, *saved)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        offs, *saved = ctx.saved_tensors
        operand = dy if offs is None else Groups(dy, offs)
        with no_autocast(dy.device.type):
            gradients = multiply_backward(ctx.forward_pass, operand, tuple(saved))
        return *gradients, None, None, None, None, None, None


class QuantizedLayer(LowPrecisionLayer):
    """Base class of linears whose GEMMs take quantized operands.

    Attributes:
        backend: multiplies the operands, a `GemmBackend`.
        operands: the layer's quantizers and their state.
        quantizers: casts each operand, a `GemmOperand`.
        row_multiple: the GEMM of the weight gradient needs a multiple of this many rows, to which x
            is padded with zeros.
    """

    in_fp8 = True
    cast_names: tuple[str, ...] = ()
    weight: Any
    bias: Any

    def __init__(
        self,
        size: Any,
        backend: Any,
        operands: LayerOperands,
        quantizers: Mapping[Operand, Any],
        row_multiple: int = 1,
    ) -> None:
        super().__init__(size, backend.compute_dtype, backend.delayed)
        self.backend = backend
        self.operands = operands
        self.quantizers = dict(quantizers)
        self.row_multiple = row_multiple

    def multiply(self, x: Tensor, offs: Tensor | None = None) -> Tensor:
        """Apply the linear in FP8: [rows, in] -> [rows, out], both in the compute dtype.

        Args:
            x: the input.
            offs: the end of each group of rows, int32 [groups], if the weight has a matrix for
                each group.
        """
        if torch.compiler.is_compiling() and self.backend.caches_weights:
            self.backend.weights.note_compiled_call()
        weight = self.weight.t() if self.transposed else self.weight
        grad = torch.is_grad_enabled()
        needs = grad and x.requires_grad, grad and weight.requires_grad
        record = self.delayed is not None and self.delayed.records(self.training and grad)
        rows, missing = len(x), 0
        if self.row_multiple > 1:  # an empty x is padded too: these backends have no empty GEMMs
            missing = -rows % self.row_multiple if rows else self.row_multiple
        if missing:
            x = F.pad(x, (0, 0, 0, missing))
        y: Tensor = _Multiply.apply(  # type: ignore[no-untyped-call]
            x, weight, self.bias, offs, self, needs, record, rows, self.backend.after_norm
        )
        return y[:rows] if missing else y


class QuantizedLinear(QuantizedLayer, LowPrecisionLinear):
    """A linear whose GEMMs take quantized operands."""

    def cast_shard(self, rows: Tensor) -> WeightTensors:
        """See `GatheredLayer.cast_shard`."""
        if not self.in_fp8:
            return super().cast_shard(rows)
        tensors: WeightTensors = self.backend.cast_shard(self, rows)
        return tensors
