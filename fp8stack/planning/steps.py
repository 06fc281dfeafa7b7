"""The steps of a forward pass, as a plan lists them: the operation of each module, and each cast
between floating-point dtypes, named by the tensor that is cast."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fp8stack.common.formats import ELEMENT_FORMATS
from fp8stack.layers.backend import DTYPES
from fp8stack.layers.grouped import GroupedLinear
from fp8stack.model.mixture import MixtureMLP
from fp8stack.planning.planned_layers import PlannedLinear

_ATEN: Any = torch.ops.aten
_OPERATIONS = {"": "positions", "attention": "rope"}
_OPERATIONS |= dict.fromkeys(("mlp", "experts", "shared"), "activation")
_OPERATIONS |= {name: name for name in ("embedding", "loss")}
_OUTPUTS = {"attention": "attention's output", "mlp": "mlp's output", "lm_head": "logits"}
_OUTPUTS |= {"embedding": "residual stream"}
_OUTPUTS |= {"experts": "experts' output", "shared": "shared experts' output"}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items() if name != "tf32"}


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation of one module; the backward pass of all but linears has the same dtypes.

    Attributes:
        path: of the module; "step" for operations that run once per optimizer step.
        name: see `operations.IN_COMPUTE_DTYPE` and `operations.IN_FP32`; of a step also "linear",
            and "fused norm" for a norm that Transformer Engine fuses with the linears after it.
        operands: the dtypes of the operands.
        adds_in: the dtype of accumulation; "" if there is none.
        output: the dtype of the result.
        why: the reason for these dtypes, if there is one to give.
    """

    path: str
    name: str
    operands: tuple[str, ...]
    adds_in: str = ""
    output: str
    why: str = ""


GRADIENT = ", gradient"
"""The suffix of a tensor's name where its gradient is cast back."""


@dataclass(frozen=True, kw_only=True)
class Cast:
    """One tensor cast by the module at `path`, once per micro-batch or once per optimizer step."""

    path: str
    what: str
    source: str
    target: str
    runs: Literal["forward", "backward"] = "forward"
    per: Literal["micro-batch", "step"] = "micro-batch"

    @property
    def to_fp8(self) -> bool:
        """Whether the target is FP8, FP6 or FP4."""
        return self.target.split(" ")[0] in ELEMENT_FORMATS


Step = Operation | Cast
"""A step of the forward pass of a module, or the cast of a gradient in its backward pass."""


def merged_steps(steps: Iterable[Step]) -> list[Step]:
    """The steps of operators, in order: operators of one step of a module are merged into one."""
    merged: dict[object, Step] = {}
    for step in steps:
        key: object = step
        if isinstance(step, Operation):
            key = step.path, step.name
            earlier = merged.get(key, step)
            assert isinstance(earlier, Operation)
            operands = dict.fromkeys((*earlier.operands, *step.operands))
            step = replace(step, operands=tuple(operands))
        merged[key] = step
    return list(merged.values())


class TensorNames:
    """Names of tensors, by which casts are named. Results inherit the name of their operand."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, int], str] = {}

    def __getitem__(self, x: Tensor) -> str:
        return self._names.get(_place(x), "")

    def __setitem__(self, x: Tensor, name: str) -> None:
        self._names[_place(x)] = name

    def enter_block(self, x: Tensor) -> None:
        """Name the input of a block."""
        self[x] = _OUTPUTS["embedding"]

    def leave(self, path: str, output: Any) -> None:
        """Name the output of the module at `path`."""
        if name := _OUTPUTS.get(path.rpartition(".")[2]):
            # A mixture of experts gives its routing too.
            self[output if isinstance(output, Tensor) else output[0]] = name

    def inherit(self, func: Any, path: str, inputs: list[Tensor], outputs: list[Tensor]) -> str:
        """Name the outputs of an operator, and return the name that it inherits."""
        name = next(filter(None, (self[x] for x in inputs)), "")
        names = [name] * len(outputs)
        if func is _ATEN.split_with_sizes.default and "attention" in path:
            names = ["queries", "keys", "values"]
        elif func is _ATEN.add.Tensor and _operation_of(path) == "residual":
            names = [f"sum with {self[inputs[-1]]}"]
        for x, output_name in zip(outputs, names, strict=True):
            self[x] = output_name
        return name


def steps_of(
    func: Any, path: str, module: Any, inputs: list[Tensor], output: Tensor, name: str
) -> list[Step]:
    """The steps of `module` that an operator of its forward pass belongs to; none for casts within
    a GEMM or within Transformer Engine, and for casts to the same dtype.

    Args:
        func: the operator.
        path: of the module.
        module: the innermost module that runs the operator.
        inputs: of the operator, at least one of them of floating point.
        output: the first one of the operator.
        name: of the tensor that it casts, if it is a cast.
    """
    is_linear = isinstance(module, nn.Linear | GroupedLinear | PlannedLinear)
    operands = [x for x in inputs if x.is_floating_point()]
    dtypes, target = tuple(dict.fromkeys(map(_dtype_name, operands))), _dtype_name(output)
    if func is not _ATEN._to_copy.default:
        operation = _operation_of(path)
        if is_linear:
            operation, dtypes, target = "linear", (), ""
        elif getattr(module, "is_fused", False):
            operation = "fused norm"
        elif isinstance(module, MixtureMLP):
            operation = "dispatch" if func is _ATEN.index_select.default else "routing"
        elif path == "" and output.ndim < 2:  # the losses of routers join the loss
            path = operation = "loss"
        return [Operation(path=path, name=operation, operands=dtypes, output=target)]
    is_reversed = torch.is_grad_enabled() and operands[0].requires_grad
    if is_linear:
        name = "input"
        if isinstance(operands[0], nn.Parameter):
            name = "weight" if operands[0].ndim == module.weight.ndim else "bias"
        # Outside of autograd a quantized GEMM casts its operands itself, except the bias.
        if not (is_reversed or name == "bias"):
            return []
    if dtypes == (target,):
        return []
    cast = Cast(path=path, what=name, source=dtypes[0], target=target)
    back = replace(cast, what=name + GRADIENT, source=target, target=dtypes[0], runs="backward")
    return [cast, back] if is_reversed else [cast]


def _operation_of(path: str) -> str:
    """The operation of a module that is not a linear."""
    last = path.rpartition(".")[2]
    if last == "dropout":
        return "dropout" if path == last else "branch dropout"
    return "norm" if last.endswith("norm") else _OPERATIONS.get(last, "residual")


def _dtype_name(x: Tensor) -> str:
    """The name of a tensor's dtype, as in plans."""
    return _DTYPE_NAMES.get(x.dtype, str(x.dtype))


def _place(x: Tensor) -> tuple[int, int]:
    return int(x.untyped_storage()._cdata), int(x.storage_offset())
