"""Counts the kernels that torch's operators would launch on a GPU, and the bytes that they read and
write, on a CPU by a `TorchDispatchMode`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8stack.numerics.operators import EAGER

# Operators that return views or memory that is not filled in.
_NOTHING = {
    *("detach", "alias", "view", "_unsafe_view", "as_strided", "select", "slice", "expand", "t"),
    *("transpose", "permute", "unsqueeze", "squeeze", "unbind", "split", "split_with_sizes"),
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "diagonal"),
    *("_reshape_alias", "lift_fresh", "set_", "is_same_size"),
    *("profiler::_record_function_enter_new", "profiler::_record_function_exit"),
}
# The tensors in one launch of torch's multi-tensor kernels, by how many lists they take, and the
# blocks of 65,536 elements in it (ATen/native/cuda/MultiTensorApply.cuh of torch 2.13, CUDA 13).
_TENSORS = {1: 770, 2: 448, 3: 336, 4: 252, 5: 210}
_BLOCKS, _BLOCK = 2240, 65536
_FILLS = ("zero_", "fill_", "_foreach_zero_")
_CAT = 128  # tensors that one launch of cat joins


class Launches(TorchDispatchMode):
    """Counts launches by operator while `counting`. An operator of fp8stack counts as the
    operators that it calls.

    Attributes:
        counts: launches by operator.
        passed: bytes read and written by operator, in tensors of `watched` or more elements.
    """

    def __init__(self, watched: int = 1 << 60) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.passed: Counter[str] = Counter()
        self.counting = True
        self.watched = watched

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name.startswith("fp8stack::"):
            with self:
                eager = EAGER.get(name.removeprefix("fp8stack::")) or OPDEFS[name]._init_fn
                return eager(*args, **kwargs)
        out = func(*args, **kwargs)
        if self.counting and name not in _NOTHING:
            self.counts[name] += launches(name, args)
            self._note_bytes(name, func, args, kwargs, out)
        return out

    def _note_bytes(self, name: str, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        written = {id(tensor): tensor for tensor in tensors_in(out)}
        # torch's fused optimizers write gradients back where they are given a scale for them.
        unwritten = "grads" if kwargs.get("grad_scale") is None else ""
        for argument, value in zip(func._schema.arguments, args, strict=False):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if writes and argument.name != unwritten:
                written |= {id(tensor): tensor for tensor in tensors_in(value)}
        read = [] if name in _FILLS else tensors_in(args)
        for tensor in (*read, *written.values()):
            if tensor.numel() >= self.watched:
                self.passed[name] += tensor.numel() * tensor.element_size()


def tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def launches(name: str, args: Any) -> int:
    """The number of kernels that one call of an operator launches on a GPU."""
    lists = [a for a in args if isinstance(a, list | tuple) and a and isinstance(a[0], Tensor)]
    if name in ("cat", "stack") and lists:
        return -(-len(lists[0]) // _CAT)
    if not lists or not name.startswith(("_foreach", "_fused")):
        return 1
    depth = len(lists) - (name.startswith("_fused"))  # the steps of an optimizer are no such list
    if not name.endswith("_"):
        depth += name != "_foreach_norm"  # its output is a list, too
    tensors = blocks = count = 0
    for tensor in lists[0]:
        remaining = -(-tensor.numel() // _BLOCK)
        tensors += 1
        while remaining:
            launched = min(_BLOCKS - blocks, remaining)
            blocks, remaining = blocks + launched, remaining - launched
            if blocks == _BLOCKS:
                count, blocks, tensors = count + 1, 0, 1 if remaining else 0
        if tensors == _TENSORS[depth]:
            count, blocks, tensors = count + 1, 0, 0
    return count + (blocks > 0) + (name == "_foreach_norm")


@contextmanager
def outside_of_blocks(run: Any, mode: Launches) -> Iterator[None]:
    """Count what the steps of a run launch outside its blocks, the loss and their backward passes:
    the launches of the model's hooks, embeddings, the guard, clipping and the optimizer."""
    depth = [0]

    def enter(levels: int) -> None:
        depth[0] += levels
        mode.counting = depth[0] == 0

    backward = run.accelerator.backward

    def hidden(loss: Tensor) -> None:
        enter(1)
        backward(loss)
        enter(-1)

    with ExitStack() as stack:
        for module in (*run.model.blocks, run.model.loss):
            stack.enter_context(module.register_forward_pre_hook(lambda *_: enter(1)))
            stack.enter_context(module.register_forward_hook(lambda *_: enter(-1)))
        stack.enter_context(patch.object(run.accelerator, "backward", hidden))
        stack.enter_context(mode)
        yield
