"""Files that run a program when they are unpickled, and every place where a user may hand
us a file (R6). The program makes a file; if that is there afterwards, something was executed."""

import io
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fp8stack.common.errors import UserError
from fp8stack.training.load import load
from tests.faults.bounded import TRACEBACK, called
from tests.faults.inputs.input_corruptions import NEWEST, replace


class Payload:
    """Unpickled, it runs `touch` on the marker."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.marker}'",)


def _saved(payload: Payload, zipped: bool) -> bytes:
    stream = io.BytesIO()
    torch.save({"model": payload}, stream, _use_new_zipfile_serialization=zipped)
    return stream.getvalue()


def _numpy(payload: Payload) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.array([payload], dtype=object), allow_pickle=True)
    return stream.getvalue()


Maker = Callable[[Payload], bytes]
PAYLOADS: dict[str, Maker] = {
    "old.pkl": lambda payload: pickle.dumps(payload, protocol=0),
    "saved.pt": lambda payload: _saved(payload, True),
    "legacy.bin": lambda payload: _saved(payload, False),
    "saved.safetensors": lambda payload: _saved(payload, True),
    "objects.npy": _numpy,
    "pickle.toml": lambda payload: pickle.dumps(payload, protocol=0),
    "pickle.json": pickle.dumps,
    "megatron.idx": lambda payload: (
        b"MMIDIDX\0\0" + struct.pack("<QB", 1, 8) + _saved(payload, False)
    ),
}
DOORS: dict[str, tuple[str, ...]] = {
    **{flag: ("pretrain", f"--{flag}", "{file}") for flag in ("data", "model", "recipe", "config")},
    **{flag: ("pretrain", f"--{flag}", "{file}") for flag in ("resume", "init-from", "what-if")},
    "resume a folder": ("pretrain", "--resume", "{folder}"),
    "data in a folder": ("pretrain", "--data", "{folder}"),
    "init from a folder": ("pretrain", "--init-from", "{folder}"),
    "report": ("report", "{file}"),
    "show a folder": ("show", "{folder}"),
    "resume a run": ("pretrain", "--resume", "{run}"),
    "init from a run": ("pretrain", "--init-from", "{run}"),
    "report on a run": ("report", "{run}"),
    "compare": ("compare", "--recipes", "fp32,{file}"),
    "compare from": ("compare", "--from", "{file}"),
    "compare from a run": ("compare", "--from", "{run}", "--recipes", "{file}"),
}
OF_A_RUN = ("run.toml", "plan.json", "metrics.jsonl", "telemetry.jsonl")
OTHERS = (".metadata", "pytorch_model.bin", "custom_checkpoint_0.pkl", "scheduler.bin",
          "random_states_0.pkl", "__init__.py", "fp8.pkl")  # fmt: skip


def executed(pristine: Path, place: Path, name: str) -> list[str]:
    """The places where the payload `name` was executed, or commands that failed without a message;
    `place` is an empty folder, `pristine` a good run."""
    marker = place / "executed"
    file, folder, run = place / name, place / "folder", place / "run"
    content = PAYLOADS[name](Payload(marker))
    file.write_bytes(content)
    folder.mkdir()
    for other_name in (*OTHERS, name, "run.toml", "checkpoint.json"):
        (folder / other_name).write_bytes(content)
    _plant(pristine, run, content)
    failures = []
    for door, words in DOORS.items():
        arguments = [word.format(file=file, folder=folder, run=run) for word in words]
        ended = called([*arguments, *_short(arguments[0], place)], place)
        if marker.exists():
            failures.append(f"{name} was executed by {door}")
            marker.unlink()
        if ended.code == TRACEBACK or (ended.code and not ended.is_one_line):
            failures.append(f"{name} at {door}: exit {ended.code}, {ended.stderr[-300:]}")
    for path in (file, folder, run, run / "checkpoints" / NEWEST):
        with suppress(UserError):
            load(path)
            failures.append(f"load took {path}")
    return failures + ([f"{name} was executed by load"] if marker.exists() else [])


def _plant(pristine: Path, run: Path, content: bytes) -> None:
    """A copy of a run in which every file is the payload; checkpoints have manifests that agree."""
    shutil.copytree(pristine, run)
    for checkpoint in (run / "checkpoints").iterdir():
        for path in list(checkpoint.glob("*.safetensors")):
            replace(checkpoint, path.name, content)
        for other_name in OTHERS:
            (checkpoint / other_name).write_bytes(content)
    for own_name in OF_A_RUN:
        (run / own_name).write_bytes(content)


def _short(command: str, place: Path) -> list[str]:
    """Flags with which a command that goes well after all is soon done."""
    flags = {
        "pretrain": ["--steps", "1", "--context", "16", "--batch", "1", "--out", str(place / "o")],
        "compare": ["--steps", "1", "--seeds", "1", "--context", "16", "--data", __file__],
    }
    return flags.get(command, [])
