"""Faults in kernels, and whether the comparison of executed code notices them.

The functions without arguments are for a process in which Triton interprets kernels, and change
torch in it. So that they can, this module imports nothing that imports inductor.
"""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch


class Fault(NamedTuple):
    """A line of kernels that is changed.

    Attributes:
        kernels: the module of `fp8stack.layers.kernels`, or "inductor" for generated kernels.
        line: a part of the sources.
        wrong: the code in its place.
    """

    kernels: str
    line: str
    wrong: str


OURS, NVFP4, GENERATED = "triton_kernels", "triton_nvfp4", "inductor"

DELAYED = [
    # The amax leaves the first half out, ignores negative values, is of rounded values.
    Fault(OURS, "(amaxes + tile, tl.max(largest))", "(amaxes + tile, half * tl.max(largest))"),
    Fault(OURS, "values, tl.abs(values), 0.0)", "values, values, 0.0)"),
    Fault(OURS, "(amaxes + tile, tl.max(largest))", "(amaxes + tile, tl.max(largest) * 0.9375)"),
    # Casts: a bit less, towards zero, another scale, a larger bound.
    Fault(
        OURS,
        "codes = held.to(HOW.float8)",
        "codes = (held.to(tl.int32, bitcast=True) & -0x200000).to(tl.float32, bitcast=True)"
        ".to(HOW.float8)",
    ),
    Fault(
        OURS,
        "codes = held.to(HOW.float8)",
        "codes = (held.to(tl.int32, bitcast=True) & -0x100000).to(tl.float32, bitcast=True)"
        ".to(HOW.float8)",
    ),
    Fault(OURS, "times = tl.load(scale)", "times = 2.0 * tl.load(scale)"),
    # SwiGLU: operands swapped, a sign, the values not rounded to bfloat16.
    Fault(OURS, "value = _load(x + width, row", "value = _load(x, row"),
    Fault(OURS, "share = 1.0 / (1.0 + tl.exp(-gate))", "share = 1.0 / (1.0 + tl.exp(gate))"),
    Fault(OURS, "return values.to(tl.bfloat16).to(tl.float32)", "return values"),
    # The transpose: a row that belongs to its neighbour, and rows that are left out.
    Fault(
        OURS,
        "tl.store(line + group, packed",
        "tl.store(line + group // 2, packed",
    ),
    Fault(OURS, "tl.store(line + group, packed, mask=(group < stride) & in_width)", "pass"),
    Fault(OURS, "(packed >> 8) |", "(packed >> 16) |"),
    Fault(OURS, "tl.store(line + group, packed, mask=inside)",
          "tl.store(line + group, packed, mask=group < stride - 1)"),
    # Generated kernels: bounds, a sum and a maximum over rows, masks, places, roundings.
    Fault(GENERATED, "448.0", "96.0"),
    Fault(GENERATED, "9.999999747378752e-06", "1.0e-02"),
    Fault(GENERATED, "triton_helpers.max2(", "triton_helpers.min2("),
    Fault(GENERATED, "xmask = xindex < xnumel", "xmask = xindex < xnumel - 1"),
    Fault(GENERATED, "libdevice.rsqrt(", "libdevice.sqrt("),
    Fault(GENERATED, ".to(tl.float8e4nv)", ".to(tl.float8e5)"),
    Fault(GENERATED, "(32 + x0) % 64", "(31 + x0) % 64"),
    Fault(GENERATED, "tl_math.abs(", "("),
    Fault(GENERATED, ".to(tl.bfloat16)", ".to(tl.float16)"),
]  # fmt: skip
MX = [
    Fault(OURS, "if rounding == \"rceil\":", "if rounding == \"even\":"),
    Fault(OURS, "code = exponent + ((bits & 0x7FFFFF) > least).to(tl.int32)", "code = exponent"),
    Fault(OURS, "(254 - code) << 23", "(253 - code) << 23"),
    Fault(OURS, "+ block // 4\n", "\n"),
    Fault(OURS, "line % 32 * 16 + line // 32 % 4 * 4", "line % 128 // 4 * 16 + line % 4 * 4"),
    Fault(OURS, "tl.max(tl.reshape(sizes, shape), axis=1)",
          "tl.min(tl.reshape(sizes, shape), axis=1)"),
    Fault(OURS, "place = packed_at(column, first // MX_BLOCK, tl.cdiv(rows, MX_BLOCK))",
          "place = packed_at(column, first // MX_BLOCK, tl.cdiv(rows, MX_BLOCK)) // 2"),
    Fault(OURS, "_times(scales)[:, None, :]", "_times(scales)[:, None, :] * 0.5"),
]  # fmt: skip
BLOCKS = [
    Fault(OURS, "multiplier = _scale_of(tl.max(largest, axis=0)[None, :], HOW)",
          "multiplier = _scale_of(0.0 * tl.max(largest, axis=0)[None, :] + tl.max(largest), HOW)"),
    Fault(OURS, "tl.store(inverse + out_block * rows + row, inverse_of(scales)",
          "tl.store(inverse + out_block * rows + row, scales"),
    Fault(OURS, "& -0x800000)", "& -0x400000)"),
]  # fmt: skip
NV = [
    Fault(NVFP4, "codes = (even | (odd << 4)).to(tl.uint8)",
          "codes = (odd | (even << 4)).to(tl.uint8)"),
    Fault(NVFP4, "lane = zero + (column // 4", "lane = zero + (column"),
    Fault(NVFP4, "_bits(counter, streams + 1,", "_bits(counter, streams,"),
    Fault(NVFP4, "bits = tl.trans(bits)", "pass"),
    Fault(NVFP4, "tl.join(tl.join(a, c), tl.join(b, d))", "tl.join(tl.join(a, b), tl.join(c, d))"),
    Fault(NVFP4, "tl.where((sign != 0)[None, :], -values, values)", "values"),
    Fault(NVFP4, "tl.static_range(4)", "tl.static_range(3)"),
    Fault(NVFP4, "+ 2688.0, tensor_amax)", "+ 2304.0, tensor_amax)"),
    Fault(NVFP4, "tensor_amax = tl.load(amaxes + 2)", "tensor_amax = tl.load(amaxes)"),
    Fault(NVFP4, "below = tl.floor(steps)", "below = tl.floor(steps + 0.5)"),
]  # fmt: skip


def in_delayed() -> list[str]:
    return unnoticed("delayed", DELAYED, "9.0")


def in_block() -> list[str]:
    return unnoticed("block", BLOCKS, "9.0")


def in_mxfp8() -> list[str]:
    return unnoticed("mxfp8", MX, "10.0")


def in_nvfp4() -> list[str]:
    return unnoticed("nvfp4", NV, "10.0")


def different_conversions() -> list[str]:
    """Conversions in the interpreter that are not a GPU's."""
    pretend("9.0")
    importlib.import_module("bench.gpu_code.interpreter")
    from tests.support import conversion_kernel

    return conversion_kernel.differences()


def pretend(capability: str) -> None:
    from bench.gpu_code.pretend import pretend

    major, minor = map(int, capability.split("."))
    pretend((major, minor))


def unnoticed(recipe: str, faults: list[Fault], capability: str) -> list[str]:
    """The faults that a step does not notice; and what is wrong without any fault."""
    pretend(capability)
    from bench.gpu_code.comparison import compare
    from bench.gpu_code.execute import eager, generated, run_again
    from bench.gpu_code.executed import Case

    case = Case(model="llama-8b", recipe=recipe, capability=capability)
    step, runs = generated(case)
    wrong = compare(step, eager(case)).wrong
    for fault in faults:
        if fault.kernels == GENERATED:
            touched = [run for run in runs if fault.line in run.code]
        else:
            touched = [run for run in runs if "torch.ops.fp8stack." in run.code]

        def edit(source: str, fault: Fault = fault) -> str:
            is_generated = fault.kernels == GENERATED
            return source.replace(fault.line, fault.wrong) if is_generated else source

        with planted(fault):
            if not any(compare(run_again(run, edit), run.step).wrong for run in touched):
                wrong.append(f"{fault.line} -> {fault.wrong}")
    return wrong


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """A context in which a module of kernels has the fault."""
    if fault.kernels == GENERATED:
        yield
        return
    package = importlib.import_module("fp8stack.layers.kernels")
    module = importlib.import_module(f"fp8stack.layers.kernels.{fault.kernels}")
    source = Path(str(module.__file__)).read_text()
    assert fault.line in source, fault.line
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{fault.kernels}.py"
        file.write_text(source.replace(fault.line, fault.wrong))
        spec = importlib.util.spec_from_file_location(fault.kernels, file)
        assert spec is not None
        assert spec.loader is not None
        faulty = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(faulty)
        forget_launches()
        try:
            with patch.object(package, fault.kernels, faulty):
                yield
        finally:
            forget_launches()


def forget_launches() -> None:
    """Make the next launches look up their kernels again."""
    from fp8stack.layers.kernels import fused_casts, nvfp4, variants

    fused_casts._KERNELS.clear()
    nvfp4._launch.cache_clear()
    variants._transpose.cache_clear()
