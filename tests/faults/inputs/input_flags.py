"""Over a hundred bad configurations, flags and data files, and what must be said of each (R7)."""

import os
import shlex
import shutil
from pathlib import Path

import numpy as np

from tests.faults.bounded import called

COMMON = (
    "--set steps=1 --set batch=2 --set context=16 --set data=good.txt --set recipe=fp32 --out r "
    "--set model_overrides.layers=1 --set model_overrides.width=32 --set model_overrides.heads=2 "
    "--set sample_tokens=0 --set eval_windows=1"
)
"""Flags with which a run would be done soon if the input were good; later words win."""

SETTINGS = {  # --set, as it stands there: what must be in the message
    "steps=0": "steps = 0", "steps=-5": "steps = -5", "steps=1.5": "steps = 1.5",
    "steps=true": "steps = True", "steps=1_0_": "steps = '1_0_'", "steps=[1]": "steps = [1]",
    "steps={a=1}": "steps = {", "steps=1e9": "steps = 1000000000.0", "steps=0x": "steps = '0x'",
    "steps=": "steps = ''", "steps=99999999999999999999": "steps = 99999999999999999999",
    "batch=0": "batch = 0", "batch=2.0": "batch = 2.0", "batch=99999999999999": "batch",
    "context=0": "context = 0", "context=-1": "context = -1", "context=129": "--context 129",
    "accumulate=0": "accumulate = 0", "accumulate=3": "not divisible by accumulate 3",
    "lr=-1": "lr = -1", "lr=0": "lr = 0", "lr=nan": "lr = nan", "lr=-inf": "lr = -inf",
    "lr=1e400": "lr = inf", "lr=one": "lr = 'one'", "lr=1979-05-27": "lr = ",
    "schedule=linear": "schedule = 'linear'", "schedule=1": "schedule = 1",
    "warmup_steps=-1": "warmup_steps = -1", "decay_fraction=1.1": "decay_fraction = 1.1",
    "min_lr=-0.1": "min_lr = -0.1", "weight_decay=-1": "weight_decay = -1", "beta1=1": "beta1 = 1",
    "beta2=1.5": "beta2 = 1.5", "adam_eps=0": "adam_eps = 0", "clip=-1": "clip = -1",
    "log_every=0": "log_every = 0", "eval_every=0": "eval_every = 0",
    "eval_windows=0": "eval_windows = 0", "save_every=0": "save_every = 0",
    "keep_checkpoints=1": "keep_checkpoints = 1", "sample_tokens=-1": "sample_tokens = -1",
    "temperature=0": "temperature = 0", "workers=-1": "workers = -1", "workers=65": "workers = 65",
    "seed=9223372036854775808": "seed = 9223372036854775808", "compile=maybe": "compile = 'maybe'",
    "telemetry_every=-1": "telemetry_every = -1", "strict=1": "strict = 1",
    "what_if=['fp33']": "No recipe 'fp33'", "what_if=[1]": "what_if.0 = 1",
    "guard=1": "guard = 1", "guard.window=7": "guard.window = 7", "guard.patience=0": "patience",
    "guard.windows=9": "Did you mean 'window'?", "guard.warmup=999": "guard.warmup 999",
    "guard.deviations=0": "guard.deviations = 0", "guard.loss_factor=1": "guard.loss_factor = 1",
    "guard.overflows=4": "guard.overflows = 4", "model_overrides=1": "model_overrides = 1",
    "model_overrides.layers=0": "layers = 0", "model_overrides.layers=two": "layers = 'two'",
    "model_overrides.heads=3": "not divisible by heads 3",
    "model_overrides.kv_heads=3": "kv_heads 3", "model_overrides.norm=batch": "norm = 'batch'",
    "model_overrides.vocabulary=100": "has a vocabulary of 100",
    "model_overrides.depth=2": "No key 'depth'", "model_overrides.dropout=1": "dropout = 1",
    "model_overrides.activation=[]": "activation = []",
    "recipe_overrides.head=true": "need quantizers",
    "recipe_overrides=x": "recipe_overrides = 'x'", "setps=1": "Did you mean 'steps'?",
    "a.b.c=1": "No key 'a'", "=1": "is not key=value", "steps": "is not key=value",
    "steps.x=1": "steps", "layers=2": "--set model.layers=VALUE",
    "margin=1": "--set recipe.margin=VALUE", "learning_rate=1": "Did you mean 'lr'?",
    "model.layres=2": "Did you mean 'layers'?", "model=''": "No model ''",
    "data=''": "data is empty",
    "device=gpu": "device = 'gpu'", "backend=triton": "backend = 'triton'",
    "model_overrides.width=2147483648": "GiB",
}  # fmt: skip
FLAGS = {
    "--steps": "--steps", "--steps ''": "--steps", "--lr 1,5": "--lr", "--seed x": "--seed",
    "--model gpt2": "Did you mean 'gpt2-124m'?", "--model ./none.toml": "none.toml",
    "--model folder.toml": "folder.toml",
    "--recipe fp8": "No recipe 'fp8'. Did you mean 'delayed'? Known: auto, bf16",
    "--recipe 'a\nb'": "a\\nb", "--recipe nested.toml": "nested", "--recipe utf16.toml": "utf16",
    "--recipe empty.toml": "no quantizer", "--recipe twice.toml": "twice.toml",
    "--config empty.toml --config none.toml": "none.toml", "--config bom.toml": "bom.toml",
    "--config nested.toml": "nested.toml", "--config list.toml": "steps = [1]",
    "--config table.toml": "key", "--config folder.toml": "folder.toml",
    "--config good.txt": "good.txt is not valid TOML", "--config pipe": "no regular file",
    "--data none": "none'. Give a file or a folder", "--data empty.txt": "empty.txt is empty",
    "--data short.txt": "short.txt", "--data null.txt": "is NUL", "--data odd.bin": "odd.bin has",
    "--data wide.bin": "wider tokens", "--data array.bin": ".npy file", "--data llm.bin": "llm.c",
    "--data large.bin": "token 60000", "--data mixed": "mixed mixes", "--data hollow": "hollow",
    "--data pipe": "not a regular file", "--data /dev/zero": "not a regular file",
    "--data 'a\0b'": "NUL", "--data loop": "loop", "--data link.txt": "nowhere.txt",
    "--resume none": "--resume none", "--resume good.txt": "good.txt",
    "--resume folder.toml": "folder.toml", "--init-from none": "none",
    "--init-from ''": "init_from is empty",
    "--init-from folder.toml": "folder.toml", "--out good.txt": "good.txt is a file",
    "--what-if fp7": "fp7", "--what-if mxfp8 --telemetry-every 0":
    "what_if needs telemetry", "--device cuda": "CUDA", "--backend te --strict --recipe delayed":
    "--strict", "--nonsense": "--nonsense", "--clip 1": "--set clip=VALUE",
    "--layers 2": "--set model.layers=",
    "--config shape.toml": "Give it as --model shape.toml", "extra": "extra", "--steps 1 2": "2",
}  # fmt: skip
OTHERS = {
    "prtrain": "prtrain", "report": "Missing argument", "report none": "No run in 'none'",
    "report good.txt": "No run in 'good.txt'", "report ''": "No run in", "report r --out": "--out",
    "doctor --capability 10": "no compute capability", "doctor --capability nan": "capability",
    "doctor --capability 99.9": "No GPU has compute capability 99.9. Known: 3.0",
    "estimate --memory 80XB": "80GB", "estimate --memory 0": "--memory 0 is no memory",
    "doctor extra": "extra", "compare --recipes ''": "empty name", "compare --seeds 0": "--seeds 0",
    "compare --recipes fp32,fp32": "twice", "compare --recipes fp32,fp9": "No recipe 'fp9'",
    "compare --baseline mxfp8 --recipes fp32,bf16": "--baseline", "compare --set seed=1": "--seeds",
    "compare --from none": "none", "compare --set lr=x": "lr = 'x'", "compare --out good.txt":
    "good.txt is a file", "bench none": "none", "bench roofline --gpu Z80": "Z80",
    "bench roofline --batch 0": "--batch", "bench roofline --capability 9.0 --results none": "none",
    "bench step --recipe none": "No FP8 recipe 'none'",
    "bench step --model none": "none", "bench step --rounds 1": "--rounds",
}  # fmt: skip


def bad_input() -> dict[str, tuple[list[str], str]]:
    """Each bad input by a name: the command's words, and what the message must hold."""
    cases = {}
    for setting, message in SETTINGS.items():
        cases[f"--set {setting}"] = (["pretrain", *shlex.split(COMMON), "--set", setting], message)
    for flags, message in FLAGS.items():
        cases[flags] = (["pretrain", *shlex.split(COMMON), *shlex.split(flags)], message)
    for words, message in OTHERS.items():
        cases[words] = (shlex.split(words), message)
    return cases


def make_files(folder: Path) -> None:
    """The files that the bad input names."""
    texts = {
        "good.txt": "to be or not to be\n" * 100, "empty.txt": "", "short.txt": "short",
        "null.txt": "a\0b" * 99, "nested.toml": "steps = " + "[" * 9999, "empty.toml": "",
        "twice.toml": 'scaling = "none"\nscaling = "none"', "list.toml": "steps = [1]",
        "table.toml": "[steps]\nkey = 1", "bom.toml": "\ufeffstepz = 1", "mixed/a.txt": "text",
        "shape.toml": "layers = 1\nwidth = 32",
        "folder.toml/x": "x", "mixed/b.bin": "text", "hollow/.hidden": "text",
    }  # fmt: skip
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "utf16.toml").write_bytes("scaling = 'none'".encode("utf-16"))
    (folder / "odd.bin").write_bytes(b"\1" * 999)
    np.arange(1000, dtype="<u4").tofile(folder / "wide.bin")
    with (folder / "array.bin").open("wb") as stream:
        np.save(stream, np.arange(1000))
    np.array([20240520 % 2**16, 20240520 >> 16, *[1] * 999], "<u2").tofile(folder / "llm.bin")
    np.full(1000, 60000, "<u2").tofile(folder / "large.bin")
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
