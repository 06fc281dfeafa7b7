"""FP8 linears with torch's scaled GEMMs, which need no Transformer Engine and can be compiled.

GEMMs that the plan calls plain multiply the emulator's values instead, in the compute dtype. The
bytes, scales and amaxes equal the emulator's to the bit. x and w are quantized once, in the
forward pass, and saved in FP8 for the backward pass. The column copies are stored transposed, as
Hopper's GEMMs require.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from fp8stack import numerics
from fp8stack.common.formats import Quantizer
from fp8stack.common.quantizer_table import OPERANDS
from fp8stack.layers.backend import Backend
from fp8stack.layers.compiler import CompileBackend, compiled
from fp8stack.layers.emulate import EmulateBackend, Emulated, in_bf16
from fp8stack.layers.fsdp import ShardedWeight, WeightTensors
from fp8stack.layers.gathered_weights import (
    cast_in_blocks,
    cast_per_tensor,
    copies_of_gathered,
    is_gathered_in_fp8,
    share_amaxes,
)
from fp8stack.layers.grouped import QuantizedGroupedLinear
from fp8stack.layers.grouped_torch import CachedGroups, GroupedTorch
from fp8stack.layers.kernels.fused_casts import (
    Product,
    cast_blocks,
    cast_product,
    product_amax,
)
from fp8stack.layers.kernels.nvfp4 import cast_nvfp4
from fp8stack.layers.kernels.scaled_gemm import (
    Scaled,
    ScaleLayout,
    pack_scales,
    scaled_gemm,
    scaled_pair,
)
from fp8stack.layers.kernels.variants import has_kernel, transpose_bytes
from fp8stack.layers.linear import (
    Call,
    Gradients,
    QuantizedLinear,
    Size,
    multiply_backward,
    multiply_forward,
    no_autocast,
    require_supported_input,
)
from fp8stack.layers.operands import Draws, LayerOperands, castable
from fp8stack.layers.scaled_operands import (
    ScaledOperand,
    TorchOperand,
    operand_of,
    rows_multiple,
)
from fp8stack.layers.weight_cache import CachedWeight, WeightCache
from fp8stack.layers.weight_changes import version_of, weight_matrix
from fp8stack.numerics.cast import cast_scaled, codes_of_cast, record_amax
from fp8stack.precision.plan import LayerPlan, Plan

Copies = tuple[Scaled, Scaled | None]
Copy = Scaled | Emulated


class _MultiplyTwice(torch.autograd.Function):
    """Two linears with an activation in between. The output of the activation and the gradient of
    its input are written to memory in FP8 only, see `fused_casts`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up_weight: Tensor,
        up_bias: Tensor | None,
        down_weight: Tensor,
        down_bias: Tensor | None,
        up: QuantizedLinear,
        down: QuantizedLinear,
        activation: str,
        needs: tuple[tuple[bool, bool], tuple[bool, bool]],
        records: tuple[bool, bool],
    ) -> Tensor:
        # Neither gradient comes from the backward pass of a norm.
        of_up = Call(records[0], len(x), up_bias is not None, after_norm=True)
        of_down = Call(records[1], len(x), down_bias is not None, after_norm=True)
        hidden, up_saved, ctx.up = multiply_forward(up, x, up_weight, up_bias, needs[0], of_up)
        inner = Product(activation, hidden)
        y, down_saved, ctx.down = multiply_forward(
            down, inner, down_weight, down_bias, needs[1], of_down
        )
        ctx.activation, ctx.split = activation, len(up_saved)
        ctx.save_for_backward(hidden, *up_saved, *down_saved)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, *saved = ctx.saved_tensors
        of_up: Gradients = (None, None, None)
        with no_autocast(dy.device.type):
            of_down = multiply_backward(ctx.down, dy, tuple(saved[ctx.split :]))
            if of_down[0] is not None:
                gradient = Product(ctx.activation, hidden, of_down[0])
                of_up = multiply_backward(ctx.up, gradient, tuple(saved[: ctx.split]))
        return *of_up, *of_down[1:], None, None, None, None, None


_BY_BLOCKS = {ScaleLayout.ROWS, ScaleLayout.MX}  # a kernel makes both copies


def _copies(x: Tensor, quantizer: Quantizer, kind: ScaleLayout, across: bool = True) -> Copies:
    """The row copy and the column copy of `x`, with scales per row or block."""
    x = castable(x).contiguous()
    data, inv_scale = numerics.quantize(x, quantizer)[:2]
    along = Scaled(data, pack_scales(inv_scale, kind), kind)
    if not across:
        return along, None
    if kind is ScaleLayout.SQUARES:
        data, inv_scale = data.t().contiguous(), inv_scale.t()
    elif kind is ScaleLayout.PER_ROW:
        data, inv_scale = numerics.quantize(x, quantizer, 0)[:2]
        data = transpose_bytes(data.view(torch.uint8)).view(data.dtype)
        inv_scale = inv_scale.view(-1, 1)
    else:  # one copy is not the transpose of the other
        data, inv_scale = numerics.quantize(x.t().contiguous(), quantizer)[:2]
    return along, Scaled(data, pack_scales(inv_scale, kind), kind)


def _current_scale(x: Tensor, quantizer: Quantizer) -> Tensor:
    return numerics.current_scale(numerics.amax(x), quantizer)


_compile_once = cache(compiled)


def _plain_gemm(a: Emulated, b: Emulated, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """See `EmulateBackend.matmul`; in bfloat16 throughout where nothing is scaled."""
    in_bf16 = {a.values.dtype, b.values.dtype, out_dtype} == {torch.bfloat16}
    if not in_bf16 or a.factor is not None or b.factor is not None:
        return EmulateBackend.matmul(a, b, out_dtype, bias=bias)
    first = a.values.t() if a.form.transposed else a.values
    second = b.values if b.form.transposed else b.values.t()
    if bias is None:
        return torch.mm(first, second)
    return torch.addmm(bias.to(out_dtype), first, second)


class TorchBackend(Backend):
    """Builds linears on torch's scaled GEMMs."""

    caches_weights = True

    def __init__(self, plan: Plan, *, draws: Draws | None = None) -> None:
        super().__init__(plan, draws=draws)
        self._layers: list[QuantizedLinear] = []
        self._grouped_layers: list[QuantizedGroupedLinear] = []
        self.grouped: GroupedTorch = GroupedTorch(self)
        self._cache = WeightCache()
        self._sharded_layers: list[QuantizedLinear] = []
        # torch.compile's backend and mode, for casts of weights that no Triton kernel does.
        self.compiled_by: tuple[CompileBackend, str] | None = None
        self.after_norm = (
            False  # its own from the start, or the first block would be compiled twice
        )

    def compile_casts(self, backend: CompileBackend, mode: str) -> None:
        """See `Backend.compile_casts`."""
        self.compiled_by = backend, mode

    def fp8_linear(self, layer: LayerPlan, size: Size, operands: LayerOperands) -> QuantizedLinear:
        """See `Backend.fp8_linear`."""
        bf16 = in_bf16(self.plan, layer)
        quantizers = {name: operand_of(name, operands, layer, in_bf16=bf16) for name in OPERANDS}
        multiple = rows_multiple([quantizers[name] for name in ("input", "grad_output")])
        linear = QuantizedLinear(size, self, operands, quantizers, multiple)
        quantizers["weight"].layer = linear
        return linear

    def matmul(
        self,
        a: Copy,
        b: Copy,
        out_dtype: torch.dtype,
        *,
        bias: Tensor | None = None,
        fast_accumulation: bool = False,
    ) -> Tensor:
        """See `GemmBackend.matmul`."""
        if isinstance(a, Scaled) and isinstance(b, Scaled):
            options: dict[str, Any] = {"bias": bias, "fast_accumulation": fast_accumulation}
            options["in_float32"] = self.plan.hardware.slow_scaled_mm
            return scaled_gemm(a, b, out_dtype, **options)
        assert isinstance(a, Emulated)
        assert isinstance(b, Emulated)
        return _plain_gemm(a, b, out_dtype, bias)

    def cast(
        self, x: Tensor | Product, quantizers: TorchOperand, with_columns: bool, call: Call
    ) -> tuple[Copy, Copy | None]:
        """See `GemmBackend.cast`; the copies of a weight are cached until it changes."""
        if quantizers.cached is not None and self.is_current(quantizers, quantizers.cached):
            rows, columns = quantizers.cached.copies
            return rows, columns if with_columns else None
        return self.copies(x, quantizers, with_columns, call)

    def is_current(self, quantizers: TorchOperand | CachedGroups, cached: CachedWeight) -> bool:
        """Whether the cached copies of a weight are valid."""
        if not self.weights.copied or torch.compiler.is_compiling():
            return self.weights.copied
        # In a backward pass, activation checkpointing recomputes blocks. Outside of a pass of the
        # model, a layer that is called alone may have a weight that changed since the last pass.
        if not self.weights.fresh and torch._C._current_graph_task_id() == -1:
            return False
        assert quantizers.layer is not None
        weight = quantizers.layer._parameters.get("weight")
        if type(weight) is nn.Parameter and not weight.is_inference():  # as `version_of`, faster
            version = id(weight), weight.device, weight.data_ptr(), weight._version
            if cached.version == version:
                return True
        return cached.version == version_of(weight_matrix(quantizers.layer))

    def copies(
        self, x: Tensor | Product, quantizers: TorchOperand, with_columns: bool, call: Call
    ) -> tuple[Copy, Copy | None]:
        """`cast` without cached copies."""
        if isinstance(quantizers, ScaledOperand):
            return self.quantize(x, quantizers, with_columns, call)
        assert isinstance(x, Tensor)
        rows: Copy | None = None
        columns: Copy | None = None
        scaled, values = (quantizers.rows, quantizers.columns), quantizers.values
        if scaled[0] is None or (with_columns and scaled[1] is None):
            across = with_columns and scaled[1] is None
            rows, columns = EmulateBackend.cast(self, x, values, across, call)
        elif not with_columns and call.record and values.always_records:
            assert values.slot_across is not None
            values.slot_across.record(numerics.amax(x))
        if scaled[0] is not None:
            rows = self.quantize(x, scaled[0], False, call)[0]
        if with_columns and scaled[1] is not None:
            without_sums = call._replace(has_bias=False)
            columns = self.quantize(x, scaled[1], True, without_sums)[1]
        assert rows is not None
        return rows, columns

    def quantize(
        self, x: Tensor | Product, quantizers: ScaledOperand, with_columns: bool, call: Call
    ) -> Copies:
        """The copies of `x` for scaled GEMMs. In compiled code, inductor fuses a cast with a
        delayed scale with the computation of `x`, except the transpose if a reduction over rows
        computes `x`: it would be written byte by byte."""
        quantizer, kind = quantizers.quantizer, quantizers.kind
        sums = call.has_bias and quantizers.name == "grad_output"
        if isinstance(x, Tensor) and x.dtype == torch.float64:
            x = x.float()
        if kind is ScaleLayout.PER_TENSOR:
            # In current scaling, inductor cannot fuse the cast with the computation of x.
            if isinstance(x, Tensor) and torch.compiler.is_compiling():
                by_kernel = has_kernel(x.device) and with_columns
                if quantizer.delayed or not by_kernel:
                    return self._compiled_cast(x, quantizers, with_columns, call, by_kernel)
            return self._cast(x, quantizers, with_columns, call.record, sums)
        if kind in _BY_BLOCKS and (not isinstance(x, Tensor) or has_kernel(x.device)):
            product = Product("cast", x) if isinstance(x, Tensor) else x
            copies = cast_blocks(product, quantizer, across=with_columns, sums=sums)
            assert copies.inv_scale is not None
            rows = Scaled(copies.data, copies.inv_scale, kind, None, copies.sums)
            if copies.transposed is None or copies.inv_scale_across is None:
                return rows, None
            return rows, Scaled(copies.transposed, copies.inv_scale_across, kind)
        assert isinstance(x, Tensor)
        total = x.sum(0, dtype=torch.float32) if sums else None
        if kind is ScaleLayout.NV:
            across = quantizers.across if with_columns else None
            assert across != "forward"
            bits = quantizers.bits(False, call.rows), quantizers.bits(True, call.rows)
            rows, columns = cast_nvfp4(x, quantizer, across, bits)
        else:
            by_row = kind is ScaleLayout.PER_ROW
            make = self._compiled(_copies, x, quantizers) if by_row else _copies
            rows, columns = make(x, quantizer, kind, with_columns)
        return rows._replace(sums=total), columns

    def _cast(
        self,
        x: Tensor | Product,
        quantizers: ScaledOperand,
        with_columns: bool,
        record: bool,
        sums: bool,
    ) -> Copies:
        """`quantize` with one scale per tensor, in eager code or by a kernel."""
        slot, quantizer = quantizers.slot, quantizers.quantizer
        recorded = counts = None
        if slot is not None:
            scale, recorded, counts = slot.cast_arguments(record)
        else:  # current scaling: the amax comes first
            if isinstance(x, Tensor):
                scale = self._compiled(_current_scale, x, quantizers)(x, quantizer)
            else:
                scale = numerics.current_scale(product_amax(x), quantizer)
        total = x.sum(0, dtype=torch.float32) if sums and isinstance(x, Tensor) else None
        # The operator is for the Triton kernels and for dispatch modes; else call the CPU code.
        observed = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
        if isinstance(x, Tensor) and x.is_cpu and not observed:
            data = cast_scaled(x.contiguous(), scale, quantizers.target)
            turned = data.t().clone(memory_format=torch.contiguous_format) if with_columns else None
            if recorded is not None:
                record_amax(recorded, numerics.amax(x), counts)
            return scaled_pair(data, turned, scale, total)
        product = Product("cast", x) if isinstance(x, Tensor) else x
        options = {"across": with_columns, "sums": sums and total is None}
        options["record"] = recorded is not None
        copies = cast_product(product, scale, quantizer.format, **options)
        if copies.amax is not None and recorded is not None:
            record_amax(recorded, copies.amax, counts)
        sums_of_rows = copies.sums if total is None else total
        return scaled_pair(copies.data, copies.transposed, scale, sums_of_rows)

    def _compiled(self, cast: Any, x: Tensor, quantizers: ScaledOperand) -> Any:
        """`cast`, compiled if it casts a weight outside of compiled code on a GPU."""
        outside = quantizers.name == "weight" and not torch.compiler.is_compiling()
        if self.compiled_by and outside and has_kernel(x.device):
            return _compile_once(cast, *self.compiled_by)
        return cast

    def _compiled_cast(
        self, x: Tensor, quantizers: ScaledOperand, with_columns: bool, call: Call, by_kernel: bool
    ) -> Copies:
        """`_cast` in code that inductor can fuse, except that a kernel writes the transpose if a
        reduction computes or consumes `x`."""
        dy = quantizers.name == "grad_output"
        sums = dy and call.has_bias
        total = x.sum(0, dtype=torch.float32) if sums else None
        reduced = quantizers.name == "input" or (dy and (call.has_bias or not call.after_norm))
        scale = quantizers.scale(x, False, call.record)
        assert scale is not None
        format, dtype = quantizers.quantizer.format, quantizers.target.dtype
        assert dtype is not None
        if not (by_kernel and reduced):
            data = numerics.cast_to_fp8(x, scale, format).contiguous()
            return scaled_pair(data, data.t().contiguous() if with_columns else None, scale, total)
        codes = codes_of_cast(x, scale, format)
        turned = transpose_bytes(
            codes
        )  # of the codes, before the view: inductor then reads them from memory
        return scaled_pair(codes.view(dtype), turned.view(dtype), scale, total)

    def cache_weight(self, layer: QuantizedLinear, record: bool) -> None:
        """Quantize the weight of a layer and cache the copies."""
        quantizers: TorchOperand = layer.quantizers["weight"]
        call = Call(record, len(layer.matrix), has_bias=False)
        copies = self.copies(layer.matrix, quantizers, True, call)
        quantizers.cached = CachedWeight(copies, version_of(weight_matrix(layer)))

    def register_hooks(self, model: nn.Module) -> None:
        """See `Backend.register_hooks`: a hook caches the quantized weights for all micro-batches
        of a step."""
        self._layers = [
            layer
            for layer in model.modules()
            if isinstance(layer, QuantizedLinear) and layer.backend is self
        ]
        self._grouped_layers = [
            layer
            for layer in model.modules()
            if isinstance(layer, QuantizedGroupedLinear) and layer.backend is self.grouped
        ]
        for layer in self._layers:  # `convert` built another, on meta
            layer.quantizers["weight"].layer = layer
        model.register_forward_pre_hook(self._cache_weights)

    def norm_linear(self, x: Tensor, norm: nn.Module, linear: nn.Module) -> Tensor:
        """See `Backend.norm_linear`."""
        normed = norm(x)
        self.after_norm = True
        try:
            y: Tensor = linear(normed)
        finally:
            self.after_norm = False
        return y

    def mlp(self, x: Tensor, mlp: Any) -> Tensor:
        """See `Backend.mlp`; where possible, a kernel fuses the activation with the casts."""
        return self._fused_mlp(x, mlp) if self._fuses(x, mlp) else mlp(x)

    def _fuses(self, x: Tensor, mlp: Any) -> bool:
        """Whether `_fused_mlp` can replace the layers of an MLP, with the same results."""
        if not has_kernel(x.device) or _has_hooks(mlp):
            return False
        layers = (mlp.up, mlp.down)
        if not all(_takes_products(layer) for layer in layers):
            return False
        # Each layer pads its input separately: the activation of a padded row may not be zero.
        rows = x.numel() // x.shape[-1]
        return rows > 0 and rows % max(layer.row_multiple for layer in layers) == 0

    def _fused_mlp(self, x: Tensor, mlp: Any) -> Tensor:
        up, down = mlp.up, mlp.down
        compiling = torch.compiler.is_compiling()
        if compiling:
            self.weights.note_compiled_call()
        for layer in (up, down):
            require_supported_input(x, layer._parameters.get("weight"))
            if not compiling:
                layer.was_called = True
        grad = torch.is_grad_enabled()
        up_needs = grad and x.requires_grad, grad and up.weight.requires_grad
        bias_trains = grad and up.bias is not None and up.bias.requires_grad
        down_needs = any(up_needs) or bias_trains, grad and down.weight.requires_grad
        records = [
            layer.delayed is not None and layer.delayed.records(layer.training and grad)
            for layer in (up, down)
        ]
        with no_autocast(x.device.type):
            rows = x.to(self.compute_dtype).reshape(-1, up.in_features)
            parameters = (up.matrix, up.bias, down.matrix, down.bias)
            y: Tensor = _MultiplyTwice.apply(  # type: ignore[no-untyped-call]
                rows, *parameters, up, down, mlp.activation, (up_needs, down_needs), tuple(records)
            )
            return y.view(*x.shape[:-1], down.out_features)

    def prepare_sharding(self, module: nn.Module) -> None:
        """See `Backend.prepare_sharding`."""
        super().prepare_sharding(module)
        within, ranks = set(module.modules()), dist.get_world_size()
        for layer in self._layers:
            operand = layer.quantizers["weight"]
            if layer not in within or not is_gathered_in_fp8(operand, layer.out_features, ranks):
                continue
            layer.weight = nn.Parameter(ShardedWeight(layer.weight.data, layer))
            self._sharded_layers.append(layer)

    def before_all_gather(self) -> None:
        """See `Backend.before_all_gather`."""
        # DTensors, whose local tensors are `ShardedWeight`s.
        shards = [layer.weight.to_local().plain() for layer in self._sharded_layers]  # type: ignore[attr-defined]
        share_amaxes([layer.quantizers["weight"] for layer in self._sharded_layers], shards)

    def cast_shard(self, layer: QuantizedLinear, rows: Tensor) -> WeightTensors:
        """See `GemmBackend.cast_shard`."""
        operand = layer.quantizers["weight"]
        if operand.kind is ScaleLayout.PER_TENSOR:
            record = layer.delayed is not None and layer.delayed.is_recording
            return cast_per_tensor(operand, rows, record)
        cast = self._compiled(cast_in_blocks, rows, operand)
        gathered, shared = cast(rows, operand.quantizer, operand.kind, operand.shared)
        return WeightTensors(gathered, shared, operand.quantizer)

    def gathered_copies(
        self, tensors: list[Tensor], quantizers: ScaledOperand, with_columns: bool
    ) -> Copies:
        """See `GemmBackend.gathered_copies`."""
        return copies_of_gathered(tensors, quantizers, with_columns)

    def _cache_weights(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or self.weights.copied:
            return
        together: list[tuple[QuantizedLinear, Tensor]] = []
        # Inference tensors could not be saved for a backward pass. (Leaving inference mode enables
        # gradients, hence `no_grad`.)
        with torch.inference_mode(False), torch.no_grad():
            for layer in self._layers:
                weight, quantizers = weight_matrix(layer), layer.quantizers["weight"]
                if not layer.in_fp8 or weight is None or isinstance(weight, DTensor):
                    quantizers.cached = None  # the weight is sharded or computed at each call
                elif quantizers.in_batched_cast and _is_plain(weight):
                    together.append((layer, weight))
                else:
                    self.cache_weight(layer, self.weights.first)
            for grouped_layer in self._grouped_layers:
                self.grouped.cache_weight(grouped_layer, self.weights.first)
            if together:
                self._cache.cast(together, self.delayed, self.weights)
        self.weights.mark_copied()


def _is_plain(weight: Tensor) -> bool:
    """Whether the kernel that casts many weights can read this one."""
    plain = type(weight) in (Tensor, nn.Parameter) and weight._base is None
    return plain and weight.is_contiguous() and has_kernel(weight.device)


def _has_hooks(module: nn.Module) -> bool:
    """Whether hooks run before or after the module, in the forward or the backward pass."""
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


def _takes_products(layer: nn.Module) -> bool:
    """Whether a kernel may compute the layer's input and output gradient as it casts them, so that
    they never exist in high precision: no hook reads them."""
    if type(layer) is not QuantizedLinear or not layer.in_fp8 or layer.keeps_dtype:
        return False
    if _has_hooks(layer):
        return False
    kinds = {getattr(layer.quantizers[name], "kind", None) for name in ("input", "grad_output")}
    return kinds <= {ScaleLayout.PER_TENSOR, *_BY_BLOCKS}
