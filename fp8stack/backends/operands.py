"""What the GEMMs of a linear multiply: its operands, quantized as the layer's quantizers say.

What comes out are values in float32, or bytes with scales to be kept for the backward pass.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from fp8stack import numerics
from fp8stack.backends.delayed import Slots, several_ranks
from fp8stack.errors import UserError
from fp8stack.formats import FORMATS, Operand, Quantizer, Quantizers
from fp8stack.numerics import Quantized, RandomBits, Rounded

# A scaled value this little above fp8_max still rounds down to it, so it needs no clamp.
_ROUNDS_DOWN = 1.01


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

    def state_dict(self) -> dict[str, Tensor]:
        """`<module path>.draws` by layer, int64 and 0-dim, copies."""
        return {f"{path}.draws": layer.counter.clone() for path, layer in self.layers.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Put back what `state_dict` gave.

        Raises:
            UserError: a layer too many or too few; nothing is changed.
        """
        if odd := sorted(state.keys() ^ {f"{path}.draws" for path in self.layers}):
            raise UserError(
                f"FP8 state: '{odd[0]}' is {'not ' if odd[0] in state else 'only '}in this model. "
                "Load it into the model it came from."
            )
        for path, layer in self.layers.items():
            layer.counter.copy_(state[f"{path}.draws"])


class LayerDraws:
    """The random bits of one layer.

    Attributes:
        counter: how many backward passes it made: int64, 0-dim.
    """

    def __init__(self, seed: int, path: str) -> None:
        self._seed = seed
        self._stream = zlib.crc32(path.encode())
        with torch.inference_mode(False):
            self.counter = torch.zeros((), dtype=torch.int64)

    def bits(self, name: Operand, across: bool, rows: int) -> RandomBits:
        """Those to round one copy of an operand of `rows` rows with; every rank draws those of its
        own rows of the whole batch, which is shared out in order."""
        stream = self._stream ^ _STREAMS[name] ^ across
        first_row = 0 if name == "weight" or not several_ranks() else dist.get_rank() * rows
        return RandomBits(self._seed, stream, self.counter, first_row)


_STREAMS: dict[Operand, int] = {"input": 2, "weight": 4, "grad_output": 6}


class Saved(NamedTuple):
    """An operand that is kept for the backward pass; what its quantizer has no use for is None."""

    data: Tensor
    scales: Tensor | None = None
    amax: Tensor | None = None
    has_nan: Tensor | None = None


class LayerOperands:
    """Quantizes the operands of one layer.

    Args:
        quantizers: what by.
        slots: where its delayed quantizers find their scales.
        draws: the bits of its stochastic ones.
    """

    def __init__(
        self, quantizers: Quantizers, slots: Slots | None = None, draws: LayerDraws | None = None
    ) -> None:
        self.quantizers = quantizers
        self.slots = slots or {}
        self.draws = draws

    def scale(
        self, x: Tensor, name: Operand, record: bool, across: bool = False
    ) -> tuple[Tensor | None, Tensor | None]:
        """The scale to cast `x` with if one serves the whole of it, and its amax if that was
        needed; recorded if amaxes are."""
        quantizer = self.quantizers.across(name) if across else self.quantizers.along(name)
        assert isinstance(quantizer, Quantizer)
        slot = self.slots.get((name, across))
        if slot is None:
            if not quantizer.per_tensor or quantizer.hadamard:
                return None, None
            largest = numerics.amax(x)
            return numerics.current_scale(largest, quantizer), largest
        scale = slot.scale()
        if not record:
            return scale, None
        largest = numerics.amax(x)
        slot.record(largest)
        return scale, largest

    def round(
        self, x: Tensor, name: Operand, record: bool, both: bool
    ) -> tuple[Rounded, Rounded | None]:
        """`x` [rows, columns] for a GEMM that reduces over its columns and, if `both`, for one that
        reduces over its rows; `record` its amax, if amaxes are recorded at all."""
        along, across = self.quantizers.along(name), self.quantizers.across(name)
        turned = across == "forward" or (along == across and (along is None or along.turns))
        if both and not turned and _in_parts(along) and _in_parts(across):
            bits = self._bits(along, name, False, x), self._bits(across, name, True, x)
            return numerics.round_both(x, along, across, bits)
        first = self._round(x, name, along, record, False)
        if not both or turned:
            return first, first if both else None
        assert across != "forward"
        return first, self._round(x, name, across, record, True)

    def _round(
        self, x: Tensor, name: Operand, quantizer: Quantizer | None, record: bool, across: bool
    ) -> Rounded:
        if quantizer is None:
            return Rounded(x.to(torch.float32), None)
        scale, largest = self.scale(x, name, record, across)
        saturates = True
        # Elsewhere a clamp costs less than asking for a number.
        if largest is not None and x.device.type == "cpu" and not torch.compiler.is_compiling():
            assert scale is not None
            saturates = not float(largest * scale) < FORMATS[quantizer.format].max * _ROUNDS_DOWN
        bits = self._bits(quantizer, name, across, x)
        return numerics.round_to(
            x, quantizer, 0 if across else 1, bits, scale=scale, saturates=saturates
        )

    def _bits(
        self, quantizer: Quantizer, name: Operand, across: bool, x: Tensor
    ) -> RandomBits | None:
        if not quantizer.stochastic:
            return None
        assert self.draws is not None
        return self.draws.bits(name, across, len(x))

    def pack(self, x: Tensor, name: Operand, rounded: Rounded) -> Saved:
        """The bytes and scales of `x` for the GEMM over its rows; `rounded` is what the GEMM over
        its columns took."""
        across = self.quantizers.across(name)
        if across == "forward":
            return Saved(rounded.values, rounded.factor)
        if across is None:
            return Saved(x)
        if across == self.quantizers.along(name) and across.per_tensor and across.turns:
            dtype = FORMATS[across.format].dtype
            assert dtype is not None
            return Saved(rounded.values.to(dtype), rounded.factor)
        scale, _ = self.scale(x, name, False, True)
        made = numerics.quantize(x, across, 0, self._bits(across, name, True, x), scale=scale)
        return Saved(made.data, made.scales, made.amax, made.has_nan)

    def unpack(self, saved: Saved, name: Operand, shape: torch.Size) -> Rounded:
        """What `pack` packed of an operand of this shape, as `round` gives it."""
        across = self.quantizers.across(name)
        if saved.amax is None or saved.has_nan is None:
            return Rounded(saved.data.to(torch.float32), saved.scales)
        assert isinstance(across, Quantizer)
        assert saved.scales is not None
        made = Quantized(saved.data, saved.scales, saved.amax, across, 0, shape, saved.has_nan)
        return Rounded(*numerics.unpack(made))


def _in_parts(quantizer: object) -> TypeGuard[Quantizer]:
    """Whether it has a scale for each part of a tensor, so that both copies are made at once."""
    return isinstance(quantizer, Quantizer) and not quantizer.per_tensor
