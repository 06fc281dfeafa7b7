"""What the GEMMs of a linear multiply: its operands, quantized as the layer's quantizers say.

What comes out are values in float32, or bytes with scales to be kept for the backward pass.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fp8stack import numerics
from fp8stack.backends.delayed import Slots
from fp8stack.backends.shared_amaxes import several_ranks
from fp8stack.errors import UserError
from fp8stack.formats import FORMATS, OPERANDS, Operand, Quantizer, Quantizers
from fp8stack.numerics import Quantized, RandomBits, Rounded
from fp8stack.numerics.rounding import Rounding, rounding, rounding_of_both


class Draws:
    """How often each layer's gradients were rounded at random: a counter per layer, of which no two
    backward passes draw the same bits. It is part of `fp8_state`, so that a resumed run draws what
    it would have drawn.

    Args:
        seed: of the bits.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.layers: dict[str, LayerDraws] = {}

    def layer(self, path: str) -> LayerDraws:
        """The counter of the layer at a module path."""
        return self.layers.setdefault(path, LayerDraws(self.seed, path))

    def move(self, device: torch.device) -> None:
        """Have the counters on `device`."""
        for layer in self.layers.values():
            if layer.counter.device != device:
                with torch.inference_mode(False):
                    layer.counter = layer.counter.to(device)
                    layer.stream = layer.stream.to(device)

    def state_dict(self) -> dict[str, Tensor]:
        """`<module path>.draws` by layer, int64 and 0-dim, copies."""
        return {f"{path}.draws": layer.counter.clone() for path, layer in self.layers.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Put back what `state_dict` gave.

        Raises:
            UserError: a layer too many or too few, or another tensor; nothing is changed.
        """
        if odd := sorted(state.keys() ^ {f"{path}.draws" for path in self.layers}):
            raise UserError(
                f"FP8 state: '{odd[0]}' is {'not ' if odd[0] in state else 'only '}in this model. "
                "Load it into the model it came from."
            )
        for name, tensor in state.items():
            if tensor.shape != () or tensor.dtype != torch.int64:
                raise UserError(
                    f"FP8 state: '{name}' is {tensor.dtype} {tuple(tensor.shape)}, not int64 (). "
                    "Give what fp8_state gave."
                )
        for path, layer in self.layers.items():
            layer.counter.copy_(state[f"{path}.draws"])


class LayerDraws:
    """The random bits of one layer; `counter` is how many backward passes it made: int64, 0-dim."""

    def __init__(self, seed: int, path: str) -> None:
        self._seed = seed
        self._stream = zlib.crc32(path.encode())
        with torch.inference_mode(False):
            # On the CPU until the first pass, also where `convert` builds layers on meta.
            self.counter = torch.zeros((), dtype=torch.int64, device="cpu")
            # A tensor, so that code that is compiled for one layer serves all that are like it.
            self.stream = torch.tensor(self._stream, device="cpu")

    def bits(self, name: Operand, across: bool, rows: int) -> RandomBits:
        """Those to round one copy of an operand of `rows` rows with; every rank draws those of its
        own rows of the whole batch, which is shared out in order."""
        stream = self.stream if torch.compiler.is_compiling() else self._stream
        stream = stream ^ (_STREAMS[name] + across)
        first_row = 0 if name == "weight" or not several_ranks() else dist.get_rank() * rows
        return RandomBits(self._seed, stream, self.counter, first_row)


def castable(x: Tensor) -> Tensor:
    """`x` in a dtype that casts take: float64, which a weight may have, becomes float32."""
    return x.float() if x.dtype == torch.float64 else x


def _with_row_scales(rounded: Rounded) -> Rounded:
    """Give a GEMM over the rows of a matrix the operand of the GEMM over its columns: the values,
    times a factor for each row, by which the output could not be multiplied afterwards."""
    values, factor = rounded
    if factor is None or not factor.ndim:
        return rounded
    return Rounded((values * factor[:, None]).to(values.dtype), None)


_STREAMS: dict[Operand, int] = {"input": 2, "weight": 4, "grad_output": 6}


class Saved(NamedTuple):
    """An operand that is kept for the backward pass; what its quantizer has no use for is None."""

    data: Tensor
    scales: Tensor | None = None
    amax: Tensor | None = None
    has_nan: Tensor | None = None


class LayerOperands:
    """Quantizes the operands of one layer; `slots` have the scales of its delayed quantizers,
    `draws` the bits of its stochastic ones."""

    def __init__(
        self, quantizers: Quantizers, slots: Slots | None = None, draws: LayerDraws | None = None
    ) -> None:
        self.quantizers = quantizers
        self.slots = slots or {}
        self.draws = draws
        # By operand: how each copy is rounded, and both at once where that is possible.
        self._roundings: dict[tuple[Operand, bool], Rounding] = {}
        self._both: dict[Operand, Rounding] = {}
        self._turned: set[Operand] = set()  # whose second copy is the first one's values
        for name in OPERANDS:
            along, across = quantizers.along(name), quantizers.across(name)
            if along is not None:
                self._roundings[name, False] = rounding(along, [1])
            if quantizers.turned(name):
                self._turned.add(name)
            elif isinstance(across, Quantizer):
                self._roundings[name, True] = rounding(across, [0])
                at_once = None if along is None else rounding_of_both(along, across)
                if at_once is not None:
                    self._both[name] = at_once

    def scale(self, x: Tensor, name: Operand, record: bool, across: bool = False) -> Tensor | None:
        """The scale to cast `x` with, if one serves the whole of it; its amax is recorded if amaxes
        are."""
        quantizer = self.quantizers.across(name) if across else self.quantizers.along(name)
        assert isinstance(quantizer, Quantizer)
        slot = self.slots.get((name, across))
        if slot is not None:
            if record:
                slot.record(numerics.amax(x))
            return slot.scale()
        if not quantizer.per_tensor or quantizer.hadamard:
            return None
        return numerics.current_scale(numerics.amax(x), quantizer)

    def round(
        self, x: Tensor, name: Operand, record: bool, both: bool, bf16: bool = False
    ) -> tuple[Rounded, Rounded | None]:
        """`x` [rows, columns] for a GEMM that reduces over its columns and, if `both`, for one that
        reduces over its rows; `record` its amax, if amaxes are recorded at all; the values in
        float32, or in bfloat16."""
        if both and (at_once := self._both.get(name)) is not None:
            one, other = at_once.round(x, bf16=bf16)
            return one, other
        first = self._round(x, name, False, record, bf16)
        if not both or name in self._turned:
            return first, _with_row_scales(first) if both else None
        return first, self._round(x, name, True, record, bf16)

    def _round(self, x: Tensor, name: Operand, across: bool, record: bool, bf16: bool) -> Rounded:
        rounding = self._roundings.get((name, across))
        if rounding is None:
            return Rounded(x.to(torch.bfloat16 if bf16 else torch.float32), None)
        bits = self.bits(name, across, len(x))
        slot = self.slots.get((name, across))
        scale = None if slot is None else slot.scale()
        into = slot if record else None
        recorded, counts = (None, None) if into is None else (into.recorded, into.counts)
        return rounding.round(x, bits, scale, recorded, counts, bf16)[0]

    def bits(self, name: Operand, across: bool, rows: int) -> RandomBits | None:
        """Those that a copy of an operand of `rows` rows is rounded by, where that is drawn."""
        quantizer = self.quantizers.across(name) if across else self.quantizers.along(name)
        if not isinstance(quantizer, Quantizer) or not quantizer.stochastic:
            return None
        assert self.draws is not None
        return self.draws.bits(name, across, rows)

    def pack(self, x: Tensor, name: Operand, rounded: Rounded) -> Saved:
        """The bytes and scales of `x` for the GEMM over its rows; `rounded` is what the GEMM over
        its columns took."""
        across = self.quantizers.across(name)
        if across == "forward":
            return Saved(*_with_row_scales(rounded))
        if across is None:
            return Saved(x)
        if across == self.quantizers.along(name) and across.per_tensor and across.turns:
            dtype = FORMATS[across.format].dtype
            assert dtype is not None
            return Saved(rounded.values.to(dtype), rounded.factor)
        scale = self.scale(x, name, False, True)
        bits = self.bits(name, True, len(x))
        made = numerics.quantize(castable(x), across, 0, bits, scale=scale)
        return Saved(made.data, made.scales, made.amax, made.has_nan)

    def backward_ran(self) -> None:
        """Note the end of a backward pass: the next one draws other bits."""
        if self.draws is not None:
            self.draws.counter.add_(1)

    def unpack(self, saved: Saved, name: Operand, shape: torch.Size) -> Rounded:
        """What `pack` packed of an operand of this shape, as `round` gives it."""
        across = self.quantizers.across(name)
        if saved.amax is None or saved.has_nan is None:
            return Rounded(saved.data.to(torch.float32), saved.scales)
        assert isinstance(across, Quantizer)
        assert saved.scales is not None
        made = Quantized(saved.data, saved.scales, saved.amax, across, 0, shape, saved.has_nan)
        return Rounded(*numerics.unpack(made))
