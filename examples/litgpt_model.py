"""litgpt's GPT in FP8, in a plain PyTorch loop.

pip install litgpt
python examples/litgpt_model.py
python examples/litgpt_model.py --model Llama-3.2-1B --recipe current
"""

import argparse
from pathlib import Path

import torch
from litgpt import GPT, Config

import fp8stack

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="pythia-14m", help="a name that litgpt knows")
parser.add_argument("--recipe", default="delayed")
parser.add_argument("--steps", type=int, default=10)
args = parser.parse_args()

# Random weights in the shape of a model; `litgpt download` and its checkpoint give real ones.
torch.manual_seed(0)
config = Config.from_name(args.model, block_size=128)
model = GPT(config)
fp8stack.convert(model, fp8stack.resolve(args.recipe, fp8stack.probe()))
print(*fp8stack.plan_of(model).summary(), sep="\n")

text = torch.tensor(list(Path(__file__).read_bytes()))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(args.steps):
    starts = torch.randint(len(text) - 65, (4,))
    batch = torch.stack([text[start : start + 65] for start in starts])
    logits = model(batch[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1}: loss {loss.item():.4f}")

# In litgpt's own `litgpt pretrain`, call `convert` right after it makes its GPT. Save
# fp8stack.fp8_state(model) with each checkpoint, to resume delayed scaling exactly.
