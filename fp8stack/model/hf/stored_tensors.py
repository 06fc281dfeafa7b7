"""The tensors of a folder's safetensors files, as they are stored and dequantized."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fp8stack.common.errors import UserError, quoted
from fp8stack.model.hf.schemes import REMEDY, Schemes, StoredScheme
from fp8stack.numerics import Quantized, dequantize


class Tensors(Mapping[str, Tensor]):
    """The tensors of safetensors files by name. Each file is opened once."""

    def __init__(self, path: Path, files: Mapping[str, list[str] | None]) -> None:
        self._opened: dict[Path, Any] = {}
        self._file_of: dict[str, Path] = {}
        for name, expected in files.items():
            file = path / name
            if not file.is_file():
                raise UserError(f"{file} is missing.")
            try:
                self._opened[file] = safe_open(str(file), framework="pt")
                names = list(self._opened[file].keys())
            except (SafetensorError, OSError, ValueError) as error:
                raise UserError(f"{file} is not a safetensors file: {error}.") from error
            if missing := sorted(set(expected or ()) - set(names)):
                raise UserError(f"{file} lacks the tensor '{quoted(missing[0])}' of the index.")
            self._file_of |= dict.fromkeys(names if expected is None else expected, file)

    def __getitem__(self, name: str) -> Tensor:
        file = self._file_of[name]
        try:
            tensor: Tensor = self._opened[file].get_tensor(name)
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise UserError(f"{file}: '{quoted(name)}' cannot be read: {error}.") from error
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, from its file's header, without reading its values."""
        return tuple(self._slice(name).get_shape())

    def _slice(self, name: str) -> Any:
        """safetensors' handle on a tensor whose values are not read."""
        file = self._file_of[name]
        try:
            return self._opened[file].get_slice(name)
        except (SafetensorError, OSError, ValueError) as error:
            raise UserError(f"{file}: '{quoted(name)}' cannot be read: {error}.") from error

    def dtype(self, name: str) -> str:
        """The dtype of a tensor as its file's header names it, such as "BF16" or "F8_E4M3"."""
        return str(self._slice(name).get_dtype())

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


class DequantizedTensors(Mapping[str, Tensor]):
    """The tensors of a folder under the names that they have without quantization: the weight of a
    quantized module in float32, the others as they are stored. Scales of activations and of the
    key-value cache are left out.

    A weight is the product of element and scale, rounded once to float32; in NVFP4 the scale is the
    float32 quotient of the E4M3 scale and `weight_global_scale`, as in compressed-tensors.

    Raises:
        UserError: a quantized module has no scheme, or lacks a tensor; and `shape` or access to a
            weight or a scale, if its scales have another shape, dtype or range.
    """

    def __init__(self, stored: Tensors, schemes: Schemes, where: str) -> None:
        self._stored, self._where = stored, where
        self.schemes: dict[str, StoredScheme] = {}  # of quantized modules, by path
        self._of_activations = False
        self._names = dict.fromkeys(stored)
        for name in stored if schemes.groups else ():
            module, _, key = name.rpartition(".")
            if key == "weight_packed" or (key == "weight" and stored.dtype(name) == "F8_E4M3"):
                scheme = schemes.of_module(module)
                if scheme is None or scheme.data != key:
                    self._refuse(name, f"is quantized, and {schemes.where} gives it no scheme")
                self.schemes[module] = scheme
                for tensor in scheme.tensors:
                    if f"{module}.{tensor}" not in stored:
                        self._refuse(name, f"has no '{tensor}' beside it, as {scheme}")
                    del self._names[f"{module}.{tensor}"]
                self._names[f"{module}.weight"] = None
            elif key in _OF_ACTIVATIONS:
                del self._names[name]
                self._of_activations = True

    def notes(self) -> list[str]:
        """Lines for the user: the schemes, the nearest recipes, and the scales that are not read.
        Scales that are all powers of two count as such, whatever `config.json` calls them."""
        lines = []
        for scheme in dict.fromkeys(self.schemes.values()):
            modules = [module for module in self.schemes if self.schemes[module] == scheme]
            if scheme.weight.scale == "float32" and all(
                (torch.frexp(self.scales(module)).mantissa == 0.5).all() for module in modules
            ):
                scheme = replace(scheme, weight=replace(scheme.weight, scale="power_of_two"))
            lines.append(
                f"{len(modules)} linears of the folder are {scheme}; the nearest recipe is "
                f"{scheme.nearest_recipe}"
            )
        if self._of_activations:
            lines.append("the folder's scales of activations are left out")
        return lines

    def __getitem__(self, name: str) -> Tensor:
        module = name.removesuffix(".weight")
        if name not in self._names:
            raise KeyError(name)
        if module not in self.schemes or name == module:
            return self._stored[name]
        scheme, shape = self.schemes[module], self.shape(name)
        quantizer = scheme.weight
        scales = self.scales(module)
        data = self._stored[f"{module}.{scheme.data}"]
        if quantizer.format == "e2m3":
            data = unpack_fp6(data)
        return dequantize(
            Quantized(
                data=data,
                scales=scales.reshape(()) if quantizer.per_tensor else scales,
                amax=scales.new_zeros(()),  # of no use: all levels of the scales are in `scales`
                quantizer=replace(quantizer, scale="float32"),
                dim=1,
                shape=torch.Size(shape),
                has_nan=torch.tensor(False),
            )
        )

    def scales(self, module: str) -> Tensor:
        """The float32 scales that the elements of a quantized module are multiplied by."""
        scheme = self.schemes[module]
        scales = self._scale(module, scheme.scales)
        if scheme.weight.scale == "e4m3":
            scales = scales / self._scale(module, "weight_global_scale")
        return scales

    def input_scale(self, module: str) -> Tensor:
        """The float32 scale [] that a server multiplies the quantized inputs of a module by."""
        self._require(module, self.schemes[module], "input_scale", _FLOATS, [(), (1,)])
        return self._scale(module, "input_scale").reshape(())

    def _scale(self, module: str, key: str) -> Tensor:
        """A scale in float32. Raises a UserError unless it is finite, positive and normal; E4M3
        scales of blocks may be zero or subnormal."""
        scale = self._stored[f"{module}.{key}"]
        if scale.dtype == torch.uint8:
            scale = scale.view(torch.float8_e8m0fnu)
        least, largest = _LIMITS.get(scale.dtype, _FLOAT32)
        if key == "weight_global_scale":
            least, largest = _GLOBAL
        values = scale.float()
        wrong_values = values[~((least <= values) & (values <= largest))]
        if len(wrong_values):
            limits = f"scales from {least:.3g} to {largest:.3g}"
            reason = f"holds {wrong_values[0]:.3g}, where {self.schemes[module]} has {limits}"
            self._refuse(f"{module}.{key}", reason)
        return values

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, from its file's header, without reading its values."""
        module = name.removesuffix(".weight")
        if module not in self.schemes or name == module:
            return self._stored.shape(name)
        scheme = self.schemes[module]
        quantizer, data = scheme.weight, f"{module}.{scheme.data}"
        shape = self._stored.shape(data)
        dtype, bits = self._stored.dtype(data), quantizer.element.bits
        is_whole = len(shape) == 2 and shape[1] * 8 % bits == 0
        if not is_whole or dtype != ("U8" if scheme.is_packed else "F8_E4M3"):
            self._refuse(data, f"is {dtype} {list(shape)}, as {scheme}")
        rows, columns = shape[0], shape[1] * 8 // bits
        height, width = quantizer.blocks or (1, columns)  # a row is a block, too
        expected: list[tuple[int, ...]] = [(-(-rows // height), -(-columns // width))]
        if quantizer.per_tensor:
            expected = [(), (1,), (1, 1)]
        self._require(module, scheme, scheme.scales, _DTYPES[quantizer.scale], expected)
        if quantizer.scale == "e4m3":
            self._require(module, scheme, "weight_global_scale", ("F32",), [(), (1,)])
        return rows, columns

    def _require(
        self,
        module: str,
        scheme: StoredScheme,
        key: str,
        dtypes: tuple[str, ...],
        shapes: list[tuple[int, ...]],
    ) -> None:
        name = f"{module}.{key}"
        dtype, shape = self._stored.dtype(name), self._stored.shape(name)
        if dtype not in dtypes or shape not in shapes:
            expected = f"{' or '.join(dtypes)} {list(shapes[-1])}"
            self._refuse(name, f"is {dtype} {list(shape)}, where {scheme} has {expected}")

    def _refuse(self, name: str, reason: str) -> NoReturn:
        raise UserError(f"{self._where}: '{quoted(name)}' {reason}. {REMEDY}.")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


_OF_ACTIVATIONS = {
    *("input_scale", "input_global_scale", "output_scale", "activation_scale"),
    *("q_scale", "k_scale", "v_scale"),
}
"""Names of scales that no weight has."""
_FLOATS = ("F32", "BF16", "F16", "F8_E8M0")
_DTYPES = {
    "float32": _FLOATS,
    "power_of_two": (*_FLOATS, "U8"),
    "e8m0": ("U8", "F8_E8M0"),
    "e4m3": ("F8_E4M3",),
}
"""The dtypes, in safetensors' words, that scales of each kind are stored in."""
_FLOAT32 = torch.finfo(torch.float32).smallest_normal, torch.finfo(torch.float32).max
"""The least and the largest scale."""
_LIMITS = {torch.float8_e4m3fn: (0.0, 448.0), torch.float8_e8m0fnu: (2.0**-127, 2.0**127)}
"""The same of dtypes of eight bits: blocks of small values or zeros have E4M3 scales below 2^-6."""
_GLOBAL = 2.0**-119, 2.0**120
"""The same of NVFP4's global scale, by which normal E4M3 scales are divided to normal float32s."""


def pack_fp6(codes: Tensor) -> Tensor:
    """Pack four codes of six bits into three bytes, the first code lowest: uint8 [rows, columns] ->
    uint8 [rows, 3 / 4 columns]."""
    shifts = torch.tensor([0, 6, 12, 18])
    words = (codes.view(len(codes), -1, 4).to(torch.int32) << shifts).sum(2, dtype=torch.int32)
    return torch.stack([words >> shift & 255 for shift in (0, 8, 16)], 2).to(torch.uint8).flatten(1)


def unpack_fp6(packed: Tensor) -> Tensor:
    """Unpack what `pack_fp6` packed: uint8 [rows, columns], a code to a byte."""
    triples = packed.view(len(packed), -1, 3).to(torch.int32)
    words = (triples << torch.tensor([0, 8, 16])).sum(2, dtype=torch.int32)
    codes = torch.stack([words >> shift & 63 for shift in (0, 6, 12, 18)], 2)
    return codes.to(torch.uint8).flatten(1)
