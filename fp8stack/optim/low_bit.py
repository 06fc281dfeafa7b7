"""AdamW with moments of one byte each, which is torchao's; the only file here that imports it."""

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from fp8stack.config import RunConfig
from fp8stack.errors import UserError

LowBit = Literal["adamw8bit", "adamwfp8"]
BLOCK = 256
"""Elements that share a scale."""
SMALLEST = 4096
"""Elements of a parameter below which torchao keeps float32 moments."""


def low_bit_adamw(name: LowBit, parameters: Sequence[Tensor], config: RunConfig) -> Optimizer:
    """torchao's AdamW; codes of 8 bits by a table of 256 values, or of E4M3, and a float32 scale
    for each 256. Parameters stay float32. Raises a UserError if torchao is missing or too old."""
    made: Optimizer = low_bit_optimizers()[name](
        parameters,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        block_size=BLOCK,
    )
    return made


def low_bit_optimizers() -> dict[str, Any]:
    """torchao's classes by our names. Raises a UserError if torchao is missing or too old."""
    try:
        from torchao.optim import AdamW8bit, AdamWFp8
    except ImportError as error:
        raise UserError(
            "The optimizers adamw8bit and adamwfp8 need torchao: pip install 'torchao>=0.18', or "
            "choose --set optimizer=adamw."
        ) from error
    return {"adamw8bit": AdamW8bit, "adamwfp8": AdamWFp8}
