"""Casts of emulated FP8 on a CPU, compiled by numba: amax, scale and rounding in one pass.

They give the same values as the torch expressions in `rounding`, to the bit, without temporaries.
The threads of torch's own OpenMP library process a matrix tile by tile.

If numba is missing or fails, `why_not` returns the reason, and `rounding` uses torch.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fp8stack.common.terminal import warn
from fp8stack.numerics.blocks import RoundingRule
from fp8stack.numerics.hadamard import MINUS
from fp8stack.numerics.operators import operator

if TYPE_CHECKING:
    from fp8stack.numerics.fused_kernels import CastWork

# Threads that import numba at the same time deadlock.
_LOCK = threading.RLock()
RULES: list[RoundingRule] = []
"""The rounding rules, by their ids."""
_NUMBERS: dict[RoundingRule, int] = {}
Bits = tuple[Tensor | None, int, int, int]
"""The counter, seed, stream and first row of `RandomBits`."""

# Up to so many elements, one thread is faster than several.
_ALONE = 1 << 15
# Elements of a tile.
_TILE = 1 << 13
# The most elements of a tile whose blocks span several rows, and the fewest tiles for each thread.
# Whole rows are faster, since memory is then read in order, but every thread needs tiles.
_TALL_TILE, _SHARES = 1 << 18, 4
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PLAIN = (Tensor, torch.nn.Parameter)
Results = list[tuple[tuple[int, ...], torch.dtype]]
"""The shape and dtype of each result of a cast."""


def number(rule: RoundingRule) -> int:
    """The integer id of a rounding rule, by which `round` and the operator find it."""
    with _LOCK:
        index = _NUMBERS.setdefault(rule, len(RULES))
        if index == len(RULES):
            RULES.append(rule)
    return index


def needs_operator(x: Tensor) -> bool:
    """Whether a compiler, mode or profiler records the operators on `x`. Otherwise the function is
    called directly: an operator costs as much as the work on a small matrix."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or type(x) not in _PLAIN
        or torch.autograd.profiler._is_profiler_enabled
    )


def implementation(x: Tensor) -> Callable[..., list[Tensor]] | None:
    """The function that rounds `x`: `round`, or `op` if `needs_operator`; None in compiled code, on
    a GPU, or without numba. A tensor without memory takes the operator while a dispatch mode
    records operators."""
    if torch.compiler.is_compiling() or x.dtype not in _DTYPES or x.numel() == 0:
        return None
    if x.is_meta or isinstance(x, FakeTensor):
        return op if torch._C._len_torch_dispatch_stack() > 0 else None
    if not x.is_cpu or (_KERNELS or _loaded())[1] is not None:
        return None
    return op if needs_operator(x) else round


def rounds_groups(x: Tensor) -> bool:
    """Whether `round_groups` rounds `x`, which has memory."""
    is_supported = x.is_cpu and x.dtype in _DTYPES and x.numel() > 0
    return is_supported and (_KERNELS or _loaded())[1] is None


def why_not() -> str | None:
    """The reason why casts on this machine are not compiled by numba; None if they are."""
    return _loaded()[1]


_KERNELS: tuple[Any, str | None] | None = None
"""The result of `_load`, once it was called."""


def _loaded() -> tuple[Any, str | None]:
    """The kernels and None, or None and the reason why there are none."""
    global _KERNELS
    if _KERNELS is None:  # else a fork may begin while another thread holds the lock
        with _LOCK:
            _KERNELS = _KERNELS or _load()
    return _KERNELS


def _load() -> tuple[Any, str | None]:
    """Import the kernels, which numba compiles and caches."""
    try:
        from numba.core import event

        class WarnOnce(event.Listener):
            """Warns when numba begins to compile, which it does only without cached code."""

            warned = False

            def on_start(self, event: object) -> None:
                if not self.warned:
                    warn(_COMPILING)
                self.warned = True

            def on_end(self, event: object) -> None:
                pass

        with event.install_listener("numba:compile", WarnOnce()):
            from fp8stack.numerics import fused_kernels
    except ImportError as error:
        problem = f"numba cannot be imported ({error})"
    except Exception as error:  # a compiler may raise anything
        problem = f"numba failed ({str(error).partition(chr(10))[0]})"
    else:
        return fused_kernels, None
    warn(f"Casts are slower than they could be: {problem}.")
    return None, problem


_COMPILING = "Compiling the casts for this CPU, once: about 10 s."


@lru_cache(maxsize=1)
def _gomp_parallel() -> Callable[..., None] | None:
    """GOMP_parallel, which runs a C function in all threads, of the GNU OpenMP library that torch's
    wheels for Linux load; None elsewhere."""
    try:
        parallel = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    run: Callable[..., None] = parallel
    return run


def _run(kernel: Any, works: int, threads: int) -> None:
    """Run a kernel on the array of works at the address `works`."""
    parallel = _gomp_parallel() if threads > 1 else None
    if parallel is None:
        kernel.ctypes(works)
    else:
        parallel(kernel.address, works, threads, 0)


def _tile(rule: RoundingRule, rows: int, columns: int, threads: int) -> tuple[int, int]:
    """The rows and columns of a tile: whole blocks, and whole rows if they are short enough."""
    hadamard: int = rule.quantizer.hadamard or 1
    high = max([hadamard if rule.dim == 0 else 1, *(height for height, _ in rule.blocks)])
    wide = max([hadamard if rule.dim == 1 else 1, 4, *(width for _, width in rule.blocks)])
    width = -(-columns // wide) * wide
    if (1, 0) not in rule.blocks:
        elements_per_share = rows * columns // (_SHARES * threads) if high > 1 else 0
        elements = max(_TILE, min(_TALL_TILE, elements_per_share))
        tiles_per_row = -(-columns // (max(1, elements // high // wide) * wide))
        width = -(-columns // tiles_per_row // wide) * wide  # equal widths
    return max(1, min(_TILE // width, rows) // high) * high, width


@lru_cache(maxsize=4096)
def _plan(
    number: int,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    has_scale: bool,
    bf16: bool,
    threads: int,
) -> tuple[CastWork, bool, Results]:
    """The work of a cast without addresses, whether it needs an amax first, and its results."""
    rule = RULES[number]
    results, quantizer = _results(rule, rows, columns, bf16), rule.quantizer
    target, scale = quantizer.element, quantizer.scale
    kernels = _loaded()[0]
    work: CastWork = kernels.CastWork(groups=1)
    work.source_bf16, work.result_bf16 = dtype == torch.bfloat16, bf16
    if set(rule.blocks) == {(0, 0)} and not quantizer.hadamard and not quantizer.stochastic:
        rows, columns = 1, rows * columns
    work.source_rows, work.source_columns = rows, columns
    work.rows, work.columns = rule.shape(rows, columns)
    work.height, work.width = rule.blocks[0]
    work.other_height, work.other_width = rule.blocks[-1]
    work.tile_rows, work.tile_columns = _tile(rule, work.rows, work.columns, threads)
    work.hadamard, work.dim = quantizer.hadamard, rule.dim
    work.minus_signs = MINUS.get(quantizer.hadamard, 0)
    kind = quantizer.scale_rounding if scale == "e8m0" else "e4m3" if scale == "e4m3" else "float32"
    work.scale_kind = kernels.SCALES.index("given" if has_scale else kind)
    work.power_of_two = scale == "power_of_two"
    work.carries_scales = rule.carries
    work.stochastic = quantizer.stochastic
    work.mantissa_bits = target.mantissa_bits
    work.largest_exponent = (target.max_code >> target.mantissa_bits) - target.bias
    work.max, work.min_normal = target.max, target.min_normal
    work.min_subnormal = target.min_subnormal or 0.0
    work.limit = 1 / target.max if scale == "e8m0" else target.max
    work.eps = quantizer.eps
    value_dtype = torch.bfloat16 if quantizer.hadamard else dtype
    max_value = torch.finfo(value_dtype if rule.carries else torch.float32).max
    work.overflow = min(max_value, torch.finfo(torch.float32).max)
    needs_amax = bool(quantizer.hadamard) or (0, 1) in rule.blocks or scale == "e4m3"
    needs_amax = needs_amax or ((0, 0) in rule.blocks and not has_scale)
    return work, needs_amax, results


def round(
    x: Tensor,
    number: int,
    scale: Tensor | None,
    recorded: Tensor | None,
    is_counted: Tensor | None,
    counter: Tensor | None,
    seed: int,
    stream: int,
    first_row: int,
    bf16: bool = False,
) -> list[Tensor]:
    """Round `x` by the rule with this id: for each of the rule's blocks the values, float32 or
    `bf16`, and, if `RoundingRule.has_factor`, the factor of the output; see `rounding.Rounding`."""
    rule = RULES[number]
    source = (x if x.dtype == torch.bfloat16 else x.to(torch.float32)).contiguous()
    threads = torch.get_num_threads() if source.numel() > _ALONE else 1
    sizes = *source.shape, x.dtype, scale is not None, bf16, threads
    template, needs_amax, output_shapes = _plan(number, *sizes)
    kernels = (_KERNELS or _loaded())[0]
    work = type(template).from_buffer_copy(template)
    results = []
    for shape, dtype in output_shapes:
        results.append(torch.empty(shape, dtype=dtype))
    work.source = source.data_ptr()
    if rule.has_factor:
        work.factor, work.other_factor = results[1].data_ptr(), results[-1].data_ptr()
    work.result = results[0].data_ptr()
    if len(rule.blocks) > 1:
        work.other_result = results[len(results) // 2].data_ptr()
    if counter is not None:
        work.counter, work.seed, work.stream = int(counter), seed, stream
        work.first_row = first_row
    if scale is not None:
        if scale.device.type != "cpu":
            raise ValueError(f"The scale of a tensor on the CPU is on {scale.device}. Move it")
        work.scale = scale.data_ptr()
    if recorded is not None:
        work.recorded = recorded.data_ptr()
        work.is_recording = 0 if is_counted is None else is_counted.data_ptr()
    if needs_amax:
        if (0, 1) in rule.blocks:
            columns_amax = torch.zeros(work.columns, dtype=torch.int32)
            work.column_amaxes = columns_amax.data_ptr()
        _run(kernels.find_tiles, ctypes.addressof(work), threads)
        work.next_tile = 0
        if work.hadamard:
            work.source = work.result
            work.source_rows, work.source_columns = work.rows, work.columns
            work.source_bf16 = bf16
    if threads == 1:
        kernels.round_tiles.ctypes(ctypes.addressof(work))
    else:
        _run(kernels.round_tiles, ctypes.addressof(work), threads)
    return results


_RESULT_FIELDS = ("result", "factor"), ("other_result", "other_factor")


def round_groups(
    x: Tensor,
    number: int,
    sizes: np.ndarray,
    scale: Tensor | None,
    amaxes: Tensor | None,
    bits: tuple[Tensor | None, int, Tensor | None, int],
    results: list[Tensor],
) -> None:
    """`round` for each group of the rows of `x`, in one call of a kernel.

    Args:
        x: [rows, columns], or groups of one size, [groups, rows, columns].
        number: the id of the rule.
        sizes: the number of rows of each group, int64 [groups].
        scale: the scale of each group, float32 [groups], if scales are given.
        amaxes: zeros, replaced by the amaxes of the groups, float32 [groups]; for a given scale.
        bits: the counter, seed, streams [groups] and first row of the random bits.
        results: for each of the rule's blocks, memory for the values and, if the rule has factors,
            the factors. They have a row for each padded row of the groups, or an entry for each
            group.
    """
    rule, columns = RULES[number], x.shape[-1]
    is_bf16 = results[0].dtype == torch.bfloat16
    source = (x if x.dtype == torch.bfloat16 else x.to(torch.float32)).contiguous()
    threads = torch.get_num_threads() if source.numel() > _ALONE else 1
    max_rows = max(1, int(sizes.max()))
    sizes_and_types = max_rows, columns, x.dtype, scale is not None, is_bf16, threads
    template, needs_amax, _ = _plan(number, *sizes_and_types)
    kernels = (_KERNELS or _loaded())[0]
    works = np.frombuffer(bytearray(bytes(template) * len(sizes)), np.dtype(type(template)))
    works["groups"] = np.arange(len(sizes), 0, -1)
    padded = -(-sizes // rule.row_multiple) * rule.row_multiple
    if template.rows == 1 < max_rows:  # elements are rounded as one row
        works["source_columns"] = works["columns"] = sizes * columns
    else:
        works["source_rows"], works["rows"] = sizes, padded
    index, starts = np.arange(len(sizes)), np.cumsum(padded) - padded
    works["source"] = source.data_ptr() + (np.cumsum(sizes) - sizes) * columns * source.itemsize
    remaining_results = iter(results)
    for block, names in zip(rule.blocks, _RESULT_FIELDS, strict=False):
        values = next(remaining_results)
        works[names[0]] = values.data_ptr() + starts * values.shape[-1] * values.itemsize
        if rule.has_factor:
            factors = next(remaining_results)
            by_row = block == (1, 0)
            offsets = starts if by_row else index * (factors.numel() // len(sizes))
            works[names[1]] = factors.data_ptr() + offsets * factors.itemsize
    counter, seed, streams, first_row = bits
    if counter is not None and streams is not None:
        works["counter"], works["seed"], works["first_row"] = int(counter), seed, first_row
        works["stream"] = streams.numpy()
    address = works.ctypes.data
    if scale is not None:
        scale = scale.contiguous()
        works["scale"] = scale.data_ptr() + index * scale.itemsize
    if amaxes is not None:
        works["recorded"] = amaxes.data_ptr() + index * amaxes.itemsize
    if needs_amax:
        if (0, 1) in rule.blocks:
            column_amaxes = np.zeros((len(sizes), int(template.columns)), np.int32)
            works["column_amaxes"] = column_amaxes.ctypes.data + index * column_amaxes.strides[0]
        _run(kernels.find_tiles, address, threads)
        works["next_tile"] = 0
        if template.hadamard:
            works["source"], works["source_bf16"] = works["result"], is_bf16
            works["source_rows"], works["source_columns"] = works["rows"], works["columns"]
    _run(kernels.round_tiles, address, threads)


def _results(rule: RoundingRule, rows: int, columns: int, bf16: bool) -> Results:
    """The shape and dtype of the values and factors for each block."""
    shape, dtype = rule.shape(rows, columns), torch.bfloat16 if bf16 else torch.float32
    results: Results = []
    for block in rule.blocks:
        results.append((shape, dtype))
        if rule.has_factor:
            results.append((rule.factor_shape(block, *shape), torch.float32))
    return results


def _fake(x: Tensor, number: int, *options: Any) -> list[Tensor]:
    rows, columns = x.shape
    results = _results(RULES[number], rows, columns, options[-1])
    return [x.new_empty(shape, dtype=dtype) for shape, dtype in results]


op = operator(
    "round(Tensor x, int rule, Tensor? scale, Tensor(a!)? recorded, Tensor? is_counted,"
    " Tensor? counter, int seed, int stream, int first_row, bool bf16) -> Tensor[]",
    round,
    _fake,
)
"""`round` as an operator, see `needs_operator`."""
