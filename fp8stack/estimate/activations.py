"""What a forward pass keeps for the backward pass, tensor by tensor, as the model's code has it.

N rows (B sequences of T tokens), D width, H query heads, G key/value heads, E head width, V
vocabulary; c and a are the bytes of a value in the compute dtype and in attention. The residual
stream is float32.
"""

from __future__ import annotations

from dataclasses import dataclass

from fp8stack.backends.base import DTYPES
from fp8stack.estimate.operands import (
    Kept,
    keeps_input,
    kept_by_linear,
    round_up,
    row_multiple,
    value_bytes,
)
from fp8stack.model.config import GPTConfig
from fp8stack.model.gpt import Recompute
from fp8stack.model.loss import chunk_rows
from fp8stack.precision import Plan
from fp8stack.precision.plan import LayerPlan

TOKEN = 8  # bytes of an int64


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A forward pass of one micro-batch on one rank.

    `sequences` is B, `context` T; `save_fp8` and `gathers` as in `kept_by_linear`.
    """

    config: GPTConfig
    plan: Plan
    sequences: int
    context: int
    save_fp8: bool = False
    gathers: bool = False

    @property
    def rows(self) -> int:
        """N."""
        return self.sequences * self.context

    @property
    def on_cpu(self) -> bool:
        """Where torch composes dropout and attention's dropout of several operators."""
        return self.plan.device == "cpu"

    @property
    def attention_bytes(self) -> int:
        """a."""
        return DTYPES[self.plan.attention].itemsize

    def rows_out(self, layer: LayerPlan) -> int:
        """The rows of what a linear gives: a view of the rows that a scaled GEMM was padded to."""
        return round_up(self.rows, row_multiple(layer, self.plan))

    def linear(self, layer: LayerPlan) -> Kept:
        """See `kept_by_linear`."""
        return kept_by_linear(
            layer, self.plan, self.rows, save_fp8=self.save_fp8, gathers=self.gathers
        )


def kept_by_block(of: Pass, layers: dict[str, LayerPlan]) -> Kept:
    """What one block keeps if nothing of it runs again.

    Args:
        of: the pass.
        layers: of the block: qkv, output, up, down.
    """
    config, rows, c = of.config, of.rows, value_bytes(of.plan)
    kept = Kept()
    for layer in layers.values():
        kept += of.linear(layer)
    activations = 0
    for after in (("qkv",), ("up", "down")):
        within = (layers[name] for name in after)
        activations += _norm(of, all(la.fp8 and of.plan.runs(la) == "te" for la in within))
    activations += _attention(of, layers["qkv"], layers["output"])
    # The activation keeps what `up` gave; ReLU^2 its own ReLU in its place. SwiGLU: silu(gate) too.
    up = layers["up"]
    activations += c * up.out_features * (rows if config.activation == "relu2" else of.rows_out(up))
    if config.activation == "swiglu":
        activations += c * rows * config.hidden
    activations += 2 * _dropout(of, c)
    return kept + Kept(activations)


def kept_by_checkpoint(of: Pass, layers: dict[str, LayerPlan], checkpointing: Recompute) -> int:
    """What one block keeps that runs again in the backward pass: its input, float32 [N, D];
    "selective" also what its GEMMs gave, and attention with its log-sum-exp.

    The emulator's GEMMs give float32.
    """
    config, rows, c = of.config, of.rows, value_bytes(of.plan)
    total = 4 * rows * config.width
    if checkpointing == "block":
        return total
    for layer in layers.values():
        size = 4 if layer.fp8 and of.plan.runs(layer) == "emulate" else c
        total += size * of.rows_out(layer) * layer.out_features
    if not _composes_attention(of) and not config.dropout:
        total += of.attention_bytes * rows * config.width + 4 * rows * config.heads
    return total


def kept_outside(of: Pass) -> int:
    """Tokens, the mask of dropout, and the last norm."""
    tokens = TOKEN * of.sequences * (of.context + 1)
    return tokens + _dropout(of, 4) + _norm(of, False)


def kept_by_loss(of: Pass) -> Kept:
    """What the head and the loss keep, by `head_loss`, targets included.

    Logits that fit into a chunk: the head's operands and float32 log-probabilities [N, V]. Else a
    plain float32 head keeps its gradients, of its input and its weight, in place of logits; one in
    bf16 its operands and the gradient of the logits; one in fp16, or in FP8 whose logits are not
    float32, its operands and the logits; other FP8 heads their input alone.
    """
    layer, rows, c = of.plan.layer("lm_head"), of.rows, value_bytes(of.plan)
    inputs, outputs = layer.in_features, layer.out_features
    targets = TOKEN * rows
    if rows <= chunk_rows(of.config.vocabulary):
        return of.linear(layer) + Kept(4 * rows * of.config.vocabulary + targets + 4)
    if not layer.fp8 and c == 4:
        return Kept(4 * inputs * (rows + outputs))
    if layer.fp8 and (c == 4 or of.plan.runs(layer) == "emulate"):
        return Kept(4 * rows * inputs + targets + TOKEN)
    kept = of.linear(layer) + Kept(c * rows * outputs)
    at_once = not layer.fp8 and of.plan.compute_dtype == "bf16"
    return kept if at_once else kept + Kept(targets + TOKEN)


def loss_workspace(of: Pass) -> int:
    """What the loss needs for a while beside what it keeps: logits on the way there, and on the way
    back the gradients of the log-probabilities and of the logits, float32, of a chunk at most."""
    layer, rows, c = of.plan.layer("lm_head"), of.rows, value_bytes(of.plan)
    vocabulary, padded = of.config.vocabulary, layer.out_features
    chunk = chunk_rows(vocabulary)
    if rows <= chunk:
        forth = c * padded + (4 * padded if c < 4 else 0)
        forth += 4 * vocabulary if padded > vocabulary else 0
        return rows * max(forth, 2 * 4 * vocabulary)
    # One chunk's log-probabilities besides, and where the head ran over all rows, their logits.
    whole = 0 if c == 4 or (layer.fp8 and of.plan.runs(layer) == "emulate") else c * rows * padded
    return whole + 3 * 4 * chunk * vocabulary


def block_workspace(of: Pass) -> int:
    """What the backward pass of a block needs for a while, most of it in the MLP: the gradients
    before and after its activation (SwiGLU: of its output, gate and value) or, by then, the
    emulator's float32 casts of a gradient (in blocks a source and two layouts); and two of the
    residual stream, float32."""
    config, rows, c = of.config, of.rows, value_bytes(of.plan)
    gated = config.activation == "swiglu"
    gradients = c * config.hidden * (3 if gated else 2)
    for layer in of.plan.layers:
        if layer.quantizers is not None and of.plan.runs(layer) == "emulate":
            along = layer.quantizers.along("grad_output")
            across = layer.quantizers.across("grad_output")
            copies = 1 if along == across and (along is None or along.turns) else 3
            gradients = max(gradients, 4 * copies * config.hidden * (2 if gated else 1))
    return rows * (gradients + 2 * 4 * config.width)


def _norm(of: Pass, fused: bool) -> int:
    """A norm's input, float32 [N, D], and one or two float32 statistics per row. Transformer
    Engine's norm that is fused with the linear after it keeps the input in the compute dtype."""
    size = value_bytes(of.plan) if fused else 4
    statistics = 2 if of.config.norm == "layernorm" else 1
    return of.rows * (size * of.config.width + statistics * 4)


def _dropout(of: Pass, size: int) -> int:
    """The mask of a dropout over [N, D] values of `size` bytes; on a GPU, of bools."""
    if not of.config.dropout:
        return 0
    return of.rows * of.config.width * (size if of.on_cpu else 1)


def _composes_attention(of: Pass) -> bool:
    """Whether torch has no fused attention: on a CPU with dropout; on a GPU for grouped queries in
    float32."""
    if of.on_cpu:
        return of.config.dropout > 0
    return of.config.query_groups != of.config.heads and of.attention_bytes == 4


def _attention(of: Pass, qkv: LayerPlan, output: LayerPlan) -> int:
    """What lies between `qkv` and the output's GEMM.

    Fused attention keeps queries, keys, values, its output and a float32 log-sum-exp per row and
    head. Where nothing was done to queries and keys, all three are the memory that `qkv` gave, and
    a plain linear after it keeps that output too, the same memory. Composed attention keeps them
    as float32 copies, one per query head, with T x T probabilities per head, and with dropout the
    mask and what it leaves.
    """
    config, rows, c, a = of.config, of.rows, value_bytes(of.plan), of.attention_bytes
    heads = config.heads + config.query_groups  # queries and keys
    width = config.head_width
    turned = config.positions == "rope" or config.qk_norm
    made = c * of.rows_out(qkv) * (heads + config.query_groups) * width
    total, keeps_qkv = 0, False
    if config.qk_norm:  # in float32
        total += 4 * rows * heads  # statistics
        keeps_qkv = of.on_cpu and c == 4  # else the norms' inputs are copies
        total += 0 if keeps_qkv else 4 * rows * heads * width
    if _composes_attention(of):
        scores = (3 if config.dropout else 1) * config.heads * of.context
        total += 4 * rows * (3 * config.heads * width + scores)
    else:
        if a != c:
            total += a * rows * (heads + config.query_groups) * width
        else:
            keeps_qkv = True
            total += a * rows * heads * width if turned else 0
        total += 4 * rows * config.heads
        if not keeps_input(output, of.plan) or a != c:
            total += a * rows * config.heads * width
    return total + (made if keeps_qkv else 0)
