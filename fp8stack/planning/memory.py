"""A run's memory by its parts, and its peak: `estimate(setting) -> Estimate`, in bytes per rank.

Nothing is allocated: sizes come from a trace of the model on tensors without memory, and from the
shapes of its parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from fp8stack.layers.backend import DTYPES
from fp8stack.layers.gathered_weights import gathered_bytes, is_gathered_in_fp8
from fp8stack.layers.operands import LayerOperands
from fp8stack.layers.torch import TorchOperand
from fp8stack.model import loss as losses
from fp8stack.model.config import GPTConfig
from fp8stack.model.gpt import Recompute
from fp8stack.planning.run_keys import OptimizerName
from fp8stack.planning.trace import Trace, trace
from fp8stack.precision import LayerPlan, Plan

Shapes = Mapping[str, tuple[int, ...]]

FLOAT = 4  # bytes of a float32
STEP = 4  # an optimizer counts its steps in a float32 for each tensor

# torchao's optimizers: a float32 scale per block, and in 8 bits a table of 256 values per moment.
# Smaller tensors, and those that are no whole blocks, keep float32 moments.
BLOCK, SMALLEST, TABLE = 256, 4096, 256

PARTS = {
    "parameters": "float32 master weights, tied ones once, the vocabulary padded",
    "gradients": "float32, as many",
    "optimizer": "its state after a step",
    "fp8_weights": "FP8 copies of weights that are kept until the weights change",
    "buffers": "amax histories and scales of delayed scaling, RoPE's tables, random draws",
    "gathered": "FSDP2: whole weights of the root and two blocks, gradients of head and block",
    "weight_copies": "weights cast for a micro-batch's GEMMs and kept for its backward pass",
    "activations": "what a micro-batch keeps for its backward pass, the loss apart",
    "loss": "what the head and the loss keep of it",
    "workspace": "what the loss, or a block in its backward pass, needs for a while",
}
"""The parts by name, with what they are."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The settings that decide a step's memory.

    `sequences` is the micro-batch of one rank; `micro_batches` how many make a step.
    """

    config: GPTConfig
    plan: Plan
    sequences: int
    context: int
    micro_batches: int = 1
    optimizer: OptimizerName = "adamw"
    momentum: float = 0.9
    checkpointing: Recompute = "none"
    ranks: int = 1
    parallel: Literal["ddp", "fsdp"] = "ddp"

    @property
    def shares_out(self) -> bool:
        """Whether parameters are sharded over the ranks."""
        return self.ranks > 1 and self.parallel == "fsdp"


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes of each of `PARTS` on the rank that needs most, and figures for the peak.

    Attributes:
        gradients_stay: whether gradients exist during a forward pass, as they do from a step's
            second micro-batch on, and always with DDP's buckets.
        head_gradient: the gradient that a backward pass computes first.
        late_gradients: the gradients that it computes last, of the first block and an untied
            embedding.
        first_block: saved by the first block until the end of the backward pass.
        loss_workspace: temporary memory of the loss.
        block_workspace: temporary memory of a block's backward pass, including, with checkpointing,
            what the block recomputes.
    """

    parameters: int
    gradients: int
    optimizer: int
    fp8_weights: int
    buffers: int
    gathered: int
    weight_copies: int
    activations: int
    loss: int
    gradients_stay: bool
    head_gradient: int
    late_gradients: int
    first_block: int
    loss_workspace: int
    block_workspace: int

    def parts(self) -> dict[str, int]:
        """The parts by name, in the order of `PARTS`."""
        return {name: getattr(self, name) for name in PARTS}

    @property
    def workspace(self) -> int:
        """The larger of the workspaces of the loss and of a block."""
        return max(self.loss_workspace, self.block_workspace)

    @property
    def lasting(self) -> int:
        """Memory in use throughout a step."""
        return self.parameters + self.optimizer + self.fp8_weights + self.buffers + self.gathered

    @property
    def floor(self) -> int:
        """Memory that any batch needs: `lasting`, and the gradients."""
        return self.lasting + self.gradients

    @property
    def saved(self) -> int:
        """Memory that a forward pass saves for its backward pass."""
        return self.weight_copies + self.activations + self.loss

    @property
    def peak(self) -> int:
        """The peak of a step after the first.

        A backward pass frees what was saved while it makes gradients, block by block, so the most
        is at the loss, or in the last block, or in the first one, or with all gradients.
        """
        at_loss = self.saved + self.loss_workspace
        in_last = self.saved - self.loss + max(self.head_gradient, self.block_workspace)
        if self.gradients_stay:
            return self.lasting + self.gradients + max(at_loss, in_last)
        in_last = self.saved - self.loss + self.head_gradient + self.block_workspace
        in_first = self.first_block + self.block_workspace + self.gradients - self.late_gradients
        return self.lasting + max(at_loss, in_last, in_first, self.gradients)


def estimate(setting: Setting) -> Estimate:
    """The memory that a run with this setting takes on each rank, part by part, in bytes.

    Not in it: the allocator's rounding and unused blocks, the CUDA context, workspaces of
    libraries, data and the program itself.
    """
    config, plan = setting.config, setting.plan
    shapes = config.parameter_shapes(plan.layer("lm_head").out_features)
    shards = sharded(shapes, setting.ranks) if setting.shares_out else shapes
    parameters = float_bytes(shards)
    size = setting.sequences, setting.context
    traced = trace(config, plan, *size, gathers=setting.shares_out)
    kinds = [_block(setting, traced, f"blocks.{place}") for place in range(len(traced.kinds))]
    blocks = [kind for kind, indices in zip(kinds, traced.kinds, strict=True) for _ in indices]
    first_block = {name: shape for name, shape in shards.items() if name.startswith("blocks.0.")}
    embedding = float_bytes({"": shards["embedding.weight"]})
    return Estimate(
        parameters=parameters,
        gradients=parameters,
        optimizer=optimizer_bytes(
            shapes,
            setting.optimizer,
            setting.momentum,
            setting.ranks if setting.shares_out else 1,
        ),
        fp8_weights=0 if setting.shares_out else traced.fp8_weights,
        buffers=_buffers(config, plan),
        gathered=_gathered(setting, shapes) if setting.shares_out else 0,
        weight_copies=sum(x.weight_copies for x in blocks) + traced.weight_copies["loss"],
        activations=sum(block.activations for block in blocks) + traced.activations[""],
        loss=traced.activations["loss"],
        gradients_stay=setting.micro_batches > 1 or setting.ranks > 1,
        head_gradient=embedding,  # of the same shape
        late_gradients=float_bytes(first_block) + (0 if config.tied else embedding),
        first_block=kinds[0].activations + kinds[0].weight_copies,
        loss_workspace=_loss_workspace(setting),
        block_workspace=max(kind.recomputed for kind in kinds) + _block_workspace(setting),
    )


class _Block(NamedTuple):
    """The bytes of activations and of copies of weights that a block saves, and the bytes beyond
    them that its backward pass computes again."""

    activations: int
    weight_copies: int = 0
    recomputed: int = 0


def _block(setting: Setting, traced: Trace, block: str) -> _Block:
    """A traced block: with checkpointing it saves its input, and with "selective" also the outputs
    of its GEMMs and attention."""
    activations, weight_copies = traced.activations[block], traced.weight_copies[block]
    if setting.checkpointing == "none":
        return _Block(activations, weight_copies)
    element = DTYPES[setting.plan.recipe.residual].itemsize
    residual = element * setting.sequences * setting.context * setting.config.width
    outputs = traced.selective(block) if setting.checkpointing == "selective" else 0
    recomputed = max(activations + weight_copies - outputs, 0)
    return _Block(residual + outputs, recomputed=recomputed)


def _loss_workspace(setting: Setting) -> int:
    """Temporary memory of the loss: logits in the forward pass, and in the backward pass the
    gradients of the log-probabilities and of the logits, float32, of a chunk at most; or the casts
    of the gradient of an FP8 head's logits."""
    plan, layer = setting.plan, setting.plan.layer("lm_head")
    vocabulary, padded = setting.config.vocabulary, layer.out_features
    rows, chunk = setting.sequences * setting.context, losses.chunk_rows(vocabulary)
    c = DTYPES[plan.compute_dtype].itemsize
    if rows <= chunk:
        forth = c * padded + (4 * padded if c < 4 else 0)
        forth += 4 * vocabulary if padded > vocabulary else 0
        return rows * max(forth, 2 * 4 * vocabulary)
    # One chunk's log-probabilities besides, and where the head ran over all rows, the gradients of
    # their logits; in float32, the chunk's own is counted already.
    gradients = c * (rows if c < FLOAT else rows - chunk if layer.fp8 else 0) * padded
    softmax = 3 * FLOAT * chunk * vocabulary
    casts = _gradient_casts(plan, layer) * rows * padded if layer.fp8 else 0
    return max(gradients + softmax, casts)


def _gradient_casts(plan: Plan, layer: LayerPlan) -> int:
    """The bytes per element of both copies of a layer's quantized output gradient."""
    assert layer.quantizers is not None
    turned = layer.quantizers.reuses_rowwise("grad_output")
    if plan.backend_of(layer) == "emulate":
        rounds = plan.compute_dtype != "fp32"  # in blocks two layouts and a float32 source
        return FLOAT * (1 if turned else 2 + rounds)
    return 2


def _block_workspace(setting: Setting) -> int:
    """Temporary memory of a block's backward pass, most of it in the MLP: the gradients before and
    after its activation or, by then, the emulator's float32 casts of a gradient (in blocks a source
    and two layouts); and two gradients of the residual stream, float32. Experts have as many rows
    as tokens times experts per token; by then the float32 gradients of their outputs are freed."""
    plan, c = setting.plan, DTYPES[setting.plan.compute_dtype].itemsize
    copies = [0]
    for layer in plan.layers:
        if layer.quantizers is not None and plan.backend_of(layer) == "emulate":
            copies.append(1 if layer.quantizers.reuses_rowwise("grad_output") else 3)
    largest = 0
    for up in plan.layers:
        path, _, name = up.name.rpartition(".")
        if name == "up":
            inner = plan.layer(f"{path}.down").in_features
            gradients = max(c * (up.out_features + inner), 4 * max(copies) * up.out_features)
            largest = max(largest, round(up.active * (up.groups or 1)) * gradients)
    return setting.sequences * setting.context * (largest + 2 * 4 * setting.config.width)


def _buffers(config: GPTConfig, plan: Plan) -> int:
    """Delayed scaling: for each quantizer a history as long as the longest, four float32 (its
    scale, target, amax, and the scale of the pass before), two bools, and two places, int64; and a
    flag. Stochastic rounding: a count for each layer, int64. RoPE: a cosine and a sine for each
    token of the model's context and element of a head. Experts: biases that balance their load, and
    for each router the tokens of each expert, int64, and a loss."""
    total, lengths = float_bytes(config.buffer_shapes()), []
    if config.experts is not None:
        total += len(config.routers) * (8 * config.experts.count + FLOAT)
    for layer in plan.layers:
        if layer.quantizers is not None:
            total += 8 * layer.quantizers.stochastic
            casts = layer.quantizers.casts.values()
            lengths += [q.history_length for q in casts if q.delayed] * (layer.groups or 1)
    slots = plan.recipe.attention_slots.values()
    lengths += config.layers * [quantizer.history_length for quantizer in slots]
    if lengths:
        total += len(lengths) * (4 * (max(lengths) + 4) + 2 + 2 * 8) + 1
    if config.positions == "rope":
        total += 2 * 4 * config.context * config.head_dim
    return total


def _gathered(setting: Setting, shapes: Shapes) -> int:
    """FSDP2 gathers the root's parameters for the whole pass, and the parameters of two blocks at a
    time; the whole gradients of the head and of a block exist until they are summed over ranks, the
    head's with the root's at the end of the pass. The last block is as large as any."""
    block = f"blocks.{setting.config.layers - 1}."
    root = {name: shape for name, shape in shapes.items() if not name.startswith("blocks.")}
    last = {name: shape for name, shape in shapes.items() if name.startswith(block)}
    in_root, in_last = float_bytes(root), float_bytes(last)
    for layer in setting.plan.layers:
        if layer.name.startswith(block):
            in_last -= _saved_by_gathering(setting, layer)
        elif layer.name == "lm_head" and not setting.config.tied:
            in_root -= _saved_by_gathering(setting, layer)
    head = float_bytes({"": shapes["embedding.weight"]})  # of the same shape
    return in_root + head + 2 * in_last + float_bytes(last)


def _saved_by_gathering(setting: Setting, layer: LayerPlan) -> int:
    """The bytes of a layer's float32 weight less those of the weight as FSDP2 gathers it."""
    if layer.groups:
        return 0
    elements = layer.in_features * layer.out_features
    if layer.quantizers is None:
        in_float32 = layer.precision in ("fp32", "tf32")  # a router's
        dtype = torch.float32 if in_float32 else DTYPES[setting.plan.compute_dtype]
        return (FLOAT - dtype.itemsize) * elements
    if setting.plan.backend_of(layer) != "torch":
        return 0
    operand = TorchOperand("weight", LayerOperands(layer.quantizers), layer.plain_gemms)
    if not is_gathered_in_fp8(operand, layer.out_features, setting.ranks):
        return 0
    return FLOAT * elements - gathered_bytes(operand, layer.out_features, layer.in_features)


# Parameters and optimizer state


def sharded(shapes: Shapes, ranks: int) -> Shapes:
    """The shapes of FSDP2's largest shards: rows are divided by the ranks, rounded up."""
    return {name: (-(-rows // ranks), *columns) for name, (rows, *columns) in shapes.items()}


def float_bytes(shapes: Shapes) -> int:
    """The bytes of float32 tensors of these shapes."""
    return FLOAT * sum(map(math.prod, shapes.values()))


def optimizer_bytes(
    shapes: Shapes, optimizer: OptimizerName, momentum: float = 0.9, ranks: int = 1
) -> int:
    """The bytes of an optimizer's state after a step, for parameters of these shapes that so many
    ranks share.

    AdamW (fused) has two float32 moments and a step count for each tensor; SGD one float32 buffer,
    or nothing if `momentum` is 0. The others handle the matrices of the blocks and leave the rest
    to AdamW: Muon has one float32 buffer, torchao's AdamW two moments of a byte per value, with
    their scales.
    """
    shards = sharded(shapes, ranks)
    if optimizer == "sgd":
        return float_bytes(shards) if momentum else 0
    return sum(_state_of(name, shape, shards[name], optimizer) for name, shape in shapes.items())


def _state_of(
    name: str, shape: tuple[int, ...], shard: tuple[int, ...], optimizer: OptimizerName
) -> int:
    count, full_count = math.prod(shard), math.prod(shape)
    inner = name.startswith("blocks.") and len(shape) == 2 and not name.endswith(".bias")
    if inner and optimizer == "muon":
        return FLOAT * count
    if inner and optimizer != "adamw" and full_count >= SMALLEST and full_count % BLOCK == 0:
        table = FLOAT * TABLE if optimizer == "adamw8bit" else 0
        return 2 * (count + FLOAT * count // BLOCK + table) + STEP
    return 2 * FLOAT * count + STEP
