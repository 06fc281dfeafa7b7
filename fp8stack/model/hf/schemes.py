"""Schemes in which folders of transformers store weights in FP8, FP6 or FP4, from the
`quantization_config` of their `config.json`.

Sources: for `quant_method` "fp8", transformers' `FineGrainedFP8Config`, vLLM's `Fp8Config`, and the
folders of DeepSeek-V3 and Qwen3-FP8; `QuantizationConfig`, `QuantizationScheme` and the compressors
of compressed-tensors 0.20.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import Annotated, Any, NoReturn

from pydantic import StringConstraints, TypeAdapter, ValidationError
from pydantic_core import SchemaError

from fp8stack.common.errors import UserError, quoted
from fp8stack.common.formats import BLOCKS, Quantizer
from fp8stack.model.hf.input_schemes import inputs_of_fp8, inputs_of_group
from fp8stack.precision.recipe_file import load_recipe

INVERSE = "weight_scale_inv"
"""The layout of `quant_method` "fp8" with a `weight_block_size`, named after its scales."""
AUTO_FP8 = "fp8"
"""The layout of `quant_method` "fp8" without `weight_block_size`, as AutoFP8 wrote it."""
PLAIN = "float-quantized"
"""compressed-tensors' layout of FP8 with one scale per tensor, row or block."""
PACKED = {
    ("e2m1", "e4m3", 16): "nvfp4-pack-quantized",
    ("e2m1", "e8m0", 32): "mxfp4-pack-quantized",
    ("e2m3", "e8m0", 32): "mxfp6-pack-quantized",
}
"""compressed-tensors' layouts with fewer than eight bits, by (format, scale, length of a block)."""

GROUPED: dict[str, Quantizer] = {
    layout: Quantizer(format=format, scale=scale, block=(1, length))  # type: ignore[arg-type]
    for (format, scale, length), layout in PACKED.items()
} | {"mxfp8-quantized": Quantizer(scale="e8m0", block=(1, 32))}
"""The quantizers of layouts that have only one."""
_KINDS = {
    "float32": "a float32 scale",
    "power_of_two": "a power-of-two scale",
    "e8m0": "an E8M0 scale",
    "e4m3": "an E4M3 scale",
}
_READABLE = f"fp8 and compressed-tensors with {PLAIN}, {', '.join(GROUPED)}"
REMEDY = "Give a folder of its weights in float32, bfloat16 or float16"


@dataclass(frozen=True, kw_only=True)
class StoredScheme:
    """The form in which a folder stores a weight.

    Attributes:
        layout: `weight_scale_inv`, `fp8`, or the name of compressed-tensors' format.
        weight: format of the elements, elements that share a scale, and kind of the scales. The
            scales need not be the ones that this quantizer would compute.
    """

    layout: str
    weight: Quantizer

    @property
    def name(self) -> str:
        """The value of `export --scheme` that writes it; the layout if none does."""
        if self.layout == INVERSE:
            return "deepseek" if self.weight.block == (128, 128) else INVERSE
        if self.layout != PLAIN:
            return self.layout.removesuffix("-pack-quantized")
        block = self.weight.block
        return "block" if not isinstance(block, str) else {"row": "channel"}.get(block, block)

    @property
    def is_packed(self) -> bool:
        """Whether several elements share bytes."""
        return self.weight.element.bits < 8

    @property
    def data(self) -> str:
        """The name of a module's tensor with the elements."""
        return "weight_packed" if self.is_packed else "weight"

    @property
    def scales(self) -> str:
        """The name of a module's tensor with the scales."""
        return INVERSE if self.layout == INVERSE else "weight_scale"

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of a module's tensors."""
        upper = ("weight_global_scale",) if self.weight.scale == "e4m3" else ()
        return self.data, self.scales, *upper

    def __str__(self) -> str:
        quantizer = self.weight
        shared = str(quantizer.block)
        if quantizer.blocks is not None:
            rows, columns = quantizer.blocks
            shared = f"block of {rows} x {columns}" if rows > 1 else f"{columns} values"
        bits = f"FP{quantizer.element.bits}"
        return f"{bits} with {_KINDS[quantizer.scale]} per {shared} ({self.layout})"

    @property
    def nearest_recipe(self) -> str:
        """The recipe that quantizes weights most alike, with the options that change it to that."""
        quantizer = self.weight
        if isinstance(quantizer.block, str):
            name = {"tensor": "current", "row": "rowwise"}[quantizer.block]
        elif quantizer.format == "e4m3":
            name = "mxfp8" if quantizer.scale == "e8m0" else "block"
        else:
            name = {"e2m3": "mxfp6_e2m3"}.get(quantizer.format, "mxfp4")
            name = "nvfp4" if quantizer.scale == "e4m3" else name
        quantizers = load_recipe(name).quantizers
        assert quantizers is not None
        assert quantizers.weight is not None
        options = ""
        if quantizer.scale != quantizers.weight.scale:
            options += f" --set recipe.quantizer.scale={quantizer.scale}"
        if quantizer.block != quantizers.weight.block:
            options += f" --set 'recipe.weight.block={_listed(quantizer.block)}'"
        return f"--recipe {name}{options}"


def stored_schemes(table: Mapping[str, Any], where: str) -> Schemes:
    """The schemes of a folder by the `config.json` at the path `where`, with contents `table`.
    Raises a UserError that names the scheme if it cannot be read."""
    config = table.get("quantization_config")
    if config is None:
        return Schemes(where=where)
    if not isinstance(config, dict):
        _refuse(where, config, "it is no table")
    method = config.get("quant_method")
    if method == "fp8":
        scheme = _fp8(config, where)
        inputs = inputs_of_fp8(config, scheme.weight)
        group = _Group(targets=(_LINEAR,), scheme=scheme, inputs=inputs)
        return Schemes(where=where, groups=(group,))
    if method == "compressed-tensors":
        return Schemes(where=where, groups=tuple(_groups(config, where)))
    _refuse(where, method or "a scheme without a name", f"read are {_READABLE}")


_LINEAR = "Linear"
"""A target that stands for every linear."""


@dataclass(frozen=True, kw_only=True)
class _Group:
    """The modules that share a scheme, by name, pattern (`re:...`) or class.

    `inputs` is the quantizer of their inputs in a server; None: they are not quantized, a text: the
    scheme is not known.
    """

    targets: tuple[str, ...]
    scheme: StoredScheme
    inputs: Quantizer | str | None = None

    def rank(self, module: str) -> int:
        """0 if a target is the module's path, 1 if a pattern matches it, 2 if all linears are
        targets, 3 if the module is in another group."""
        patterns = [t.removeprefix("re:") for t in self.targets if t.startswith("re:")]
        if module in self.targets:
            return 0
        if any(_matches(pattern, module) for pattern in patterns):
            return 1
        return 2 if _LINEAR in self.targets else 3


@cache
def _parsed(pattern: str) -> TypeAdapter[str]:
    """Parse a regular expression for Rust's engine, which runs in linear time. Raises a ValueError
    or a SchemaError for what it does not take, such as lookarounds and backreferences."""
    return TypeAdapter(Annotated[str, StringConstraints(pattern=rf"\A(?:{pattern})")])


def _matches(pattern: str, module: str) -> bool:
    """Whether a pattern matches the beginning of a module's path."""
    try:
        return bool(_parsed(pattern).validate_python(module))
    except ValidationError:
        return False


@dataclass(frozen=True, kw_only=True)
class Schemes:
    """The schemes of a folder, by module."""

    where: str  # the path of `config.json`
    groups: tuple[_Group, ...] = ()  # none: nothing is quantized

    def of_module(self, module: str) -> StoredScheme | None:
        """The scheme of a quantized module of transformers; None if no group has it."""
        group = self._group_of(module)
        return None if group is None else group.scheme

    def inputs_of_module(self, module: str) -> Quantizer | None:
        """The quantizer that a server has for the inputs of a quantized module; None if it does not
        quantize them. Raises a UserError that names the scheme if it is not known."""
        group = self._group_of(module)
        inputs = None if group is None else group.inputs
        if isinstance(inputs, str):
            raise UserError(
                f"{self.where}: quantization_config has {quoted(inputs)}, which no recipe "
                "computes. Name the nearest recipe of served:... in place of the folder."
            )
        return inputs

    def _group_of(self, module: str) -> _Group | None:
        ranked = [(group.rank(module), group) for group in self.groups]
        rank, group = min(ranked, key=itemgetter(0), default=(3, None))
        return group if rank < 3 else None


def _refuse(where: str, scheme: object, reason: str) -> NoReturn:
    scheme = quoted(str(scheme))
    raise UserError(f"{where}: quantization_config is of {scheme}: {reason}. {REMEDY}.")


def _listed(block: object) -> object:
    return list(block) if isinstance(block, tuple) else block


def _fp8(config: Mapping[str, Any], where: str) -> StoredScheme:
    """The scheme of `quant_method` "fp8"."""
    if config.get("fmt", "e4m3") != "e4m3":
        _refuse(where, f"fp8 with fmt = {config['fmt']}", "only e4m3 is read")
    if config.get("expert_dtype", "fp8") != "fp8":
        _refuse(where, f"fp8 with expert_dtype = {config['expert_dtype']}", "only fp8 is read")
    if "weight_block_size" not in config:
        return StoredScheme(layout=AUTO_FP8, weight=Quantizer())
    block = config["weight_block_size"]
    powers = config.get("scale_fmt", "float") == "ue8m0"
    scheme = f"fp8 with weight_block_size = {block}"
    quantizer = Quantizer(
        block="tensor" if block is None else _block(block, where, scheme),
        scale="power_of_two" if powers else "float32",
    )
    return StoredScheme(layout=INVERSE, weight=quantizer)


def _block(value: object, where: str, scheme: str) -> tuple[int, int]:
    """A block of rows and columns as `config.json` writes it."""
    for block in BLOCKS:
        if value in (list(block), f"{block[0]}x{block[1]}"):
            return block
    readable = ", ".join(str(list(block)) for block in BLOCKS)
    _refuse(where, scheme, f"blocks are read that are {readable}")


def _groups(config: Mapping[str, Any], where: str) -> Iterator[_Group]:
    """The groups of a `quantization_config` of compressed-tensors."""
    scheme = f"compressed-tensors {config.get('format')}"
    sparsity = config.get("sparsity_config")
    sparse = isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense"
    for key, is_used in (("sparsity_config", sparse), ("transform_config", True)):
        if config.get(key) and is_used:
            _refuse(where, scheme, f"{key} is set, which is not read")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        _refuse(where, scheme, "it has no table config_groups")
    for name, group in groups.items():
        targets = group.get("targets") if isinstance(group, dict) else None
        if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
            _refuse(where, scheme, f"its group {quoted(name)} has no list of targets")
        for target in (target for target in targets if target.startswith("re:")):
            try:
                _parsed(target.removeprefix("re:"))
            except (SchemaError, ValueError):
                reason = "is no pattern that is read; lookarounds and backreferences are not"
                _refuse(where, scheme, f"its target {quoted(target)} {reason}")
        if group.get("weights") is not None:
            layout = group.get("format") or config.get("format")
            stored = _compressed(layout, group["weights"], where)
            inputs = inputs_of_group(group.get("input_activations"))
            yield _Group(targets=tuple(targets), scheme=stored, inputs=inputs)


def _compressed(layout: object, weights: object, where: str) -> StoredScheme:
    """The scheme of a group of compressed-tensors, from its table `weights`."""
    scheme = f"compressed-tensors {layout}"
    if not isinstance(weights, dict):
        _refuse(where, scheme, "the group's weights are no table")
    layout = PLAIN if layout == "naive-quantized" else layout  # the same without activations
    bits, kind, strategy = (weights.get(key) for key in ("num_bits", "type", "strategy"))
    quantizer = GROUPED.get(layout) if isinstance(layout, str) else None
    if layout != PLAIN and quantizer is None:
        _refuse(where, scheme, f"read are {_READABLE}")
    if kind != "float" or weights.get("symmetric") is False:
        _refuse(where, scheme, "only weights of type float that are symmetric are read")
    if quantizer is None:
        blocks = {"tensor": "tensor", "channel": "row"}
        if bits == 8 and strategy == "block":
            structure = weights.get("block_structure")
            name = f"{scheme} with block_structure = {structure}"
            quantizer = Quantizer(block=_block(structure, where, name))
        elif bits == 8 and isinstance(strategy, str) and strategy in blocks:
            quantizer = Quantizer(block=blocks[strategy])  # type: ignore[arg-type]
        else:
            of_strategy = f"{scheme} of {bits} bits with strategy = {strategy}"
            _refuse(where, of_strategy, "8 bits with tensor, channel or block are read")
    elif (bits, weights.get("group_size")) != (quantizer.element.bits, quantizer.block[1]):
        expected = f"{quantizer.element.bits} and {quantizer.block[1]}"
        _refuse(where, scheme, f"num_bits and group_size must be {expected}")
    assert isinstance(layout, str)
    return StoredScheme(layout=layout, weight=quantizer)
