"""What FP8 gained, shape by shape, as measured on this machine and kept in the user's cache.

No torch here.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fp8stack.errors import StorageError, quoted
from fp8stack.io import write_atomically
from fp8stack.precision.hardware import Hardware
from fp8stack.precision.profit import Shape

log = logging.getLogger("fp8stack")

_ShapeName = Annotated[str, Field(pattern=r"^[1-9]\d{0,11} x [1-9]\d{0,11} -> [1-9]\d{0,11}$")]
_Ratio = Annotated[float, Field(gt=0)]


class _File(BaseModel):
    """`measured[what it was measured with][shape]`: bf16's time / FP8's time."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    version: Literal[1] = 1
    measured: dict[str, dict[_ShapeName, _Ratio]] = Field(default_factory=dict)


def cache_path() -> Path:
    """The file that measurements are kept in, where the platform wants caches to be.

    It is `$XDG_CACHE_HOME/fp8stack/shapes.json`, by default in `~/.cache`; on macOS in
    `~/Library/Caches`, on Windows in `%LOCALAPPDATA%`.
    """
    asked = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME", "")
    if asked and Path(asked).is_absolute():  # else to be ignored, says the XDG specification
        folder = Path(asked)
    elif sys.platform == "darwin":
        folder = Path.home() / "Library" / "Caches"
    else:
        folder = Path.home() / ".cache"
    return folder / "fp8stack" / "shapes.json"


def load_measured(hardware: Hardware, backend: str, kernel: str) -> dict[Shape, float]:
    """What was measured on GPUs of that name with the same torch and Transformer Engine, where
    `backend`, "te" or "torch", ran the plan's `kernel`: bf16's time / FP8's time by (tokens, in,
    out). Empty if nothing was, and, with a warning in the log, if the file cannot be read.
    """
    if backend not in ("te", "torch"):
        return {}
    stored = _read(cache_path()).measured.get(_key(hardware, backend, kernel), {})
    return {_parsed(name): ratio for name, ratio in stored.items()}


def save_measured(
    hardware: Hardware, backend: str, kernel: str, measured: Mapping[Shape, float]
) -> Path:
    """Add measurements to the cache, over older ones of the same shapes; returns its path.

    Raises:
        StorageError: it cannot be written.
    """
    path = cache_path()
    content = _read(path)
    entry = content.measured.setdefault(_key(hardware, backend, kernel), {})
    entry.update({"{} x {} -> {}".format(*shape): ratio for shape, ratio in measured.items()})
    _File.model_validate(content.model_dump())  # what is written can be read
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"Cannot write {quoted(str(path))}: {error.strerror}. Make it writable, or set "
            "XDG_CACHE_HOME to a folder that is."
        ) from error
    write_atomically(path, json.dumps(content.model_dump(), indent=1).encode())
    return path


def _key(hardware: Hardware, backend: str, kernel: str) -> str:
    te = f"Transformer Engine {hardware.te_version}"
    return " | ".join(
        (hardware.name, f"torch {hardware.torch_version}", te, f"backend {backend}", kernel)
    )


def _parsed(name: str) -> Shape:
    tokens, inputs, outputs = map(int, re.findall(r"\d+", name))
    return tokens, inputs, outputs


def _read(path: Path) -> _File:
    try:
        return _File.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return _File()
    except ValidationError as error:
        first = error.errors()[0]
        where = " ".join(map(str, first["loc"]))
        why = f"{where}: {first['msg']}" if where else first["msg"]
    except OSError as error:
        why = error.strerror or str(error)
    log.warning(
        "The measurements in %s are ignored: %s. Measure again with: fp8stack bench shapes",
        quoted(str(path)),
        quoted(why),
    )
    return _File()
