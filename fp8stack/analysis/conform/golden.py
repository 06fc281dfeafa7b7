"""Checks against the golden corpus, committed results of other implementations.

`golden/*.safetensors` holds inputs and results. Its metadata holds, as JSON, `made_by` and how each
case was made. Files of TE's Python references were made on a CPU by `python -m bench golden
--references`; a file captured from a GPU names that GPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from fp8stack import numerics
from fp8stack.analysis.conform.checks import Check, Context, Facts, merged, same_bits
from fp8stack.common.errors import UserError
from fp8stack.common.formats import Quantizer
from fp8stack.layers.kernels.scaled_gemm import ScaleLayout, pack_scales
from fp8stack.numerics import AmaxHistory

FOLDER = Path(__file__).parent / "golden"
SLOTS = {"input": "e4m3", "weight": "e4m3", "grad_output": "e5m2"}
Case = dict[str, Any]
Tensors = dict[str, Tensor]


@lru_cache(maxsize=4)
def load(path: Path) -> tuple[dict[str, Any], Tensors]:
    """A golden file's description and tensors."""
    with safe_open(path, "pt") as file:
        description = json.loads(file.metadata()["description"])
        return description, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def golden(context: Context) -> Iterator[Check]:
    """Check against Transformer Engine's Python references, and results captured from GPUs, if
    any."""
    for path in sorted(FOLDER.glob("*.safetensors")):
        description, tensors = load(path)
        for case in description["cases"]:
            if case["kind"] in CHECKS:
                check = partial(compared, case, tensors, context.device)
                yield Check(f"{case['name']}, by {description['made_by']}", check)


def compared(case: Case, tensors: Tensors, device: str = "cpu") -> Facts:
    """Compare one case, computed here, with the file: bytes, scales and histories."""
    inputs = {
        name: tensor.to(device) for name, tensor in tensors.items() if name.startswith("inputs/")
    }
    return CHECKS[case["kind"]](case, fields_of(f"{case['name']}/", tensors), inputs)


def fields_of(prefix: str, tensors: Tensors) -> Tensors:
    """The tensors whose name begins with `prefix`, by the rest of it.

    Raises:
        UserError: there is none.
    """
    fields = {n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)}
    if not fields:
        raise UserError(f"The golden file has no tensors of {prefix[:-1]}. Install fp8stack again.")
    return fields


def _cast(case: Case, fields: Tensors, inputs: Tensors) -> Facts:
    x, comparisons = inputs[case["input"]], {}
    for place, scale in enumerate(fields["scales"].to(x.device)):
        results = {
            "bytes": numerics.cast_to_fp8(x, scale, case["format"]),
            "inverses": numerics.inverse(scale),
            "amax": numerics.amax(x),
        }
        pairs = {name: (tensor, fields[name][place]) for name, tensor in results.items()}
        comparisons[f"scale {float(scale):g}"] = same_bits(pairs)
    return merged(comparisons)


def _history(case: Case, fields: Tensors, inputs: Tensors) -> Facts:
    kind = {key: case[key] for key in ("length", "margin", "algorithm")}
    if "input" in case:
        amaxes = inputs[case["input"]]
    else:
        operands = [inputs[f"inputs/steps {name}"] for name in ("x", "w", "dy")]
        amaxes = torch.stack([torch.stack([*map(numerics.amax, x)]) for x in operands], 1)
    history = AmaxHistory(SLOTS, **kind, device=amaxes.device)
    comparisons = {}
    for step, scales in enumerate(fields["scales"]):
        for slot, amax in zip(SLOTS, amaxes[step], strict=True):
            history.record(slot, amax)
        history.update()
        comparisons[f"step {step}"] = same_bits({"scales": (history.scales, scales)})
    state = history.state_dict()
    saved_amaxes = torch.stack([state[f"{slot}.amax_history"] for slot in SLOTS], dim=1)
    return merged(
        comparisons | {"at the end": same_bits({"histories": (saved_amaxes, fields["histories"])})}
    )


def _quantizer(case: Case, fields: Tensors, inputs: Tensors) -> Facts:
    """`rowwise` and, if the file has it, `columnwise`: bytes and scales of a quantizer."""
    fixed: dict[str, Any] = {
        key: tuple(v) if isinstance(v, list) else v for key, v in case["quantizer"].items()
    }
    pairs = {}
    for way, dim in (("along", 1), ("across", 0)):
        if f"bytes {way}" in fields:
            quantized = numerics.quantize(inputs[case["input"]], Quantizer(**fixed), dim)
            for name, tensor in (("scales", quantized.scales), ("bytes", quantized.data)):
                expected = fields[f"{name} {way}"]
                pairs[f"{name} {way}"] = tensor.reshape(expected.shape), expected
    return same_bits(pairs)


def _layout(case: Case, fields: Tensors, inputs: Tensors) -> Facts:
    codes = inputs[case["input"]].view(torch.float8_e8m0fnu)
    return same_bits(
        {"scales": (pack_scales(codes, ScaleLayout.MX).reshape(-1), fields["scales"].view(-1))}
    )


CHECKS: dict[str, Callable[[Case, Tensors, Tensors], Facts]] = {
    "cast": _cast,
    "history": _history,
    "quantizer": _quantizer,
    "layout": _layout,
}
