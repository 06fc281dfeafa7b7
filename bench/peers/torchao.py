"""torchao's FP8 and MXFP8 linears, alone and in a model. This module needs torchao."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.prototype.moe_training.mxfp8_linear import mx_mm
from torchao.prototype.mx_formats.config import (
    MXFP8Dim0CastKernelChoice,
    MXFP8Dim1CastKernelChoice,
    ScaleCalculationMode,
)
from torchao.quantization.quantize_.common import KernelPreference


class TorchaoMxfp8(nn.Linear):
    """torchao's emulated MXFP8 linear, with the casts that run without CUDA."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = mx_mm.apply(
            x.reshape(-1, self.in_features),
            self.weight,
            torch.float8_e4m3fn,
            torch.float8_e4m3fn,
            torch.float8_e4m3fn,
            32,
            KernelPreference.EMULATED,
            MXFP8Dim0CastKernelChoice.TORCH,
            MXFP8Dim1CastKernelChoice.TORCH,
            ScaleCalculationMode.RCEIL,
            False,
        )
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias


def with_torchao(model: nn.Module, recipe: str, device: str) -> nn.Module:
    """Replace the linears of `model`, except the head, by torchao's: recipe tensorwise, rowwise or
    mxfp8. They are emulated on a CPU; MXFP8 is emulated everywhere."""
    if recipe == "mxfp8":
        for parent in list(model.modules()):
            for name, child in parent.named_children():
                if type(child) is nn.Linear and name != "lm_head":
                    child.__class__ = TorchaoMxfp8  # same parameters, another forward pass
        return model
    config = Float8LinearConfig.from_recipe_name(recipe)
    if device == "cpu":
        config = dataclasses.replace(config, emulate=True)
    converted: nn.Module = convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, name: name != "lm_head"
    )
    return converted
