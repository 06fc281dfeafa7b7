"""LoRA with PEFT on a frozen model in FP8: the base layers run in FP8, adapters in their own dtype.

pip install peft
python examples/peft_lora.py
python examples/peft_lora.py --model Qwen/Qwen3-0.6B --targets q_proj,v_proj
"""

import argparse
from pathlib import Path

import peft
import torch
import transformers

import fp8stack

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", help="a name on the Hugging Face Hub, or a folder")
parser.add_argument("--targets", default="c_attn,c_fc", help="the layers that get adapters")
parser.add_argument("--recipe", default="delayed")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--out", default="runs/lora")
args = parser.parse_args()

torch.manual_seed(0)
if args.model:
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
else:
    config = transformers.GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4)
    model = transformers.GPT2LMHeadModel(config)

# Convert first: PEFT then wraps layers that run in FP8, and its small adapters stay as they are.
# (To convert a model that has adapters already, pass exclude="*lora_*".)
fp8stack.convert(model, fp8stack.resolve(args.recipe, fp8stack.probe()))
targets = args.targets.split(",")
lora = peft.LoraConfig(r=16, target_modules=targets, task_type="CAUSAL_LM")
model = peft.get_peft_model(model, lora)
model.print_trainable_parameters()

text = torch.tensor(list(Path(__file__).read_bytes()))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
for step in range(args.steps):
    starts = torch.randint(len(text) - 64, (4,))
    batch = torch.stack([text[start : start + 64] for start in starts])
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1}: loss {loss.item():.4f}")
model.save_pretrained(args.out)  # the adapters alone
