"""The golden file of Transformer Engine's Python references, which is made without a GPU.

TE checks its kernels against functions in Python. This module extracts these functions from TE's
sources, without TE's compiled part: delayed scaling, current scaling and NVFP4 from the installed
package; block scaling, MXFP8 and the swizzle from tests/pytorch of a checkout.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import math
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fp8stack.analysis.conform.check_inputs import DTYPES, NVFP4, amaxes
from fp8stack.common.formats import Quantizer

Tensors = dict[str, Tensor]
Made = Iterator[tuple[str, dict[str, Any], Tensors]]


def ties(rows: int, columns: int, seed: int = 1) -> Tensor:
    """Values halfway between codes of every format: small multiples of 2^-8, whose sums are
    exact."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-64, 64, (rows, columns), generator=generator)
    return x / 16 * 2.0 ** torch.randint(-4, 4, (rows, 1), generator=generator)


def matrix(kind: str, dtype: str, seed: int = 1) -> Tensor:
    """[192, 320], with blocks of all magnitudes; "special" has zeros, limits, infinities and
    NaN."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(192, 320, generator=generator)
    x *= 2.0 ** torch.randint(-12, 13, (192, 1), generator=generator)
    x *= 2.0 ** torch.randint(-6, 7, (1, 320), generator=generator)
    if kind == "special":
        x[:32] = 0
        x[32:48] *= 1e-38
        x[48:64] = x[48:64].sign() * 3e38
        x[70, 3], x[71, 40], x[72, 130] = torch.inf, -torch.inf, torch.nan
        x[128:, 256:] = torch.nan
        x[100] = 448.0
        x[101, :] = 2.0**-130
    return x.to(DTYPES[dtype])


_WIDE = {dtype: matrix("ordinary", dtype)[:136, :144].clone() for dtype in ("bf16", "fp32")}
INPUTS = {
    **{f"ordinary {dtype}": x[:64, :96].clone() for dtype, x in _WIDE.items()},
    **{f"wide {dtype}": x for dtype, x in _WIDE.items()},
    "ties bf16": ties(64, 96).bfloat16(),
    "codes": (torch.arange(256 * 8) * 37 % 251 + 1).to(torch.uint8).view(256, 8),
}
_TE = "transformer_engine.pytorch"


def installed() -> Path | None:
    """The folder of TE's Python sources; None if TE is not installed."""
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0], "pytorch")
    return path if (path / "custom_recipes").exists() else None


def definitions(path: Path, *names: str, **imported: Any) -> types.SimpleNamespace:
    """Load only the functions, classes and constants `names` of a file, with the `imported` names
    as globals."""
    chosen = [
        node
        for node in ast.parse(path.read_text()).body
        if getattr(node, "name", None) in names
        or (isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) in names)
    ]
    assert len(chosen) == len(names), (path, names)
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    module = ast.fix_missing_locations(ast.Module([future, *chosen], []))
    scope = {"torch": torch, "math": math, "dataclasses": dataclasses, "jit_fuser": lambda f: f}
    scope |= dict.fromkeys(("Tuple", "Optional", "Union", "Callable", "DelayedScaling"), Any)
    with TemporaryDirectory() as folder:
        file = Path(folder) / path.name
        file.write_text(ast.unparse(module))
        loaded = _load(path.stem, file, **scope, **imported)
    return types.SimpleNamespace(**{name: getattr(loaded, name) for name in names})


@contextmanager
def nvfp4_reference(folder: Path) -> Iterator[Any]:
    """The module of the NVFP4 reference, with empty stand-ins for its imports other than torch."""

    def module(name: str, **contents: Any) -> types.ModuleType:
        stub = types.ModuleType(name)
        stub.__dict__.update(contents)
        return stub

    class Base:
        def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
            self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    path = folder / "custom_recipes" / "reference_nvfp4.py"
    utils = _load("reference_utils", path.with_name("reference_utils.py"))
    recipes = module(f"{_TE}.custom_recipes", gemm=mock.MagicMock(), reference_utils=utils)
    tensor = module(f"{_TE}.quantized_tensor", QuantizedTensorStorage=object, Quantizer=Base)
    stubs = {
        "transformer_engine": module("transformer_engine"),
        _TE: module(_TE),
        f"{_TE}.custom_recipes": recipes,
        f"{_TE}.quantized_tensor": tensor,
    }
    with mock.patch.dict(sys.modules, stubs):
        yield _load("reference_nvfp4", path)


def _load(name: str, path: Path, **contents: Any) -> Any:
    """Load the module in a file, with `contents` as additional globals."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module.__dict__.update(contents)
    with mock.patch.dict(sys.modules, {name: module}):  # dataclasses look themselves up
        spec.loader.exec_module(module)
    return module


def captured(tests: Path, commit: str) -> tuple[dict[str, Any], Tensors]:
    """The description and tensors of the golden file; `tests` is TE's tests/pytorch at `commit`."""
    package = installed()
    if package is None:
        raise SystemExit("python -m bench golden --references needs transformer-engine's package.")
    version = metadata.version("transformer-engine")
    tensors = {f"inputs/{name}": x for name, x in INPUTS.items()}
    tensors["inputs/amaxes"] = _amaxes()
    cases = []
    source = f"transformer-engine {version}, transformer_engine/pytorch"
    makers = [(source, maker(package)) for maker in (_delayed, _current, _nvfp4)]
    source = f"TransformerEngine {commit}, tests/pytorch"
    makers += [(source, maker(tests)) for maker in (_blocks, _mxfp8, _swizzle)]
    for source, maker in makers:
        for name, case, case_tensors in maker:
            cases.append({"name": name, "source": source, **case})
            tensors |= {f"{name}/{key}": value for key, value in case_tensors.items()}
    description = {
        "made_by": "TE's Python references",
        "gpu": None,
        "versions": {"transformer-engine": version, "torch": torch.__version__},
        "command": "python -m bench golden --references TESTS --commit COMMIT",
        "cases": cases,
    }
    return description, tensors


def _amaxes() -> Tensor:
    """Amaxes of three slots in 60 steps. None is 0 or NaN, which the reference treats differently
    than TE's kernels."""
    values = amaxes()
    values = values[(values > 0) & ~values.isnan()][:180].clone().view(60, 3)
    # Later amaxes are of similar size, so that windows matter.
    values[20:] = values[20:].log2().remainder(8).exp2()
    return values


def _delayed(package: Path) -> Made:
    names = (
        "_update_amax_history",
        "_default_get_amax_and_update_history",
        "_default_sf_compute",
        "_compute_amax_and_update_history",
        "_compute_scaling_factor",
        "_amax_and_scale_update",
    )
    update = definitions(package / "quantization.py", *names)._amax_and_scale_update
    for length, margin, algorithm in (
        (1, 0, "max"),
        (4, 0, "max"),
        (16, 1, "max"),
        (4, 0, "most_recent"),
    ):
        recipe = types.SimpleNamespace(
            amax_compute_algo=algorithm, margin=margin, scaling_factor_compute_algo=None
        )
        histories: list[Tensor] = []
        scale_columns: list[Tensor] = []
        # Tensors, as a float over a tensor is a product with the reciprocal, which rounds twice.
        for largest in map(torch.tensor, (448.0, 448.0, 57344.0)):
            history, scale, every = torch.zeros(length, 1), torch.ones(1), []
            for amax in _amaxes()[:, len(histories)]:
                history[0, 0] = amax
                update(history, scale, largest, recipe)
                every.append(scale.clone())
            histories.append(history[:, 0])
            scale_columns.append(torch.cat(every))
        case = {"kind": "history", "length": length, "margin": margin, "algorithm": algorithm}
        tensors = {"scales": torch.stack(scale_columns, 1), "histories": torch.stack(histories, 1)}
        name = f"delayed: history of {length}, {algorithm}, margin {margin}"
        yield name, {**case, "input": "inputs/amaxes"}, tensors


def quantizer_case(quantizer: Quantizer, x: str) -> dict[str, Any]:
    """The description of a case with this quantizer and input."""
    plain = Quantizer()
    fields = {k: v for k, v in dataclasses.asdict(quantizer).items() if v != getattr(plain, k)}
    return {"kind": "quantizer", "input": f"inputs/{x}", "quantizer": fields}


def _current(package: Path) -> Made:
    path = package / "custom_recipes" / "reference_current_scaling.py"
    scale_of = definitions(path, "_scale_from_amax_tensor")._scale_from_amax_tensor
    for format, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        for scale, eps in (("float32", 0.0), ("power_of_two", 0.0), ("float32", 1e6)):
            for x in ("ordinary bf16", "ordinary fp32"):
                values = INPUTS[x].float()
                into, out, _ = scale_of(
                    torch.float32, values.abs().amax().view(1), dtype, eps=eps,
                    pow_2_scales=scale == "power_of_two",
                )  # fmt: skip
                quantizer = Quantizer(format=format, scale=scale, eps=eps)  # type: ignore[arg-type]
                tensors = {"bytes along": (values * into).to(dtype), "scales along": out}
                name = f"current: {format}, {scale}, eps {eps:g}, {x}"
                yield name, quantizer_case(quantizer, x), _as_bytes(tensors)


def _as_bytes(tensors: Tensors) -> Tensors:
    return {k: v.view(torch.uint8) if v.element_size() == 1 else v for k, v in tensors.items()}


def _nvfp4(package: Path) -> Made:
    with nvfp4_reference(package) as reference:
        for tile in ((1, 16), (16, 16)):
            for hadamard in (0, 16) if tile == (1, 16) else (0,):
                x = "ties bf16" if hadamard else "ordinary bf16"
                quantizer = dataclasses.replace(NVFP4, block=tile, hadamard=hadamard)
                fields: Tensors = {}
                for way, data in (("along", INPUTS[x]), ("across", INPUTS[x].t().contiguous())):
                    quantizer_reference = reference.NVFP4QuantizerRef(
                        reference.reference_utils.Fp4Formats.E2M1,
                        columnwise=False,
                        quant_tile_shape=tile,
                        with_rht=bool(hadamard),
                    )
                    data = quantizer_reference._apply_rht(data)
                    quantizer_reference.with_rht = False
                    quantized = quantizer_reference.quantize(data)
                    scales = quantized.scale[:: tile[0]]
                    turned = [t if way == "along" else t.t() for t in (quantized.data, scales)]
                    fields |= {f"bytes {way}": turned[0], f"scales {way}": turned[1]}
                name = f"nvfp4: {tile[0]}x{tile[1]}{', hadamard' if hadamard else ''}, {x}"
                yield name, quantizer_case(quantizer, x), _as_bytes(fields)


def _blocks(tests: Path) -> Made:
    folder = tests / "references"
    scale = definitions(folder / "quantize_scale_calc.py", "scale_from_amax_tensor")
    path = folder / "blockwise_quantizer_reference.py"
    names = ("QuantizeResult", "CuBLASScaleMunger", "BlockwiseQuantizerReference")
    reference = definitions(path, *names, **vars(scale)).BlockwiseQuantizerReference()
    for block in ((1, 128), (128, 128)):
        for kind in ("power_of_two", "float32"):
            for x in ("wide bf16", "wide fp32") if kind == "float32" else ("wide bf16",):
                quantized = reference.quantize(
                    INPUTS[x], torch.float8_e4m3fn, return_transpose=True, munge_scale_shapes=False,
                    pow_2_scales=kind == "power_of_two", quant_tile_shape=block,
                )  # fmt: skip
                fields = {
                    "bytes along": quantized.data, "scales along": quantized.scale,
                    "bytes across": quantized.data_t.t(), "scales across": quantized.scale_t.t(),
                }  # fmt: skip
                if block[0] > 1:  # the same bytes, transposed
                    del fields["bytes across"], fields["scales across"]
                quantizer = Quantizer(block=block, scale=kind)
                name = f"block: {block[0]}x{block[1]}, {kind}, {x}"
                yield name, quantizer_case(quantizer, x), _as_bytes(fields)


def _mxfp8(tests: Path) -> Made:
    names = (
        "MXFP8_BLOCK_SIZE",
        "FP8_E4M3_MAX",
        "_float_to_e8m0",
        "_e8m0_to_scale_inv",
        "_mxfp8_2d_quantize_reference",
    )
    quantize = definitions(tests / "test_mxfp8_2d_quantize.py", *names)._mxfp8_2d_quantize_reference
    for x in ("ordinary bf16", "ordinary fp32"):
        fields: Tensors = {}
        for way, data in (("along", INPUTS[x]), ("across", INPUTS[x].t())):
            # The reference has 32 x 32 blocks: 32 copies of a row make its blocks rows of 32.
            codes, scales, _ = quantize(data.repeat_interleave(32, 0).contiguous())
            copies = codes.view(torch.uint8)[::32], scales[::32]
            turned = [t if way == "along" else t.t() for t in copies]
            fields |= {f"bytes {way}": turned[0], f"scales {way}": turned[1]}
        yield f"mxfp8: 1x32, {x}", quantizer_case(Quantizer(block=(1, 32), scale="e8m0"), x), fields
        codes, scales, _ = quantize(INPUTS[x])
        fields = {"bytes along": codes.view(torch.uint8), "scales along": scales[::32]}
        square = Quantizer(block=(32, 32), scale="e8m0")
        yield f"mxfp8: 32x32, {x}", quantizer_case(square, x), fields


def _swizzle(tests: Path) -> Made:
    path = tests / "mxfp8" / "mxfp8_utils.py"
    swizzle = definitions(path, "_rowwise_swizzle_mxfp8_scale")._rowwise_swizzle_mxfp8_scale
    scales = swizzle(256, 256, INPUTS["codes"])
    yield (
        "mxfp8: scales as cuBLAS reads them",
        {"kind": "layout", "input": "inputs/codes"},
        {"scales": scales},
    )
