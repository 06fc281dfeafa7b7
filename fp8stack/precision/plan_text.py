"""The text of a plan: summary and notes, with similar layers in one line. Pure; no torch here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from fp8stack.precision.native_gemms import feature_multiple, kernel_of

if TYPE_CHECKING:
    from fp8stack.precision.plan import LayerPlan, Plan


def summary(plan: Plan, forward: bool = False) -> list[str]:
    """The lines that describe the plan at the start of a run. With `forward`, the share of FP8 is
    the share in a forward pass."""
    bits = plan.native_bits if plan.is_fp8 else 8
    emulated = "fp32" if plan.hardware.other_gpu else plan.compute_dtype
    method = {
        "reference": "plain torch",
        "emulate": f"emulated by {emulated} GEMMs on the exact operands",
        "torch": f"FP{bits} GEMMs by torch's scaled_mm",
        "te": f"FP{bits} GEMMs by Transformer Engine",
    }[plan.backend]
    if plan.is_fp8 and not plan.runs_fp8:
        method = f"with no layer in {_formats(plan)}"
    request = f"{plan.asked} -> " if plan.asked != plan.recipe.name else ""
    lines = [f"plan: {request}{plan.recipe.name}, {method}, on {plan.device}"]
    layer_reasons = {layer.sentence for layer in plan.layers if layer.reason or layer.why}
    reasons = [reason for reason in plan.reasons if reason not in layer_reasons]
    in_fp8 = sentences(layer for layer in plan.layers if layer.fp8)
    lines += [f"  because {reason}" for reason in (*reasons, *in_fp8)]
    without_fp8 = sentences(layer for layer in plan.layers if not layer.fp8)
    if plan.is_fp8 and plan.layers:
        lines.append("; ".join([_headline(plan, forward), *without_fp8]))
    else:
        lines += [f"  {sentence}" for sentence in without_fp8]
    lines += [f"note: {note}" for note in plan.notes]
    return [
        *lines,
        *(f"predicted: a step takes {time}" for time in plan.times),
        *beside_layers(plan),
    ]


def notes(plan: Plan) -> list[str]:
    """Notes on models and layers for which FP8 may not be faster, and on emulated layers whose
    sizes a GPU's FP8 GEMMs do not support."""
    lines = [f"FP8 may not pay: a step takes {plan.doubt}"] if plan.doubt else []
    if doubted := [layer for layer in plan.layers if layer.doubt]:
        layers = _by_kind(doubted, lambda layer: layer.doubt)
        lines.append(
            f"FP8 may not pay in {len(doubted)}/{len(plan.layers)} layers: {'; '.join(layers)}"
        )
    if odd_layers := [layer for layer in plan.layers if _odd_size(plan, layer)]:
        layers = _by_kind(odd_layers, lambda layer: _odd_size(plan, layer))
        lines.append(f"emulated here, but on a GPU not in {plan.recipe.name}: {'; '.join(layers)}")
    return lines


def beside_layers(plan: Plan) -> Iterator[str]:
    """Sentences about attention and the residual stream, if the recipe sets their precision."""
    if plan.attention_precision != plan.compute_dtype:
        yield f"attention: {plan.attention_precision}, the recipe says so"
    if plan.recipe.residual != "fp32":
        yield f"residual stream: {plan.recipe.residual}, the recipe says so"


def sentences(layers: Iterable[LayerPlan]) -> list[str]:
    """The reasons of layers, without duplicates."""
    explained = (layer for layer in layers if layer.reason or layer.why)
    return _by_kind(explained, lambda layer: f"{layer.precision}, {layer.reason or layer.why}")


def _by_kind(layers: Iterable[LayerPlan], text: Callable[[LayerPlan], str]) -> list[str]:
    """One line for each distinct text, after the names of its layers. Layers that differ only in
    their block share a name."""
    groups: dict[str, dict[str, list[str]]] = {}
    for layer in layers:
        pattern = re.sub(r"(?:(?<=\.)|^)\d+(?=\.)", "*", layer.name)
        groups.setdefault(text(layer), {}).setdefault(pattern, []).append(layer.name)
    return [
        f"{', '.join(map(_named, patterns, patterns.values()))}: {reason}"
        for reason, patterns in groups.items()
    ]


def _named(pattern: str, names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} layers {pattern}"


def indivisible(shape: tuple[int, int], multiple: int) -> str:
    """The sides of a layer that are not divisible by `multiple`, in words; "" without one."""
    sides = zip(("in", "out"), shape, strict=True)
    odd_sizes = [f"{size} {side} features" for side, size in sides if size % multiple]
    return f"{' and '.join(odd_sizes)}, not divisible by {multiple}" if odd_sizes else ""


def _odd_size(plan: Plan, layer: LayerPlan) -> str:
    """The reason that no GPU would run this layer, which a CPU emulates, in FP8; or ""."""
    quantizers = layer.quantizers
    emulated = plan.device == "cpu" and plan.backend_of(layer) == "emulate"
    if not emulated or quantizers is None or layer.groups or kernel_of(quantizers) is None:
        return ""
    return indivisible((layer.in_features, layer.out_features), feature_multiple(quantizers, "te"))


def _formats(plan: Plan) -> str:
    """The formats of the quantized operands in words, such as "FP8", "FP4 and FP8", "e3m4"."""
    tables = plan.tables or plan.recipe.tables
    names = {name for table in tables for name in table.own_formats or (f"FP{table.bits}",)}
    return " and ".join(sorted(names))


def share(plan: Plan, work: Iterable[float]) -> float:
    """The share of `work` in the plan's multiplications per token, for one GEMM of each layer."""
    total = sum(layer.work for layer in plan.layers) + plan.work_outside_linears
    return sum(work) / total if total else 0.0


def forward_share(plan: Plan) -> float:
    """The share of FP8 in the multiplications of a forward pass."""
    layers = [(layer.work, layer.quantizers) for layer in plan.layers if layer.quantizers]
    quantized = plan.has_quantized_weights
    return share(plan, [work for work, of in layers if of.input and (of.weight or quantized)])


def _headline(plan: Plan, forward: bool) -> str:
    fp8_share = forward_share(plan) if forward else plan.fp8_share
    percent = f"{100 * fp8_share:.0f}"
    if percent == "100" and fp8_share < 1:
        percent = ">99"
    if percent == "0" and fp8_share > 0:
        percent = "<1"
    linears = [layer.fp8 for layer in plan.layers if not layer.groups]
    groups = [layer.fp8 for layer in plan.layers if layer.groups]
    kinds = [
        f"{sum(flags)} of {len(flags)} {noun}{'s' * (len(flags) != 1)}"
        for noun, flags in (("linear", linears), ("expert group", groups))
        if flags
    ]
    return f"{_formats(plan)}: {percent} % of {plan.counted} ({', '.join(kinds)})"
