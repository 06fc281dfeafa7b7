"""Which operation of a step computes in what, as data.

Dtypes are spelled fp32, bf16, fp16, e4m3, e5m2. "tf32" is float32 that a GEMM rounds to TF32;
"e4m3 in fp32" are values of FP8 held in float32, the emulator's operands.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fp8stack.model.config import GPTConfig
from fp8stack.precision import LayerPlan, Plan
from fp8stack.precision.recipe import BlockRecipe, CurrentRecipe, DelayedRecipe

IN_COMPUTE_DTYPE = {
    "fprop": "the GEMM of a linear's forward pass, y = x w^T: where the time goes",
    "dgrad": "its gradient for the input, dx = dy w",
    "wgrad": "its gradient for the weight, dw = dy^T x",
    "bias gradient": "a sum of dy over rows",
    "attention": "the GEMMs of attention; its softmax and its sums are fp32 in torch's kernels",
    "activation": "elementwise: memory is what it takes",
    "branch dropout": "elementwise",
}
"""What runs in the compute dtype, and why it may. A linear's GEMMs take FP8 operands instead where
the plan has the linear in FP8; attention is fp32 where the recipe says attention = fp32."""

IN_FP32 = {
    "embedding": "a look-up; the gradients of many rows add up",
    "positions": "added to the residual stream",
    "dropout": "on the residual stream",
    "norm": "a mean and a variance over a row",
    "rope": "angles of thousands of radians",
    "residual": "small terms add up over all layers",
    "loss": "softmax and logarithm over the vocabulary",
    "gradient accumulation": "small terms add up over micro-batches",
    "loss scaling": "scales beyond the range of fp16",
    "clipping": "a norm over all parameters",
    "optimizer": "updates far smaller than the weights",
    "amax history": "scales are computed of it",
}
"""What runs in float32 in every recipe, and why it must."""

# What an optimizer keeps or computes in less than float32. Weights are float32 in all of them.
OPTIMIZERS = {
    "adamw": ("fp32", ""),
    "sgd": ("fp32", ""),
    "muon": ("bf16", "of matrices: orthogonalized in bf16, the momentum is fp32"),
    "adamw8bit": ("int8", "moments of large tensors in 8 bits with a scale per block"),
    "adamwfp8": ("e4m3", "moments of large tensors in FP8 with a scale per block"),
}


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of one module; forward and backward are alike but for a linear's GEMMs.

    `operands` are the dtypes of what is multiplied or read, `adds_in` is that of sums within ("" if
    there are none), `output` that of the result; `path` is the module's, "step" what happens once
    per optimizer step.
    """

    path: str
    name: str
    operands: tuple[str, ...]
    adds_in: str
    output: str
    why: str = ""


def held(dtype: str) -> str:
    """The dtype that tensors have: TF32 is float32 outside of GEMMs."""
    return "fp32" if dtype == "tf32" else dtype


def operations_of(
    config: GPTConfig, plan: Plan, *, optimizer: str = "adamw", grad_compression: str = "none"
) -> list[Operation]:
    """All operations of a training step, in the order of the forward pass, the step's own last.

    Args:
        config: the shape of the model.
        plan: with its layers decided.
        optimizer: a run's, by name.
        grad_compression: a run's.
    """
    made = [_in_fp32("embedding", "embedding")]
    if config.positions == "learned":
        made.append(_in_fp32("", "positions"))
    if config.dropout:
        made.append(_in_fp32("dropout", "dropout"))
    for index in range(config.layers):
        made += _block(f"blocks.{index}", config, plan)
    made.append(_in_fp32("final_norm", "norm"))
    made += _linear(plan, "lm_head", bias=False)
    made.append(_in_fp32("loss", "loss"))
    return [*made, *_step(plan, optimizer, grad_compression)]


def _block(path: str, config: GPTConfig, plan: Plan) -> Iterator[Operation]:
    dtype, attention = held(plan.compute_dtype), f"{path}.attention"
    yield _norm(f"{path}.attention_norm", config, plan, f"{attention}.qkv")
    yield from _linear(plan, f"{attention}.qkv", config.bias)
    if config.qk_norm:
        yield _in_fp32(f"{attention}.query_norm", "norm")
        yield _in_fp32(f"{attention}.key_norm", "norm")
    if config.positions == "rope":
        yield _in_fp32(attention, "rope")
    why = "the recipe says attention = fp32" if plan.attention != plan.compute_dtype else ""
    yield Operation(
        path=attention,
        name="attention",
        operands=(plan.attention,) * 3,
        adds_in="fp32",
        output=held(plan.attention),
        why=why,
    )
    yield from _linear(plan, f"{attention}.output", config.bias)
    if config.dropout:
        yield _elementwise(f"{path}.dropout", "branch dropout", dtype)
    yield _in_fp32(path, "residual")
    yield _norm(f"{path}.mlp_norm", config, plan, f"{path}.mlp.up", f"{path}.mlp.down")
    yield from _linear(plan, f"{path}.mlp.up", config.bias)
    yield _elementwise(f"{path}.mlp", "activation", dtype)
    yield from _linear(plan, f"{path}.mlp.down", config.bias)


def _norm(path: str, config: GPTConfig, plan: Plan, *linears: str) -> Operation:
    """A norm in a block: Transformer Engine runs it together with the FP8 linears after it."""
    one = _in_fp32(path, "norm")
    known = config.norm == "rmsnorm" or config.bias
    known = known and (len(linears) == 1 or config.activation != "gelu")  # TE's is gelu_tanh
    if plan.backend != "te" or not known or not all(plan.layer(name).fp8 for name in linears):
        return one
    dtype = held(plan.compute_dtype)
    # Where TE fuses norm and cast, nothing is rounded in between.
    gives = formats_of(plan, plan.layer(linears[0]))[0]
    return replace(
        one,
        operands=(dtype,),
        output=gives if plan.scaling in ("delayed", "mxfp8") else dtype,
        why="within Transformer Engine's module, which rounds its input",
    )


def _linear(plan: Plan, path: str, bias: bool) -> Iterator[Operation]:
    """The three GEMMs of a linear, and the gradient of its bias."""
    layer, dtype = plan.layer(path), held(plan.compute_dtype)
    forward, backward = formats_of(plan, layer)
    # Float32 where the GEMM itself can give it: rounding to a compute dtype first would lose bits.
    gradient = "fp32" if layer.fp8 and plan.backend in ("torch", "emulate") else dtype
    for name, operands, output in (
        ("fprop", (forward, forward), dtype),
        ("dgrad", (backward, forward), dtype),
        ("wgrad", (backward, forward), gradient),
    ):
        yield Operation(
            path=path,
            name=name,
            operands=operands,
            adds_in=_adds_in(plan, layer, name),
            output=output,
            why=layer.reason,
        )
    if bias:
        yield Operation(
            path=path, name="bias gradient", operands=(dtype,), adds_in="fp32", output=gradient
        )


def formats_of(plan: Plan, layer: LayerPlan) -> tuple[str, str]:
    """What a linear's GEMMs multiply: x and w, and dy."""
    if not layer.fp8:
        return plan.compute_dtype, plan.compute_dtype
    recipe = plan.recipe
    forward, backward = "e4m3", "e4m3"
    if isinstance(recipe, DelayedRecipe | CurrentRecipe):
        forward, backward = recipe.forward_format, recipe.backward_format
    if plan.backend != "emulate":
        return forward, backward
    # A scale that is no power of two makes values that bfloat16 cannot hold.
    exact = not (isinstance(recipe, BlockRecipe) and not recipe.power_of_two)
    holder = "bf16" if plan.device == "cuda" and plan.compute_dtype == "bf16" and exact else "fp32"
    return f"{forward} in {holder}", f"{backward} in {holder}"


def _adds_in(plan: Plan, layer: LayerPlan, name: str) -> str:
    per_tensor = isinstance(plan.recipe, DelayedRecipe | CurrentRecipe)
    native = layer.fp8 and plan.backend in ("torch", "te") and plan.device == "cuda"
    # torch's use_fast_accum, TE's split accumulator: Hopper and Ada add in fewer bits.
    return "fp32, fast" if native and per_tensor and name == "fprop" else "fp32"


def _step(plan: Plan, optimizer: str, grad_compression: str) -> Iterator[Operation]:
    yield _in_fp32("step", "gradient accumulation")
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
        yield _in_fp32("step", "loss scaling")
    yield _in_fp32("step", "clipping")
    dtype, why = OPTIMIZERS[optimizer]
    yield Operation(
        path="step",
        name="optimizer",
        operands=("fp32",) if dtype == "fp32" else ("fp32", dtype),
        adds_in="fp32",
        output="fp32",
        why=why or IN_FP32["optimizer"],
    )
    if plan.scaling == "delayed" and plan.runs_fp8:
        yield _in_fp32("step", "amax history")


def _in_fp32(path: str, name: str) -> Operation:
    return Operation(
        path=path,
        name=name,
        operands=("fp32",),
        adds_in="fp32",
        output="fp32",
        why=IN_FP32[name],
    )


def _elementwise(path: str, name: str, dtype: str) -> Operation:
    return Operation(path=path, name=name, operands=(dtype,), adds_in="", output=dtype)
