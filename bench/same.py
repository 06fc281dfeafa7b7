"""Compare the results of this checkout with another commit's, to the bit, on this machine.

    python -m bench.same REV [--only training,plans] [--recipes A,B] [--steps N]

Both trees train every shipped recipe on the same text, resume from the checkpoint in the middle,
and plan and estimate every model on every kind of GPU. The command compares losses and gradient
norms, the bytes of every tensor of the checkpoints, telemetry's figures, and the JSON of `plan` and
`estimate`. Recipes are compared as this checkout reads them, whatever form they are written in. The
exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODEL = """\
vocabulary = 256
context = 64
layers = 2
width = 64
heads = 2
norm = "rmsnorm"
activation = "swiglu"
positions = "rope"
qk_norm = true
bias = false
tied = false
"""
CAPABILITIES = ("none", "7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
TIMES = {"step_ms", "tokens_per_s", "mfu", "memory_gib", "seconds", "machine"}
SHOWN = 40
SECTIONS = ("training", "plans")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.same", description=__doc__)
    parser.add_argument("revision", help="the commit to compare with, or a folder that holds one")
    parser.add_argument("--only", default=",".join(SECTIONS), help="(default: %(default)s)")
    parser.add_argument("--recipes", default="", help="some of the shipped recipes (default: all)")
    parser.add_argument("--steps", type=int, default=8, help="of each run (default: %(default)s)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    for section in chosen.only.split(","):
        if section not in SECTIONS:
            parser.error(f"--only: no section '{section}', only {', '.join(SECTIONS)}")
    if chosen.child:
        Path(chosen.child).write_text(json.dumps(dict(_facts(chosen))))
        return 0
    with tempfile.TemporaryDirectory() as folder, _tree(chosen.revision) as other_tree:
        facts = [_in_tree(tree, Path(folder)) for tree in (other_tree, ROOT)]
    return _report(*facts)


def _report(then: dict[str, Any], now: dict[str, Any]) -> int:
    differing = [key for key in then if key in now and then[key] != now[key]]
    missing, new = sorted(then.keys() - now.keys()), sorted(now.keys() - then.keys())
    print(
        f"{len(then)} facts: {len(differing)} differ, {len(missing)} are gone, {len(new)} are new"
    )
    for keys in _alike(differing):
        print(f"  {len(keys)} such as {keys[0]}: {then[keys[0]]} -> {now[keys[0]]}")
    for word, changed in (("gone", missing), ("new", new)):
        for keys in _alike(changed):
            print(f"  {word}: {len(keys)} such as {keys[0]}")
    return 1 if differing or missing else 0


def _alike(keys: list[str]) -> list[list[str]]:
    """Group the facts of a command or run that have the same last word; numbers are ignored."""
    groups: dict[str, list[str]] = {}
    for key in keys:
        words = re.sub(r"\d+", "", key).split()
        groups.setdefault(f"{words[0]} {words[-1]}", []).append(key)
    return list(groups.values())[:SHOWN]


@contextlib.contextmanager
def _tree(revision: str) -> Iterator[Path]:
    """The files of a commit, in a worktree that is removed at the end."""
    if Path(revision).is_dir():
        yield Path(revision).resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "-q", "--detach", str(tree), revision], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def _in_tree(tree: Path, folder: Path) -> dict[str, Any]:
    """The facts of a tree, computed by the tree's package in a separate process."""
    out = folder / f"facts-{len(list(folder.iterdir()))}.json"
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_WAIT_POLICY": "passive"}
    words = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--child", str(out)]
    with tempfile.TemporaryDirectory() as work:
        subprocess.run(words, cwd=work, env=environment, check=True)
    return {
        name: leaf
        for fact, value in json.loads(out.read_text()).items()
        for name, leaf in _leaves(fact, value)
    }


def _facts(chosen: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    # Read from files, because the modules of the other tree may have other names.
    models, recipes = (
        sorted(path.stem for path in (ROOT / kind).glob("*.toml")) for kind in ("models", "recipes")
    )
    recipes = chosen.recipes.split(",") if chosen.recipes else recipes
    sections = chosen.only.split(",")
    if "training" in sections:
        Path("shape.toml").write_text(MODEL)
        Path("text.txt").write_bytes(
            b"".join(b"%d squared is %d.\n" % (n, n * n) for n in range(4000))
        )
        for recipe in recipes:
            backends = ["auto"] + (["torch"] if recipe in ("delayed", "current") else [])
            for backend in backends:
                yield from _trained(recipe, backend, chosen.steps)
    if "plans" in sections:
        for model in models:
            for recipe in recipes:
                for capability in CAPABILITIES:
                    yield from _planned(model, recipe, capability)


def _trained(recipe: str, backend: str, steps: int) -> Iterator[tuple[str, Any]]:
    """The facts of a run that stopped half-way and was resumed."""
    out, middle = f"{recipe}-{backend}", steps // 2
    flags = ["--model", "shape.toml", "--recipe", recipe, "--backend", backend, "--out", out]
    flags += ["--data", "text.txt", "--batch", "4", "--accumulate", "2", "--lr", "1e-3"]
    flags += ["--eval-every", str(middle), "--save-every", str(middle), "--device", "cpu"]
    flags += ["--set", "telemetry_every=3", "--set", "warmup_steps=2", "--set", "sample_tokens=4"]
    flags += ["--set", "eval_windows=4", "--seed", "7", "--set", "keep_checkpoints=9"]
    _command("pretrain", *flags, "--steps", str(steps))
    _command("pretrain", "--resume", f"{out}/checkpoints/step-{middle:06d}")
    for name in ("metrics", "telemetry"):
        for number, line in enumerate(Path(out, f"{name}.jsonl").read_text().splitlines()):
            for key, value in json.loads(line).items():
                if key not in TIMES:
                    yield f"{out} {name} row {number} {key}", value
    for file in sorted(Path(out).glob("checkpoints/*/*.safetensors")):
        yield from _tensors(f"{out} {file.parent.name}/{file.name}", file)


def _tensors(name: str, file: Path) -> Iterator[tuple[str, Any]]:
    import torch
    from safetensors.torch import load_file

    for key, tensor in load_file(file).items():
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        yield f"{name} {key}", f"{tensor.dtype} {hashlib.sha256(data).hexdigest()[:16]}"


def _planned(model: str, recipe: str, capability: str) -> Iterator[tuple[str, Any]]:
    words = ["--model", model, "--recipe", recipe, "--capability", capability, "--json"]
    for command in ("plan", "estimate"):
        text = _command(command, *words)
        try:
            answer = json.loads(text)
        except ValueError:
            answer = text
        yield f"{command} {model} {recipe} {capability}", answer


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of nested JSON by path; recipes are converted to this checkout's form."""
    from fp8stack.precision import recipe_from_json

    if not isinstance(value, dict | list):
        yield name, value
        return
    for key, child in value.items() if isinstance(value, dict) else enumerate(value):
        if key == "recipe" and isinstance(child, dict):
            child = recipe_from_json(child, name).to_json()
        if key not in TIMES:
            yield from _leaves(f"{name} {key}", child)


def _command(*arguments: str) -> str:
    """Run the command in this process. Returns its output, including errors."""
    from fp8stack import cli

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            cli.main(list(arguments))
        except SystemExit as ended:
            if ended.code:
                out.write(f"exit code {ended.code}")
    return out.getvalue()


if __name__ == "__main__":
    raise SystemExit(main())
