"""Fine-tune a model of transformers in FP8, in a plain PyTorch loop; save it with its FP8 state.

python examples/03_convert_hugging_face.py                       # a tiny model with random weights
python examples/03_convert_hugging_face.py --model Qwen/Qwen3-0.6B --recipe current
"""

import argparse
from pathlib import Path

import safetensors.torch
import torch
import transformers

import fp8stack

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", help="a name on the Hugging Face Hub, or a folder")
parser.add_argument("--recipe", default="delayed")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--out", type=Path, default=Path("runs/converted"))
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
if args.model:  # float32 master weights: the layers cast from them
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
else:
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
model.to(device)

# Replaces the linear layers in place. Parameters, their names and ties stay, so the optimizer,
# checkpoints and the rest of the loop do not change.
fp8stack.convert(model, fp8stack.resolve(args.recipe, fp8stack.probe()))
print(*fp8stack.plan_of(model).summary(), sep="\n")

# Real data would be tokenized with the model's own tokenizer; here each byte is a token.
text = Path(__file__).read_bytes()
tokens = torch.tensor(list(text), device=device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4 if args.model else 3e-3)
for step in range(args.steps):
    starts = torch.randint(len(tokens) - 64, (4,))
    batch = torch.stack([tokens[start : start + 64] for start in starts])
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1}: loss {loss.item():.4f}")

# The weights are ordinary: from_pretrained loads them. The amax histories and scales go beside
# them; fp8stack.load_fp8_state puts them back when you resume.
model.save_pretrained(args.out)
safetensors.torch.save_file(fp8stack.fp8_state(model), args.out / "fp8.safetensors")
