"""Kernels in Triton's interpreter, which runs them by numpy on a machine without a GPU.

Import this module in a process with `TRITON_INTERPRET` set before Triton is imported. It changes
the interpreter permanently: conversions between floating-point formats round to nearest even and
saturate in FP8 as on a GPU, products of matrices are added up in float32, functions are torch's,
and reductions are computed on all rows at once, in the order of a tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import GridExpr
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, TensorHandle

_FLOATS = {
    tl.float64: torch.float64, tl.float32: torch.float32, tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2,
}  # fmt: skip
_CODES = {torch.bfloat16: np.int16, torch.float8_e4m3fn: np.uint8, torch.float8_e5m2: np.uint8}
_BITS = {np.int16: torch.int16, np.uint8: torch.uint8}
_FUNCTIONS = (
    "rsqrt", "sqrt", "exp", "exp2", "log", "log2", "sin", "cos", "erf", "tanh", "floor", "ceil",
    "trunc", "abs", "isnan", "isinf", "signbit",
)  # fmt: skip


class InductorKernel:
    """A kernel that inductor generated.

    Args:
        name: the kernel's name.
        source: the Python code that defines it.
    """

    def __init__(self, name: str, source: str) -> None:
        self._tuner: Any = getattr(PyCodeCache.load(source), name)

    def run(self, *arguments: Any, stream: Any = None) -> None:
        """Run the kernel on tensors of the CPU, in the first configuration of inductor's autotuner,
        but with blocks of at least 64 x 64 elements, because the interpreter's time is that of
        single operations."""
        tuner = self._tuner
        config, signature = tuner.configs[0].kwargs, tuner.triton_meta["signature"]
        names = [name for name in signature if name not in config]
        grid_names = tuner.inductor_meta.get("extra_launcher_args", [])
        values = dict(zip([*names, *grid_names], arguments, strict=True))
        config = config | _larger_blocks(config, tuner.size_hints or {})
        grid = GridExpr.from_meta(tuner.inductor_meta, config).eval_slow(values | config)
        tuner.fn[grid](**{name: values[name] for name in names}, **config)


def _larger_blocks(config: dict[str, int], sizes: dict[str, int]) -> dict[str, int]:
    """`XBLOCK` of a configuration, enlarged."""
    if "XBLOCK" not in config or "RSPLIT_SIZE" in config:
        return {}
    width = config.get("YBLOCK", config.get("R0_BLOCK", sizes.get("r0_", 1)))
    return {"XBLOCK": max(config["XBLOCK"], min(sizes.get("x", 1), 4096 // width))}


def _set_up() -> None:
    builder: Any = InterpreterBuilder
    plain_cast, reduce = builder.cast_impl, ReduceOps
    patch_language = interpreter._patch_lang

    def cast(self: Any, source: TensorHandle, target: Any) -> TensorHandle:
        if source.dtype.scalar in _FLOATS and target.scalar in _FLOATS:
            return _converted(source, target.scalar)
        if source.dtype.scalar in _FLOATS:  # to integers
            source = _converted(source, tl.float32)
        elif target.scalar in _FLOATS and target.scalar not in (tl.float32, tl.float64):
            return _converted(plain_cast(self, source, tl.float32), target.scalar)
        return plain_cast(self, source, target)

    def dot(self: Any, a: TensorHandle, b: TensorHandle, c: TensorHandle, *_: Any) -> TensorHandle:
        product = _as_torch(a).float() @ _as_torch(b).float() + _as_torch(c)
        return _as_handle(product, c.dtype.scalar, c.data.shape)

    builder.cast_impl = cast
    builder.create_dot = dot
    builder.create_fp_to_fp = lambda self, source, target, rounding: cast(self, source, target)
    for name in ("exp", "exp2", "log", "log2", "sin", "cos", "erf", "sqrt", "rsqrt"):
        setattr(builder, f"create_{name}", _on_handles(getattr(torch, name)))
    reduce.generic_reduce = _reduced
    # At every call of a function, in half of the time.
    interpreter._patch_lang = cache(
        lambda fn: SimpleNamespace(restore=lambda: None, scope=patch_language(fn))
    )
    libdevice = {name: _on_tensors(getattr(torch, name)) for name in _FUNCTIONS}
    triton_helpers.libdevice = SimpleNamespace(**libdevice, nearbyint=_on_tensors(torch.round))


def _as_torch(handle: TensorHandle) -> Tensor:
    dtype = _FLOATS[handle.dtype.scalar]
    data = np.ascontiguousarray(handle.data)
    if dtype in _CODES:
        return torch.from_numpy(data.view(_CODES[dtype]).copy()).view(dtype)
    return torch.from_numpy(data.copy())


def _as_handle(values: Tensor, dtype: Any, shape: Sequence[int]) -> TensorHandle:
    if values.dtype in _CODES:
        data = values.view(_BITS[_CODES[values.dtype]]).numpy()
        data = data.view(interpreter._get_np_dtype(dtype))
    else:
        data = values.numpy()
    return TensorHandle(data.reshape(shape), dtype)


def _converted(source: TensorHandle, target: Any) -> TensorHandle:
    values, dtype = _as_torch(source), _FLOATS[target]
    if values.dtype.itemsize < 4:
        values = values.float()
    if dtype.itemsize == 1:  # cvt.rn.satfinite, which keeps NaN
        largest = torch.finfo(dtype).max
        values = values.clamp(-largest, largest)
    return _as_handle(values.to(dtype), target, source.data.shape)


def _on_handles(function: Callable[[Tensor], Tensor]) -> Callable[..., TensorHandle]:
    def run(self: Any, x: TensorHandle) -> TensorHandle:
        return _as_handle(function(_as_torch(x)), x.dtype.scalar, x.data.shape)

    return run


def _on_tensors(function: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def run(x: Any, _semantic: Any = None) -> Any:
        y = function(_as_torch(x.handle))
        if y.dtype == torch.bool:
            y, dtype = y.int(), tl.int32
        else:
            dtype = x.handle.dtype.scalar
        handle = _as_handle(y, dtype, x.handle.data.shape)
        return tl.tensor(handle, tl.block_type(dtype, list(x.shape)) if x.shape else dtype)

    return run


def _reduced(self: Any, operands: Sequence[Any]) -> list[Any]:
    """`generic_reduce` of the interpreter, which calls the function for every single element."""
    if self.axis is None and self.keep_dims:
        raise NotImplementedError
    tensors, axis = self.unravel(operands, self.axis)
    dtypes = [x.dtype for x in tensors]

    def wrapped(arrays: Sequence[Any]) -> list[Any]:
        return [self.to_tensor(x, dtype) for x, dtype in zip(arrays, dtypes, strict=True)]

    while tensors[0].handle.data.shape[axis] > 1:  # a power of two
        halves = zip(*(np.split(x.handle.data, 2, axis) for x in tensors), strict=True)
        first, second = map(wrapped, halves)
        combined = self.combine_fn.fn(*first, *second)
        tensors = combined if isinstance(combined, tuple) else (combined,)
    if self.keep_dims:
        return list(tensors)
    return wrapped([x.handle.data.squeeze(axis) for x in tensors])


_set_up()
