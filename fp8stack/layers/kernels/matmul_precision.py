"""Set torch's precision of float32 products, exact or rounded to TF32 or bfloat16, for a while.

The setting is one for the whole process, so code that changes it restores it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

Position = str | tuple[str, str]
"""The setting: the name that torch.set_float32_matmul_precision takes, or the fp32_precision of
CUDA and of oneDNN, where torch.backends set them differently."""


def _position() -> Position:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch refuses to name a mix of both settings
        backends: Any = torch.backends
        return backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision


def _turn(position: Position) -> None:
    if isinstance(position, str):
        torch.set_float32_matmul_precision(position)
    else:
        backends: Any = torch.backends
        backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision = position


@contextmanager
def exact_matmul() -> Iterator[None]:
    """Multiply float32 matrices exactly, not as TF32, for a while; compiled code cannot switch."""
    if torch.compiler.is_compiling() or (before := _position()) == "highest":
        yield
        return
    _turn("highest")
    try:
        yield
    finally:
        _turn(before)


class MatmulPrecision:
    """Sets a precision in the forward and backward passes of models, and restores the previous one
    outside of them. The precision stays set if torch.compile takes a whole model, because compiled
    code cannot switch, and after a backward pass that failed.

    Args:
        precision: see torch.set_float32_matmul_precision.
    """

    def __init__(self, precision: str) -> None:
        self.precision = precision
        self._passes: list[_Pass] = []  # forward passes under way

    def attach(self, model: nn.Module) -> None:
        """Follow the passes of `model`."""
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end, always_call=True)

    def _begin(self, model: nn.Module, args: object) -> None:
        if torch.compiler.is_compiling():
            torch.set_float32_matmul_precision(self.precision)
            return
        self._passes.append(_Pass(self.precision))
        self._passes[-1].enter()

    def _end(self, model: nn.Module, args: object, output: object) -> None:
        if torch.compiler.is_compiling():
            return
        ended = self._passes.pop()
        if ended.leave():
            ended.follow_backward(output)


class _Pass:
    """A forward pass, and the backward passes through what it computed."""

    def __init__(self, precision: str) -> None:
        self.precision = precision
        self.before: Position | None = None  # the precision outside of the pass
        self.first = torch._C._autograd._get_sequence_nr()  # the first node that it records

    def enter(self, *_: object) -> None:
        """Set the precision."""
        if self.before is None:
            self.before = _position()
            _turn(self.precision)

    def leave(self, *_: object) -> bool:
        """Restore the previous precision. Returns whether it differs."""
        before, self.before = self.before, None
        if before is not None:
            _turn(before)
        return before not in (None, self.precision)

    def follow_backward(self, output: object) -> None:
        """Enter before the first node of a backward pass that this pass recorded, and leave after
        the last. Autograd runs the latest recorded node first, so nodes of other models, recorded
        before or after this pass, do not run in between."""
        tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
        ends = {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}
        nodes = self._nodes(ends)
        if not nodes:
            return
        for end in ends & nodes:
            end.register_prehook(self._begin_backward)
        min(nodes, key=_number).register_hook(self.leave_after)

    def _nodes(self, ends: set[Any]) -> set[Node]:
        """The nodes that this pass recorded on the way to `ends`."""
        nodes: set[Node] = set()
        pending = list(ends)
        while pending:
            node = pending.pop()
            # A leaf's own node has the largest number of all; it adds, and multiplies nothing.
            if node in nodes or _number(node) < self.first or not node.next_functions:
                continue
            nodes.add(node)
            pending += [next_node for next_node, _ in node.next_functions if next_node is not None]
        return nodes

    def _begin_backward(self, gradients: object) -> None:
        self.enter()
        # Covers a backward pass that does not reach the last node.
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self.leave)

    def leave_after(self, *_: object) -> None:
        """A node's hook: `leave`."""
        self.leave()


def _number(node: Node) -> int:
    """The place in which autograd recorded a node."""
    number: int = node._sequence_nr()
    return number
