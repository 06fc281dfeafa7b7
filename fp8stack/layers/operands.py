"""The quantizers of a linear's operands, with their delayed scales and random bits."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8stack.common.errors import UserError
from fp8stack.common.formats import Quantizer
from fp8stack.common.quantizer_table import Operand, Quantizers
from fp8stack.layers.delayed import Slots, device_of
from fp8stack.layers.shared_amaxes import several_ranks
from fp8stack.numerics import RandomBits
from fp8stack.numerics.amax_history import moved


class RngState:
    """The state of stochastic rounding: a counter of backward passes for each layer, as each pass
    draws new random bits. The counters are part of `fp8_state`, so that a resumed run draws the
    same bits as an uninterrupted one.

    Args:
        seed: the seed of the bits.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.layers: dict[str, LayerRngState] = {}

    def layer(self, path: str, groups: int = 0) -> LayerRngState:
        """The state of the layer at a module path; `groups` is the number of groups of a grouped
        linear, else 0."""
        return self.layers.setdefault(path, LayerRngState(self.seed, path, groups))

    def attach(self, model: nn.Module) -> None:
        """Make the counters part of the FP8 state of `model`. They move to the device of each
        forward pass."""
        model.stochastic_rounding = self  # type: ignore[assignment]
        if self.layers:
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def _before_forward(
        self, model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object] | None = None
    ) -> None:
        counter = next(iter(self.layers.values())).counter
        self.move(device_of(model, (args, kwargs), counter.device))

    def move(self, device: torch.device) -> None:
        """Move the counters to `device`. They move to meta only while they are 0, and are reset to
        0 when they move from meta."""
        for layer in self.layers.values():
            if layer.counter.device == device or (device.type == "meta" and layer.counter):
                continue
            with torch.inference_mode(False):
                layer.counter = moved(layer.counter, device, 0)
                stream = layer.stream
                if stream.is_meta:
                    stream = torch.as_tensor(layer.first_stream, device="cpu")
                layer.stream = stream.to(device)

    def state_dict(self) -> dict[str, Tensor]:
        """`<module path>.draws` by layer, int64 and 0-dim, copies."""
        return {f"{path}.draws": layer.counter.clone() for path, layer in self.layers.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the tensors of `state_dict`.

        Raises:
            UserError: an unknown or missing layer, or a tensor of another shape or dtype; nothing
                is changed.
        """
        if mismatched := sorted(state.keys() ^ {f"{path}.draws" for path in self.layers}):
            relation = "not in" if mismatched[0] in state else "only in"
            raise UserError(
                f"FP8 state: '{mismatched[0]}' is {relation} this model. Load it into the model it "
                "came from."
            )
        for name, tensor in state.items():
            if tensor.shape != () or tensor.dtype != torch.int64:
                raise UserError(
                    f"FP8 state: '{name}' is {tensor.dtype} {tuple(tensor.shape)}, not int64 (). "
                    "Give what fp8_state gave."
                )
        for path, layer in self.layers.items():
            layer.counter.copy_(state[f"{path}.draws"])


class LayerRngState:
    """The state of one layer's random bits. `counter` is the number of its backward passes, int64
    and 0-dim. A group of a grouped linear draws the bits of a linear at `<path>.<group>`."""

    def __init__(self, seed: int, path: str, groups: int = 0) -> None:
        self._seed = seed
        streams = [zlib.crc32(f"{path}.{group}".encode()) for group in range(groups)]
        stream = streams or zlib.crc32(path.encode())
        with torch.inference_mode(False):
            # On the CPU until the first pass, also if `convert` builds layers on meta.
            self.counter = torch.zeros((), dtype=torch.int64, device="cpu")
            # A tensor, so that code compiled for one layer is reused for all layers like it.
            self.stream = torch.tensor(stream, device="cpu")
        self.first_stream = self.stream if isinstance(stream, list) else stream

    def bits(self, name: Operand, columnwise: bool, rows: int) -> RandomBits:
        """Random bits for the rowwise or the columnwise copy of an operand. `rows` is its number of
        rows, in all groups together; for groups, the stream is a vector. Each rank draws the bits
        of its own rows of the global batch."""
        stream = self.stream if torch.compiler.is_compiling() else self.first_stream
        stream = stream ^ (_STREAMS[name] + columnwise)
        first_row = 0 if name == "weight" or not several_ranks() else dist.get_rank() * rows
        return RandomBits(self._seed, stream, self.counter, first_row)


def castable(x: Tensor) -> Tensor:
    """`x` in a dtype that casts accept: float64, a possible dtype of weights, becomes float32."""
    return x.float() if x.dtype == torch.float64 else x


_STREAMS: dict[Operand, int] = {"input": 2, "weight": 4, "grad_output": 6}


class LayerOperands:
    """The quantizers of one layer, the `slots` of its delayed quantizers and the random bits
    (`draws`) of its stochastic ones."""

    def __init__(
        self, quantizers: Quantizers, slots: Slots | None = None, draws: LayerRngState | None = None
    ) -> None:
        self.quantizers = quantizers
        self.slots = slots or {}
        self.draws = draws

    def backward_ran(self) -> None:
        """Called at the end of a backward pass, so that the next one draws new bits."""
        if self.draws is not None:
            self.draws.counter.add_(1)


class OperandQuantizers:
    """The quantizers of one operand of a layer, with their slots and random bits.

    Attributes:
        name: the operand.
        rowwise: the quantizer of the rowwise copy, over whose columns a GEMM reduces; None for high
            precision.
        columnwise: the quantizer of the columnwise copy; "forward": the columnwise copy takes the
            values of the rowwise copy.
        slot, columnwise_slot: the slots of these quantizers in the amax history, if delayed.
        stochastic, columnwise_stochastic: whether these quantizers round stochastically.
    """

    def __init__(self, name: Operand, operands: LayerOperands) -> None:
        self.name = name
        self.rowwise = operands.quantizers.rowwise(name)
        self.columnwise = operands.quantizers.columnwise(name)
        self.slot = operands.slots.get((name, False))
        self.columnwise_slot = operands.slots.get((name, True))
        self._draws = operands.draws
        self.stochastic = self.rowwise is not None and self.rowwise.stochastic
        self.columnwise_stochastic = (
            isinstance(self.columnwise, Quantizer) and self.columnwise.stochastic
        )

    def bits(self, columnwise: bool, rows: int) -> RandomBits | None:
        """Random bits for one copy of `rows` rows, None if the quantizer is not stochastic."""
        if not (self.columnwise_stochastic if columnwise else self.stochastic):
            return None
        assert self._draws is not None
        return self._draws.bits(self.name, columnwise, rows)
