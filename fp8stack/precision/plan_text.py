"""A plan in words: its summary, notes, and layers of one kind together. Pure; no torch here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from fp8stack.precision.native_gemms import feature_multiple, kernel_of

if TYPE_CHECKING:
    from fp8stack.precision.plan import LayerPlan, Plan


def summary(plan: Plan, forward: bool = False) -> list[str]:
    """The plan in a few lines, as printed at the start of a run. With `forward`, the share of FP8
    is that of the GEMMs of a forward pass alone."""
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
    of_layers = {layer.sentence for layer in plan.layers if layer.reason or layer.why}
    reasons = [reason for reason in plan.reasons if reason not in of_layers]
    in_fp8 = sentences(layer for layer in plan.layers if layer.fp8)
    lines += [f"  because {reason}" for reason in (*reasons, *in_fp8)]
    without_fp8 = sentences(layer for layer in plan.layers if not layer.fp8)
    if plan.is_fp8 and plan.layers:
        lines.append("; ".join([_headline(plan, forward), *without_fp8]))
    else:
        lines += [f"  {sentence}" for sentence in without_fp8]
    return [*lines, *(f"note: {note}" for note in plan.notes), *beside_layers(plan)]


def notes(plan: Plan) -> list[str]:
    """Notes on models and layers that run in FP8 although it may not be faster, and on emulated
    layers of sizes that a GPU's FP8 GEMMs do not take."""
    lines = [f"FP8 may not pay for {plan.doubt}"] if plan.doubt else []
    if doubted := [layer for layer in plan.layers if layer.doubt]:
        layers = _by_kind(doubted, lambda layer: layer.doubt)
        lines.append(
            f"FP8 may not pay in {len(doubted)}/{len(plan.layers)} layers: {'; '.join(layers)}"
        )
    if odd := [layer for layer in plan.layers if _odd_size(plan, layer)]:
        layers = _by_kind(odd, lambda layer: _odd_size(plan, layer))
        lines.append(f"emulated here, but on a GPU not in {plan.recipe.name}: {'; '.join(layers)}")
    return lines


def beside_layers(plan: Plan) -> Iterator[str]:
    """Sentences about attention and the residual stream, if the recipe sets their precision."""
    if plan.attention_precision != plan.compute_dtype:
        yield f"attention: {plan.attention_precision}, the recipe says so"
    if plan.recipe.residual != "fp32":
        yield f"residual stream: {plan.recipe.residual}, the recipe says so"


def sentences(layers: Iterable[LayerPlan]) -> list[str]:
    """The reasons of layers, each once."""
    explained = (layer for layer in layers if layer.reason or layer.why)
    return _by_kind(explained, lambda layer: f"{layer.precision}, {layer.reason or layer.why}")


def _by_kind(layers: Iterable[LayerPlan], text: Callable[[LayerPlan], str]) -> list[str]:
    """Texts about layers, each once after the names of its layers. Layers that differ only in their
    block have one name."""
    groups: dict[str, dict[str, list[str]]] = {}
    for layer in layers:
        pattern = re.sub(r"(?:(?<=\.)|^)\d+(?=\.)", "*", layer.name)
        groups.setdefault(text(layer), {}).setdefault(pattern, []).append(layer.name)
    return [
        f"{', '.join(map(_named, patterns, patterns.values()))}: {about}"
        for about, patterns in groups.items()
    ]


def _named(pattern: str, names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} layers {pattern}"


def indivisible(shape: tuple[int, int], multiple: int) -> str:
    """The problem that a side of a layer is not divisible by `multiple`; "" if both are."""
    sides = zip(("in", "out"), shape, strict=True)
    odd = [f"{size} {side} features" for side, size in sides if size % multiple]
    return f"{' and '.join(odd)}, not divisible by {multiple}" if odd else ""


def _odd_size(plan: Plan, layer: LayerPlan) -> str:
    """The reason that no GPU runs this layer, which a CPU emulates, in FP8; "" if one does."""
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
    """The share of `work`, multiplications per token, in all of one GEMM with weights per layer."""
    total = sum(layer.work for layer in plan.layers) + plan.work_outside_linears
    return sum(work) / total if total else 0.0


def forward_share(plan: Plan) -> float:
    """The share of FP8 in the multiplications of a forward pass."""
    layers = [(layer.work, layer.quantizers) for layer in plan.layers if layer.quantizers]
    served = plan.has_quantized_weights
    return share(plan, [work for work, of in layers if of.input and (of.weight or served)])


def _headline(plan: Plan, forward: bool) -> str:
    in_fp8 = forward_share(plan) if forward else plan.fp8_share
    percent = f"{100 * in_fp8:.0f}"
    if percent == "100" and in_fp8 < 1:
        percent = ">99"
    if percent == "0" and in_fp8 > 0:
        percent = "<1"
    linears = [layer.fp8 for layer in plan.layers if not layer.groups]
    groups = [layer.fp8 for layer in plan.layers if layer.groups]
    kinds = [
        f"{sum(in_fp8)} of {len(in_fp8)} {noun}{'s' * (len(in_fp8) != 1)}"
        for noun, in_fp8 in (("linear", linears), ("expert group", groups))
        if in_fp8
    ]
    return f"{_formats(plan)}: {percent} % of {plan.counted} ({', '.join(kinds)})"
