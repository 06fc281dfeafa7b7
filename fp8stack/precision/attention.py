"""The kinds of attention that multiply in FP8: what each needs, casts and keeps. Data.

They are cuDNN's, by way of Transformer Engine. Source: TE 2.20, `get_attention_backend` and its
kernels, which have delayed scaling below 10.0, and nothing on 12.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fp8stack.precision.kernels import BLACKWELL, HOPPER_OR_BLACKWELL, Gpus

SEQUENCE_MULTIPLE = 128
"""What a sequence is divisible by, of which no token is masked but the later ones."""


@dataclass(frozen=True, kw_only=True)
class Fp8Attention:
    """A kind of attention in FP8.

    Attributes:
        gpus: those that have it.
        head_multiple: what divides the width of a head on 10.x, which is 128 at most.
        head_widths: the widths in words.
        cudnn: the first that has it, then those with known errors; and the same in words.
        slots: the operands whose scales come from the amaxes of earlier passes; those of gradients
            begin with d. S is the softmax, dP its gradient.
        gradient_format: of gradients.
        copies: of queries, keys, values and the output's gradient that are cast; the backward pass
            keeps them.
        keeps_fp8_output: whether the output that it keeps is in FP8.
    """

    gpus: Gpus = BLACKWELL
    head_multiple: int = 16
    head_widths: str = "16, 32, 48 ... 128 elements"
    cudnn: tuple[int, ...]
    cudnn_in_words: str
    slots: tuple[str, ...] = ()
    gradient_format: Literal["e4m3", "e5m2"] = "e5m2"
    copies: int = 1
    keeps_fp8_output: bool = False

    def widths_on(self, capability: tuple[int, int] | None) -> tuple[int, str]:
        """What divides the width of a head on a GPU, and the widths in words."""
        if capability == (9, 0):  # for gradients
            return 128, "128 elements on compute capability 9.0"
        return self.head_multiple, self.head_widths


FP8_ATTENTION = {
    "mxfp8": Fp8Attention(
        head_multiple=32,
        head_widths="32, 64, 96 or 128 elements",
        cudnn=(92100, 92300, 92301),
        cudnn_in_words="9.21 or later, not 9.23.0 or 9.23.1",
        gradient_format="e4m3",
        copies=2,  # in blocks along a head's elements, and along tokens
    ),
    "delayed": Fp8Attention(
        gpus=HOPPER_OR_BLACKWELL,
        cudnn=(91200,),  # TE itself needs it
        cudnn_in_words="9.12 or later",
        slots=("QKV", "S", "O", "dO", "dP", "dQKV"),
        keeps_fp8_output=True,
    ),
    "current": Fp8Attention(
        cudnn=(91400,),
        cudnn_in_words="9.14 or later",
        slots=("S", "dP"),  # what the kernel casts before all of it is known
    ),
}
