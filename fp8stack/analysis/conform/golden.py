"""The rows of the golden corpus, committed results of other implementations.

`golden/*.safetensors` holds inputs and results. Its metadata holds, as JSON, `made_by` and how each
case was made. Files of TE's Python references were made on a CPU by `python -m bench golden
--references`; a file captured from a GPU names that GPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from fp8stack import numerics
from fp8stack.analysis.conform.checks import Context, Results, Row
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


def golden(context: Context) -> Iterator[Row]:
    """Transformer Engine's Python references, and results captured from GPUs, if any."""
    for path in sorted(FOLDER.glob("*.safetensors")):
        description, tensors = load(path)
        for case in description["cases"]:
            if case["kind"] in COMPUTE:
                yield golden_row(case, tensors, description["made_by"], context.device)


def golden_row(case: Case, tensors: Tensors, made_by: str, device: str = "cpu") -> Row:
    """One case, computed here, and the file's bytes, scales and histories."""

    def inputs() -> Iterator[tuple[str, tuple[Tensors, Tensors]]]:
        of_file = {n: x.to(device) for n, x in tensors.items() if n.startswith("inputs/")}
        yield "", (of_file, fields_of(f"{case['name']}/", tensors))

    def computed(tensors: tuple[Tensors, Tensors]) -> Results:
        return COMPUTE[case["kind"]](case, tensors[1], tensors[0])

    name = f"{case['name']}, by {made_by}"
    return Row("golden", name, computed, lambda tensors: tensors[1], inputs)


def fields_of(prefix: str, tensors: Tensors) -> Tensors:
    """The tensors whose name begins with `prefix`, by the rest of it.

    Raises:
        UserError: there is none.
    """
    fields = {n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)}
    if not fields:
        raise UserError(f"The golden file has no tensors of {prefix[:-1]}. Install fp8stack again.")
    return fields


def _cast(case: Case, fields: Tensors, inputs: Tensors) -> Results:
    x, scales = inputs[case["input"]], fields["scales"].to(inputs[case["input"]].device)
    data = [numerics.cast_to_fp8(x, scale, case["format"]) for scale in scales]
    inverses, amax = [numerics.inverse(scale) for scale in scales], numerics.amax(x)
    bytes_of_each = torch.stack([codes.view(torch.uint8) for codes in data])
    return {
        "bytes": bytes_of_each.view(fields["bytes"].dtype),
        "inverses": torch.stack(inverses),
        "amax": amax.expand_as(fields["amax"]),
    }


def _history(case: Case, fields: Tensors, inputs: Tensors) -> Results:
    kind = {key: case[key] for key in ("length", "margin", "algorithm")}
    if "input" in case:
        amaxes = inputs[case["input"]]
    else:
        operands = [inputs[f"inputs/steps {name}"] for name in ("x", "w", "dy")]
        amaxes = torch.stack([torch.stack([*map(numerics.amax, x)]) for x in operands], 1)
    history, scales = AmaxHistory(SLOTS, **kind, device=amaxes.device), []
    for step in amaxes:
        for slot, amax in zip(SLOTS, step, strict=True):
            history.record(slot, amax)
        history.update()
        scales.append(history.scales.clone())
    state = history.state_dict()
    windows = torch.stack([state[f"{slot}.amax_history"] for slot in SLOTS], dim=1)
    return {"scales": torch.stack(scales), "histories": windows}


def _quantizer(case: Case, fields: Tensors, inputs: Tensors) -> Results:
    """Bytes and scales of the copies that the file has."""
    fixed: dict[str, Any] = {
        key: tuple(v) if isinstance(v, list) else v for key, v in case["quantizer"].items()
    }
    results = {}
    for way, dim in (("along", 1), ("across", 0)):
        if f"bytes {way}" in fields:
            quantized = numerics.quantize(inputs[case["input"]], Quantizer(**fixed), dim)
            for name, tensor in (("scales", quantized.scales), ("bytes", quantized.data)):
                results[f"{name} {way}"] = tensor.reshape(fields[f"{name} {way}"].shape)
    return results


def _layout(case: Case, fields: Tensors, inputs: Tensors) -> Results:
    codes = inputs[case["input"]].view(torch.float8_e8m0fnu)
    return {"scales": pack_scales(codes, ScaleLayout.MX).reshape(fields["scales"].shape)}


COMPUTE: dict[str, Callable[[Case, Tensors, Tensors], Results]] = {
    "cast": _cast,
    "history": _history,
    "quantizer": _quantizer,
    "layout": _layout,
}
