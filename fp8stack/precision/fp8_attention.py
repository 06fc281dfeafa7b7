"""FP8 attention as data: the requirements, casts and saved tensors of each kind.

The kernels are cuDNN's, called through Transformer Engine. Source: TE 2.20, `get_attention_backend`
and its kernels, which have only delayed scaling below 10.0, and nothing on 12.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fp8stack.precision.native_gemms import BLACKWELL, HOPPER_OR_BLACKWELL, Gpus

SEQUENCE_MULTIPLE = 128
"""The sequence length must be divisible by this: the only mask is the causal one, no padding."""


@dataclass(frozen=True, kw_only=True)
class Fp8Attention:
    """A kind of attention in FP8.

    Attributes:
        gpus: the GPUs that support it.
        head_multiple: the width of a head must be divisible by this on 10.x; it is 128 at most.
        head_widths: the supported widths in words.
        cudnn: the first version that supports it, then the versions with known errors.
        cudnn_in_words: the same for messages.
        slots: the operands whose scales come from the amaxes of earlier passes; names of gradients
            begin with d. S is the softmax, dP its gradient.
        gradient_format: the FP8 format of gradients.
        copies: the number of FP8 copies of queries, keys, values and the output's gradient; they
            are saved for the backward pass.
        keeps_fp8_output: whether the saved output is in FP8.
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
        """The divisor of the width of a head on a GPU, and the supported widths in words."""
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
        slots=("S", "dP"),  # the kernel casts them before it has all of their amax
    ),
}
