"""Spread a model over ranks: by DDP, with a full model on every rank, or by FSDP2, which shards it.
Gradients are summed over ranks, not averaged. Every rank divides its loss by the number of ranks
instead, so that the gradient of an output, and its FP8 codes, are the same for any number of
ranks."""

from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from fp8stack.common.errors import UserError
from fp8stack.layers.fsdp import ShardedWeight, local_shard
from fp8stack.model.gpt import GPT
from fp8stack.planning.run_config import RunConfig

# Gradients are views of the buckets that DDP reduces, which saves a copy.
DDP_OPTIONS = DistributedDataParallelKwargs(gradient_as_bucket_view=True)


def part_of(tokens: Tensor, rank: int, ranks: int, accumulate: int) -> Tensor:
    """A rank's rows of every micro-batch, in order: [batch, ...] -> [batch / ranks, ...]."""
    if ranks == 1:
        return tokens
    share = len(tokens) // (accumulate * ranks)
    micro_batches = tokens.view(accumulate, ranks, share, *tokens.shape[1:])
    return micro_batches[:, rank].reshape(accumulate * share, *tokens.shape[1:])


def spread(
    model: GPT, accelerator: Accelerator, config: RunConfig, around: GPT | None = None
) -> nn.Module:
    """Wrap the model, which may be compiled, for training on several ranks; see `model_in` for
    `around`. FSDP2 turns parameters into DTensors that are sharded by rows: build the optimizer
    after the first call."""
    if config.parallel == "fsdp":
        fully_shard_model(model, accelerator, around)
        return model
    wrapped: nn.Module = accelerator.prepare_model(model)
    if not isinstance(wrapped, DistributedDataParallel):
        raise UserError(
            "accelerate's configuration asks for a dynamo backend or FSDP, which fp8stack sets by "
            "itself. Leave them out there, and give --compile or --parallel fsdp."
        )
    one_by_one = _sums_one_by_one(config, accelerator.device, accelerator.num_processes)
    hook = _sum_in_bf16 if config.grad_compression == "bf16" else _sum
    wrapped.register_comm_hook(one_by_one, hook)
    return wrapped


def fully_shard_model(
    model: GPT, accelerator: Accelerator, around: GPT | None = None, *, trains: bool = True
) -> None:
    """Shard by FSDP2, block by block. (accelerate's FSDP2 needs a GPU, and has its own FP8 path.)

    Args:
        around: a sharded model, whose shards `model`, which is on meta, takes instead of its own.
        trains: whether `model` takes the parameters themselves, which the optimizer changes, and
            `around` is not used any more.
    """
    backend = model.backend
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    root_layers = [module for module in model.children() if module is not model.blocks]
    for module in (*root_layers, *model.blocks, model):
        if module is not model and around is None:  # the full model may not fit on the device
            module.to(accelerator.device)
        tied = module is model.lm_head and model.config.tied
        if module is not model and not tied:
            backend.prepare_sharding(module)
        if module in root_layers:  # sharded with the root
            continue
        # For the root as well: else its parameters stay gathered after an evaluation.
        sharded = fully_shard(module, mesh=mesh, reshard_after_forward=True)
        assert isinstance(sharded, FSDPModule)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has no other way to sum
    if around is not None:
        _take_shards(model, around, trains)
    model.register_forward_pre_hook(lambda *_: backend.before_all_gather(), prepend=True)


@torch.no_grad()
def _take_shards(model: GPT, around: GPT, trains: bool) -> None:
    """Replace the parameters of `model`, sharded on meta, by those of `around`. Shards that layers
    cast before they are gathered are wrapped for the layers of `model`."""
    for path, module in model.named_modules():
        for name, on_meta in module._parameters.items():
            if on_meta is None:
                continue
            parameter: Any = around.get_parameter(f"{path}.{name}" if path else name)
            like, rows = on_meta.to_local(), local_shard(parameter)
            rows = like.like(rows) if isinstance(like, ShardedWeight) else rows
            if trains:
                parameter._local_tensor = rows
            else:
                shard: Any = DTensor(rows, parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]
                parameter = nn.Parameter(shard, requires_grad=False)
            module._parameters[name] = parameter


def _sums_one_by_one(config: RunConfig, device: torch.device, ranks: int) -> bool:
    """Whether to reduce every gradient separately, so that a resumed run matches to the bit.

    With three or more ranks, the order in which a value is summed depends on its position in the
    reduced tensor, and DDP rebuilds its buckets after the first step of every process.
    """
    repeats = device.type == "cpu" if config.deterministic is None else config.deterministic
    return repeats and ranks > 2


def _sum(one_by_one: bool, bucket: dist.GradBucket) -> Future[Tensor]:
    """A communication hook that sums the gradients of a bucket over ranks, by one all-reduce or
    `one_by_one`; DDP's default averages them."""
    buffer = bucket.buffer()
    tensors = bucket.gradients() if one_by_one else [buffer]
    works: list[Any] = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    done = torch.futures.collect_all([work.get_future() for work in works])
    return done.then(lambda _: buffer)


def _sum_in_bf16(one_by_one: bool, bucket: dist.GradBucket) -> Future[Tensor]:
    """A communication hook that sums gradients rounded to bfloat16, which sends half the bytes.

    The sum is rounded to bfloat16, too, and written back in the gradients' dtype. (The result of
    torch's wrapper cannot be registered itself: DDP decides by its name that it needs NCCL. gloo
    can add bfloat16 as well.)
    """
    return bf16_compress_wrapper(_sum)(one_by_one, bucket)


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor of a DTensor, by a collective; any other tensor unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
