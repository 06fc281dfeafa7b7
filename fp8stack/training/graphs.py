"""CUDA graphs of training passes: the kernels of a forward and a backward pass, recorded once and
launched together afterwards.

Launching its kernels one by one can take the host longer than the GPU needs to run them. A graph
replays them at the addresses at which they were recorded, without any Python code.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8stack.layers.delayed import DelayedScaling
from fp8stack.layers.kernels.replay import records
from fp8stack.layers.linear import LowPrecisionLayer
from fp8stack.layers.weight_changes import WeightChanges
from fp8stack.training.run import Run
from fp8stack.training.run_plans import graph_obstacle

WARM_UP = 2
"""Steps that run eagerly before their passes are recorded: kernels are compiled and tuned, and
tensors that last are allocated."""


def obstacle(run: Run) -> str:
    """The reason that the passes of a run are not recorded; "" if they are."""
    reasons = {
        "only GPUs of NVIDIA have them": not records(run.accelerator.device),
        "training is not compiled": not run.compiled,
        "Transformer Engine's modules run Python code in each pass": run.plan.backend == "te",
    }
    by_config = graph_obstacle(run.config, run.model.config, run.ranks.count)
    return next((reason for reason, holds in reasons.items() if holds), by_config)


class CudaRecorder:
    """Records the kernels of functions as CUDA graphs, which share a memory pool and so must be
    replayed in the order in which they were recorded.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        # Autograd runs a backward pass on the streams of its forward pass, so warm-up uses the
        # stream on which functions are recorded.
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, function: Callable[[], Tensor]) -> Tensor:
        """Call `function` eagerly, on the stream of the recorder."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = function()
        current.wait_stream(self._stream)
        return result

    def record(self, function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Record the kernels of `function` without running them. Returns a function that runs them,
        and the result, which each run overwrites. Raises a RuntimeError if `function` synchronizes
        with the device."""
        graph = torch.cuda.CUDAGraph()
        options: dict[str, Any] = {"pool": self._pool, "stream": self._stream}
        # Other threads read data and pin memory meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local", **options):
            result = function()
        return graph.replay, result


class _Graph(NamedTuple):
    inputs: list[Tensor]  # the memory from which the graph reads the arguments
    replay: Callable[[], None]
    loss: Tensor


class GraphedPasses:
    """Calls a function that runs a training pass, and replays it from the third step on.

    A step's first pass and its later passes are different graphs: only the first one casts the
    weights, and it writes the gradients to which the others add. After a replay, the gradients, the
    FP8 state and the counters of random bits are those after the eager call, in the same order of
    operations. Whenever a shape, an address or the precision of a layer changes, everything is
    recorded again, after two more eager steps. A pass that cannot be recorded is called eagerly
    from then on, with a warning.

    Args:
        run_pass: runs a forward and a backward pass of `model` on tensors of fixed shapes and
            returns the loss, 0-dim. It must not read the device's memory on the host.
        model: its gradients are None before the first pass of each step.
        weights, delayed: those of the model's backend.
    """

    def __init__(
        self,
        run_pass: Callable[..., Tensor],
        model: nn.Module,
        weights: WeightChanges,
        delayed: DelayedScaling | None,
    ) -> None:
        self._run_pass = run_pass
        self._weights, self._delayed = weights, delayed
        self._parameters = list(model.parameters())
        self._layers = [m for m in model.modules() if isinstance(m, LowPrecisionLayer)]
        self._refused = False
        self._key: Hashable = None

    def _forget(self, key: Hashable, device: torch.device) -> None:
        self._key, self._recorder = key, CudaRecorder(device)
        self._graphs: dict[tuple[bool, bool], _Graph] = {}
        self._gradients: list[Tensor | None] = []  # which the graphs write
        self._copies: list[Any] = []  # of weights, which the graphs write and read
        self._steps = 0  # since everything was forgotten

    def __call__(self, *inputs: Tensor, first: bool) -> Tensor:
        """Run a pass. `first` is whether it is the first pass since the weights changed. Returns
        the loss: 0-dim."""
        if self._refused:
            return self._run_pass(*inputs)
        key = self._state_key(inputs)
        if key != self._key:
            self._forget(key, inputs[0].device)
        self._steps += first
        if self._steps <= WARM_UP:
            return self._recorder.warm_up(lambda: self._run_pass(*inputs))
        # Whether the pass begins with an update of the scales, for the amaxes of the one before.
        updates = self._delayed is not None and self._delayed.is_pending
        graph = self._graphs.get((first, updates)) or self._record(inputs, first, updates)
        if graph is None:
            return self._run_pass(*inputs)
        torch._foreach_copy_(graph.inputs, inputs)
        graph.replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        if self._delayed is not None:
            self._delayed.note_replayed_pass()
        return graph.loss.clone()  # the next replay overwrites it

    def _state_key(self, inputs: tuple[Tensor, ...]) -> Hashable:
        """The shapes, addresses and precisions that the graphs depend on."""
        state = [] if self._delayed is None else self._delayed.step_state()
        return (
            *(x.shape for x in inputs),
            *(tensor.data_ptr() for tensor in (*self._parameters, *state)),
            *((layer.in_fp8, layer.compute_dtype) for layer in self._layers),
        )

    def _record(self, inputs: tuple[Tensor, ...], first: bool, updates: bool) -> _Graph | None:
        """Record a pass, which does not run. Returns None if it cannot be recorded."""
        static = [x.clone() for x in inputs]
        try:
            replay, loss = self._recorder.record(lambda: self._run_pass(*static))
        except RuntimeError as error:
            warnings.warn(
                f"A training pass could not be recorded as a CUDA graph, and training goes on "
                f"without: {error}",
                stacklevel=3,
            )
            self._refused = True
            self._graphs.clear()
            self._weights.mark_changed()  # nothing was cast
            if self._delayed is not None:
                self._delayed.is_pending = updates
            if first:
                for parameter in self._parameters:
                    parameter.grad = None
            return None
        if first:
            self._gradients = [parameter.grad for parameter in self._parameters]
            self._copies = _copies_of_weights(self._layers)
        graph = self._graphs[first, updates] = _Graph(static, replay, loss)
        return graph


def _copies_of_weights(layers: list[LowPrecisionLayer]) -> list[Any]:
    """The cached copies of weights, which other code may replace."""
    operands = [
        operand for layer in layers for operand in getattr(layer, "quantizers", {}).values()
    ]
    cached = [getattr(operand, "cached_weight", None) for operand in operands]
    cached += [cast for layer in layers for cast in layer.casts.values()]
    return [weight.copies for weight in cached if weight is not None]
