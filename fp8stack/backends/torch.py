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
from fp8stack.backends.operands import Draws, LayerOperands, castable
from fp8stack.backends.weights import Version, WeightChanges, own_weight, version_of
from fp8stack.formats import Operand, Quantizer, fp8_format
from fp8stack.numerics.amax import record_amax
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

_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def _tensors(copy: Scaled | None) -> _Saved:
    return (None,) * 3 if copy is None else (copy.data, copy.inv_scale, copy.whole)


def _restored(kind: Scales, tensors: _Saved) -> Scaled | None:
    data, inv_scale, whole = tensors
    return None if data is None or inv_scale is None else Scaled(data, inv_scale, kind, whole)


def _forward(
    layer: ScaledLinear,
    x: Tensor | Product,
    weight: Tensor,
    bias: Tensor | None,
    needs: tuple[bool, ...],
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
    y = layer.backend.gemm(x_along, w_along, dtype, bias=bias, fast_accumulation=True)
    saved = (*_tensors(x_across), *_tensors(w_across))
    return y, saved, _Ran(layer, record, gathers, weight.dtype, bias is not None, rows)


def _backward(ran: _Ran, dy: Tensor | Product, saved: _Saved, apart: bool = False) -> _Gradients:
    """The gradients of x, w and b."""
    layer = ran.layer
    x_across = _restored(layer.kind("input"), saved[:3])
    w_across = _restored(layer.kind("weight"), saved[3:])
    dx = dw = None
    apart = apart or ran.has_bias  # whose sum over rows is a reduction, too
    along, across, db = layer.quantize(
        dy, "grad_output", ran.record, x_across is not None, ran.has_bias, apart, ran.rows
    )
    if ran.gathers:
        _, w_across = layer.quantized_weight(layer.weight, False, True)
    if w_across is not None:
        dx = layer.backend.gemm(along, w_across, dy.dtype if isinstance(dy, Tensor) else dy.x.dtype)
    if across is not None:
        assert x_across is not None
        dw = layer.backend.gemm(across, x_across, torch.float32).to(ran.weight_dtype)
    if db is not None:
        db = db.to(ran.weight_dtype)
    layer.backend.count_gemms((dx is not None) + (dw is not None))
    layer.operands.backward_ran()
    layer.backend.weights.backward_ran()
    if ran.record and layer.delayed is not None:
        layer.delayed.backward_ran()
    return dx, dw, db


class _Multiply(torch.autograd.Function):
    """One linear; or two around an activation, of which neither what it gives nor the gradient of
    what it takes is written but in FP8, see `fused_casts`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        down_weight: Tensor | None,
        down_bias: Tensor | None,
        up: ScaledLinear,
        down: ScaledLinear | None,
        activation: str,
        needs: tuple[bool, ...],  # gradients of x and the weight; of what it gives, and down's
        records: tuple[bool, ...],
        apart: bool,  # whether the gradient of y comes from a reduction
        rows: int | None,
    ) -> Tensor:
        y, saved, ctx.up = _forward(up, x, weight, bias, needs[:2], records[0], rows)
        ctx.down, ctx.activation, ctx.apart = None, activation, apart
        if down is not None:
            assert down_weight is not None
            hidden, inner = y, Product(activation, y)
            given = (inner, down_weight, down_bias, needs[2:], records[1])
            y, of_down, ctx.down = _forward(down, *given)
            saved = (*saved, *of_down, hidden)
        ctx.save_for_backward(*saved)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        gradient: Tensor | Product | None = dy
        of_up: _Gradients = (None, None, None)
        of_down = of_up
        with no_autocast(dy.device.type):
            if ctx.down is not None:
                of_down = _backward(ctx.down, dy, saved[6:12])
                inner = of_down[0]
                gradient = None if inner is None else Product(ctx.activation, saved[12], inner)
            if gradient is not None:
                of_up = _backward(ctx.up, gradient, saved[:6], ctx.apart)
        return *of_up, *of_down[1:], None, None, None, None, None, None, None


def _both(data: Tensor, transposed: Tensor | None, scale: Tensor) -> tuple[Scaled, Scaled | None]:
    """Both copies of what was cast by one scale."""
    along = Scaled(data, numerics.inverse(scale), Scales.PER_TENSOR)
    return along, None if transposed is None else along._replace(data=transposed)


_BY_BLOCKS = {Scales.ROWS, Scales.MX}  # of which a kernel makes both copies


def _copies(
    x: Tensor, quantizer: Quantizer, kind: Scales, across: bool = True
) -> tuple[Scaled, Scaled | None]:
    """`x` with scales by row or by block, for its two GEMMs, see `ScaledLinear.quantize`."""
    x = castable(x).contiguous()
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
        self.backend.weights.layer_runs()
        weight = self.matrix
        grad = torch.is_grad_enabled()
        needs = (grad and x.requires_grad, grad and weight.requires_grad)
        # The gradient of what attention takes after a norm comes from no reduction; that of what
        # goes to the residual sum does, by the next norm.
        apart = not self.backend.after_norm
        rows = len(x)
        multiple = MULTIPLES[self.kind("input")]
        missing = -rows % multiple if rows else multiple  # no GEMM takes an empty operand
        if missing:
            x = F.pad(x, (0, 0, 0, missing))
        y: Tensor = _Multiply.apply(  # type: ignore[no-untyped-call]
            *(x, weight, self.bias, None, None, self, None, ""),
            *(needs, (self.records(),), apart, rows),
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
            turned = weight.data8.t().contiguous() if across else None
            return _both(weight.data8, turned, weight.scale)
        kept, weights = self._kept, self.backend.weights
        # A part that is called by itself may have changed since the model's last pass.
        if (
            kept is not None
            and weights.copied
            and (
                torch.compiler.is_compiling()
                or (weights.copies_serve and kept.version == version_of(own_weight(self)))
            )
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
        quantizer, kind = self.quantizer(name), self.kind(name)
        if isinstance(x, Tensor):
            x = castable(x)
        product = Product("cast", x) if isinstance(x, Tensor) else x
        if kind in _BY_BLOCKS and (not isinstance(x, Tensor) or has_kernel(x.device)):
            made = cast_blocks(product, quantizer, across=across, sums=sums)
            assert made.inv_scale is not None
            along = Scaled(made.data, made.inv_scale, kind)
            if made.transposed is None or made.inv_scale_across is None:
                return along, None, made.sums
            return along, Scaled(made.transposed, made.inv_scale_across, kind), made.sums
        if not isinstance(x, Tensor):
            return self._cast(product, name, record, across, sums)
        total = x.sum(0, dtype=torch.float32) if sums else None
        if kind is Scales.PER_TENSOR:
            # Compiled, a cast is fused with what made x, but not where the amax comes first.
            by_kernel = has_kernel(x.device) and across
            if torch.compiler.is_compiling() and (quantizer.delayed or not by_kernel):
                return *self._compiled_cast(x, name, record, across, by_kernel and apart), total
            return *self._cast(product, name, record, across, False)[:2], total
        if kind is Scales.NV:
            turned = self.operands.quantizers.across(name) if across else None
            assert turned != "forward"
            own = len(x) if rows is None else rows
            bits = self.operands.bits(name, False, own), self.operands.bits(name, True, own)
            return *cast_nvfp4(x, quantizer, turned, bits), total
        return *_copies(x, quantizer, kind, across), total

    def _cast(
        self, product: Product, name: Operand, record: bool, across: bool, sums: bool
    ) -> tuple[Scaled, Scaled | None, Tensor | None]:
        """`quantize` by one scale."""
        quantizer, slot = self.quantizer(name), self.operands.slots.get((name, False))
        if slot is None:  # current scaling: the amax comes first
            in_memory = product.name == "cast"
            largest = numerics.amax(product.x) if in_memory else product_amax(product)
            scale, record = numerics.current_scale(largest, quantizer), False
        else:
            scale = slot.scale()
        made = cast_product(
            product, scale, quantizer.format, across=across, record=record, sums=sums
        )
        if made.amax is not None and slot is not None:
            slot.record(made.amax)
        return *_both(made.data, made.transposed, scale), made.sums

    def _compiled_cast(
        self, x: Tensor, name: Operand, record: bool, across: bool, apart: bool
    ) -> tuple[Scaled, Scaled | None]:
        """`_cast` in code that the compiler can see, but for the transpose if `apart`."""
        format, scale = self.quantizer(name).format, self.operands.scale(x, name, record)
        assert scale is not None
        if not apart:
            data = numerics.cast_to_fp8(x, scale, format).contiguous()
            return _both(data, data.t().contiguous() if across else None, scale)
        codes, dtype = codes_of_cast(x, scale, format), fp8_format(format).dtype
        assert dtype is not None
        turned = transpose_bytes(codes)  # before the view: so it is of what was stored
        return _both(codes.view(dtype), turned.view(dtype), scale)

    @property
    def takes_products(self) -> bool:
        """Whether its input and the gradient of its output may be made as they are cast, and nobody
        is to see them."""
        kinds = {self.kind("input"), self.kind("grad_output")}
        hooks = (self._forward_hooks, self._forward_pre_hooks, self._backward_hooks)
        plain = self.in_fp8 and not self.keeps_dtype and not any(hooks)
        return plain and kinds <= {Scales.PER_TENSOR, *_BY_BLOCKS}


class TorchBackend(Backend):
    """FP8 on the hardware, with torch alone."""

    keeps_weights = True
    gemm = staticmethod(scaled_gemm)
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
        self.weights.layer_runs()
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
            y: Tensor = _Multiply.apply(  # type: ignore[no-untyped-call]
                rows, *parameters, up, down, mlp.activation, needs, records, False, None
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
        self.weights.made_copies()


def _is_plain(weight: Tensor) -> bool:
    """Whether the kernel for many weights can read it."""
    plain = type(weight) in (Tensor, nn.Parameter) and weight._base is None
    return plain and weight.is_contiguous() and has_kernel(weight.device)


class _Together:
    """The weights that one kernel casts for all their layers, and their copies."""

    def __init__(self) -> None:
        self._groups: list[tuple[KeptWeights, bool]] = []  # and whether scaling is delayed
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
                recorded = delayed.history.all_recorded
                # The device decides whether amaxes count, if only it knows of a change.
                amaxes = recorded if changes.certain else torch.zeros_like(recorded)
                kept.cast(delayed.first_scales, amaxes if record else None)
                if record and not changes.certain:
                    record_amax(recorded, amaxes, delayed.first)
            else:
                kept.cast()
        copies = []
        for layer, weight in layers:
            assert layer._kept is not None
            layer._kept.version = seen.get(layer) or version_of(weight)
            copies.append(layer._kept)
        versions = [found.version for found in copies]
        if versions != self._versions:  # what was saved of the copies is no longer there
            tensors = [copy.data for found in copies for copy in found.copies]
            torch.autograd.graph.increment_version(tensors)
            self._versions = versions

    def _make(self, layers: list[tuple[ScaledLinear, Tensor]]) -> None:
        self._groups = []
        groups: dict[Any, list[tuple[ScaledLinear, Tensor]]] = defaultdict(list)
        for layer, weight in layers:
            layer._kept = None  # before others take as much memory
            groups[layer.quantizer("weight"), weight.dtype, weight.device].append((layer, weight))
        for (quantizer, *_), members in groups.items():
            slots = [layer.operands.slots for layer, _ in members if quantizer.delayed]
            columns = [of_layer["weight", False].column for of_layer in slots]
            kept = KeptWeights([weight.detach() for _, weight in members], quantizer, columns)
            self._groups.append((kept, quantizer.delayed))
            for (layer, _), (along, across) in zip(members, kept.copies, strict=True):
                layer._kept = Kept((across, along) if layer.transposed else (along, across), ())
