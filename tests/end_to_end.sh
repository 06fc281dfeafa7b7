#!/bin/bash
# From a folder of JSONL to a model that transformers loads: end_to_end.sh JSONL FOLDER
# Every step is a command that a user would type; what they wrote is in FOLDER.
set -euo pipefail
jsonl=$(realpath "$1")
mkdir -p "$2"
cd "$2"

fp8stack prepare "$jsonl" --train-bpe 512 --held-out 0.1 --workers 1 --out tokens

fp8stack pretrain --recipe delayed --data tokens --steps 60 --batch 8 --context 64 --lr 3e-3 \
    --set model_overrides.vocabulary=512 --set model_overrides.layers=2 \
    --set model_overrides.width=64 --set model_overrides.heads=2 --set warmup_steps=10 \
    --set eval_windows=8 --set sample_tokens=16 --eval-every 30 --telemetry-every 20 \
    --device cpu --out run > pretrain.txt

fp8stack report run
fp8stack report run --text > report.txt
fp8stack eval run --recipes fp32,delayed --json > eval.json
fp8stack export run --format hf --out exported

# What transformers makes of the exported folder, without a line of ours.
HF_HUB_OFFLINE=1 python - <<'PYTHON'
import torch
import transformers
from safetensors.torch import save_file

model = transformers.AutoModelForCausalLM.from_pretrained("exported", dtype=torch.float32)
tokenizer = transformers.AutoTokenizer.from_pretrained("exported")
tokens = tokenizer("Once there was a number", return_tensors="pt").input_ids
with torch.no_grad():
    logits = model(tokens).logits
written = model.generate(tokens, max_new_tokens=8, do_sample=False)[0]
text = tokenizer.decode(written, skip_special_tokens=True)
save_file({"tokens": tokens, "logits": logits, "written": written}, "transformers.safetensors")
open("transformers.txt", "w", encoding="utf-8").write(text)
PYTHON

fp8stack generate run --prompt "Once there was a number" --tokens 8 --temperature 0 \
    --recipe fp32 > generated.txt
