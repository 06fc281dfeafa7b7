"""The numerics of FP8 training: formats, casts, scales, blocks and the amax history.

Everything here is plain tensor arithmetic that gives the same bits on every device.
"""

from fp8stack.common.formats import FORMATS, Format, Quantizer
from fp8stack.numerics.amax_history import AmaxHistory
from fp8stack.numerics.cast import amax, cast_to_fp8, inverse, tensor_scale
from fp8stack.numerics.quantized import (
    Quantized,
    dequantize,
    quantize,
    unpack,
)
from fp8stack.numerics.random import RandomBits
from fp8stack.numerics.rounding import (
    Rounded,
    round_to,
)
from fp8stack.numerics.scales import current_scale

__all__ = [
    "FORMATS",
    "AmaxHistory",
    "Format",
    "Quantized",
    "Quantizer",
    "RandomBits",
    "Rounded",
    "amax",
    "cast_to_fp8",
    "current_scale",
    "dequantize",
    "inverse",
    "quantize",
    "round_to",
    "tensor_scale",
    "unpack",
]
