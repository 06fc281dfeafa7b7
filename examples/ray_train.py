"""Data parallel training in FP8 with Ray Train: two workers, on CPUs over gloo.

pip install "ray[train]"
python examples/ray_train.py
"""

import argparse
import tempfile
from pathlib import Path

import ray.train
import torch
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

import fp8stack


def train_loop(config):
    """What each worker does. A checkpoint has the FP8 state beside model and optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    # Convert first: prepare_model wraps the model in DDP. The workers share one amax history.
    fp8stack.convert(model, fp8stack.resolve("delayed", fp8stack.probe()))
    wrapped = prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if checkpoint := ray.train.get_checkpoint():  # after a failure
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder, "state.pt"), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        fp8stack.load_fp8_state(model, state["fp8"])
    device, rank = next(model.parameters()).device, ray.train.get_context().get_world_rank()
    data = torch.Generator(device).manual_seed(rank)  # each worker has a part of the data
    for _ in range(config["steps"]):
        x = torch.randn(32, 64, device=device, generator=data)
        loss = (wrapped(x) - x.flip(-1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state["fp8"] = fp8stack.fp8_state(model)  # the same on all workers
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state, Path(folder, "state.pt"))
        saved = ray.train.Checkpoint.from_directory(folder) if rank == 0 else None
        ray.train.report({"loss": loss.item()}, checkpoint=saved)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"steps": args.steps},
        scaling_config=ray.train.ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available()),
        run_config=ray.train.RunConfig(storage_path=str(Path("runs/ray").absolute())),
    )
    print(trainer.fit().metrics)
