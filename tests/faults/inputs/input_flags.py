"""Bad configurations, flags and data files, and what must be said of each (R7)."""

import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from fp8stack.model.config import GPTConfig
from fp8stack.planning.run_config import GuardConfig, RunConfig
from tests.faults.bounded import called

COMMON = (
    "--set steps=1 --set batch=2 --set context=16 --set data=good.txt --set recipe=fp32 --out r "
    "--set model_overrides.layers=1 --set model_overrides.width=32 --set model_overrides.heads=2 "
    "--set sample_tokens=0 --set eval_windows=1"
)
"""Flags with which a run would be done soon if the input were good; later words win."""

SETTINGS = {  # --set, as it stands there: what must be in the message
    "steps=1_0_": "steps = '1_0_'", "steps=": "steps = ''", "context=129": "--context 129",
    "accumulate=3": "not divisible by accumulate 3", "lr=1e400": "lr = inf",
    "lr=1979-05-27": "lr = ", f"lr={'9' * 5000}": "lr = ",
    "lr=0.1\nsteps=5": "sets more than one key",
    "compile_mode=reduce-overhead": "'max-autotune-no-cudagraphs'",
    "what_if=['fp33']": "No recipe 'fp33'", "guard=1": "guard = 1", "guard.windows=9":
    "flags: guard: No key 'windows'. Did you mean 'window'? Nearest: window",
    "model_overrides.experts.bias=nan": "experts.bias = nan: Input should be a finite number",
    "guard.warmup=999": "guard.warmup 999", "model_overrides.heads=3": "not divisible by heads 3",
    "model_overrides.kv_heads=3": "kv_heads 3",
    "model_overrides.vocabulary=100": "has a vocabulary of 100",
    "model_overrides.width=2147483648": "GiB",
    "recipe_overrides.head=true": "need quantizers", "setps=1": "Did you mean 'steps'?",
    "=1": "is not key=value", "steps.x=1": "steps", "layers=2": "--set model.layers=VALUE",
    "learning_rate=1": "Did you mean 'lr'?",
    "interval=4": "there is no key 'interval': scales of delayed scaling",
    "model.layres=2": "Did you mean 'layers'?", "model=''": "No model ''",
    "data=''": "data is empty",
}  # fmt: skip
RECIPES = {  # --recipe delayed, with this setting of the recipe
    "interval=4": "ignores its own interval. Leave it out",
    "power_of_two=true": "power_of_two changes nothing",
    "exclude=['blocks.9.*']": "the pattern 'blocks.9.*' in exclude matches no layer",
    "exclude_last_blocks=99": "exclude_last_blocks = 99, and the model has 1 block. Give 1 at most",
}
FLAGS = {
    "--steps abc": "Invalid value for '--steps' = 'abc': Input should be", "--steps": "--steps",
    "--model gpt2": "Did you mean 'gpt2-124m'?", "--model ./none.toml": "none.toml",
    "--model folder.toml": "folder.toml",
    "--recipe fp8": "No recipe 'fp8'. Did you mean 'delayed'? Known: auto, bf16",
    "--recipe 'a\nb'": "a\\nb", "--recipe nested.toml": "nested", "--recipe utf16.toml": "utf16",
    "--recipe empty.toml": "no quantizer", "--recipe twice.toml": "twice.toml",
    "--config bom.toml": "bom.toml", "--config table.toml": "key",
    "--config ''": "--config is empty. Give a run file",
    "--config good.txt": "good.txt is not valid TOML", "--config pipe": "no regular file",
    "--data none": "none'. Give a file or a folder", "--data llm.bin": "llm.c",
    "--data hollow": "hollow", "--data 'a\0b'": "NUL",
    "--data loop": "loop", "--data link.txt": "nowhere.txt",
    "--resume none": "--resume none", "--resume folder.toml": "folder.toml",
    "--init-from folder.toml": "No run and no checkpoint at", f"--init-from {'x' * 5000}": "xxx",
    "--init-from ''": "init_from is empty", "--out good.txt": "good.txt is a file",
    "--out good.txt/r": "good.txt is a file. Give a path in", "--out mine":
    "mine/sample.txt is in the way", "--out h\udcff": "out is not valid UTF-8",
    "--what-if fp7": "fp7", "--what-if mxfp8 --telemetry-every 0":
    "what_if needs telemetry", "--device cuda": "CUDA", "--backend te --strict --recipe delayed":
    "--strict: 'delayed' does not run as asked: ", "--recipe block --backend torch --strict":
    "'block' does not run as asked: torch has no block GEMM on a CPU",
    "--recipe delayed --backend torch --strict --set model.width=24":
    "blocks.0.attention.qkv cannot run in FP8: 24 in features and 72 out features, not divisible",
    "--recipe auto --set recipe.head=maybe": "recipe.head = maybe needs a recipe by name",
    "--set model.layers=2048 --set model.mlp_width=2147483648": "parameters are the most",
    "--recipe fp16 --set loss_scale=0.5": "loss_scale 0.5 is not between min_loss_scale 1 and max",
    "--recipe fp16 --set loss_scale=0.25": "lower min_loss_scale to 0.25",
    "--recipe fp16 --set first_loss_scale=262145": "raise max_loss_scale",
    "--threads two": "threads", "--threads 0": "threads", "--threads 99999": "Give --threads 1 to",
    "--profile --set profile_step=99": "profile_step 99 is after the last step",
    "--nonsense": "--nonsense", "--clip 1": "--set clip=VALUE",
    "--config shape.toml": "Give it as --model shape.toml", "extra": "extra",
}  # fmt: skip
OTHERS = {
    "pretend": "No such command 'pretend'. Did you mean 'pretrain'? See --help.",
    "plan --recipes x": "No such option: --recipes (Possible options: --recipe). See --help.",
    "report": "Missing argument 'RUNS'. See --help.", "report none": "No run in 'none'",
    "doctor --capability 10": "is no compute capability",
    "prepare good.txt --tokenizer '' --out t": "No tokenizer ''",
    "doctor --capability 99.9": "No GPU has compute capability 99.9. Known: 3.0",
    "estimate --memory 80GB": "--memory",
    "list model": "No kind to list 'model'. Did you mean 'models'?", "list runs nowhere":
    "No folder nowhere. Give the one that your runs are in.", "list models there":
    "FOLDER is for `list runs`. Leave it out.", "list runs --capability 9.0":
    "--capability is for `list recipes`.", "show nowhere": "No run in 'nowhere'",
    "compare --recipes ''": "empty name", "compare --seeds 0": "--seeds 0",
    "compare --recipes fp32,fp32": "twice", "compare --baseline mxfp8 --recipes fp32,bf16":
    "--baseline", "compare --set seed=1": "--seeds", "compare --from none": "none",
    "compare --out good.txt": "good.txt is a file", "bench none": "none",
    "compare --threads 99999": "Give --threads 1 to", "eval run --threads 99999":
    "Give --threads 1 to", "bench step --threads 99999": "Give --threads 1 to",
    "bench step --recipe none": "No FP8 recipe 'none'", "bench step --rounds 1": "--rounds",
}  # fmt: skip


def wrong_values(schema: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """Each key of `schema`, with values in TOML of another type and beyond its limits."""
    wrong = {"number": "nan", "integer": "1.5", "boolean": "maybe"}
    for key, entry in schema.model_json_schema()["properties"].items():
        entry |= entry.get("anyOf", [{}])[0]
        value = "nonsense" if "enum" in entry else wrong.get(entry.get("type"))
        values = [value] if value else []
        values += [str(entry["minimum"] - 1)] if "minimum" in entry else []
        values += [str(entry["maximum"] * 2 + 1)] if "maximum" in entry else []
        yield from ((key, value) for value in values)


def bad_input() -> dict[str, tuple[list[str], str]]:
    """Each bad input by a name: the command's words, and what the message must hold."""
    rows = [(["--set", setting], message) for setting, message in SETTINGS.items()]
    for table, schema in (("", RunConfig), ("guard.", GuardConfig), ("model.", GPTConfig)):
        for key, value in wrong_values(schema):
            rows.append((["--set", f"{table}{key}={value}"], f"{key} = "))
    rows += [
        (["--recipe", "delayed", "--set", f"recipe.{setting}"], message)
        for setting, message in RECIPES.items()
    ]
    rows += [(shlex.split(words), message) for words, message in FLAGS.items()]
    rows = [(["pretrain", *shlex.split(COMMON), *words], message) for words, message in rows]
    rows += [(shlex.split(words), message) for words, message in OTHERS.items()]
    return {" ".join(words).removeprefix(f"pretrain {COMMON} "): (words, m) for words, m in rows}


def make_files(folder: Path) -> None:
    """The files that the bad input names."""
    texts = {
        "good.txt": "to be or not to be\n" * 100, "nested.toml": "steps = " + "[" * 9999,
        "empty.toml": "", "twice.toml": 'scaling = "none"\nscaling = "none"',
        "table.toml": "[steps]\nkey = 1", "bom.toml": "\ufeffstepz = 1",
        "shape.toml": "layers = 1\nwidth = 32", "mine/sample.txt": "mine",
        "folder.toml/x": "x", "hollow/.hidden": "text",
    }  # fmt: skip
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "utf16.toml").write_bytes("scaling = 'none'".encode("utf-16"))
    np.array([20240520 % 2**16, 20240520 >> 16, *[1] * 999], "<u2").tofile(folder / "llm.bin")
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to("loop")
    (folder / "link.txt").symlink_to("nowhere.txt")


def problem(folder: Path, arguments: list[str], message: str) -> str:
    """Run the command on bad input in `folder`, which holds the files of `make_files`. Returns the
    problem, "" if there is none."""
    before = sorted(folder.rglob("*"))
    ended = called(arguments, folder)
    created = sorted(set(folder.rglob("*")) - set(before))
    for path in created:
        shutil.rmtree(path, ignore_errors=True)
    if ended.code != 2 or not ended.is_one_line:
        return f"exit {ended.code}: {ended.stderr[-500:] or ended.stdout[-200:]}"
    if message not in ended.stderr:
        return f"'{message}' is not said: {ended.stderr}"
    return f"left behind: {created[0]}" if created else ""
