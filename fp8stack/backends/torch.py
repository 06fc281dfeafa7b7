"""FP8 linears on torch's own scaled GEMMs: no Transformer Engine needed, and they compile.

The bytes, scales and amaxes are those of the emulator, to the bit. x and w are quantized in the
forward pass, once for both their GEMMs, and saved as FP8 for the backward pass; the copies that
reduce over rows are stored transposed, as Hopper wants them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from fp8stack import numerics
from fp8stack.backends.base import Backend
from fp8stack.backends.compiler import CompileBackend, compiled
from fp8stack.backends.delayed import DelayedScaling
from fp8stack.backends.fsdp import FullWeight, ShardedWeight
from fp8stack.backends.linear import LowPrecisionLinear, Size, no_autocast, require_plain
from fp8stack.backends.operands import Draws, LayerOperands
from fp8stack.backends.weights import Version, WeightChanges, own_weight, version_of
from fp8stack.formats import Operand, Quantizer, fp8_format
from fp8stack.numerics.cast import codes_of_cast
from fp8stack.ops.fused_casts import (
    Product,
    cast_blocks,
    cast_product,
    cast_transpose,
    product_amax,
)
from fp8stack.ops.kernels import has_kernel, transpose_bytes
from fp8stack.ops.nvfp4 import cast_nvfp4
from fp8stack.ops.scaled_gemm import MULTIPLES, Scaled, Scales, pack_scales, scaled_gemm
from fp8stack.ops.weights import KeptWeights
from fp8stack.precision.plan import LayerPlan, Plan


@dataclass
class Kept:
    """A weight's copies, for the GEMM over its columns and that over its rows, and its version."""

    copies: tuple[Scaled, Scaled]
    version: Version


class _Ran(NamedTuple):
    """What a linear's backward pass needs to know of its forward pass, beside tensors."""

    layer: ScaledLinear
    record: bool
    gathers: bool  # whether its weight is gathered again
    weight_dtype: torch.dtype
    has_bias: bool
    rows: int | None  # of its input, before it was padded


_Saved = tuple[Tensor | None, ...]
"""The data and inverse scales of x and of w, for the GEMMs that reduce over their rows, as
`_tensors` gives them."""


def _tensors(copy: Scaled | None) -> _Saved:
    return (None,) * 3 if copy is None else (copy.data, copy.inv_scale, copy.whole)


def _forward(
    layer: ScaledLinear,
    x: Tensor | Product,
    weight: Tensor,
    bias: Tensor | None,
    needs: tuple[bool, bool],
    record: bool,
    rows: int | None = None,
) -> tuple[Tensor, _Saved, _Ran]:
    """y = x w^T + b with FP8 operands; x and w are quantized once and reused in backward. `needs`
    says of which of the two a gradient is wanted."""
    needs_dx, needs_dw = needs
    x_along, x_across, _ = layer.quantize(x, "input", record, needs_dw, apart=True, rows=rows)
    # A gathered weight is gathered again for the backward pass: keeping it would undo that.
    gathers = needs_dx and isinstance(weight, FullWeight)
    w_along, w_across = layer.quantized_weight(weight, record, needs_dx and not gathers)
    layer.backend.count_gemms(1)
    dtype = x.dtype if isinstance(x, Tensor) else x.x.dtype
    y = scaled_gemm(x_along, w_along, dtype, bias=bias, fast_accumulation=True)
    saved = (*_tensors(x_across), *_tensors(w_across))
    return y, saved, _Ran(layer, record, gathers, weight.dtype, bias is not None, rows)


def _backward(
    ran: _Ran, dy: Tensor | Product, saved: _Saved, apart: bool = False
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, w and b."""
    layer = ran.layer
    x_data, x_scale, x_whole, w_data, w_scale, w_whole = saved
    dx = dw = db = None
    apart = apart or ran.has_bias  # whose sum over rows is a reduction, too
    along, across, db = layer.quantize(
        dy, "grad_output", ran.record, x_data is not None, ran.has_bias, apart, ran.rows
    )
    if ran.gathers:
        _, w_across = layer.quantized_weight(layer.weight, False, True)
    elif w_data is not None and w_scale is not None:
        w_across = Scaled(w_data, w_scale, layer.kind("weight"), w_whole)
    else:
        w_across = None
    if w_across is not None:
        dx = scaled_gemm(along, w_across, dy.dtype if isinstance(dy, Tensor) else dy.x.dtype)
    if across is not None:
        assert x_data is not None
        assert x_scale is not None
        x_across = Scaled(x_data, x_scale, layer.kind("input"), x_whole)
        dw = scaled_gemm(across, x_across, torch.float32).to(ran.weight_dtype)
    if db is not None:
        db = db.to(ran.weight_dtype)
    layer.backend.count_gemms((dx is not None) + (dw is not None))
    layer.operands.backward_ran()
    if ran.record and layer.delayed is not None:
        layer.delayed.backward_ran()
    return dx, dw, db


class _Multiply(torch.autograd.Function):
    """One linear, see `_forward`. The gradient of what attention takes after a norm does not come
    from a reduction; that of what goes to the residual sum does, by the next norm."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: ScaledLinear,
        needs: tuple[bool, bool],
        record: bool,
        after_norm: bool,
        rows: int,
    ) -> Tensor:
        y, saved, ctx.ran = _forward(layer, x, weight, bias, needs, record, rows)
        ctx.save_for_backward(*saved)
        ctx.apart = not after_norm
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        with no_autocast(dy.device.type):
            found = _backward(ctx.ran, dy, ctx.saved_tensors, ctx.apart)
        return *found, None, None, None, None, None


class _MultiplyTwice(torch.autograd.Function):
    """Two linears around an activation, of which neither what it gives nor the gradient of what it
    takes is written but in FP8, see `fused_casts`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up_weight: Tensor,
        up_bias: Tensor | None,
        down_weight: Tensor,
        down_bias: Tensor | None,
        up: ScaledLinear,
        down: ScaledLinear,
        activation: str,
        needs: tuple[bool, bool, bool, bool],  # gradients of x, up's, what up gives, down's
        records: tuple[bool, bool],
    ) -> Tensor:
        hidden, of_up, ctx.up = _forward(up, x, up_weight, up_bias, needs[:2], records[0])
        inner = Product(activation, hidden)
        y, of_down, ctx.down = _forward(down, inner, down_weight, down_bias, needs[2:], records[1])
        ctx.save_for_backward(hidden, *of_up, *of_down)
        ctx.activation = activation
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, *saved = ctx.saved_tensors
        of_up: Any = (None, None, None)
        with no_autocast(dy.device.type):
            inner, *of_down = _backward(ctx.down, dy, tuple(saved[6:]))
            if inner is not None:
                gradient = Product(ctx.activation, hidden, inner)
                of_up = _backward(ctx.up, gradient, tuple(saved[:6]))
        return *of_up, *of_down, None, None, None, None, None


_BY_BLOCKS = {Scales.ROWS, Scales.MX}  # of which a kernel makes both copies


def _copies(
    x: Tensor, quantizer: Quantizer, kind: Scales, across: bool = True
) -> tuple[Scaled, Scaled | None]:
    """`x` with scales by row or by block, for its two GEMMs, see `ScaledLinear.quantize`."""
    x = x.contiguous()
    data, inv_scale = numerics.quantize(x, quantizer)[:2]
    along = Scaled(data, pack_scales(inv_scale, kind), kind)
    if not across:
        return along, None
    if kind is Scales.SQUARES:
        data, inv_scale = data.t().contiguous(), inv_scale.t()
    elif kind is Scales.PER_ROW:
        data, inv_scale = numerics.quantize(x, quantizer, 0)[:2]
        data = transpose_bytes(data.view(torch.uint8)).view(data.dtype)
        inv_scale = inv_scale.view(-1, 1)
    else:  # one copy is not the transpose of the other
        data, inv_scale = numerics.quantize(x.t().contiguous(), quantizer)[:2]
    return along, Scaled(data, pack_scales(inv_scale, kind), kind)


_compiled_copies = cache(partial(compiled, _copies))


class ScaledLinear(LowPrecisionLinear):
    """A linear on `scaled_mm`."""

    def __init__(self, size: Size, backend: TorchBackend, operands: LayerOperands) -> None:
        super().__init__(size, backend.compute_dtype, backend.delayed)
        self.backend = backend
        self.operands = operands
        self._kept: Kept | None = None  # what is multiplied by until the weight changes
        # Whether the kernel for many weights can cast this one.
        self.joins = self.kind("weight") in (Scales.PER_TENSOR, Scales.SQUARES, Scales.MX)
        self.shared_scale = torch.ones(())  # current scaling of a weight that ranks share out

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": None}  # a copy quantizes for itself

    def multiply(self, x: Tensor) -> Tensor:
        """See `LowPrecisionLinear.multiply`; pads rows to what the weight gradient's GEMM takes."""
        weight = self.matrix
        grad = torch.is_grad_enabled()
        needs = (grad and x.requires_grad, grad and weight.requires_grad)
        rows = len(x)
        missing = -rows % MULTIPLES[self.kind("input")]
        if missing:
            x = F.pad(x, (0, 0, 0, missing))
        y: Tensor = _Multiply.apply(  # type: ignore[no-untyped-call]
            x, weight, self.bias, self, needs, self.records(), self.backend.after_norm, rows
        )
        return y[:rows] if missing else y

    def keep_weight(self, record: bool) -> None:
        """Quantize the weight, to be used until it changes."""
        quantizer, kind, weight = self.quantizer("weight"), self.kind("weight"), self.matrix
        by = self.backend.compiled_by
        if by and kind is Scales.PER_ROW and has_kernel(weight.device):
            along, across = _compiled_copies(*by)(weight, quantizer, kind)
        else:
            along, across, _ = self.quantize(weight, "weight", record, True)
        assert across is not None
        self._kept = Kept((along, across), version_of(own_weight(self)))

    def quantized_weight(
        self, weight: Tensor, record: bool, across: bool
    ) -> tuple[Scaled, Scaled | None]:
        """See `quantize`, for the weight."""
        if isinstance(weight, FullWeight):
            inverse = numerics.inverse(weight.scale)
            along = Scaled(weight.data8, inverse, Scales.PER_TENSOR)
            return along, along._replace(data=along.data.t().contiguous()) if across else None
        kept = self._kept
        # A part that is called by itself may have changed since the model's last pass.
        if (
            kept is not None
            and self.backend.weights.copied
            and (torch.compiler.is_compiling() or kept.version == version_of(own_weight(self)))
        ):
            return kept.copies[0], kept.copies[1] if across else None
        return self.quantize(weight, "weight", record, across)[:2]

    def cast_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The FP8 bytes of some rows of the weight [rows, in], and the scale of the whole weight:
        delayed scaling knows it; current scaling was told."""
        slot = self.operands.slots.get(("weight", False))
        scale = self.shared_scale if slot is None else slot.scale()
        record = self.delayed is not None and self.delayed.is_recording
        format = self.quantizer("weight").format
        data, _, largest = cast_transpose(rows, scale, format, across=False, record=record)
        if slot is not None and largest is not None:
            slot.record(largest)  # of these rows: the history takes the maximum over ranks
        return data, scale

    def quantizer(self, name: Operand) -> Quantizer:
        """That of an operand: one for both its copies, or the plan had not chosen this backend."""
        found = self.operands.quantizers.along(name)
        assert found is not None
        return found

    def kind(self, name: Operand) -> Scales:
        """How the scales of an operand are laid out."""
        quantizer = self.quantizer(name)
        if quantizer.blocks is None:
            return Scales.PER_TENSOR if quantizer.per_tensor else Scales.PER_ROW
        if quantizer.scale_bytes == 1:
            return Scales.MX if quantizer.scale == "e8m0" else Scales.NV
        return Scales.SQUARES if quantizer.blocks[0] > 1 else Scales.ROWS

    def quantize(
        self,
        x: Tensor | Product,
        name: Operand,
        record: bool,
        across: bool,
        sums: bool = False,
        apart: bool = False,
        rows: int | None = None,
    ) -> tuple[Scaled, Scaled | None, Tensor | None]:
        """`x` [rows, columns] for a GEMM that reduces over its columns and, if `across`, for one
        that reduces over its rows: that one is [columns, rows]. And, if `sums`, its sums over rows
        in float32. In compiled code the compiler fuses a cast by a scale that is known with what
        made `x`; but for the transpose if `apart`, for what reduces rows would write it byte by
        byte. `rows`: how many it had before it was padded, for ranks to draw the bits of their own
        rows."""
        kind = self.kind(name)
        if not isinstance(x, Tensor):
            return self._made(x, name, record, across, sums)
        if kind in _BY_BLOCKS and has_kernel(x.device):
            return self._made(Product("cast", x), name, record, across, sums)
        total = x.sum(0, dtype=torch.float32) if sums else None
        if kind is Scales.PER_TENSOR:
            data, transposed, scale = self._cast(x, name, record, across, apart)
            along = Scaled(data, numerics.inverse(scale), kind)
            return along, None if transposed is None else along._replace(data=transposed), total
        if kind is Scales.NV:
            turned = self.operands.quantizers.across(name) if across else None
            assert turned != "forward"
            own = len(x) if rows is None else rows
            bits = self.operands.bits(name, False, own), self.operands.bits(name, True, own)
            return *cast_nvfp4(x, self.quantizer(name), turned, bits), total
        return *_copies(x, self.quantizer(name), kind, across), total

    def _made(
        self, product: Product, name: Operand, record: bool, across: bool, sums: bool
    ) -> tuple[Scaled, Scaled | None, Tensor | None]:
        """`quantize` of what is not in memory."""
        quantizer, kind = self.quantizer(name), self.kind(name)
        if kind in _BY_BLOCKS:
            made = cast_blocks(product, quantizer, across=across, sums=sums)
            assert made.inv_scale is not None
            along = Scaled(made.data, made.inv_scale, kind)
            if made.transposed is None or made.inv_scale_across is None:
                return along, None, made.sums
            return along, Scaled(made.transposed, made.inv_scale_across, kind), made.sums
        slot = self.operands.slots.get((name, False))
        if slot is None:  # current scaling: the amax comes first
            scale, record = numerics.current_scale(product_amax(product), quantizer), False
        else:
            scale = slot.scale()
        made = cast_product(
            product, scale, quantizer.format, across=across, record=record, sums=sums
        )
        if made.amax is not None and slot is not None:
            slot.record(made.amax)
        along = Scaled(made.data, numerics.inverse(scale), kind)
        turned = None if made.transposed is None else along._replace(data=made.transposed)
        return along, turned, made.sums

    @property
    def takes_products(self) -> bool:
        """Whether its input and the gradient of its output may be made as they are cast, and nobody
        is to see them."""
        kinds = {self.kind("input"), self.kind("grad_output")}
        hooks = (self._forward_hooks, self._forward_pre_hooks, self._backward_hooks)
        plain = self.in_fp8 and not self.keeps_dtype and not any(hooks)
        return plain and kinds <= {Scales.PER_TENSOR, *_BY_BLOCKS}

    def _cast(
        self, x: Tensor, name: Operand, record: bool, across: bool, apart: bool
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """The FP8 bytes of `x` by one scale, those of its transpose if `across`, and the scale."""
        format = self.quantizer(name).format
        slot = self.operands.slots.get((name, False))
        kernel = across and has_kernel(x.device)
        # Compiled, a cast is fused with what made x, but not where the amax comes first.
        if torch.compiler.is_compiling() and not (kernel and slot is None):
            scale = self.operands.scale(x, name, record)
            assert scale is not None
            if kernel and apart:
                codes, dtype = codes_of_cast(x, scale, format), fp8_format(format).dtype
                assert dtype is not None
                turned = transpose_bytes(codes)  # before the view: so it is of what was stored
                return codes.view(dtype), turned.view(dtype), scale
            data = numerics.cast_to_fp8(x, scale, format).contiguous()
            return data, data.t().contiguous() if across else None, scale
        scale, record = self.operands.scale(x, name, False), record and slot is not None
        assert scale is not None
        data, transposed, largest = cast_transpose(x, scale, format, across=across, record=record)
        if largest is not None and slot is not None:
            slot.record(largest)
        return data, transposed, scale


class TorchBackend(Backend):
    """FP8 on the hardware, with torch alone."""

    keeps_weights = True
    after_norm = False  # whether a norm gave what the linear that is called takes

    def __init__(self, plan: Plan, *, draws: Draws | None = None) -> None:
        super().__init__(plan, draws=draws)
        self._layers: list[ScaledLinear] = []
        self._together = _Together()
        self._shared: list[ScaledLinear] = []
        # torch.compile's backend and mode, for the casts of weights that no kernel has together.
        self.compiled_by: tuple[CompileBackend, str] | None = None

    def compile_casts(self, backend: CompileBackend, mode: str) -> None:
        """See `Backend.compile_casts`."""
        self.compiled_by = backend, mode

    def fp8_linear(self, layer: LayerPlan, size: Size, operands: LayerOperands) -> ScaledLinear:
        """See `Backend.fp8_linear`."""
        return ScaledLinear(size, self, operands)

    def follow(self, model: nn.Module) -> None:
        """See `Backend.follow`; weights are quantized once for all micro-batches of a step."""
        parts = model.modules()
        self._layers = [p for p in parts if isinstance(p, ScaledLinear) and p.backend is self]
        model.register_forward_pre_hook(self._keep_weights)

    def norm_linear(self, x: Tensor, norm: nn.Module, linear: nn.Module) -> Tensor:
        """See `Backend.norm_linear`."""
        normed = norm(x)
        self.after_norm = True
        try:
            y: Tensor = linear(normed)
        finally:
            self.after_norm = False
        return y

    def norm_mlp(self, x: Tensor, norm: nn.Module, mlp: Any) -> Tensor:
        """See `Backend.norm_mlp`; the activation is computed as it is cast where a kernel can."""
        return self._fused_mlp(norm(x), mlp) if self._fuses(x, mlp) else mlp(norm(x))

    def _fuses(self, x: Tensor, mlp: Any) -> bool:
        """Whether `_fused_mlp` gives what the parts of an MLP give one after the other."""
        if not has_kernel(x.device) or mlp._forward_hooks or mlp._forward_pre_hooks:
            return False
        layers = (mlp.up, mlp.down)
        if not all(type(one) is ScaledLinear and one.takes_products for one in layers):
            return False
        # Rows that are added for one GEMM alone would be others in the next.
        rows = x.numel() // x.shape[-1]
        return rows > 0 and rows % max(MULTIPLES[one.kind("input")] for one in layers) == 0

    def _fused_mlp(self, x: Tensor, mlp: Any) -> Tensor:
        up, down = mlp.up, mlp.down
        for layer in (up, down):
            require_plain(x, layer._parameters.get("weight"))
            if not torch.compiler.is_compiling():
                layer.ran = True
        grad = torch.is_grad_enabled()
        of_x, of_up, of_down = (grad and one.requires_grad for one in (x, up.weight, down.weight))
        of_hidden = of_x or of_up or (grad and up.bias is not None and up.bias.requires_grad)
        with no_autocast(x.device.type):
            rows = x.to(self.compute_dtype).reshape(-1, up.in_features)
            parameters = (up.matrix, up.bias, down.matrix, down.bias)
            needs = (of_x, of_up, of_hidden, of_down)
            records = (up.records(), down.records())
            y: Tensor = _MultiplyTwice.apply(  # type: ignore[no-untyped-call]
                rows, *parameters, up, down, mlp.activation, needs, records
            )
            return y.view(*x.shape[:-1], down.out_features)

    def share_out(self, part: nn.Module | None) -> None:
        """See `Backend.share_out`; a weight with one scale whose rows can be shared equally is
        gathered as FP8 bytes."""
        super().share_out(part)
        within = set() if part is None else set(part.modules())
        for layer in self._layers:
            quantizer = layer.quantizer("weight")
            equal = layer.weight.shape[0] % dist.get_world_size() == 0
            if layer in within and equal and quantizer.per_tensor:
                layer.weight = nn.Parameter(ShardedWeight(layer.weight.data, layer))
                self._shared.append(layer)

    def before_gathering(self) -> None:
        """See `Backend.before_gathering`: the scales of current scaling, in one collective."""
        shared = [layer for layer in self._shared if not layer.quantizer("weight").delayed]
        if not shared:
            return
        # DTensors, whose local tensors are `ShardedWeight`s.
        rows = [layer.weight.to_local().plain() for layer in shared]  # type: ignore[attr-defined]
        with torch.no_grad():
            largest = torch.stack([numerics.amax(part) for part in rows])
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        for layer, amax in zip(shared, largest.unbind(), strict=True):
            layer.shared_scale = numerics.current_scale(amax, layer.quantizer("weight"))

    def _keep_weights(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or self.weights.copied:
            return
        together: list[tuple[ScaledLinear, Tensor]] = []
        # Else they could not be saved for a backward pass (and this switches gradients on).
        with torch.inference_mode(False), torch.no_grad():
            for layer in self._layers:
                weight = own_weight(layer)
                if not layer.in_fp8 or weight is None or isinstance(weight, DTensor):
                    layer._kept = None  # it is not whole here
                elif layer.joins and _is_plain(weight):
                    together.append((layer, weight))
                else:
                    layer.keep_weight(self.weights.first)
            if together:
                self._together.cast(together, self.delayed, self.weights)
        self.weights.copied = True


def _is_plain(weight: Tensor) -> bool:
    """Whether the kernel for many weights can read it."""
    plain = type(weight) in (Tensor, nn.Parameter) and weight._base is None
    return plain and weight.is_contiguous() and has_kernel(weight.device)


class _Together:
    """The weights that one kernel casts for all their layers, and their copies."""

    def __init__(self) -> None:
        self._groups: list[tuple[KeptWeights, bool]] = []  # and whether scaling is delayed
        self._kept: list[Kept] = []  # by layer
        self._where: list[tuple[int, int, torch.dtype]] = []  # the weights are
        self._versions: list[Version] = []

    def __getstate__(self) -> dict[str, Any]:
        return vars(_Together())  # a copy's weights are elsewhere

    def cast(
        self,
        layers: list[tuple[ScaledLinear, Tensor]],
        delayed: DelayedScaling | None,
        changes: WeightChanges,
    ) -> None:
        """Have the layers use copies of what their weights are now; amaxes are recorded once."""
        record, seen = changes.first, changes.versions
        where = [(id(weight), weight.data_ptr(), weight.dtype) for _, weight in layers]
        if where != self._where:
            self._make(layers)
            self._where = where
        for kept, is_delayed in self._groups:
            if is_delayed:
                assert delayed is not None
                kept.cast(delayed.first_scales, delayed.history.all_recorded if record else None)
            else:
                kept.cast()
        for (layer, weight), found in zip(layers, self._kept, strict=True):
            found.version = seen.get(layer) or version_of(weight)
        versions = [found.version for found in self._kept]
        if versions != self._versions:  # what was saved of the copies is no longer there
            tensors = [copy.data for found in self._kept for copy in found.copies]
            torch.autograd.graph.increment_version(tensors)
            self._versions = versions

    def _make(self, layers: list[tuple[ScaledLinear, Tensor]]) -> None:
        self._groups, self._kept = [], []
        for layer, _ in layers:  # before others take as much memory
            layer._kept = None
        groups: dict[Any, list[int]] = defaultdict(list)
        for place, (layer, weight) in enumerate(layers):
            groups[layer.quantizer("weight"), weight.dtype, weight.device].append(place)
        copies: dict[int, tuple[Scaled, Scaled]] = {}
        for (quantizer, *_), places in groups.items():
            slots = [layers[place][0].operands.slots for place in places if quantizer.delayed]
            columns = [of_layer["weight", False].column for of_layer in slots]
            kept = KeptWeights([layers[place][1].detach() for place in places], quantizer, columns)
            self._groups.append((kept, quantizer.delayed))
            for place, (along, across) in zip(places, kept.copies, strict=True):
                turned = layers[place][0].transposed
                copies[place] = (across, along) if turned else (along, across)
        self._kept = [Kept(copies[place], ()) for place in range(len(layers))]
        for (layer, _), found in zip(layers, self._kept, strict=True):
            layer._kept = found
