"""A run's memory by its parts, and its peak: `estimate(setting) -> Estimate`, in bytes per rank.

Nothing is allocated: sizes come from a trace of the model on tensors without memory, and from the
shapes of its parameters.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fp8stack.layers.backend import DTYPES
from fp8stack.model import loss as losses
from fp8stack.model.config import GPTConfig
from fp8stack.model.gpt import Recompute
from fp8stack.planning.planned_layers import weight_bytes
from fp8stack.planning.run_keys import OptimizerName
from fp8stack.planning.trace import Trace, section_of, trace
from fp8stack.precision import Plan

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
    "cast_weights": "copies of weights in FP8 or bf16 that are kept until the weights change",
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
        first_block: saved by the first block until the end of the backward pass.
        late_gradients: the gradients that a backward pass computes last, of the first block and an
            untied embedding.
        loss_workspace: temporary memory of the loss.
        block_workspace: temporary memory of a block's backward pass, including, with checkpointing,
            what the block recomputes.
    """

    parameters: int
    gradients: int
    optimizer: int
    cast_weights: int
    buffers: int
    gathered: int
    weight_copies: int
    activations: int
    loss: int
    gradients_stay: bool
    first_block: int
    late_gradients: int
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
        return self.parameters + self.optimizer + self.cast_weights + self.buffers + self.gathered

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
        is at the loss, or in the last block, or in the first one.
        """
        earlier = self.gradients if self.gradients_stay else 0
        at_loss = self.saved + self.loss_workspace + earlier
        in_last = self.saved - self.loss + self.block_workspace + earlier
        in_first = self.first_block + self.block_workspace
        in_first += self.gradients - (0 if self.gradients_stay else self.late_gradients)
        return self.lasting + max(at_loss, in_last, in_first, self.gradients)


def estimate(setting: Setting) -> Estimate:
    """The memory that a run with this setting takes on each rank, part by part, in bytes.

    Not in it: the allocator's rounding and unused blocks, the CUDA context, workspaces of
    libraries, data and the program itself.
    """
    config, plan, shares_out = setting.config, setting.plan, setting.shares_out
    shapes = config.parameter_shapes(plan.layer("lm_head").out_features)
    ranks = setting.ranks if shares_out else 1
    shards = sharded(shapes, ranks)
    parameters = float_bytes(shards)
    traced = trace(config, plan, setting.sequences, setting.context)
    cached, copied = 0, Counter[str]()
    for layer in plan.layers:
        of_step, of_micro_batch = weight_bytes(plan, layer)
        if shares_out:
            # FSDP2 gathers most weights in low precision and frees them. Of others, each
            # micro-batch saves a copy.
            is_emulated = layer.quantizers is not None and plan.backend_of(layer) == "emulate"
            saves = is_emulated or layer.groups or layer.plain_gemms
            saved = of_step if layer.quantizers is None else of_step // 2
            of_step, of_micro_batch = 0, of_micro_batch + saved if saves else 0
        cached += of_step
        copied[section_of(layer.name)] += of_micro_batch
    blocks = {
        index: _block(setting, traced, f"blocks.{place}", copied[f"blocks.{index}"])
        for place, kind in enumerate(traced.kinds)
        for index in kind
    }
    late = ("blocks.0.",) if config.tied else ("blocks.0.", "embedding.")
    last_gradients = {name: shape for name, shape in shards.items() if name.startswith(late)}
    return Estimate(
        parameters=parameters,
        gradients=parameters,
        optimizer=optimizer_bytes(shapes, setting.optimizer, setting.momentum, ranks),
        cast_weights=cached,
        buffers=_buffers(config, plan),
        gathered=_gathered(plan, shapes) if shares_out else 0,
        weight_copies=sum(block.weight_copies for block in blocks.values()) + copied["loss"],
        activations=sum(block.activations for block in blocks.values()) + traced.saved[""],
        loss=traced.saved["loss"],
        gradients_stay=setting.micro_batches > 1 or setting.ranks > 1,
        first_block=blocks[0].activations + blocks[0].weight_copies,
        late_gradients=float_bytes(last_gradients),
        loss_workspace=_loss_workspace(setting),
        block_workspace=max(block.recomputed for block in blocks.values())
        + _block_workspace(setting),
    )


class _Block(NamedTuple):
    """The bytes of activations and of copies of weights that a block saves, and the bytes beyond
    them that its backward pass computes again."""

    activations: int
    weight_copies: int = 0
    recomputed: int = 0


def _block(setting: Setting, traced: Trace, section: str, weight_copies: int) -> _Block:
    """A traced block: with checkpointing it saves its input, and with "selective" also the outputs
    of its GEMMs and attention."""
    activations = traced.saved[section]
    if setting.checkpointing == "none":
        return _Block(activations, weight_copies)
    element = DTYPES[setting.plan.recipe.residual].itemsize
    residual = element * setting.sequences * setting.context * setting.config.width
    outputs = traced.selective[section] if setting.checkpointing == "selective" else 0
    recomputed = max(activations + weight_copies - outputs, 0)
    return _Block(residual + outputs, recomputed=recomputed)


def _loss_workspace(setting: Setting) -> int:
    """Temporary memory of the loss: two float32 tensors of the size of the logits, or with a loss
    in chunks three of a chunk, and the gradient of all logits in the compute dtype."""
    vocabulary = setting.plan.layer("lm_head").out_features
    rows, chunk = setting.sequences * setting.context, losses.chunk_rows(setting.config.vocabulary)
    if rows <= chunk:
        return 2 * FLOAT * rows * vocabulary
    element = DTYPES[setting.plan.compute_dtype].itemsize
    gradient = element * rows * vocabulary if element < FLOAT else 0
    return gradient + 3 * FLOAT * chunk * vocabulary


def _block_workspace(setting: Setting) -> int:
    """Temporary memory of a block's backward pass, most of it in the MLP: the gradients before and
    after its activation or, by then, the emulator's float32 casts of a gradient, three if its
    copies differ; and two float32 gradients of the residual stream. Experts have as many rows as
    tokens times experts per token."""
    plan = setting.plan
    element, largest = DTYPES[plan.compute_dtype].itemsize, 0
    for up in plan.layers:
        path, _, name = up.name.rpartition(".")
        if name == "up":
            size = element * (up.out_features + plan.layer(f"{path}.down").in_features)
            if up.quantizers is not None and plan.backend_of(up) == "emulate":
                copies = 1 if up.quantizers.reuses_rowwise("grad_output") else 3
                size = max(size, FLOAT * copies * up.out_features)
            largest = max(largest, round(up.active * (up.groups or 1) * size))
    return setting.sequences * setting.context * (largest + 2 * FLOAT * setting.config.width)


def _buffers(config: GPTConfig, plan: Plan) -> int:
    """Delayed scaling has a history for each quantizer, as long as the longest, and a few more
    numbers. RoPE has a cosine and a sine for each token of the context and element of a head."""
    lengths = [
        quantizer.history_length
        for layer in plan.layers
        if layer.quantizers is not None
        for quantizer in layer.quantizers.casts.values()
        for _ in range(layer.groups or 1)
        if quantizer.delayed
    ]
    total = FLOAT * len(lengths) * max(lengths, default=0)
    if config.positions == "rope":
        total += 2 * FLOAT * config.context * config.head_dim
    return total


def _gathered(plan: Plan, shapes: Shapes) -> int:
    """FSDP2 gathers the root's parameters for the whole pass, and the parameters of two blocks at a
    time; the whole gradients of the head and of a block exist until they are summed over ranks.
    Linears are gathered in the compute dtype at most."""
    element = DTYPES[plan.compute_dtype].itemsize
    linears = {f"{layer.name}.weight" for layer in plan.layers if not layer.groups}
    gathered, gradients = Counter[str](), Counter[str]()
    for name, shape in shapes.items():
        gradients[section_of(name)] += FLOAT * math.prod(shape)
        gathered[section_of(name)] += (element if name in linears else FLOAT) * math.prod(shape)
    largest = max(gradients, key=lambda section: gradients[section] * section.startswith("blocks."))
    head = FLOAT * math.prod(shapes["embedding.weight"])  # of the same shape
    return gathered[""] + head + 2 * gathered[largest] + gradients[largest]


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
