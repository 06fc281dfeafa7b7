"""How a model is spread over ranks: DDP, a whole one on each, or FSDP2, which shares it out.
Gradients are summed over ranks, not averaged: each rank divides its loss by their number instead,
so that the gradient of an output is the same for any number of ranks, and so are its FP8 codes."""

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

from fp8stack.backends import Backend
from fp8stack.backends.fsdp import ShardedWeight
from fp8stack.backends.linear import LowPrecisionLinear
from fp8stack.backends.observe import fp8_linears
from fp8stack.config import RunConfig
from fp8stack.errors import UserError
from fp8stack.model.gpt import GPT
from fp8stack.precision import Plan

# Gradients are views of the buckets that DDP reduces: no copy of them.
DDP_OPTIONS = DistributedDataParallelKwargs(gradient_as_bucket_view=True)

TE_SHARDED = "--parallel fsdp cannot share out Transformer Engine's layers"


def require_divisible(config: RunConfig, ranks: int) -> None:
    """Raise a UserError unless each rank gets as much of a batch as any other."""
    if config.batch % (config.accumulate * ranks):
        micro = f" in {config.accumulate} micro-batches" if config.accumulate > 1 else ""
        raise UserError(
            f"batch {config.batch}{micro} cannot be shared equally by {ranks} ranks. Choose a "
            f"multiple of {config.accumulate * ranks}."
        )


def require_possible(plan: Plan, config: RunConfig, ranks: int) -> None:
    """Refuse what several ranks cannot do. Raises a UserError with what to choose instead."""
    if ranks > 1 and plan.backend == "te" and config.parallel == "fsdp":
        raise UserError(f"{TE_SHARDED}. Choose --parallel ddp, or --backend torch.")
    if ranks > 1 and config.grad_compression != "none" and config.parallel != "ddp":
        raise UserError(
            f"--grad-compression {config.grad_compression} with --parallel {config.parallel} is "
            "not possible: DDP alone has it. Choose --parallel ddp, or leave it out."
        )


def part_of(tokens: Tensor, rank: int, ranks: int, accumulate: int) -> Tensor:
    """A rank's share of each micro-batch, in order: [batch, ...] -> [batch / ranks, ...]."""
    if ranks == 1:
        return tokens
    share = len(tokens) // (accumulate * ranks)
    parts = tokens.view(accumulate, ranks, share, *tokens.shape[1:])
    return parts[:, rank].reshape(accumulate * share, *tokens.shape[1:])


def spread(
    model: nn.Module,
    backend: Backend,
    accelerator: Accelerator,
    config: RunConfig,
    *,
    compiled: bool = False,
) -> nn.Module:
    """The model, which may be `compiled`, as all ranks train it together. With FSDP2 its parameters
    become DTensors, each split by rows: optimizers are made after."""
    if config.parallel == "fsdp":
        assert isinstance(model, GPT)
        _share_out(model, backend, accelerator, compiled=compiled)
        return model
    wrapped: nn.Module = accelerator.prepare_model(model)
    assert isinstance(wrapped, DistributedDataParallel)
    wrapped.register_comm_hook(None, _sum_in_bf16 if config.grad_compression == "bf16" else _sum)
    return wrapped


def _share_out(model: GPT, backend: Backend, accelerator: Accelerator, compiled: bool) -> None:
    """FSDP2, block by block. (accelerate has it on GPUs alone, with an FP8 path of its own.)"""
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    rest = [part for part in model.children() if part is not model.blocks]
    for part in (*rest, *model.blocks, model):
        if part is not model:  # block by block: a device need not hold all at once
            part.to(accelerator.device)
        if part in rest:  # shared out with the root
            continue
        # Compiled code takes whole weights in float32; so do the root's layers.
        backend.share_out(None if compiled or part is model else part)
        # The root as well: else an evaluation would leave its parameters whole.
        sharded = fully_shard(part, mesh=mesh, reshard_after_forward=True)
        assert isinstance(sharded, FSDPModule)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has no other way to sum
    before = _BeforeGathering(model, backend)
    model.register_forward_pre_hook(before, prepend=True)


class _BeforeGathering:
    """A hook that makes ready for what FSDP2 gathers in a pass of the model. A layer that left FP8,
    or came back to it, has its weight gathered in other memory from then on: FSDP2 is made to
    forget what it has of it (private names of torch 2.11 to 2.13)."""

    def __init__(self, model: GPT, backend: Backend) -> None:
        self.backend = backend
        self.gathered = {
            layer: layer.in_fp8
            for layer in fp8_linears(model).values()
            if isinstance(layer.weight, DTensor)
            and isinstance(layer.weight.to_local(), ShardedWeight)
        }

    def __call__(self, model: nn.Module, args: tuple[object, ...]) -> None:
        for layer, was in self.gathered.items():
            if layer.in_fp8 != was:
                self.gathered[layer] = layer.in_fp8
                _forget_gathered(model, layer)
        self.backend.before_gathering()


def _forget_gathered(model: nn.Module, layer: LowPrecisionLinear) -> None:
    for part in model.modules():
        if isinstance(part, FSDPModule) and (group := part._get_fsdp_state()._fsdp_param_group):
            for parameter in group.fsdp_params:
                if parameter.sharded_param is layer.weight:
                    parameter.all_gather_outputs, parameter._unsharded_inner_tensors = [], []
                    parameter.__dict__.pop("_unsharded_param", None)


def _sum(state: object, bucket: dist.GradBucket) -> Future[Tensor]:
    """DDP's hook: the sum over ranks, where it has their mean by itself.

    Each gradient by itself: with three ranks or more, the order in which a value is summed depends
    on its place in what is reduced, and DDP lays its buckets out anew after the first step of each
    start. So a run that goes on would else not repeat to the bit.
    """
    buffer = bucket.buffer()
    works: list[Any] = [dist.all_reduce(part, async_op=True) for part in bucket.gradients()]
    done = torch.futures.collect_all([work.get_future() for work in works])
    return done.then(lambda _: buffer)


def _sum_in_bf16(state: object, bucket: dist.GradBucket) -> Future[Tensor]:
    """DDP's hook: `_sum` of gradients that are rounded to bfloat16 before; half the bytes travel.

    The sum is rounded to bfloat16, too, and written back in the gradients' own dtype. (What
    torch's wrapper returns cannot be registered by itself: by its name, DDP takes it for NCCL's
    alone. gloo adds bfloat16 as well.)
    """
    return bf16_compress_wrapper(_sum)(state, bucket)


def whole(tensor: Tensor) -> Tensor:
    """A tensor that ranks share, in full on each of them: a collective; others as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
