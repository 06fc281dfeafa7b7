"""Fine-tune on texts in FP8 with TRL's SFTTrainer, and resume to the bit. Nothing is downloaded.

pip install trl
python examples/trl_sft.py
"""

import argparse
from pathlib import Path

import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import fp8stack
from fp8stack.integrations.transformers import FP8StateCallback

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--recipe", default="delayed")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--out", default="runs/sft")
args = parser.parse_args()

# A real run takes them from AutoTokenizer and AutoModelForCausalLM.
lines = [line for line in Path(__file__).read_text(encoding="utf-8").splitlines() if line]
bpe = Tokenizer(models.BPE())
bpe.pre_tokenizer = pre_tokenizers.ByteLevel()
bpe.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=320, special_tokens=["<end>"]))
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=bpe, eos_token="<end>", pad_token="<end>"
)


def trainer(steps):
    """A converted model in an SFTTrainer, which is a Trainer of transformers."""
    transformers.set_seed(0)
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer), n_positions=64, n_embd=64, n_layer=2, n_head=4,
        bos_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = fp8stack.convert(transformers.GPT2LMHeadModel(config), args.recipe)
    options = trl.SFTConfig(
        args.out, max_steps=steps, save_steps=3, logging_steps=1, max_length=64,
        bf16=False, report_to="none",
    )  # fmt: skip
    return trl.SFTTrainer(
        model, options, train_dataset=Dataset.from_dict({"text": lines}),
        processing_class=tokenizer, callbacks=[FP8StateCallback()],
    )  # fmt: skip


losses = []
for resume in (None, f"{args.out}/checkpoint-3"):
    run = trainer(args.steps)
    run.train(resume_from_checkpoint=resume)
    losses.append([row["loss"] for row in run.state.log_history if "loss" in row])
assert losses[0] == losses[1], losses
print("the resumed run has the same losses:", *losses[0])
