"""FP8 linears on any device: GEMMs in float32 or bfloat16 on the exact FP8 values of the operands.

The GEMM's dtype represents every FP8 value exactly, so products are exact and sums are float32, as
in FP8 hardware. On a CPU, a float32 GEMM may use bf16 instructions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8stack import numerics
from fp8stack.common.formats import Quantizer
from fp8stack.common.quantizer_table import OPERANDS, Operand
from fp8stack.layers.backend import Backend
from fp8stack.layers.kernels.matmul_precision import exact_matmul
from fp8stack.layers.linear import Call, LowPrecisionLinear, QuantizedLinear, Size
from fp8stack.layers.operands import Draws, LayerOperands, OperandQuantizers, castable
from fp8stack.layers.weight_cache import CachedWeight
from fp8stack.layers.weight_changes import version_of
from fp8stack.numerics import Quantized
from fp8stack.numerics.fused import needs_operator
from fp8stack.numerics.operators import operator
from fp8stack.numerics.rounding import Rounding, rounding, rounding_of_both
from fp8stack.precision.hardware import cpu_multiplies_bf16
from fp8stack.precision.plan import LayerPlan, Plan


class Form(NamedTuple):
    """The layout of an `Emulated` copy.

    Attributes:
        transposed: whether it is a column copy: the GEMM takes the transpose of its values.
        in_bf16: whether bfloat16 represents its values exactly.
        packed: the operand whose `unpack` decodes the values, if they are FP8 bytes; else None.
        shape: the shape of the operand, if `packed`.
    """

    transposed: bool
    in_bf16: bool
    packed: EmulatedOperand | None = None
    shape: tuple[int, ...] | None = None


class Emulated(NamedTuple):
    """A quantized copy of an operand, for an emulated GEMM.

    Attributes:
        values: see `numerics.Rounded`; not transposed, also in a column copy. If packed, FP8 bytes.
        factor: multiplies the GEMM's output: 0-dim, or a factor for each row of a row copy or
            column of a column copy. If packed, the scales of the bytes.
        form: the layout of both.
        amax, has_nan: the amax of the matrix, and whether it has a NaN, if packed and needed by the
            quantizer; see `numerics.Quantized`.
        sums: always None, see `GemmBackend`.
    """

    values: Tensor
    factor: Tensor | None
    form: Form
    amax: Tensor | None = None
    has_nan: Tensor | None = None
    sums: None = None


def _scaled(
    y: Tensor,
    scales: list[Tensor],
    rows: Tensor | None,
    columns: Tensor | None,
    bias: Tensor | None,
    in_place: bool = False,
) -> Tensor:
    """`y` times the factors, plus the bias. In place on `y` only with `in_place`, because selective
    activation checkpointing saves the output of a GEMM."""
    product = None if in_place else y
    scales = [scales[0] * scales[1]] if len(scales) == 2 else scales
    for factor in (*scales, rows, columns):
        if factor is not None:
            y = y * factor if y is product else y.mul_(factor)
    if bias is None:
        return y
    return y + bias if y is product else y.add_(bias)


_FLOAT32 = torch.finfo(torch.float32)
_AMORTIZING_SIZE = 2**26  # multiply-adds of a GEMM that takes longer than generating its code


# A custom operator, for compiled code, which could neither read the scales nor set the precision.
# The scales become the GEMM's alpha, which saves a pass over the output. The operator transposes
# operands, because inductor 2.13 would copy them.
def _gemm(
    a: Tensor,
    b: Tensor,
    turn: str,
    scales: list[Tensor],
    bias: Tensor | None,
    in_bf16: bool,
    out_bf16: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    a, b = a.t() if turn == "a" else a, b.t() if turn == "b" else b
    if bias is not None and out_bf16:
        bias = bias.to(torch.bfloat16)
    # oneDNN generates code for each new size, which takes longer than a small GEMM: sizes that
    # change in each step, as the groups of experts, are left to MKL.
    rows, inner, columns = *a.shape, b.shape[1]
    new_size = (rows | inner | columns) % 16 and rows * inner * columns < _AMORTIZING_SIZE
    if out_bf16 and not new_size:
        return _product(a, b, scales, bias, out)
    a, b = a.float(), b.float()  # torch has no GEMM of bfloat16 matrices to float32 on a CPU
    bias = None if bias is None else bias.float()
    if new_size or not in_bf16:
        with exact_matmul():
            y = _product(a, b, scales, bias, out)
        return y.to(torch.bfloat16) if out_bf16 else y
    # oneDNN multiplies float32 matrices in bfloat16 and sums in float32: exact for values that
    # bfloat16 represents, and faster than MKL on CPUs with AVX-512, above all with AMX. Values
    # below 2^-126 may become 0.
    precision: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before, precision.fp32_precision = precision.fp32_precision, "bf16"
    try:
        return _product(a, b, scales, bias, out)
    finally:
        precision.fp32_precision = before


def _product(
    a: Tensor, b: Tensor, scales: list[Tensor], bias: Tensor | None, out: Tensor | None
) -> Tensor:
    if not scales:
        return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)
    # The product is exact in float64; the GEMM rounds it once.
    factors = list(map(Tensor.item, scales))
    alpha = math.prod(factors)
    if not _FLOAT32.tiny <= alpha <= _FLOAT32.max:
        # Multiply the output by these factors instead. BLAS skips the operands if alpha is 0, or
        # subnormal and treated as 0, which would lose a NaN. MKL's GEMM for AVX2 treats an alpha of
        # NaN as 1, and turns infinity, which stands for an overflowing product, into NaN.
        if not alpha <= _FLOAT32.max:
            factors = [math.nan if math.isnan(alpha) else math.inf]
        y = torch.mm(a.float(), b.float(), out=out)
        for factor in sorted(factors, reverse=True):  # the smallest last: it may leave 0
            y.mul_(factor)
        return (y if bias is None else y.add_(bias)).to(a.dtype)
    if bias is not None:
        return torch.addmm(bias, a, b, alpha=alpha, out=out)
    y = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype) if out is None else out
    return torch.addmm(y, a, b, beta=0, alpha=alpha, out=y)


def _fake_gemm(
    a: Tensor,
    b: Tensor,
    turn: str,
    scales: list[Tensor],
    bias: Tensor | None,
    in_bf16: bool,
    out_bf16: bool = False,
) -> Tensor:
    dtype = torch.bfloat16 if out_bf16 else torch.float32
    return a.new_empty(a.shape[turn == "a"], b.shape[turn != "b"], dtype=dtype)


_cpu_gemm = operator(
    "cpu_gemm(Tensor a, Tensor b, str turn, Tensor[] scales, Tensor? bias, bool in_bf16,"
    " bool out_bf16=False) -> Tensor",
    _gemm,
    _fake_gemm,
)


class EmulatedOperand(OperandQuantizers):
    """The quantizers and rounding rules of an operand of an emulated layer.

    Attributes:
        rounding, rounding_across: the rule that rounds the row copy and the column copy; None in
            high precision.
        rounding_both: the rule that rounds both copies in one pass over the operand; None if there
            is no such rule.
        reuses_row_copy: whether the column copy has the values of the row copy.
        bf16: whether values are bfloat16, else float32.
        rows, columns: the layout of each copy.
        packs: whether the column copy is saved as FP8 bytes, which the backward pass unpacks.
        bytes_of_rows: the dtype of these bytes if they are the row copy's values, else None.
        cached_weight: within `kept_weights`, the row copy of a weight, valid until the weight
            changes.
        always_records: whether the column copy's amax is recorded even if the copy is not needed,
            as in a frozen layer: for copies with separate slots.
    """

    def __init__(
        self, name: Operand, operands: LayerOperands, bf16: bool = False, save_fp8: bool = False
    ) -> None:
        super().__init__(name, operands)
        along, across = self.along, self.across
        self.cached_weight: CachedWeight | None = None
        self.rounding: Rounding | None = None if along is None else rounding(along, [1])
        self.rounding_across: Rounding | None = None
        self.rounding_both: Rounding | None = None
        self.reuses_row_copy = operands.quantizers.turned(name)
        if isinstance(across, Quantizer) and not self.reuses_row_copy:
            self.rounding_across = rounding(across, [0])
            self.rounding_both = None if along is None else rounding_of_both(along, across)
        self.bf16 = bf16
        self.packs = save_fp8 and name != "grad_output"
        self.bytes_of_rows: torch.dtype | None = None
        if isinstance(across, Quantizer) and across == along and across.per_tensor:
            self.bytes_of_rows = across.element.dtype if across.turns else None
        separate = self.slot_across is not None and self.slot_across is not self.slot
        self.always_records = separate and name != "grad_output"
        in_bf16 = along is not None and along.exact_in_bf16
        self.rows = Form(False, in_bf16)
        if isinstance(across, Quantizer):
            in_bf16 = across.exact_in_bf16
        else:
            dequantized = across == "forward" and along is not None
            in_bf16 = dequantized and along is not None and along.exact_across_in_bf16
        self.columns = Form(True, in_bf16)

    def kept_copies(self, weight: Tensor, cast: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
        """The copies that `cast` returns, of the weight as it is."""
        version = version_of(weight)
        if self.cached_weight is None or self.cached_weight.version != version:
            self.cached_weight = None  # free the memory, and let `cast` cast
            self.cached_weight = CachedWeight(cast(), version)
        return self.cached_weight.copies

    def pack(self, x: Tensor, rows: Emulated, call: Call) -> Emulated:
        """The column copy of `x` as FP8 bytes where possible; `rows` is the row copy of `x`."""
        across, form = self.across, self.columns._replace(packed=self, shape=tuple(x.shape))
        if across == "forward":
            return Emulated(*_with_row_scales(rows)[:2], form)
        if across is None:
            return Emulated(x, None, form)
        if self.bytes_of_rows is not None:
            return Emulated(rows.values.to(self.bytes_of_rows), rows.factor, form)
        scale = self.scale(x, across=True, record=call.record)
        bits = self.bits(True, call.rows, call.first_row)
        packed = numerics.quantize(castable(x), across, 0, bits, scale=scale)
        return Emulated(packed.data, packed.scales, form, packed.amax, packed.has_nan)

    def unpack(self, copy: Emulated) -> Emulated:
        """The column copy, with values in the GEMM's dtype, that `pack` packed."""
        values, factor, form = copy.values, copy.factor, copy.form
        dtype = torch.bfloat16 if self.bf16 else torch.float32
        if copy.amax is None or copy.has_nan is None:
            values = values.to(torch.float32)
        else:
            assert isinstance(self.across, Quantizer)
            assert factor is not None
            assert form.shape is not None
            size = torch.Size(form.shape)
            held = Quantized(values, factor, copy.amax, self.across, 0, size, copy.has_nan)
            values, factor = numerics.unpack(held)
        return Emulated(values.to(dtype), factor, self.columns)


def _with_row_scales(rows: Emulated) -> Emulated:
    """A row copy with the factors of its rows multiplied into the values, for a GEMM that reduces
    over the rows and could not apply them to its output."""
    values, factor = rows.values, rows.factor
    if factor is None or not factor.ndim:
        return rows
    return rows._replace(values=(values * factor[:, None]).to(values.dtype), factor=None)


@contextmanager
def kept_weights(model: nn.Module) -> Iterator[None]:
    """A context in which emulated linears, and those that are not in FP8, round a weight once until
    it changes, in passes without gradients. It takes the memory of the rounded weights. Changes
    that `version_of` cannot see, through `weight.data`, must not happen within."""
    operands = [getattr(layer, "quantizers", {}).get("weight") for layer in model.modules()]
    emulated = [operand for operand in operands if isinstance(operand, EmulatedOperand)]
    layers = [layer for layer in model.modules() if isinstance(layer, LowPrecisionLinear)]
    plain = [layer for layer in layers if not layer.in_fp8]
    for operand in emulated:
        operand.cached_weight = CachedWeight((None, None), ())
    for layer in plain:
        layer.cached_weight = layer.weight, ()
    try:
        yield
    finally:
        for operand in emulated:
            operand.cached_weight = None
        for layer in plain:
            layer.cached_weight = None


def in_bf16(plan: Plan, layer: LayerPlan) -> bool:
    """Whether the operands of a layer's emulated GEMMs are bfloat16, else float32. Without
    instructions for it, a CPU takes many times as long for a product of bfloat16."""
    in_bf16 = plan.emulated_dtype(layer) == "bf16"
    return in_bf16 and (plan.device != "cpu" or cpu_multiplies_bf16())


class EmulateBackend(Backend):
    """Builds linears that emulate FP8 GEMMs, on any device."""

    def __init__(self, plan: Plan, *, save_fp8: bool = False, draws: Draws | None = None) -> None:
        super().__init__(plan, draws=draws)
        self._save_fp8 = save_fp8

    def fp8_linear(self, layer: LayerPlan, size: Size, operands: LayerOperands) -> QuantizedLinear:
        """See `Backend.fp8_linear`."""
        bf16 = in_bf16(self.plan, layer)
        quantizers = {
            name: EmulatedOperand(name, operands, bf16, self._save_fp8) for name in OPERANDS
        }
        return QuantizedLinear(size, self, operands, quantizers)

    def cast(
        self: Backend, x: Tensor, quantizers: EmulatedOperand, with_columns: bool, call: Call
    ) -> tuple[Emulated, Emulated | None]:
        """See `GemmBackend.cast`."""
        if quantizers.cached_weight is not None and not (with_columns or call.record):
            again = partial(EmulateBackend.cast, self, x, quantizers, with_columns, call)
            return quantizers.kept_copies(x, again)
        bf16 = quantizers.bf16
        packs = with_columns and quantizers.packs
        if with_columns and not packs and quantizers.rounding_both is not None:
            first, second = quantizers.rounding_both.round(x, bf16=bf16)
            return Emulated(*first, quantizers.rows), Emulated(*second, quantizers.columns)
        copies = []
        casts_columns = with_columns and not packs and not quantizers.reuses_row_copy
        for across in (False, True) if casts_columns else (False,):
            rounding = quantizers.rounding_across if across else quantizers.rounding
            form = quantizers.columns if across else quantizers.rows
            if rounding is None:
                values = x.to(torch.bfloat16 if bf16 else torch.float32)
                copies.append(Emulated(values, None, form))
                continue
            scale = recorded = counts = bits = None
            slot = quantizers.slot_across if across else quantizers.slot
            if slot is not None:
                scale, recorded, counts = slot.cast_arguments(call.record)
            if quantizers.stochastic_across if across else quantizers.stochastic:
                bits = quantizers.bits(across, call.rows, call.first_row)
            rounded = rounding.round(x, bits, scale, recorded, counts, bf16)[0]
            copies.append(Emulated(*rounded, form))
        rows = copies[0]
        if not with_columns:
            if call.record and quantizers.always_records and quantizers.slot_across is not None:
                quantizers.slot_across.record(numerics.amax(x))
            return rows, None
        if packs:
            return rows, quantizers.pack(x, rows, call)
        if quantizers.reuses_row_copy:
            by_row = rows.factor is not None and rows.factor.ndim
            values, factor = (_with_row_scales(rows) if by_row else rows)[:2]
            return rows, Emulated(values, factor, quantizers.columns)
        return rows, copies[1]

    @staticmethod
    def matmul(
        a: Emulated,
        b: Emulated,
        out_dtype: torch.dtype,
        *,
        bias: Tensor | None = None,
        fast_accumulation: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `GemmBackend.matmul`; the scales are applied in float32. On a CPU, a float32 product
        may be written to `out`."""
        if b.form.packed is not None:
            b = b.form.packed.unpack(b)
        turn = "a" if a.form.transposed else "neither" if b.form.transposed else "b"
        scales = []  # factors of the full output; `rows` and `columns` are per row and column
        for factor in (a.factor, b.factor):
            if factor is not None and not factor.ndim:
                scales.append(factor)
        rows = a.factor[:, None] if a.factor is not None and a.factor.ndim else None
        columns = b.factor if b.factor is not None and b.factor.ndim else None
        if not a.values.is_cpu:
            a_matrix = a.values.t() if turn == "a" else a.values
            b_matrix = b.values.t() if turn == "b" else b.values
            with exact_matmul():  # TF32 would round the operands
                if a_matrix.dtype == torch.bfloat16:
                    y = torch.mm(a_matrix, b_matrix, out_dtype=torch.float32)
                else:
                    y = a_matrix @ b_matrix
            return _scaled(y, scales, rows, columns, bias).to(out_dtype)
        in_bf16 = a.form.in_bf16 and b.form.in_bf16
        by_row = rows is not None or columns is not None
        # A bfloat16 GEMM sums in float32 and rounds once.
        out_bf16 = out_dtype == a.values.dtype == b.values.dtype == torch.bfloat16 and not by_row
        bias = None if bias is None else bias.float()
        matrices = a.values, b.values, turn, scales, None if by_row else bias, in_bf16, out_bf16
        is_observed = out is None and needs_operator(a.values)
        y = _cpu_gemm(*matrices) if is_observed else _gemm(*matrices, out)
        if by_row:
            y = _scaled(y, [], rows, columns, bias, in_place=not is_observed)
        return y.to(out_dtype)
