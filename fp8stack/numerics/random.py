"""Random bits that follow from a counter: Philox4x32-10, the same on every device.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), and
their library Random123.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_HALF = 1 << 31
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


@dataclass(frozen=True)
class RandomBits:
    """32 random bits for each element of a matrix, by its place in the matrix.

    The same place has the same bits, whatever part of the matrix is asked for: rows may be drawn in
    parts, on several devices.

    Attributes:
        seed: half of the key; of a run. Taken modulo 2^32, as `stream` is.
        stream: the other half of the key; of a layer and an operand. int, or int64 0-dim.
        counter: int64, 0-dim, on the device of the matrix: of a pass. A tensor, so that compiled
            code and the device serve every value.
        first_row: the row of the whole matrix that row 0 is, int or int64 0-dim.
    """

    seed: int
    stream: int | Tensor
    counter: Tensor
    first_row: int | Tensor = 0

    def bits(self, rows: int, columns: int) -> Tensor:
        """The bits of each element: int64 [rows, columns] in [0, 2^32)."""
        device = self.counter.device
        # Masked, a lane is int64 in the code that inductor generates. As an index it is int32, and
        # Triton 3.6 compiles no product of it with a constant over 2^31.
        lanes = torch.arange(-(-columns // 4), device=device) & _WORD
        row = (torch.arange(rows, device=device) + (self.first_row & _WORD)) & _WORD
        low, high = self.counter & _WORD, (self.counter >> 32) & _WORD
        key: tuple[int | Tensor, ...] = (self.seed, self.stream)
        if torch.compiler.is_compiling():
            # Tensors, because inductor's code for a CPU turns integers that may vary into floats.
            key = tuple(
                n if isinstance(n, Tensor) else torch.full((), n, dtype=torch.int64, device=device)
                for n in key
            )
        words = philox4x32(lanes, row[:, None], low, high, *key)
        return torch.stack(words, dim=-1).flatten(1)[:, :columns]


def philox4x32(
    c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: int | Tensor, k1: int | Tensor
) -> tuple[Tensor, ...]:
    """Philox4x32-10 of four counter words and two key words.

    Args:
        c0, c1, c2, c3: int64 in [0, 2^32), broadcast with each other.
        k0, k1: taken modulo 2^32, int or int64 0-dim.

    Returns:
        Four words, int64 in [0, 2^32), of the shape that the counter words broadcast to.
    """
    shape = torch.broadcast_tensors(c0, c1, c2, c3)[0].shape  # type: ignore[no-untyped-call]
    for _ in range(_ROUNDS):
        k0, k1 = k0 & _WORD, k1 & _WORD
        (high0, low0), (high1, low1) = _product(c0, _MULTIPLIERS[0]), _product(c2, _MULTIPLIERS[1])
        c0, c1 = _mixed(high1, c1, k0, shape), low1
        c2, c3 = _mixed(high0, c3, k1, shape), low0
        k0, k1 = k0 + _KEY_STEPS[0], k1 + _KEY_STEPS[1]
    return c0, c1 & _WORD, c2, c3 & _WORD


def _product(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """The two halves of `word * multiplier`, an odd number below 2^32: the high one, and an int64
    whose low 32 bits are the low one.

    The product itself may exceed int64, and signed overflow has no defined result in the C++ that
    inductor generates. Moved by 2^31, a word is a signed one, and its product fits:
    `word * m = (word - 2^31) * m + 2^31 + (m >> 1) * 2^32`.
    """
    moved = (word - _HALF).mul_(multiplier).add_(_HALF)
    return (moved >> 32).add_(multiplier >> 1), moved


def _mixed(high: Tensor, low: Tensor, key: int | Tensor, shape: torch.Size) -> Tensor:
    """The low 32 bits of `high ^ low ^ key`; in place where `high` has the whole `shape`."""
    if high.shape != shape:  # the first rounds: words of a row or of a column alone
        return (high ^ low ^ key) & _WORD
    return high.bitwise_xor_(low).bitwise_xor_(key).bitwise_and_(_WORD)
