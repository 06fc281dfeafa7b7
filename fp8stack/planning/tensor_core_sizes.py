"""The sizes of a model that do not suit tensor cores, and the next that do.

Source: NVIDIA, Matrix Multiplication Background User's Guide, "Tensor Core Requirements": operands
in multiples of 16 bytes, best of 128 bytes, which is 64 elements of two bytes.
"""

from __future__ import annotations

from fp8stack.model.config import GPTConfig, padded_vocabulary
from fp8stack.precision import Plan

BEST = 64
_TF32 = 4
_ATTENTION = {"fp32": 1, "tf32": _TF32, "bf16": 8, "fp16": 8}


def needed_multiple(plan: Plan) -> int:
    """The multiple that tensor cores need of the sizes of the plan's GEMMs; 1 in fp32."""
    return _TF32 if plan.compute_dtype == "tf32" else plan.vocabulary_multiple


def size_notes(config: GPTConfig, plan: Plan, tokens: int | None = None) -> list[str]:
    """A sentence for each size that is not a multiple of what the plan's GEMMs need, or of 64; and
    one if an expert gets fewer than 64 rows of a micro-batch of so many `tokens`, on average."""
    multiple = needed_multiple(plan)
    if multiple == 1:
        return []
    notes = []
    padded = padded_vocabulary(config, plan.vocabulary_multiple)
    if padded != config.vocabulary:
        notes.append(
            f"vocabulary {config.vocabulary} is padded to {padded}, a multiple of "
            f"{plan.vocabulary_multiple}; the padding is no token and stays zero"
        )
    if padded % BEST:
        best = padded_vocabulary(config, BEST)
        notes.append(_best("vocabulary", padded, best))
    precision = "FP8" if plan.is_fp8 else plan.compute_dtype
    sizes = {"width": config.width}
    if not all(map(config.has_experts, range(config.layers))):
        sizes["mlp_width"] = config.hidden
    if config.experts is not None:
        sizes["experts.width"] = config.experts.width
    for name, size in sizes.items():
        if size % multiple:
            notes.append(_too_odd(name, size, multiple, f"{precision} GEMMs want"))
        elif size % BEST:
            notes.append(_best(name, size, _up(size, BEST)))
    if config.experts is not None and tokens is not None:
        rows = tokens * config.experts.per_token / config.experts.count
        if rows < BEST:
            notes.append(
                f"an expert gets {rows:.2g} rows of a micro-batch on average; from {BEST} on, "
                "tensor cores are used well: take a larger micro-batch (--accumulate)"
            )
    multiple = _ATTENTION[plan.attention]
    if config.head_dim % multiple:
        wish = f"attention in {plan.attention} wants"
        notes.append(_too_odd("head width", config.head_dim, multiple, wish))
    return notes


def _too_odd(name: str, size: int, multiple: int, wish: str) -> str:
    return (
        f"{name} {size} is no multiple of {multiple}, which {wish}; "
        f"the next one is {_up(size, multiple)}"
    )


def _best(name: str, size: int, best: int) -> str:
    return f"{name} {size} is no multiple of {BEST}, which suits tensor cores best; {best} is one"


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
