"""Train a GPT in FP8 and look at what came out. Two to four minutes on two CPU cores:

python examples/01_first_run.py
"""

import argparse
import json

import fp8stack

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--recipe", default="delayed", help="`fp8stack list recipes` has the others")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--out", default="runs/first")
parser.add_argument("--tiny", action="store_true", help="a smaller model, for a quick look")
args = parser.parse_args()

# What the recipe means on this machine. Without an FP8 GPU the same FP8 values are emulated.
hardware = fp8stack.probe()
plan = fp8stack.plan_for(fp8stack.load_config("gpt-nano"), args.recipe, hardware)
print(*plan.summary(), sep="\n")

# Without `data` it trains on the source of Python's standard library, which every machine has.
# Any key of a run file is an argument here: docs/configuration.md.
keys = {"recipe": args.recipe, "steps": args.steps, "out": args.out}
if args.tiny:
    keys |= {"context": 32, "model_overrides": {"layers": 1, "width": 64}, "eval_windows": 4}
run = fp8stack.pretrain(**keys, overwrite=True)

# The run folder: metrics.jsonl has a row per step, loss.png the plot, sample.txt some text.
rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
losses = [row["loss"] for row in rows if row.get("loss") is not None]
print(f"\nloss {losses[0]:.3f} -> {losses[-1]:.3f} nats per byte; see {run}/loss.png")

# A checkpoint is loaded in any recipe: the weights in it are float32.
model = fp8stack.load(run, recipe="fp32")
print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
print((run / "sample.txt").read_text())
