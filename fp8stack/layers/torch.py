"""FP8 linears with torch's scaled GEMMs, which need no Transformer Engine and can be compiled.

GEMMs in a layer's `plain_gemms` multiply the emulator's values in high precision instead. Bytes,
scales and amaxes equal the emulator's to the bit. x and w are quantized once, in the forward pass,
and saved in FP8 for the backward pass. Columnwise copies are stored transposed, as Hopper's GEMMs
require.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8stack import numerics
from fp8stack.common.formats import Format, Quantizer
from fp8stack.common.quantizer_table import OPERANDS, Operand
from fp8stack.layers.backend import Backend
from fp8stack.layers.compiler import CompileBackend, compiled
from fp8stack.layers.delayed import Slot
from fp8stack.layers.emulate import Emulated, EmulatedOperand, emulated_matmul, in_bf16
from fp8stack.layers.fsdp import ShardedWeight, WeightTensors, is_dtensor
from fp8stack.layers.fused_mlp import fused_mlp, fuses_mlp
from fp8stack.layers.gathered_weights import (
    cast_in_blocks,
    cast_per_tensor,
    copies_of_gathered,
    is_gathered_in_fp8,
    share_amaxes,
)
from fp8stack.layers.grouped import GroupedSize, QuantizedGroupedLinear
from fp8stack.layers.kernels.fused_casts import FusedInput, cast_blocks, cast_product, product_amax
from fp8stack.layers.kernels.grouped_gemm import Groups
from fp8stack.layers.kernels.nvfp4 import cast_nvfp4
from fp8stack.layers.kernels.scaled_gemm import (
    BLOCK_KERNELS,
    MULTIPLES,
    Scaled,
    ScaleLayout,
    pack_scales,
    scaled_gemm,
    scaled_grouped_gemm,
    scaled_pair,
)
from fp8stack.layers.kernels.variants import has_kernel, transpose_bytes
from fp8stack.layers.linear import Call, QuantizedLayer, QuantizedLinear, Size
from fp8stack.layers.operands import LayerOperands, RngState, castable
from fp8stack.layers.weight_cache import BatchedCasts, is_castable_in_batch
from fp8stack.layers.weight_changes import (
    CachedWeight,
    WeightChanges,
    version_of,
    weight_matrix,
)
from fp8stack.numerics.cast import cast_scaled, codes_of_cast, record_amax
from fp8stack.precision.plan import LayerPlan, Plan

Copy = Scaled | Emulated
_GEMMS_OF: dict[Operand, tuple[str, str]] = {
    "input": ("fprop", "wgrad"),
    "weight": ("fprop", "dgrad"),
    "grad_output": ("dgrad", "wgrad"),
}
"""The GEMMs that take the rowwise and the columnwise copy of each operand."""


class TorchOperand(EmulatedOperand):
    """The quantizers of an operand of torch's scaled GEMMs, and of GEMMs in high precision on the
    emulator's values.

    Args:
        plain_gemms: the GEMMs of the layer that run in high precision.
        bf16: whether these GEMMs multiply bfloat16 values, else float32.
        groups: whether it is the operand of a grouped linear.

    Attributes:
        casts: the casts of the rowwise and the columnwise copy; None for a copy that a GEMM in high
            precision takes.
        joint_cast: the cast that makes both copies of a matrix, if there is one.
        cached_weight: the copies of a weight.
        shared: the values of a sharded weight that all ranks share: its scale in current scaling,
            the amaxes of its columns with scales per row.
        layer: the layer, if the operand is its weight.
    """

    def __init__(
        self,
        name: Operand,
        operands: LayerOperands,
        plain_gemms: Collection[str] = (),
        *,
        bf16: bool = False,
        groups: bool = False,
    ) -> None:
        super().__init__(name, operands, bf16)
        self.groups = groups
        rowwise, columnwise, columnwise_slot = self.rowwise, self.columnwise, self.columnwise_slot
        if columnwise == "forward":
            columnwise, columnwise_slot = rowwise, self.slot
        rowwise_cast = columnwise_cast = self.joint_cast = None
        is_scaled = [gemm not in plain_gemms for gemm in _GEMMS_OF[name]]
        if is_scaled[0]:
            assert rowwise is not None
            rowwise_cast = _scaled_cast(rowwise, self.slot, columnwise)
        if is_scaled[1]:
            assert columnwise is not None
            quantizer = replace(columnwise, hadamard=0)
            columnwise_cast = _scaled_cast(
                quantizer, columnwise_slot, columnwise, with_rowwise=False
            )
        self.casts = rowwise_cast, columnwise_cast
        if (
            rowwise_cast
            and columnwise_cast
            and not groups
            and _equal_but_for_hadamard(rowwise, columnwise)
        ):
            self.joint_cast = rowwise_cast
        self.cached_weight: CachedWeight | None = None
        self.shared = torch.ones((), device="cpu")
        self.layer: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"cached_weight": None}  # a copied layer casts its own weight

    @property
    def in_batched_cast(self) -> bool:
        """Whether the kernel that casts many weights supports this quantizer."""
        layouts = (ScaleLayout.PER_TENSOR, ScaleLayout.SQUARES, ScaleLayout.MX)
        return self.joint_cast is not None and self.joint_cast.kind in layouts

    def cast(
        self, x: Tensor | FusedInput | Groups, with_columnwise: bool, call: Call
    ) -> tuple[Copy, Copy | None]:
        """See `GemmOperand.cast`; the copies of a weight are cached until it changes."""
        cached = self.cached_weight
        if cached is not None and self._is_current(cached):
            rowwise, columnwise = cached.copies
            return rowwise, columnwise if with_columnwise else None
        if self.joint_cast is not None:
            assert not isinstance(x, Groups)
            return scaled_copies(x, self, self.joint_cast, with_columnwise, call)
        assert not isinstance(x, FusedInput)
        if self.groups:
            rowwise, columnwise = super().cast(x, with_columnwise, call)
            return self._as_float8(rowwise, False), columnwise and self._as_float8(columnwise, True)
        if self.casts == (None, None):
            return super().cast(x, with_columnwise, call)
        assert isinstance(x, Tensor)
        return self._cast_separately(x, with_columnwise, call)

    def _cast_separately(
        self, x: Tensor, with_columnwise: bool, call: Call
    ) -> tuple[Copy, Copy | None]:
        """Cast each copy by itself: their quantizers differ, or only one is for a scaled GEMM."""
        rowwise_cast, columnwise_cast = self.casts
        rowwise: Copy
        if rowwise_cast is None:
            rowwise = self.copy(x, None, False, call)
        else:
            rowwise = scaled_copies(x, self, rowwise_cast, False, call)[0]
        if not with_columnwise:
            if call.record and self.always_records and self.columnwise_slot is not None:
                self.columnwise_slot.record(numerics.amax(x))
            return rowwise, None
        if columnwise_cast is not None:
            call = call._replace(has_bias=False)  # the sums of dy are computed once
            return rowwise, scaled_copies(x, self, columnwise_cast, True, call)[1]
        if not self.reuses_rowwise:
            return rowwise, self.copy(x, None, True, call)
        values = rowwise if isinstance(rowwise, Emulated) else self.copy(x, None, False, call)
        return rowwise, self.columnwise_of(values)

    def _is_current(self, cached: CachedWeight) -> bool:
        """Whether the cached copies of a weight are valid."""
        assert self.layer is not None
        weights: WeightChanges = self.layer.backend.weights
        if not weights.copied or torch.compiler.is_compiling():
            return weights.copied
        # A layer that is called alone, outside of a pass of the model, may have a weight that
        # changed since the last pass. A backward pass may call layers to recompute activations.
        if not weights.fresh and torch._C._current_graph_task_id() == -1:
            return False
        weight = self.layer._parameters.get("weight")
        if type(weight) is nn.Parameter and not weight.is_inference():  # as `version_of`, faster
            version = id(weight), weight.device, weight.data_ptr(), weight._version
            if cached.version == version:
                return True
        return cached.version == version_of(weight_matrix(self.layer))

    def _as_float8(self, copy: Emulated, columnwise: bool) -> Copy:
        """Convert the values of a copy of groups to FP8: for a scaled GEMM, or to save memory until
        the backward pass. Values that FP8 does not represent stay as they are."""
        cast, quantizer = self.casts[columnwise], self.columnwise if columnwise else self.rowwise
        is_saved = columnwise and self.name != "grad_output"
        if not isinstance(quantizer, Quantizer) or quantizer.blocks is not None:
            return copy
        dtype = quantizer.element.dtype
        if dtype is None or (cast is None and not is_saved):
            return copy
        data = copy.values.to(dtype)
        if cast is None:
            return copy._replace(values=data)
        assert copy.factor is not None
        if columnwise:  # of a weight: [groups, in, out], which has to be contiguous
            data = data.transpose(-2, -1).contiguous()
        return Scaled(data, copy.factor, cast.kind, offs=copy.offs)


def _equal_but_for_hadamard(rowwise: Quantizer | None, columnwise: Quantizer | None) -> bool:
    """Whether the quantizers are equal up to their Hadamard transforms."""
    if rowwise is None or columnwise is None:
        return rowwise is columnwise
    return replace(rowwise, hadamard=columnwise.hadamard) == columnwise


def _scaled_cast(
    quantizer: Quantizer,
    slot: Slot | None,
    columnwise: Quantizer | None,
    *,
    with_rowwise: bool = True,
) -> ScaledCast:
    if quantizer.blocks is None:
        kind = ScaleLayout.PER_TENSOR if quantizer.per_tensor else ScaleLayout.PER_ROW
    elif quantizer.scale_bytes == 1:
        kind = ScaleLayout.MX if quantizer.scale == "e8m0" else ScaleLayout.NV
    else:
        kind = ScaleLayout.SQUARES if quantizer.blocks[0] > 1 else ScaleLayout.ROWS
    return ScaledCast(quantizer, kind, slot, quantizer.element, columnwise, with_rowwise)


ScaledCopies = tuple[Scaled, Scaled | None]


class ScaledCast(NamedTuple):
    """The cast of one copy or both copies of an operand for scaled GEMMs.

    Attributes:
        quantizer: the quantizer of both copies, except for the columnwise Hadamard transform.
        kind: the layout of the scales.
        slot: the slot in the amax history, if the scale is delayed.
        target: the FP8 or FP4 format.
        columnwise: the quantizer of the columnwise copy.
        with_rowwise: whether the rowwise copy is needed, else only the columnwise one.
    """

    quantizer: Quantizer
    kind: ScaleLayout
    slot: Slot | None
    target: Format
    columnwise: Quantizer | None
    with_rowwise: bool = True


def scaled_copies(
    x: Tensor | FusedInput,
    operand: TorchOperand,
    cast: ScaledCast,
    with_columnwise: bool,
    call: Call,
) -> ScaledCopies:
    """The rowwise and, if needed, the columnwise copy of `x` for scaled GEMMs.

    Args:
        x: the matrix to cast.
        operand: its quantizers.
        cast: one of the casts of `operand`.
        with_columnwise: whether the columnwise copy is needed.
        call: the call of the linear.
    """
    quantizer, kind = cast.quantizer, cast.kind
    needs_sums = call.has_bias and operand.name == "grad_output"
    if isinstance(x, Tensor) and x.dtype == torch.float64:
        x = x.float()
    if kind is ScaleLayout.PER_TENSOR:
        return _with_one_scale(x, operand, cast, with_columnwise, call, needs_sums)
    if kind in BLOCK_KERNELS and (isinstance(x, FusedInput) or has_kernel(x.device)):
        fused_input = FusedInput("cast", x) if isinstance(x, Tensor) else x
        copies = cast_blocks(fused_input, quantizer, columnwise=with_columnwise, sums=needs_sums)
        assert copies.inv_scale is not None
        rowwise = Scaled(copies.data, copies.inv_scale, kind, None, copies.sums)
        if copies.transposed is None or copies.columnwise_inv_scale is None:
            return rowwise, None
        return rowwise, Scaled(copies.transposed, copies.columnwise_inv_scale, kind)
    assert isinstance(x, Tensor)
    column_sums = x.sum(0, dtype=torch.float32) if needs_sums else None
    if kind is ScaleLayout.NV:
        columnwise_quantizer = cast.columnwise if with_columnwise else None
        bits = operand.bits(not cast.with_rowwise, call.rows), operand.bits(True, call.rows)
        rowwise, columnwise = cast_nvfp4(x, quantizer, columnwise_quantizer, bits)
    else:
        is_per_row = kind is ScaleLayout.PER_ROW
        run = compiled_cast(_copies_in_torch, x, operand) if is_per_row else _copies_in_torch
        rowwise, columnwise = run(x, quantizer, kind, with_columnwise)
    return rowwise._replace(sums=column_sums), columnwise


def _with_one_scale(
    x: Tensor | FusedInput,
    operand: TorchOperand,
    cast: ScaledCast,
    with_columnwise: bool,
    call: Call,
    needs_sums: bool,
) -> ScaledCopies:
    """`scaled_copies` with one scale per tensor. In compiled code, inductor fuses the computation
    of `x` with a cast whose scale is delayed, but not with the transpose if a reduction over rows
    computes or reads `x`: inductor would write the transpose byte by byte."""
    quantizer, recorded, is_counted = cast.quantizer, None, None
    if cast.slot is not None:
        scale, recorded, is_counted = cast.slot.cast_arguments(call.record)
    elif isinstance(x, FusedInput):  # current scaling: the amax comes first
        scale = numerics.current_scale(product_amax(x), quantizer)
    else:
        scale = compiled_cast(_current_scale, x, operand)(x, quantizer)
    column_sums = x.sum(0, dtype=torch.float32) if needs_sums and isinstance(x, Tensor) else None
    if isinstance(x, FusedInput) or not _casts_in_torch(x, quantizer, with_columnwise):
        fused_input = FusedInput("cast", x) if isinstance(x, Tensor) else x
        options = {"columnwise": with_columnwise, "sums": needs_sums and column_sums is None}
        options["record"] = recorded is not None
        copies = cast_product(fused_input, scale, quantizer.format, **options)
        if copies.amax is not None and recorded is not None:
            record_amax(recorded, copies.amax, is_counted)
        column_sums = copies.sums if column_sums is None else column_sums
        return scaled_pair(copies.data, copies.transposed, scale, column_sums)
    if recorded is not None:
        record_amax(recorded, numerics.amax(x), is_counted)
    compiling = torch.compiler.is_compiling()
    is_dy = operand.name == "grad_output"
    meets_reduction = operand.name == "input" or (is_dy and (call.has_bias or not call.after_norm))
    if compiling and meets_reduction and with_columnwise and has_kernel(x.device):
        # A kernel transposes the bytes before they are viewed as float8, so that inductor reads
        # them from memory.
        codes = codes_of_cast(x, scale, quantizer.format)
        dtype = cast.target.dtype
        assert dtype is not None
        transposed = transpose_bytes(codes).view(dtype)
        return scaled_pair(codes.view(dtype), transposed, scale, column_sums)
    data = cast_scaled(x.contiguous(), scale, cast.target)
    transposed = data.t().clone(memory_format=torch.contiguous_format) if with_columnwise else None
    return scaled_pair(data, transposed, scale, column_sums)


def _casts_in_torch(x: Tensor, quantizer: Quantizer, with_columnwise: bool) -> bool:
    """Whether torch's own operators cast `x` with one scale, and not our operator: in compiled code
    that inductor can fuse, and in eager code on a CPU without a dispatch mode."""
    if torch.compiler.is_compiling():
        # Inductor cannot fuse a cast with the computation of x if its scale is current.
        return quantizer.delayed or not (has_kernel(x.device) and with_columnwise)
    return x.is_cpu and not torch._C._len_torch_dispatch_stack()


def _copies_in_torch(
    x: Tensor, quantizer: Quantizer, kind: ScaleLayout, with_columnwise: bool = True
) -> ScaledCopies:
    """The two copies of `x` with scales per row or block."""
    x = castable(x).contiguous()
    data, inv_scale = numerics.quantize(x, quantizer)[:2]
    rowwise = Scaled(data, pack_scales(inv_scale, kind), kind)
    if not with_columnwise:
        return rowwise, None
    if kind is ScaleLayout.SQUARES:
        data, inv_scale = data.t().contiguous(), inv_scale.t()
    elif kind is ScaleLayout.PER_ROW:
        data, inv_scale = numerics.quantize(x, quantizer, 0)[:2]
        data = transpose_bytes(data.view(torch.uint8)).view(data.dtype)
        inv_scale = inv_scale.view(-1, 1)
    else:  # neither copy is the transpose of the other
        data, inv_scale = numerics.quantize(x.t().contiguous(), quantizer)[:2]
    return rowwise, Scaled(data, pack_scales(inv_scale, kind), kind)


def _current_scale(x: Tensor, quantizer: Quantizer) -> Tensor:
    return numerics.current_scale(numerics.amax(x), quantizer)


_compile_once = cache(compiled)


def compiled_cast(cast: Callable[..., Any], x: Tensor, operand: TorchOperand) -> Callable[..., Any]:
    """Compile `cast` if it casts a weight on a GPU, in eager code; else return it as it is."""
    if operand.layer is None or torch.compiler.is_compiling() or not has_kernel(x.device):
        return cast
    compiled_by = operand.layer.backend.compiled_by
    return _compile_once(cast, *compiled_by) if compiled_by else cast


class TorchBackend(Backend):
    """Builds linears on torch's scaled GEMMs."""

    caches_weights = True

    def __init__(self, plan: Plan, *, draws: RngState | None = None) -> None:
        super().__init__(plan, draws=draws)
        self._layers: list[QuantizedLayer] = []
        self._batched_casts = BatchedCasts()
        self._sharded_layers: list[QuantizedLinear] = []
        # torch.compile's backend and mode, for casts of weights that no Triton kernel does.
        self.compiled_by: tuple[CompileBackend, str] | None = None
        # Set on the instance from the start, or the first block would be compiled twice.
        self.after_norm = False

    def compile_casts(self, backend: CompileBackend, mode: str) -> None:
        """See `Backend.compile_casts`."""
        self.compiled_by = backend, mode

    def fp8_linear(self, layer: LayerPlan, size: Size, operands: LayerOperands) -> QuantizedLinear:
        """See `Backend.fp8_linear`."""
        quantizers = self._quantizers(layer, operands)
        # The rows of x and dy are padded to a multiple of this.
        row_casts = (*quantizers["input"].casts, *quantizers["grad_output"].casts)
        multiple = max((MULTIPLES[cast.kind] for cast in row_casts if cast is not None), default=1)
        linear = QuantizedLinear(size, self, operands, quantizers, multiple)
        quantizers["weight"].layer = linear
        return linear

    def fp8_grouped_linear(
        self, layer: LayerPlan, size: GroupedSize, operands: LayerOperands
    ) -> QuantizedGroupedLinear:
        """See `Backend.fp8_grouped_linear`."""
        quantizers = self._quantizers(layer, operands, groups=True)
        linear = QuantizedGroupedLinear(size, self, operands, quantizers)
        quantizers["weight"].layer = linear
        return linear

    def _quantizers(
        self, layer: LayerPlan, operands: LayerOperands, *, groups: bool = False
    ) -> dict[Operand, TorchOperand]:
        options = {"bf16": in_bf16(self.plan, layer), "groups": groups}
        return {
            name: TorchOperand(name, operands, layer.plain_gemms, **options) for name in OPERANDS
        }

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
            if a.offs is not None:
                return scaled_grouped_gemm(a, b, out_dtype, **options)
            options["in_float32"] = self.plan.hardware.slow_scaled_mm
            return scaled_gemm(a, b, out_dtype, **options)
        assert isinstance(a, Emulated)
        assert isinstance(b, Emulated)
        if a.offs is None:
            return _high_precision_gemm(a, b, out_dtype, bias)
        # Groups may be saved as FP8 values.
        b = b._replace(values=b.values.to(a.values.dtype))
        return emulated_matmul(a, b, out_dtype, bias=bias)

    def cache_weight(self, layer: QuantizedLayer, record: bool) -> None:
        """Quantize the weight of a layer and cache the copies."""
        weight = layer.weight.t() if layer.transposed else layer.weight
        quantizers: TorchOperand = layer.quantizers["weight"]
        quantizers.cached_weight = None  # free the memory
        copies = quantizers.cast(weight, True, Call(record, len(weight), has_bias=False))
        quantizers.cached_weight = CachedWeight(copies, version_of(weight_matrix(layer)))

    def register_hooks(self, model: nn.Module) -> None:
        """See `Backend.register_hooks`; the hook caches the quantized weights for all micro-batches
        of a step."""
        self._layers = [
            layer
            for layer in model.modules()
            if isinstance(layer, QuantizedLayer) and layer.backend is self
        ]
        for layer in self._layers:  # the operand refers to the layer that `convert` built on meta
            layer.quantizers["weight"].layer = layer
            # Scaled GEMMs add a bias of the output's dtype, other GEMMs one of the parameter's.
            layer.cast_names = ("bias",) if layer.quantizers["input"].casts[0] else ()
        self._share_casts(model)
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
        """See `Backend.mlp`; if possible, a kernel fuses the activation with the casts."""
        return fused_mlp(self, x, mlp) if fuses_mlp(x, mlp) else mlp(x)

    def prepare_sharding(self, module: nn.Module) -> None:
        """See `Backend.prepare_sharding`."""
        super().prepare_sharding(module)
        modules, ranks = set(module.modules()), dist.get_world_size()
        for layer in self._layers:
            operand = layer.quantizers["weight"]
            if layer not in modules or not isinstance(layer, QuantizedLinear):
                continue
            if not is_gathered_in_fp8(operand, layer.out_features, ranks):
                continue
            layer.weight = nn.Parameter(ShardedWeight(layer.weight.data, layer))
            self._sharded_layers.append(layer)

    def before_all_gather(self) -> None:
        """See `Backend.before_all_gather`."""
        # DTensors, whose local tensors are `ShardedWeight`s.
        shards = [layer.weight.to_local().plain() for layer in self._sharded_layers]
        share_amaxes([layer.quantizers["weight"] for layer in self._sharded_layers], shards)

    def cast_shard(self, layer: QuantizedLinear, rows: Tensor) -> WeightTensors:
        """See `GemmBackend.cast_shard`."""
        operand = layer.quantizers["weight"]
        quantizer, kind, *_ = operand.joint_cast
        if kind is ScaleLayout.PER_TENSOR:
            record = layer.delayed is not None and layer.delayed.is_recording
            return cast_per_tensor(operand, rows, record)
        cast = compiled_cast(cast_in_blocks, rows, operand)
        gathered, shared = cast(rows, quantizer, kind, operand.shared)
        return WeightTensors(gathered, shared, quantizer)

    def gathered_copies(
        self, tensors: list[Tensor], quantizers: TorchOperand, with_columnwise: bool
    ) -> ScaledCopies:
        """See `GemmBackend.gathered_copies`."""
        return copies_of_gathered(tensors, quantizers, with_columnwise)

    def _cache_weights(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        if self.weights.only_tracked_changes:
            self.cast_parameters()
        if self.weights.copied:
            return
        batch: list[tuple[QuantizedLayer, Tensor]] = []
        # Inference tensors could not be saved for a backward pass. (Leaving inference mode enables
        # gradients, hence `no_grad`.)
        with torch.inference_mode(False), torch.no_grad():
            for layer in self._layers:
                weight, quantizers = weight_matrix(layer), layer.quantizers["weight"]
                if not layer.in_fp8 or weight is None or is_dtensor(weight):
                    # The weight is sharded or computed at each call.
                    quantizers.cached_weight = None
                elif quantizers.in_batched_cast and is_castable_in_batch(weight):
                    batch.append((layer, weight))
                else:
                    self.cache_weight(layer, self.weights.first)
            if batch:
                self._batched_casts.cast(batch, self.delayed, self.weights)
        self.weights.mark_copied()


def _high_precision_gemm(
    a: Emulated, b: Emulated, out_dtype: torch.dtype, bias: Tensor | None
) -> Tensor:
    """See `emulated_matmul`; bfloat16 matrices without factors take torch's bfloat16 GEMM."""
    in_bf16 = {a.values.dtype, b.values.dtype, out_dtype} == {torch.bfloat16}
    if not in_bf16 or a.factor is not None or b.factor is not None:
        return emulated_matmul(a, b, out_dtype, bias=bias)
    first = a.values.t() if a.layout.transposed else a.values
    second = b.values if b.layout.transposed else b.values.t()
    if bias is None:
        return torch.mm(first, second)
    return torch.addmm(bias.to(out_dtype), first, second)
