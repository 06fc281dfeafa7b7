"""The sizes of a model that do not suit tensor cores, and the next that do.

Source: NVIDIA, Matrix Multiplication Background User's Guide, "Tensor Core Requirements": operands
in multiples of 16 bytes.
"""

from __future__ import annotations

from fp8stack.model.config import GPTConfig, padded_vocabulary
from fp8stack.precision import Plan

_TF32 = 4
_ATTENTION = {"fp32": 1, "tf32": _TF32, "bf16": 8, "fp16": 8}


def needed_multiple(plan: Plan) -> int:
    """The multiple that tensor cores need of the sizes of the plan's GEMMs; 1 in fp32."""
    return _TF32 if plan.compute_dtype == "tf32" else plan.vocabulary_multiple


def size_notes(config: GPTConfig, plan: Plan) -> list[str]:
    """A sentence for each size that is not a multiple of what the plan's GEMMs need."""
    multiple, notes = needed_multiple(plan), []
    padded = padded_vocabulary(config, plan.vocabulary_multiple)
    if padded != config.vocabulary:
        notes.append(
            f"vocabulary {config.vocabulary} is padded to {padded}, a multiple of "
            f"{plan.vocabulary_multiple}; the padding is no token and stays zero"
        )
    sizes = [("width", config.width, multiple)]
    if not all(map(config.has_experts, range(config.layers))):
        sizes.append(("mlp_width", config.hidden, multiple))
    if config.experts is not None:
        sizes.append(("experts.width", config.experts.width, multiple))
    if multiple > 1:
        sizes.append(("head width", config.head_dim, _ATTENTION[plan.attention]))
    for name, size, needed in sizes:
        wish = f"{'FP8' if plan.is_fp8 else plan.compute_dtype} GEMMs want"
        if name == "head width":
            wish = f"attention in {plan.attention} wants"
        if size % needed:
            following = -(-size // needed) * needed
            notes.append(
                f"{name} {size} is no multiple of {needed}, which {wish}; the next one is "
                f"{following}"
            )
    return notes
