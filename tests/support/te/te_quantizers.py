"""The stand-in for Transformer Engine with TE's quantizers, and TE's own update of delayed scales.

They compute by the oracle in NumPy, NVFP4 by TE's own reference. Results lie in memory as TE's do:
padded, transposed, scales in the order that its GEMMs want.
"""

import enum
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fp8stack.analysis.conform import oracles
from fp8stack.common.formats import Quantizer as Rules
from tests.support.oracles import FLT_MAX, fp8_codes, to_numpy
from tests.support.te.te_stand_in import Source, StandIn, installed, nvfp4_of_te

SOURCE = Source()
FILES = {
    "Float8Quantizer": "float8_tensor",
    "Float8CurrentScalingQuantizer": "float8_tensor",
    "Float8BlockQuantizer": "float8_blockwise_tensor",
    "MXFP8Quantizer": "mxfp8_tensor",
    "NVFP4Quantizer": "nvfp4_tensor",
}
MAXIMA = {torch.float32: FLT_MAX, torch.bfloat16: float(torch.finfo(torch.bfloat16).max)}


class DType(enum.IntEnum):
    """Two of TE's; the order alone is TE's, the numbers are in its compiled part."""

    kFloat8E4M3 = 1
    kFloat8E5M2 = 2


class Quantizer:
    """The base of TE's quantizers: arguments by TE's signatures, and the format."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        name = type(self).__name__
        where = f"pytorch/tensor/{FILES[name]}.py:{name}.__init__"
        bound = SOURCE.signature(where).bind(self, *args, **kwargs)
        bound.apply_defaults()
        self.arguments = bound.arguments
        self.format = "e5m2" if self.arguments.get("fp8_dtype") == DType.kFloat8E5M2 else "e4m3"

    def per_tensor(self, x: Tensor, scale: np.float32) -> SimpleNamespace:
        """A `Float8Tensor`."""
        data = torch.from_numpy(fp8_codes(to_numpy(x), scale, self.format))
        transpose = data.t().contiguous() if self.arguments["columnwise"] else None
        inverse = torch.from_numpy(np.array([np.float32(1) / np.float32(scale)]))
        return SimpleNamespace(_data=data, _transpose=transpose, _scale_inv=inverse)


class Float8Quantizer(Quantizer):
    """Casts with a given scale, and notes the amax."""

    def __call__(self, x: Tensor) -> SimpleNamespace:
        amax, scale = self.arguments["amax"], self.arguments["scale"]
        assert amax.shape == (1,)
        assert scale.shape == ()
        amax.copy_(torch.fmax(amax, torch.from_numpy(oracles.amax(to_numpy(x)).reshape(1))))
        return self.per_tensor(x, np.float32(scale.item()))


class Float8CurrentScalingQuantizer(Quantizer):
    """Casts with the scale of the tensor's own amax."""

    def __call__(self, x: Tensor) -> SimpleNamespace:
        rules = self.arguments["force_pow_2_scales"], self.arguments["amax_epsilon"]
        scale = oracles.scale_of(oracles.amax(to_numpy(x)), self.format, *rules)
        return self.per_tensor(x, np.float32(scale.item()))


class Float8BlockQuantizer(Quantizer):
    """Casts by blocks; scales are transposed for 1x128, and padded to multiples of 4."""

    def __call__(self, x: Tensor) -> SimpleNamespace:
        square = self.arguments["block_scaling_dim"] == 2
        rules = Rules(
            format=self.format,
            block=(128, 128) if square else (1, 128),
            scale="power_of_two" if self.arguments["force_pow_2_scales"] else "float32",
        )
        fields = {}
        for name, matrix in (("rowwise", x), ("columnwise", x.t())):
            numbers = np.ascontiguousarray(to_numpy(matrix))
            data, inverse = oracles.quantize(numbers, rules, 1, overflow=MAXIMA[x.dtype])[:2]
            scales = torch.from_numpy(inverse if square else np.ascontiguousarray(inverse.T))
            padding = (0, -scales.shape[1] % 4)
            fields[f"_{name}_data"] = torch.from_numpy(data)
            fields[f"_{name}_scale_inv"] = torch.nn.functional.pad(scales, padding, value=-1)
        return SimpleNamespace(**fields)


class MXFP8Quantizer(Quantizer):
    """Casts by 1x32 and 32x1; codes are padded to tiles of 128 x 4, or 4 x 128."""

    def __call__(self, x: Tensor) -> SimpleNamespace:
        fields = {}
        rules = Rules(format=self.format, block=(1, 32), scale="e8m0")
        for name, dim, tile in (("rowwise", 1, (128, 4)), ("columnwise", 0, (4, 128))):
            data, codes = oracles.quantize(to_numpy(x), rules, dim)[:2]
            codes = codes.astype(np.uint8)
            missing = [-size % multiple for size, multiple in zip(codes.shape, tile, strict=True)]
            padding = (0, missing[1], 0, missing[0])
            fields[f"_{name}_data"] = torch.from_numpy(np.ascontiguousarray(data))
            scales = torch.from_numpy(np.ascontiguousarray(codes))
            fields[f"_{name}_scale_inv"] = torch.nn.functional.pad(scales, padding, value=99)
        return SimpleNamespace(**fields)


class NVFP4Quantizer(Quantizer):
    """Casts by 1x16 and 16x1, or by squares whose scales are repeated; all is padded to tiles."""

    def __call__(self, x: Tensor) -> SimpleNamespace:
        reference = nvfp4_of_te()
        tile = (16, 16) if self.arguments["with_2d_quantization"] else (1, 16)
        format = reference.reference_utils.Fp4Formats.E2M1
        result = reference.NVFP4QuantizerRef(format, quant_tile_shape=tile).quantize(x)
        fields: dict[str, Tensor] = {}
        for name, data, scales in (
            ("rowwise", result.data, result.scale),
            ("columnwise", result.data_t, result.scale_t),
        ):
            padding = (0, -scales.shape[1] % 4, 0, -scales.shape[0] % 128)
            codes = torch.nn.functional.pad(scales.view(torch.uint8), padding, value=99)
            fields |= {f"_{name}_data": data, f"_{name}_scale_inv": codes}
        return SimpleNamespace(**fields)


def available(return_reason: bool = False) -> Any:
    """`is_fp8_available` and its kin, where everything is available."""
    return (True, "") if return_reason else True


def update(stand_in: StandIn, forward: bool) -> None:
    """The scales as TE's kernel updates them, one number after another."""
    for state in stand_in.registered:
        if state.forward != forward:
            continue
        formats = state.recipe.fp8_format.value
        target = np.float32(formats.max_fwd if forward else formats.max_bwd)
        target = np.float32(target * 2.0**-state.recipe.margin)
        for slot in range(len(state.scale)):
            _update_slot(state.amax_history[:, slot], state.scale, slot, target, state.recipe)


def _update_slot(
    history: Tensor, scales: Tensor, slot: int, target: np.float32, recipe: Any
) -> None:
    window = [float(number) for number in history]
    last = window[0]
    if last == 0:
        return
    window = [*window[1:], last]
    amax = max(window) if recipe.amax_compute_algo == "max" else last
    history.copy_(torch.tensor([0.0, *window[1:]]))
    if np.isfinite(amax) and amax > 0:
        with np.errstate(over="ignore"):
            scales[slot] = min(float(target / np.float32(amax)), FLT_MAX)


@contextmanager
def te_with_quantizers() -> Iterator[StandIn]:
    """Transformer Engine can be imported, with quantizers and the update of its kernel."""
    with installed() as stand_in:
        pytorch = sys.modules["transformer_engine.pytorch"]
        quantizers = (
            *(Float8Quantizer, Float8CurrentScalingQuantizer),
            *(Float8BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer),
        )
        vars(pytorch).update({quantizer.__name__: quantizer for quantizer in quantizers})
        asks = {"is_fp8_available", "is_fp8_block_scaling_available", "is_mxfp8_available"}
        asks |= {"is_nvfp4_available"}
        vars(pytorch).update(dict.fromkeys(asks, available), DType=DType)
        quantization: Any = sys.modules["transformer_engine.pytorch.quantization"]
        manager = quantization.FP8GlobalStateManager
        quantization.FP8GlobalStateManager = type(
            "FP8GlobalStateManager",
            (manager,),
            {"reset": classmethod(lambda cls: stand_in.registered.clear())},
        )
        stand_in.update = lambda forward: update(stand_in, forward)  # type: ignore[method-assign]
        yield stand_in
