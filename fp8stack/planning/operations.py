"""The operations of a training step and its casts, and the dtypes of both, from a trace of the
model.

Dtypes are spelled fp32, bf16, fp16, e4m3, e5m2, e2m1 and so on. "tf32" is float32 that a GEMM
rounds to TF32; "e4m3 in fp32" are values of FP8 held in float32, the emulator's operands.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from operator import attrgetter

from fp8stack.common.formats import Quantizer
from fp8stack.model.config import GPTConfig
from fp8stack.planning.steps import GRADIENT, Cast, Operation
from fp8stack.planning.trace import Trace, trace
from fp8stack.precision import LayerPlan, Plan
from fp8stack.precision.fp8_attention import FP8_ATTENTION
from fp8stack.precision.native_gemms import SCALED_AFTERWARDS, kernels_of

IN_COMPUTE_DTYPE = {
    "fprop": "the GEMM of a linear's forward pass, y = x w^T: where the time goes",
    "dgrad": "its gradient for the input, dx = dy w",
    "wgrad": "its gradient for the weight, dw = dy^T x",
    "bias gradient": "a sum of dy over rows",
    "attention": "the GEMMs of attention; its softmax and its sums are fp32 in torch's kernels",
    "activation": "elementwise: memory is what it takes",
    "branch dropout": "elementwise",
    "dispatch": "rows are copied to the experts of their tokens, and back",
}
"""Operations in the compute dtype, and why that suffices. The GEMMs of a linear take FP8 operands
where the plan has it in FP8; attention is fp32 if the recipe says so."""

IN_FP32 = {
    "embedding": "a look-up; the gradients of many rows add up",
    "positions": "added to the residual stream",
    "dropout": "on the residual stream",
    "norm": "a mean and a variance over a row",
    "rope": "angles of thousands of radians",
    "residual": "small terms add up over all layers",
    "routing": "a softmax that chooses experts, and sums of their outputs, which it weights",
    "loss": "softmax and logarithm over the vocabulary",
    "gradient accumulation": "small terms add up over micro-batches",
    "loss scaling": "scales beyond the range of fp16",
    "clipping": "a norm over all parameters",
    "optimizer": "updates far smaller than the weights",
    "amax history": "scales are computed from it",
}
"""Operations in float32, and why; the residual stream is in bf16 if the recipe says so."""

# State or arithmetic of each optimizer below float32. Weights are always float32.
OPTIMIZERS = {
    "adamw": ("fp32", ""),
    "sgd": ("fp32", ""),
    "muon": ("bf16", "of matrices: orthogonalized in bf16, the momentum is fp32"),
    "adamw8bit": ("int8", "moments of large tensors in 8 bits with a scale per block"),
    "adamwfp8": ("e4m3", "moments of large tensors in FP8 with a scale per block"),
}


def stored_dtype(dtype: str) -> str:
    """The dtype in which tensors are stored: float32 for TF32."""
    return "fp32" if dtype == "tf32" else dtype


def operations_of(
    config: GPTConfig, plan: Plan, *, optimizer: str = "adamw", grad_compression: str = "none"
) -> list[Operation]:
    """All operations of a training step, in the order of the forward pass, the step's own last.

    Args:
        config: the shape of the model.
        plan: a plan with its layers.
        optimizer: the run's optimizer, by name.
        grad_compression: of the run.
    """
    steps = trace_of(config, plan).all_steps()
    traced = [step for step in steps if isinstance(step, Operation)]
    operations = [x for step in traced for x in _operations(step, config, plan)]
    return [*operations, *_step(plan, optimizer, grad_compression)]


def trace_of(config: GPTConfig, plan: Plan) -> Trace:
    """The trace of a pass of 128 rows, which every quantizer's blocks divide."""
    context = 2 ** min(config.context.bit_length() - 1, 7)
    return trace(config, plan, sequences=128 // context, context=context)


def _operations(step: Operation, config: GPTConfig, plan: Plan) -> Iterator[Operation]:
    """Yield the operations of a traced step."""
    path, name, operands, output = step.path, step.name, step.operands, step.output
    recipe = plan.recipe
    reason = IN_FP32.get(name, "")
    if name == "linear":
        yield from _linear(config, plan, path)
        return
    if name == "attention":
        operands, output, reason = (plan.attention,) * 3, stored_dtype(plan.attention), ""
        if recipe.fp8_attention:
            operands = ("e4m3",) * 3
        if plan.attention_precision != plan.compute_dtype:
            reason = f"the recipe says attention = {plan.attention_precision}"
    elif name == "residual" and recipe.residual != "fp32":
        reason = f"the recipe says residual = {recipe.residual}"
    elif name == "fused norm":
        # Transformer Engine runs all layers in FP8 or below, so each has a quantizer of its input.
        assert recipe.quantizers is not None
        assert recipe.quantizers.input is not None
        quantizer, dtype = recipe.quantizers.input, stored_dtype(plan.compute_dtype)
        name, operands = "norm", (dtype,)
        # The cast is fused with the norm, without rounding in between, if it needs no amax of all.
        is_fused = quantizer.delayed or quantizer.scale == "e8m0"
        output = quantizer.format if is_fused else dtype
        reason = "within Transformer Engine's module, which rounds its input"
    adds_in = "fp32" if name == "attention" or name in IN_FP32 else ""
    yield Operation(
        path=path, name=name, operands=operands, adds_in=adds_in, output=output, why=reason
    )


def _linear(config: GPTConfig, plan: Plan, path: str) -> Iterator[Operation]:
    """Yield the three GEMMs of a linear, and the gradient of its bias."""
    layer = plan.layer(path)
    dtype = stored_dtype(plan.compute_dtype if layer.fp8 else layer.precision)
    # Float32 where the GEMM itself can give it: rounding to a compute dtype first would lose bits.
    exact = layer.fp8 and plan.backend_of(layer) in ("torch", "emulate")
    gradient = "fp32" if exact else dtype
    for name in ("fprop", "dgrad", "wgrad"):
        yield Operation(
            path=path,
            name=name,
            operands=operands_of(plan, layer, name),
            adds_in=_adds_in(plan, layer, name),
            output=gradient if name == "wgrad" else dtype,
            why=layer.reason or layer.why,
        )
    if config.bias and path != "lm_head" and path not in config.routers:
        yield Operation(
            path=path, name="bias gradient", operands=(dtype,), adds_in="fp32", output=gradient
        )


def operands_of(plan: Plan, layer: LayerPlan, gemm: str) -> tuple[str, str]:
    """The dtypes of the operands of one of a linear's GEMMs."""
    if layer.quantizers is None:
        return layer.precision, layer.precision
    first, second = layer.quantizers.values(gemm)
    # Operands that are not quantized are rounded to the compute dtype, except a float32 weight.
    is_plain_weight = gemm != "wgrad" and _holder(plan, layer, gemm) == "fp32"
    plain = "fp32" if is_plain_weight else plan.compute_dtype
    name = name_of(plan, layer, first, plan.compute_dtype, gemm)
    return name, name_of(plan, layer, second, plain, gemm)


def name_of(
    plan: Plan, layer: LayerPlan, quantizer: Quantizer | None, plain: str, gemm: str
) -> str:
    """The dtype of an operand of a quantized layer in a GEMM; `plain` if it has no quantizer."""
    holder = _holder(plan, layer, gemm)
    name = plain if quantizer is None else quantizer.format
    return name if holder in ("", name) else f"{name} in {holder}"


def _holder(plan: Plan, layer: LayerPlan, gemm: str) -> str:
    """The dtype that emulated GEMMs hold operands in; "" for other GEMMs."""
    emulated = plan.backend_of(layer) == "emulate" or gemm in layer.plain_gemms
    return plan.emulated_dtype(layer) if emulated else ""


def _adds_in(plan: Plan, layer: LayerPlan, gemm: str) -> str:
    native = plan.device == "cuda" and plan.backend_of(layer) in ("torch", "te")
    if layer.quantizers is None or not native or gemm != "fprop" or gemm in layer.plain_gemms:
        return "fp32"
    # torch's use_fast_accum, TE's split accumulator: Hopper and Ada add in fewer bits.
    fast = kernels_of(layer.quantizers)[gemm] in SCALED_AFTERWARDS
    return "fp32, fast" if fast else "fp32"


def _step(plan: Plan, optimizer: str, grad_compression: str) -> Iterator[Operation]:
    """Yield the operations that run once per optimizer step."""
    yield _in_fp32("gradient accumulation")
    if grad_compression != "none":
        yield Operation(
            path="step",
            name="gradient exchange",
            operands=(grad_compression,),
            adds_in=grad_compression,
            output="fp32",
            why=f"the run says grad_compression = {grad_compression}",
        )
    if plan.loss_scaling:
        yield _in_fp32("loss scaling")
    yield _in_fp32("clipping")
    dtype, reason = OPTIMIZERS[optimizer]
    operands = ("fp32",) if dtype == "fp32" else ("fp32", dtype)
    in_fp32 = _in_fp32("optimizer")
    yield replace(in_fp32, operands=operands, why=reason or in_fp32.why)
    if plan.delayed and plan.runs_fp8:
        yield _in_fp32("amax history")


def _in_fp32(name: str) -> Operation:
    return Operation(
        path="step", name=name, operands=("fp32",), adds_in="fp32", output="fp32", why=IN_FP32[name]
    )


# Casts


def casts_of(config: GPTConfig, plan: Plan) -> list[Cast]:
    """All casts of a training step without activation checkpointing, module by module, in the order
    in which they run. Conversions within a GEMM or a cast to FP8 do not count, nor do conversions
    inside Transformer Engine's modules, except its casts to FP8."""
    casts: list[Cast] = []
    for path, group in groupby(trace_of(config, plan).all_steps(), key=attrgetter("path")):
        steps = list(group)
        names = {step.name for step in steps if isinstance(step, Operation)}
        of_module = [step for step in steps if isinstance(step, Cast)]
        if "linear" in names:
            once = _cast_once(plan, plan.layer(path))
            of_module = [
                replace(cast, per="step") if cast.what in once else cast for cast in of_module
            ]
            of_module += _quantized(plan, path)
            if plan.layer(path).fp8:  # the bias is cast after the operands
                of_module.sort(key=lambda x: (x.to_fp8 and x.runs == "backward", x.what == "bias"))
        elif plan.recipe.fp8_attention and "attention" in names:
            of_module += _of_attention(path, plan)
        elif "dispatch" in names and stored_dtype(plan.compute_dtype) != "fp32":
            # Gradients of a row's copies are summed in float32.
            cast = Cast(path=path, what="", source="fp32", target=plan.compute_dtype)
            for rows in ("rows for experts", "rows from experts"):
                of_module.append(replace(cast, what=rows + GRADIENT, runs="backward"))
        casts += of_module
    return casts


def _cast_once(plan: Plan, layer: LayerPlan) -> tuple[str, ...]:
    """The parameters that are cast to the compute dtype once per step, see
    `Backend.cast_parameters`."""
    if not layer.fp8:
        return ("weight", "bias") if plan.backend in ("reference", "torch") else ()
    is_scaled = plan.backend_of(layer) == "torch" and "fprop" not in layer.plain_gemms
    return ("bias",) if is_scaled else ()


def _of_attention(path: str, plan: Plan) -> Iterator[Cast]:
    """Yield the casts of the operands of attention in FP8; its kernel casts more within."""
    kind = FP8_ATTENTION[plan.recipe.attention]
    for name in ("queries", "keys", "values"):
        yield Cast(path=path, what=name, source=plan.attention, target="e4m3")
    yield Cast(
        path=path,
        what=f"output{GRADIENT}",
        source=plan.attention,
        target=kind.gradient_format,
        runs="backward",
    )


def _quantized(plan: Plan, path: str) -> Iterator[Cast]:
    """Yield the casts of a quantized linear's operands to FP8, FP6 or FP4, and the cast of a weight
    without a quantizer to the compute dtype."""
    layer, dtype = plan.layer(path), stored_dtype(plan.compute_dtype)
    plain = [
        gemm
        for gemm in ("fprop", "dgrad")
        if layer.quantizers is not None
        and gemm in layer.plain_gemms
        and layer.quantizers.gemms[gemm][1] is None
        and operands_of(plan, layer, gemm)[1] != "fp32"
    ]
    if plain:
        name = "weight" if len(plain) == 2 else f"weight for {plain[0]}"
        yield Cast(path=path, what=name, source="fp32", target=dtype, per="step")
    for place, quantizer in layer.quantizers.casts.items() if layer.quantizers else ():
        operand, _, gemm = place.partition(".")
        of_gemm = gemm or ("dgrad" if operand == "grad_output" else "fprop")
        name = operand.replace("grad_output", "output gradient")
        is_weight = operand == "weight"
        yield Cast(
            path=path,
            what=f"{name} for {gemm}" if gemm else name,
            source="fp32" if is_weight else dtype,
            target=name_of(plan, layer, quantizer, dtype, of_gemm),
            runs="backward" if operand == "grad_output" else "forward",
            # te and torch keep a quantized weight until an optimizer changes it.
            per="step" if is_weight and plan.backend_of(layer) != "emulate" else "micro-batch",
        )
