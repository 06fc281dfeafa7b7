"""Data parallel training in FP8, in a loop of your own. On a CPU it runs with gloo.

torchrun --nproc-per-node 2 examples/05_two_gpus_torchrun.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fp8stack

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--recipe", default="delayed")
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
if gpus:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpus else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()

# Convert first, then wrap. Ranks share one amax history: before each update of the scales, amaxes
# are reduced to the maximum over the ranks, so that all cast alike.
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
hardware = fp8stack.probe(device.type)
fp8stack.convert(model, fp8stack.resolve(args.recipe, hardware))
if rank == 0:
    print(*fp8stack.plan_of(model).summary(), sep="\n")
parallel = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)

data = torch.Generator(device).manual_seed(rank)  # each rank has a part of the data
for step in range(args.steps):
    x = torch.randn(32, 64, device=device, generator=data)
    loss = (parallel(x) - x.flip(-1)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss, dist.ReduceOp.AVG if gpus else dist.ReduceOp.SUM)
    if rank == 0 and (step + 1) % 5 == 0:
        print(f"step {step + 1}: loss {loss.item() / (1 if gpus else ranks):.4f}")

# After the update, all ranks have the same state, to the bit, and one rank saves it.
if (delayed := fp8stack.delayed_scaling_of(model)) is not None:
    delayed.apply_pending_update()
for name, value in fp8stack.fp8_state(model).items():
    first = value.clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, value), name
if rank == 0:
    print("ranks have the same FP8 state")
del parallel  # before its process group: the other way round, torch may wait for ever
dist.destroy_process_group()
