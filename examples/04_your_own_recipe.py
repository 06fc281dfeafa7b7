"""Write a recipe of your own and compare it with the one it started from.

python examples/04_your_own_recipe.py
"""

import argparse
import json
from pathlib import Path

import fp8stack

# A recipe is a table of quantizers, one per operand of the GEMMs. `like` takes over another's;
# what follows changes it. docs/configuration.md has every key.
RECIPE = """
description = "delayed scaling that adapts fast, with E4M3 gradients in blocks"
like = "delayed"
history_length = 16              # forget old amaxes sooner than after 1024 passes
exclude = ["*.mlp.down"]         # keep these layers in the compute dtype

[grad_output]                    # gradients are scaled by themselves, not by history
format = "e4m3"
amax = "current"
block = [1, 128]                 # one scale per 128 elements of a row
"""

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--out", type=Path, default=Path("runs/own-recipe"))
parser.add_argument("--tiny", action="store_true", help="a smaller model, for a quick look")
args = parser.parse_args()

args.out.mkdir(parents=True, exist_ok=True)
own = args.out / "fast.toml"
own.write_text(RECIPE)

# A mistake is an error that says what would do: try `formt = "e4m3"`.
print(fp8stack.load_recipe(str(own)).quantizers)

keys = {"steps": args.steps, "seed": 0}
if args.tiny:
    keys |= {"context": 32, "model_overrides": {"layers": 1, "width": 64}, "eval_windows": 4}
for recipe in ("fp32", "delayed", str(own)):
    name = Path(recipe).stem
    run = fp8stack.pretrain(recipe=recipe, out=args.out / name, overwrite=True, **keys)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["val_loss"] for row in rows if row.get("val_loss") is not None]
    print(f"{name:8} validation loss {losses[-1]:.4f}")
# One seed says little. `fp8stack compare --recipes delayed,./fast.toml --seeds 5` has intervals.
