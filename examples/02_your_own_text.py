"""Train on a text of your own, and have the model continue a prompt.

python examples/02_your_own_text.py README.md --prompt "FP8 "
"""

import argparse

import torch

import fp8stack

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("text", help="a text file, or a folder of them")
parser.add_argument("--prompt", default="The ")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--out", default="runs/own-text")
parser.add_argument("--tiny", action="store_true", help="a smaller model, for a quick look")
args = parser.parse_args()

# Tokens are bytes unless you say otherwise: tokenizer="gpt2", or the path of a tokenizer.json.
# For much text, tokenize once with `fp8stack prepare` and pass its folder as `data`. It reads
# JSON lines and parquet too, and skips other files.
keys = {"data": args.text, "recipe": "delayed", "steps": args.steps, "out": args.out}
if args.tiny:
    keys |= {"context": 32, "model_overrides": {"layers": 1, "width": 64}, "eval_windows": 4}
run = fp8stack.pretrain(**keys, overwrite=True)

model = fp8stack.load(run)  # eval mode: tokens [B, T] -> logits [B, T, vocabulary]
tokenizer = fp8stack.load_tokenizer(str(run / "tokenizer.json"))
tokens = tokenizer.encode(args.prompt)
context = model.config.context
torch.manual_seed(0)
with torch.no_grad():
    for _ in range(100):
        logits = model(torch.tensor([tokens[-context:]]))[0, -1]
        tokens.append(int(torch.multinomial((logits / 0.8).softmax(-1), 1)))
print(tokenizer.decode(tokens))
# The same, faster: fp8stack generate runs/own-text --prompt "FP8 " --tokens 100
