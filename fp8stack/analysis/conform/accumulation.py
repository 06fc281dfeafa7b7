"""The error of FP8 products that tensor cores add up with few bits.

Hopper's tensor cores add 32 FP8 products and the sum so far in fixed point: all are shifted to the
largest exponent among them, and only their highest 14 bits are kept (DeepSeek-V3 Technical Report,
arXiv 2412.19437, section 3.5.2). MMA-Sim (arXiv 2511.10909) models it to the bit: each term is
truncated to a multiple of 2^(e - 13), where e is the largest exponent, and the sum is truncated to
13 bits behind its leading one. So a step loses less than u = 2^-13 of its largest term in each
term, and never more than the term itself, and less than 2^-13 of the result in the last truncation.
GPUs that keep more bits lose less.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEP = 32  # products that an instruction adds
BITS = 13  # behind the leading one


def accumulation_error(
    a: Tensor, b: Tensor, steps: int | None = None, *, exact: bool = False
) -> Tensor:
    """A bound of the error of each element of `a @ b.t()`.

    The products are added up in the order of the columns, on one or several consecutive parts of
    them, whose sums are added in float32 (split K), from 0. The sum so far is then a difference of
    two prefix sums, which this function computes.

    Args:
        a, b: the values of the operands [rows, K], float64.
        steps: after so many instructions, a sum is moved to float32 and starts at 0 again, as with
            slow accumulation; None for fast accumulation, which never does.
        exact: whether values are FP8 numbers times powers of two that are the same for a whole
            matrix. Then only the bits of a product below u are lost.

    Returns:
        float64 [rows of a, rows of b].
    """
    error = a.new_zeros(len(a), len(b))
    for place, first in enumerate(range(0, a.shape[1], STEP)):
        columns = slice(first, first + STEP)
        terms = (a[:, None, columns] * b[None, :, columns]).abs()
        if place == 0 or (steps is not None and place % steps == 0):
            total, least, most, lost = (a.new_zeros(error.shape) for _ in range(4))
        total = total + a[:, columns] @ b[:, columns].t()
        # The largest magnitude of a sum so far, in any part that ends or began here.
        reached = torch.maximum(total - least, most - total)
        largest = torch.maximum(reached, torch.maximum(most - least, terms.amax(2))) + lost
        least, most = torch.minimum(least, total), torch.maximum(most, total)
        if exact:
            largest = 2.0 ** largest.clamp(min=2.0**-500).log2().floor()
        unit = largest[..., None] * 2.0**-BITS
        truncated = (terms.remainder(unit) if exact else terms.minimum(unit)).sum(2)
        step = truncated + 2 * unit[..., 0]  # the sum so far, and the result
        lost, error = lost + step, error + step
    return error
