"""Casts, scales, blocks and amax updates: the CPU's bytes against CUDA's, compiled code's and TE's.

A case moves the same inputs to the device, does there what the CPU did, and counts the bytes that
differ. Every one has to be 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from bench.gpu.cases import Case, Context, Facts, Pairs, Skipped, merged, same_bits, same_values
from bench.gpu.inputs import DTYPES, FORMAT_NAMES, MATRICES, amaxes, matrix, values_of
from bench.peers import te_raw
from fp8stack import numerics
from fp8stack.numerics import AmaxHistory

# Powers of two and others, from the least that a finite amax can give to the most.
SCALES = (1.0, 0.1, 3.0, 1 / 3, 2.0**-20, 1e5, 1e30, 1.3e-36, 3.4028234663852886e38)
BLOCKS = ((1, 128), (128, 1), (128, 128))


def cases(context: Context) -> Iterator[Case]:
    """All of this section, the quick ones first."""
    for dtype in DTYPES:
        for format in FORMAT_NAMES:
            yield Case(
                f"cast of {dtype} to {format}, eager", partial(_cast, context, dtype, format)
            )
            for transpose in (False, True):
                how = "TE's with transpose" if transpose else "TE's"
                check = partial(_te_cast, context, dtype, format, transpose)
                yield Case(f"cast of {dtype} to {format}, {how}", check)
    yield Case("scales and inverses, eager", partial(_scales, context, scales_of))
    yield Case("amax updates, eager", partial(_updates, context, _advance))
    for dtype in DTYPES:
        for kind in MATRICES:
            what = f"of {kind} {dtype}"
            x = partial(matrix, kind, dtype)
            yield Case(f"mxfp8 {what}, eager", partial(_on_device, context, x, every_mxfp8))
            yield Case(f"blocks {what}, eager", partial(_on_device, context, x, every_block))
            yield Case(f"rounded values {what}, eager", partial(_values, context, x))
            yield Case(f"current scaling {what}, TE's", partial(_te_current, context, x))
            yield Case(f"blocks {what}, TE's", partial(_te_blocks, context, x))
            yield Case(f"mxfp8 {what}, TE's", partial(_te_mxfp8, context, x))
    yield from compiled_cases(context)


def compiled_cases(context: Context) -> Iterator[Case]:
    """What torch.compile makes of the same; one graph each."""
    for dtype in DTYPES:
        for format in FORMAT_NAMES:
            check = partial(_compiled_cast, context, dtype, format)
            yield Case(f"cast of {dtype} to {format}, compiled", check)
    yield Case("scales and inverses, compiled", partial(_compiled_scales, context))
    yield Case("amax updates, compiled", partial(_compiled_updates, context))
    for dtype in DTYPES:
        check = partial(_compiled_on_device, context, dtype, backends_mxfp8)
        yield Case(f"mxfp8 of {dtype}, compiled", check)
        for power_of_two in (True, False):
            scales = "powers of two" if power_of_two else "any scales"
            function = partial(backends_blocks, power_of_two=power_of_two)
            check = partial(_compiled_on_device, context, dtype, function)
            yield Case(f"blocks of {dtype} with {scales}, compiled", check)


# Per tensor


def _cast(context: Context, dtype: str, format: str) -> Facts:
    return casts_with(context, dtype, format, numerics.cast_to_fp8)


def casts_with(
    context: Context, dtype: str, format: str, cast: Callable[[Tensor, Tensor, str], Tensor]
) -> Facts:
    """`cast` on the device against the CPU's bytes, for each of the scales."""
    x, parts = values_of(dtype), {}
    on_device = x.to(context.device)
    for number in SCALES:
        scale = torch.tensor(number)
        expected = numerics.cast_to_fp8(x, scale, format).view(torch.uint8)
        found = cast(on_device, scale.to(context.device), format).view(torch.uint8)
        parts[f"scale {number:.9g}"] = _with_inputs(same_bits({"x": (found, expected)}), x)
    return merged(parts)


def _with_inputs(facts: Facts, x: Tensor) -> Facts:
    """The first differences with the numbers that were cast: `x[3, 4]` names one."""
    lines = []
    for line in facts.get("first", []):
        place, bracket, rest = line.partition("]")
        at = tuple(int(index) for index in place.removeprefix("x[").split(",")) if bracket else ()
        lines.append(f"x = {float(x[at]):.9g}{rest}" if at else line)
    return facts | ({"first": lines} if lines else {})


def _compiled_cast(context: Context, dtype: str, format: str) -> Facts:
    numerics.cast_to_fp8(torch.ones(1), 1.0, format)
    return casts_with(context, dtype, format, context.compiled(numerics.cast_to_fp8))


def _te_cast(context: Context, dtype: str, format: str, transpose: bool) -> Facts:
    need_te(context, "delayed")
    x, parts = values_of(dtype), {}
    for number in SCALES:
        scale = torch.tensor(number)
        expected = numerics.cast_to_fp8(x, scale, format).view(torch.uint8)
        made, amax = te_raw.cast(x.to(context.device), scale, format, transpose)
        name = f"scale {number:.9g}"
        parts[name] = _with_inputs(same_bits({"x": (made.along, expected)}), x)
        others = {
            "inverse": (made.scales, numerics.inverse(scale)),
            "amax": (amax, numerics.amax(x)),
        }
        if made.across is not None:
            others["transpose"] = (made.across, expected)
        parts[f"{name}, its"] = same_bits(others)
    return merged(parts)


def _te_current(context: Context, x: Callable[[], Tensor]) -> Facts:
    need_te(context, "current")
    parts = {}
    for format, power_of_two, eps in (
        ("e4m3", False, 0.0),
        ("e5m2", False, 1e-3),
        ("e4m3", True, 0.0),
    ):
        data = x()
        scale = numerics.tensor_scale(numerics.amax(data), format, 0, power_of_two, eps)
        expected = numerics.cast_to_fp8(data, scale, format).view(torch.uint8)
        made = te_raw.current(data.to(context.device), format, power_of_two, eps)
        pairs = {"inverse": (made.scales, numerics.inverse(scale)), "bytes": (made.along, expected)}
        if made.across is not None:
            pairs["transpose"] = (made.across, expected)
        parts[f"{format}, power_of_two {power_of_two}, eps {eps:g}"] = same_bits(pairs)
    return merged(parts)


def scales_of(largest: Tensor) -> list[Tensor]:
    """Scales by every rule, and their inverses."""
    scales = [
        numerics.tensor_scale(largest, "e4m3"),
        numerics.tensor_scale(largest, "e5m2", margin=1),
        numerics.tensor_scale(largest, "e4m3", power_of_two=True, eps=1e-6),
        numerics.tensor_scale(largest, "e5m2", eps=0.5, overflow=65504.0),
    ]
    return [*scales, *map(numerics.inverse, scales)]


def _scales(context: Context, function: Callable[[Tensor], list[Tensor]]) -> Facts:
    expected, found = scales_of(amaxes()), function(amaxes().to(context.device))
    return same_bits(_numbered(found, expected))


def _numbered(found: list[Tensor], expected: list[Tensor]) -> Pairs:
    pairs = zip(found, expected, strict=True)
    return {f"result {i}": (_bytes(a), _bytes(b)) for i, (a, b) in enumerate(pairs)}


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.element_size() == 1 else x


def _compiled_scales(context: Context) -> Facts:
    scales_of(amaxes())
    return _scales(context, context.compiled(scales_of))


def _advance(history: AmaxHistory, recorded: Tensor) -> None:
    for slot, amax in zip(history.slots, recorded.unbind(), strict=True):
        history.record(slot, amax)
    history.update()


def _updates(context: Context, advance: Callable[[AmaxHistory, Tensor], None]) -> Facts:
    """Windows and scales after each of 40 updates."""
    parts = {}
    recorded = amaxes()[: 40 * 4].view(40, 4)
    for length, margin, algorithm in ((8, 0, "max"), (3, 1, "most_recent")):
        slots = {"a": "e4m3", "b": "e5m2", "c": "e4m3", "d": "e5m2"}
        histories = [
            AmaxHistory(slots, length=length, margin=margin, algorithm=algorithm, device=device)  # type: ignore[arg-type]
            for device in ("cpu", context.device)
        ]
        for step, amax in enumerate(recorded):
            _advance(histories[0], amax)
            advance(histories[1], amax.to(context.device))
            expected, found = (history.state_dict() for history in histories)
            pairs = {name: (found[name], expected[name]) for name in expected}
            parts[f"{algorithm}, update {step}"] = same_bits(pairs)
    return merged(parts)


def _compiled_updates(context: Context) -> Facts:
    _advance(AmaxHistory({"a": "e4m3", "b": "e5m2"}), torch.ones(2))
    return _updates(context, context.compiled(_advance))


# Blocks


def every_mxfp8(x: Tensor) -> list[Tensor]:
    """Bytes and codes by every rule, along both dimensions."""
    results: list[Tensor] = []
    for rounding in ("rceil", "floor", "even"):
        for format in FORMAT_NAMES:
            for dim in (0, 1):
                results += numerics.quantize_mxfp8(x, dim, format, rounding)
    return results


def backends_mxfp8(x: Tensor) -> list[Tensor]:
    """Bytes and codes as the torch backend asks for them."""
    return [*numerics.quantize_mxfp8(x, -1), *numerics.quantize_mxfp8(x, 0)]


def every_block(x: Tensor) -> list[Tensor]:
    """Bytes and inverse scales of every kind of block, powers of two and not."""
    results: list[Tensor] = []
    for power_of_two in (True, False):
        for format in FORMAT_NAMES:
            for block in BLOCKS:
                results += numerics.quantize_blocks(x, block, format, power_of_two)
    return results


def backends_blocks(x: Tensor, power_of_two: bool) -> list[Tensor]:
    """Bytes and inverse scales as the torch backend asks for them."""
    made = [numerics.quantize_blocks(x, block, "e4m3", power_of_two) for block in BLOCKS]
    return [tensor for pair in made for tensor in pair]


def _on_device(
    context: Context, x: Callable[[], Tensor], function: Callable[[Tensor], list[Tensor]]
) -> Facts:
    return same_bits(_numbered(function(x().to(context.device)), function(x())))


def _compiled_on_device(
    context: Context, dtype: str, function: Callable[[Tensor], list[Tensor]]
) -> Facts:
    function(matrix("ordinary", dtype))
    compiled = context.compiled(function)
    parts = {}
    for kind in MATRICES:
        x = matrix(kind, dtype)
        parts[kind] = same_bits(_numbered(compiled(x.to(context.device)), function(x)))
    return merged(parts)


def rounded_values(x: Tensor) -> list[Tensor]:
    """What the emulator multiplies."""
    scale = torch.tensor(0.37, device=x.device)
    results = [numerics.round_to_fp8(x, scale, format) for format in FORMAT_NAMES]
    results += numerics.round_to_mxfp8(x, (0, 1))
    for power_of_two in (True, False):
        results += numerics.round_to_blocks(x, BLOCKS, "e4m3", power_of_two)
    return results


def _values(context: Context, x: Callable[[], Tensor]) -> Facts:
    return same_values(_numbered(rounded_values(x().to(context.device)), rounded_values(x())))


def _te_blocks(context: Context, x: Callable[[], Tensor]) -> Facts:
    need_te(context, "block")
    data = x()
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for power_of_two in (True, False):
        for square, along, across in ((False, (1, 128), (128, 1)), (True, (128, 128), (128, 128))):
            made = te_raw.blocks(data.to(context.device), square, power_of_two)
            name = f"{'128x128' if square else '1x128'}, power_of_two {power_of_two}"
            pairs |= _te_pairs(
                name,
                made,
                numerics.quantize_blocks(data, along, "e4m3", power_of_two),
                numerics.quantize_blocks(data, across, "e4m3", power_of_two),
            )
    return same_bits(pairs)


def _te_mxfp8(context: Context, x: Callable[[], Tensor]) -> Facts:
    need_te(context, "mxfp8")
    data = x()
    made = te_raw.mxfp8(data.to(context.device))
    return same_bits(
        _te_pairs("mxfp8", made, numerics.quantize_mxfp8(data, 1), numerics.quantize_mxfp8(data, 0))
    )


def _te_pairs(
    name: str, made: te_raw.Quantized, along: tuple[Tensor, Tensor], across: tuple[Tensor, Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    assert made.across is not None
    assert made.scales_across is not None
    return {
        f"{name}: scales along": (made.scales, _bytes(along[1])),
        f"{name}: bytes along": (made.along, _bytes(along[0])),
        f"{name}: scales across": (made.scales_across, _bytes(across[1])),
        f"{name}: bytes across": (made.across, _bytes(across[0])),
    }


def need_te(context: Context, scaling: str) -> None:
    """Skip the case unless TE can be used here and has a GEMM for this scaling."""
    if not context.hardware.has_te:
        raise Skipped(context.hardware.te_problem or "Transformer Engine is not installed")
    if reason := te_raw.serves(scaling):
        raise Skipped(reason)
