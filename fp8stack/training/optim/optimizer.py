"""The optimizer of a run, and the learning rate as a function of the step."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Muon, Optimizer

from fp8stack.common.errors import MissingRequirement, UserError
from fp8stack.layers.compiler import require_tools
from fp8stack.layers.fsdp import local_shard
from fp8stack.planning.run_config import RunConfig
from fp8stack.precision import Hardware
from fp8stack.training.optim.chained import BLOCK, ChainedOptimizer, first_state
from fp8stack.training.optim.sharded_muon import ShardedMuon

SMALLEST = 4096  # elements of a parameter below which torchao keeps float32 moments


_TAKES_NO_SHARDS = {
    "sgd": "torch's fused SGD takes no sharded parameters",
    "adamwfp8": "torch 2.13 does not compile its step for sharded parameters",
}


def require_optimizer(
    config: RunConfig, hardware: Hardware, ranks: int, *, will_train: bool = True
) -> None:
    """Raise a UserError if the optimizer needs something that the machine lacks, or torch lacks it
    for FSDP2; if this one `will_train`, packages and compilers too. Call this before anything is
    built or written."""
    name, instead = config.optimizer, "choose --set optimizer=adamw"
    if name in _TAKES_NO_SHARDS and ranks > 1 and config.parallel == "fsdp":
        raise UserError(
            f"optimizer {name} is not possible with --parallel fsdp: {_TAKES_NO_SHARDS[name]}. "
            "Choose --parallel ddp, or another optimizer."
        )
    if name in ("adamw", "sgd", "muon"):
        return
    if will_train:
        low_bit_optimizers()
        require_tools(hardware.device, f"optimizer {name}", instead)
    old = hardware.capability is not None and hardware.capability < (8, 9)
    if name == "adamwfp8" and (old or hardware.other_gpu):
        raise UserError(
            "optimizer adamwfp8 needs a GPU of NVIDIA that converts to FP8, of compute capability "
            "8.9 or higher. Choose --set optimizer=adamw8bit."
        )


def build_optimizer(model: nn.Module, config: RunConfig, *, fused: bool = True) -> Optimizer:
    """Build the optimizer that `config` names. Weights and the update are float32 in every recipe.

    Weight decay applies to matrices and embeddings, not to vectors (norms, biases). `sgd` is
    torch's SGD with momentum; its weight decay is part of the gradient. `muon`, and torchao's
    `adamw8bit` and `adamwfp8`, train the matrices of the blocks; fused AdamW with float32 moments
    trains all other parameters. 8-bit moments are codes of a table of 256 values, or E4M3, with a
    float32 scale per 256 elements. Muon's steps are scaled to the size of AdamW's (Liu et al. 2025,
    arXiv:2502.16982), so that both can use the same learning rate and weight decay. Parameters that
    FSDP2 shards are updated by the ranks that hold them, to the same values; 8-bit moments need
    shards of whole blocks.

    Pass `fused=False` to inspect the groups and states only, for instance on the meta device.

    Raises a UserError if torchao is missing, no matrix is large enough for 8-bit moments, or their
    shards are no whole blocks.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if config.optimizer in ("adamw", "sgd"):
        make = _adamw if config.optimizer == "adamw" else _sgd
        return make(named, config, fused)
    inner = [p for name, p in named if _is_inner(name, p, config)]
    if not inner:
        raise UserError(
            f"optimizer {config.optimizer}: no matrix in the blocks of model {config.model} is one "
            f"that it takes (8 bits: {SMALLEST:,} elements or more). Choose --set optimizer=adamw."
        )
    chosen = {id(p) for p in inner}
    outer = [(name, p) for name, p in named if id(p) not in chosen]
    rates: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.optimizer == "muon":
        muon = ShardedMuon if isinstance(inner[0], DTensor) else Muon
        first: Optimizer = muon(inner, **rates, adjust_lr_fn="match_rms_adamw")
    else:
        _require_whole_blocks([(name, p) for name, p in named if id(p) in chosen], config.optimizer)
        betas, make = (config.beta1, config.beta2), low_bit_optimizers()[config.optimizer]
        first = make(inner, **rates, betas=betas, eps=config.adam_eps, block_size=BLOCK)
    return ChainedOptimizer([first, _adamw(outer, config, fused)])


def _is_inner(name: str, parameter: Tensor, config: RunConfig) -> bool:
    if not name.startswith("blocks.") or parameter.ndim != 2 or name.endswith(".bias"):
        return False
    size = parameter.numel()
    return config.optimizer == "muon" or (size >= SMALLEST and size % BLOCK == 0)


Named = Sequence[tuple[str, Tensor]]
"""Parameters and their names."""


def _require_whole_blocks(named: Named, optimizer: str) -> None:
    """Raise a UserError if the shards of a parameter are no whole blocks: one rank has others."""
    for name, parameter in named:
        ranks = parameter.device_mesh.size() if isinstance(parameter, DTensor) else 1
        if len(parameter) % ranks or parameter.numel() // ranks % BLOCK:
            raise UserError(
                f"optimizer {optimizer} with --parallel fsdp: {ranks} ranks cannot share "
                f"'{name}', {tuple(parameter.shape)}, in whole blocks of {BLOCK} elements. Choose "
                "--parallel ddp, another number of ranks, or --set optimizer=adamw."
            )


def _groups(parameters: Named, config: RunConfig) -> list[dict[str, Any]]:
    """Matrices with weight decay, vectors without; experts' biases are vectors in a matrix."""
    matrices: list[Tensor] = []
    vectors: list[Tensor] = []
    for name, parameter in parameters:
        is_matrix = parameter.ndim >= 2 and not name.endswith(".bias")
        (matrices if is_matrix else vectors).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _sgd(parameters: Named, config: RunConfig, fused: bool) -> SGD:
    sgd = SGD(_groups(parameters, config), lr=config.lr, momentum=config.momentum, fused=fused)
    for _, parameter in parameters:
        # The fused kernel (torch 2.13) leaves a first buffer uninitialized where it skips the step.
        # From zeros, the first step is the same.
        if state := first_state(sgd, parameter):
            sgd.state[parameter] = state
    return sgd


def _adamw(parameters: Named, config: RunConfig, fused: bool) -> AdamW:
    return AdamW(
        _groups(parameters, config),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.adam_eps,
        fused=fused,
    )


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rate of all groups."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # torchao's, on the host
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def learning_rate(step: int, config: RunConfig) -> float:
    """The learning rate of `step`, from 1; it depends on no other state. After a linear warm-up,
    "cosine" decays to `min_lr x lr` at the last step, and "wsd" (warm-up, stable, decay) keeps the
    full rate, then decays linearly over the last `decay_fraction` of the steps."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "cosine":
        done = _share(step, config.warmup_steps, config.steps)
        remaining = 0.5 * (1 + math.cos(math.pi * done))
    else:
        stable_until = round(config.steps * (1 - config.decay_fraction))
        remaining = 1 - _share(step, max(config.warmup_steps, stable_until), config.steps)
    return config.lr * (config.min_lr + (1 - config.min_lr) * remaining)


def _share(step: int, start: int, end: int) -> float:
    """The fraction of the way from `start` to `end` that `step` has reached: 0 to 1."""
    return min(1.0, max(0.0, (step - start) / max(1, end - start)))


def low_bit_optimizers() -> dict[str, Any]:
    """The classes of torchao's AdamW, by the names of our options. Raises a MissingRequirement if
    torchao is missing or old. No other module imports torchao's optimizers."""
    try:
        from torchao.optim import AdamW8bit, AdamWFp8
    except ImportError as error:
        raise MissingRequirement(
            "The optimizers adamw8bit and adamwfp8 need torchao: pip install 'torchao>=0.18'. "
            "A new run can use --set optimizer=adamw."
        ) from error
    return {"adamw8bit": _sharded(AdamW8bit), "adamwfp8": _sharded(AdamWFp8)}


def _sharded(base: Any) -> Any:
    """A class like torchao's `base`, except that a shard with fewer than 4,096 elements, of a
    parameter with more, has moments in 8 bits, too."""
    return type(base.__name__, (base,), {"_new_buffer": _new_buffer})


def _new_buffer(optimizer: Any, parameter: Tensor, signed: bool) -> Tensor:
    rows = local_shard(parameter)
    moment: Tensor = optimizer._subclass_zeros(rows, signed, optimizer.block_size)
    if not isinstance(parameter, DTensor):
        return moment
    mesh, placements = parameter.device_mesh, parameter.placements
    size: Any = {"shape": parameter.shape, "stride": parameter.stride()}
    return DTensor.from_local(moment, mesh, placements, run_check=False, **size)
