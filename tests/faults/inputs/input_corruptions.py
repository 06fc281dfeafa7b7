"""Ways in which a run on the disk is damaged or made up, and what must become of it (R5)."""

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from fp8stack.training.checkpoint import reader
from fp8stack.training.setup.start import set_up
from tests.faults.bounded import bounded
from tests.faults.numeric.small_runs import small_run, trained
from tests.faults.processes import Ended

OLDER, NEWEST = "step-000002", "step-000004"
FILES = ("model.safetensors", "optimizer.safetensors", "rng.safetensors", "fp8.safetensors",
         "checkpoint.json")  # fmt: skip
Damage = Callable[[Path], object]


def make_run(folder: Path) -> Path:
    """A finished run in delayed scaling with two checkpoints, and its data next to it."""
    torch.set_num_threads(1)
    run = small_run(folder, "run", "delayed", steps=4, telemetry_every=2)
    trained(run)  # here, so that children find all imported
    return run.folder.path


def problem(pristine: Path, place: Path, corruption: str, all_bad: bool = True) -> str:
    """Corrupt a copy, in `place`, of the run `pristine`, and one with `all_bad` checkpoints, and
    resume them. A run whose own files are damaged resumes from its newest checkpoint. Returns the
    problem, "" if there is none."""
    of_run = corruption in OF_RUNS
    damage, named = (CORRUPTIONS | OF_RUNS)[corruption]
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(pristine, place)
    good = place / "checkpoints" / (NEWEST if of_run else OLDER)
    weights = reader.load(good).tensors["model"]
    bad = place if of_run else place / "checkpoints" / NEWEST
    damage(bad)
    ended = resumed(place, weights)
    if ended.code or good.name not in ended.stdout or "other weights" in ended.stdout:
        printed = ended.stdout + ended.stderr[-300:]
        return f"not resumed from {good.name}: exit {ended.code}, {printed}"
    if named not in ended.stdout:
        return f"{named} is not named: {ended.stdout}"
    if of_run or not all_bad:
        return ""
    shutil.rmtree(place / "checkpoints")
    for name in (OLDER, NEWEST):
        shutil.copytree(pristine / "checkpoints" / name, place / "checkpoints" / name)
        damage(place / "checkpoints" / name)
    ended = resumed(place, weights)
    if ended.code != 3 or not ended.is_one_line or named not in ended.stderr:
        return f"all bad: exit {ended.code} and not 3: {ended.stdout}{ended.stderr[-300:]}"
    return ""


def resumed(run: Path, weights: Mapping[str, Tensor]) -> Ended:
    """Set up to go on with `run`, bounded; says so if the weights are not `weights`."""

    def work() -> None:
        ready = set_up({"out": str(run)}, None, [], "auto")
        print(*ready.notes, sep="\n")
        if any(not torch.equal(p, weights[name]) for name, p in ready.model.named_parameters()):
            print("other weights")

    return bounded(work, seconds=20)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest in `folder` and state its new sum, as a stranger could."""
    file = folder / "checkpoint.json"
    body = json.loads(file.read_text())
    del body["sha256"]
    change(body)
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    file.write_text(json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), **body}))


def replace(folder: Path, name: str, content: bytes) -> None:
    """Write another file in place of `name`, with a manifest that agrees."""
    (folder / name).write_bytes(content)
    sums = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    rewrite(folder, lambda body: body["files"].update({name: sums}))


def _with_tensor(group: str, name: str, change: Callable[[Tensor], Tensor] | None) -> Damage:
    """One tensor is another, or gone, and every sum is right."""

    def damage(folder: Path) -> None:
        tensors = safetensors.torch.load_file(folder / f"{group}.safetensors")
        tensor = tensors.pop(name)
        if change is not None:
            tensors[name] = change(tensor).contiguous()
        replace(folder, f"{group}.safetensors", safetensors.torch.save(tensors))

    return damage


def _edited(file: str, change: Callable[[bytes], bytes]) -> Damage:
    def damage(folder: Path) -> None:
        content = (folder / file).read_bytes()
        (folder / file).write_bytes(change(content))

    return damage


def _flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]


def _swap(folder: Path) -> None:
    (folder / FILES[0]).rename(folder / "x")
    (folder / FILES[1]).rename(folder / FILES[0])
    (folder / "x").rename(folder / FILES[1])


def _linked(name: str, target: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return damage


def _piped(folder: Path) -> None:
    (folder / "checkpoint.json").unlink()
    os.mkfifo(folder / "checkpoint.json")


def _a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("a file")


def _header(content: dict[str, Any], data: bytes = b"", claimed: int | None = None) -> bytes:
    """A safetensors file, its header as long as it is or as `claimed`."""
    text = json.dumps(content).encode()
    return struct.pack("<Q", claimed or len(text)) + text + data


def _named(name: str) -> Damage:
    return _body(lambda body: body["files"].update({name: body["files"].popitem()[1]}))


def _body(change: Callable[[dict[str, Any]], object]) -> Damage:
    return lambda folder: rewrite(folder, change)


def _info(**changes: Any) -> Damage:
    return _body(lambda body: body["info"].update(changes))


def _plan(**changes: Any) -> Damage:
    return _body(lambda body: body["info"]["plan"].update(changes))


def _model(**changes: Any) -> Damage:
    return _body(lambda body: body["info"]["identity"]["model"].update(changes))


def _manifest(content: bytes) -> Damage:
    return lambda folder: (folder / FILES[4]).write_bytes(content)


def _line_added(text: str) -> Damage:
    return _edited("metrics.jsonl", lambda content: content + text.encode() + b"\n")


_OVERLAP = {key: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} for key in ("a", "b")}
_UP = "blocks.0.mlp.up"
CORRUPTIONS: dict[str, tuple[Damage, str]] = {
    "model flipped": (_edited(FILES[0], _flipped), FILES[0]),
    "optimizer empty": (_edited(FILES[1], lambda content: b""), FILES[1]),
    "rng missing": (lambda folder: (folder / FILES[2]).unlink(), FILES[2]),
    "fp8 cut": (_edited(FILES[3], lambda content: content[:-1]), FILES[3]),
    "manifest flipped": (_edited(FILES[4], _flipped), FILES[4]),
    "manifest missing": (lambda folder: (folder / FILES[4]).unlink(), FILES[4]),
    "manifest cut": (_edited(FILES[4], lambda content: content[:-1]), FILES[4]),
    "swapped files": (_swap, "model.safetensors is damaged"),
    "another step": (_body(lambda body: body.update(step=7)), "step 7"),
    "a step that is a word": (_body(lambda body: body.update(step="x")), FILES[4]),
    "no info": (_body(lambda body: body.pop("info")), FILES[4]),
    "an unknown key": (_body(lambda body: body.update(more=1)), FILES[4]),
    "a list of files": (_body(lambda body: body.update(files=[])), FILES[4]),
    "a file without its size": (
        _body(lambda body: body["files"].update({FILES[0]: {"sha256": ""}})), FILES[4],
    ),
    "a manifest that is a list": (_manifest(b"[1]"), "is no checkpoint manifest"),
    "short weight": (_with_tensor("model", f"{_UP}.weight", lambda t: t[:3]), f"{_UP}.weight"),
    "double weight": (_with_tensor("model", f"{_UP}.weight", Tensor.double), f"{_UP}.weight"),
    "NaN weight": (_with_tensor("model", f"{_UP}.weight", lambda t: t * torch.nan), "not finite"),
    "no weight": (_with_tensor("model", f"{_UP}.weight", None), f"lacks '{_UP}.weight'"),
    "infinite moment": (
        _with_tensor("optimizer", f"{_UP}.weight.exp_avg", lambda t: t + torch.inf),
        f"'{_UP}.weight.exp_avg' is not finite",
    ),
    "short random state": (_with_tensor("rng", "cpu", lambda t: t[:9]), "RNG state"),
    "no scale": (_with_tensor("fp8", f"{_UP}.input.scale", None), f"{_UP}.input.scale"),
    "2^40 bytes of header": (
        lambda folder: replace(folder, FILES[0], _header({}, claimed=2**40)), FILES[0],
    ),
    "overlapping offsets": (
        lambda folder: replace(folder, FILES[0], _header(_OVERLAP, bytes(16))), FILES[0],
    ),
    "a name that leads out": (_named("../../run.toml"), "../../run.toml"),
    "deep nesting": (_manifest(b"[" * 10**6), "checkpoint.json is damaged"),
    "a huge number": (_manifest(b'{"step": ' + b"9" * 10**6 + b"}"), FILES[4]),
    "a million keys": (_manifest(b'{"sha256": 1' + b',"step":[{}]' * 10**6 + b"}"), FILES[4]),
    "too large a manifest": (lambda f: os.truncate(f / FILES[4], 2**38), "checkpoint.json is too"),
    "weights of another": (
        _linked(FILES[0], f"../{OLDER}/../../run.toml"), "model.safetensors is damaged",
    ),
    "weights without end": (_linked(FILES[0], "/dev/zero"), "model.safetensors"),
    "a pipe as manifest": (_piped, "checkpoint.json"),
    "a file as checkpoint": (_a_file, "checkpoint.json"),
    "no model": (_info(identity={"recipe": {}, "data": {}}), "'info.identity.model' is missing"),
    "a billion layers": (_model(layers=2**30), "layers = 1073741824"),
    "more layers than tensors": (_model(layers=2000), "layers, the weights fewer"),
    "a recipe that is a list": (_plan(recipe=[]), "recipe = []"),
    "a recipe without quantizers": (
        _plan(recipe={"name": "delayed", "quantizers": {}}), "no quantizer",
    ),
    "a layer of another model": (
        _plan(layers=[{"name": "x", "reason": "", "fp8": True}]), "the model has no layer 'x'",
    ),
    "no plan": (_info(plan={}), "'info.plan.recipe' is missing"),
    "plans without one": (_info(plans=[{}]), FILES[4]),
    "another configuration": (_info(config={"steps": "many"}), "steps = 'many'"),
    "no loss scale": (_info(scaler={}), "'info.scaler.scale' is missing"),
    "the guard's memory": (_info(guard={"watch": [], "left_fp16": 3}), "guard"),
}  # fmt: skip
"""Damages to a checkpoint's folder, and what the message must contain."""
OF_RUNS: dict[str, tuple[Damage, str]] = {
    "run.toml cut": (_edited("run.toml", lambda content: content[:40]), "run.toml"),
    "metrics nested": (_line_added("[" * 10**5), ""),
    "metrics of NaN": (_line_added('{"step": 2, "loss": NaN}'), ""),
}
"""Damages to a run's folder, likewise."""
