"""Transformer Engine 2.20's modules without our backend: their results, scales and histories.

Written for the source of TE 2.20.2. Each function needs an importable TE.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp8stack.analysis.conform.check_inputs import LinearOperands
from fp8stack.common.formats import AmaxAlgorithm

MODULES = ("Linear", "LayerNormLinear", "LayerNormMLP")


def recipe(scaling: str, **options: Any) -> Any:
    """TE's own recipe with TE's defaults, except for `options`."""
    from transformer_engine.common import recipe as recipes

    if scaling == "delayed":
        return recipes.DelayedScaling(reduce_amax=False, **options)
    classes = {
        "current": recipes.Float8CurrentScaling,
        "block": recipes.Float8BlockScaling,
        "mxfp8": recipes.MXFP8BlockScaling,
    }
    return classes[scaling](**options)


def module(
    kind: str, sizes: tuple[int, int], dtype: torch.dtype, device: str, **options: Any
) -> Any:
    """A TE module by its class's name; `sizes` are in and out, or width and hidden width."""
    import transformer_engine.pytorch as te

    assert kind in MODULES, kind
    return getattr(te, kind)(*sizes, params_dtype=dtype, device=device, **options)


def run(
    layer: nn.Module, recipe: Any, x: Tensor, dy: Tensor, first: bool | None = None
) -> dict[str, Tensor]:
    """Output and gradients of one forward and backward pass: y, dx, and `d <parameter>`."""
    import transformer_engine.pytorch as te

    x = x.detach().clone().requires_grad_()
    for parameter in layer.parameters():
        parameter.grad = None
    with te.autocast(enabled=True, recipe=recipe):
        y = layer(x, is_first_microbatch=first)
    y.backward(dy)
    assert x.grad is not None
    results = {"y": y.detach(), "dx": x.grad}
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        results[f"d {name}"] = parameter.grad
    return results


def scales_and_histories(layer: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """The scale [] and amax history [length] of each operand of a module in delayed scaling."""
    from transformer_engine.pytorch.constants import FP8BwdTensorIdx, FP8FwdTensorIdx

    meta: Mapping[str, Any] = layer.fp8_meta  # type: ignore[assignment]
    forward, backward = meta["scaling_fwd"], meta["scaling_bwd"]
    by_operand = {}
    for gemm in range(1, meta["num_gemms"] + 1):
        places = {
            "input": (forward, getattr(FP8FwdTensorIdx, f"GEMM{gemm}_INPUT")),
            "weight": (forward, getattr(FP8FwdTensorIdx, f"GEMM{gemm}_WEIGHT")),
            "grad_output": (backward, getattr(FP8BwdTensorIdx, f"GRAD_OUTPUT{gemm}")),
        }
        for operand, (state, index) in places.items():
            name = f"gemm{gemm}.{operand}"
            by_operand[name] = (state.scale[index].clone(), state.amax_history[:, index].clone())
    return by_operand


def forget() -> None:
    """Clear TE's global state: recipes that differ only in the amax algorithm share buffers,
    because TE's key for them omits it."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()


def te_states(
    device: str, steps: list[LinearOperands], length: int, algorithm: AmaxAlgorithm, margin: int
) -> Iterator[dict[str, Tensor]]:
    """The state of a TE linear after each step, by the names of `fp8_state`."""
    forget()
    options = {"amax_history_len": length, "amax_compute_algo": algorithm}
    delayed = recipe("delayed", margin=margin, **options)
    outputs, inputs = steps[0].w.shape
    layer = module("Linear", (inputs, outputs), torch.bfloat16, device, bias=False)
    for operands in steps:
        x, w, dy = (operand.to(device) for operand in operands)
        with torch.no_grad():
            layer.get_parameter("weight").copy_(w)
        run(layer, delayed, x, dy)
        state: dict[str, Tensor] = {}
        for name, (scale, window) in scales_and_histories(layer).items():
            operand = name.removeprefix("gemm1.")
            state |= {f"{operand}.scale": scale, f"{operand}.amax_history": window}
        yield state
    forget()
