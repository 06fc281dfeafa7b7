"""The quantizers that a server has for the inputs of a folder's linears, from the
`quantization_config` of its `config.json`.

Sources: `QuantizationArgs` of compressed-tensors 0.20.0; vLLM's `CompressedTensorsConfig` and
`Fp8Config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8stack.common.formats import Quantizer

STATIC = Quantizer(amax="delayed", history_length=1)
"""One scale, which the folder holds as `input_scale`."""
BY_TOKEN = Quantizer(block="row", eps=1 / 512)
"""vLLM's scale per token; the smallest is 1 / (448 * 512)."""
_BY_GROUP = {
    (8, 128): Quantizer(block=(1, 128)),
    (8, 32): Quantizer(block=(1, 32), scale="e8m0"),
    (4, 32): Quantizer(format="e2m1", block=(1, 32), scale="e8m0", scale_rounding="even"),
    (4, 16): Quantizer(format="e2m1", block=(1, 16), scale="e4m3"),
}
"""Quantizers by (bits of an element, elements of a group). NVFP4's upper scale is the tensor's own,
where servers take it from the folder."""


def inputs_of_group(table: object) -> Quantizer | str | None:
    """The quantizer of the inputs of a group of compressed-tensors, from its table
    `input_activations`: None if they are not quantized, the scheme in words if it is not known."""
    if table is None:
        return None
    if not isinstance(table, Mapping):
        return "input_activations that are no table"
    bits, strategy, size = (table.get(key) for key in ("num_bits", "strategy", "group_size"))
    dynamic = table.get("dynamic") in (True, "local")
    quantizer: Quantizer | None = None
    if table.get("type") == "float" and table.get("symmetric") is not False:
        if bits == 8 and strategy == "tensor":
            quantizer = Quantizer() if dynamic else STATIC
        elif bits == 8 and strategy == "token" and dynamic:
            quantizer = BY_TOKEN
        elif strategy in ("group", "tensor_group") and dynamic and isinstance(size, int):
            quantizer = _BY_GROUP.get((bits, size)) if isinstance(bits, int) else None
    if quantizer is not None:
        return quantizer
    kind = "dynamic" if dynamic else "static"
    return f"{kind} inputs of {bits} bits with strategy = {strategy} and group_size = {size}"


def inputs_of_fp8(config: Mapping[str, Any], weight: Quantizer) -> Quantizer | str:
    """The quantizer of inputs with `quant_method` "fp8", whose weights have the quantizer `weight`;
    the scheme in words if it is not known."""
    activations = config.get("activation_scheme", "dynamic")
    if activations == "static" and weight.per_tensor:
        return STATIC
    if activations != "dynamic":
        return f"inputs with activation_scheme = {activations}"
    if weight.per_tensor:
        return BY_TOKEN
    if weight.blocks == (128, 128):
        return Quantizer(block=(1, 128), scale=weight.scale)
    return f"dynamic inputs beside weights in blocks of {weight.block}"
