"""Files and tables by the thousand that nobody would write: taken, or refused in one line (R8).

hypothesis makes them, the same ones each time.
"""

import io
import json
import shutil
import tomllib
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fp8stack.analysis import report
from fp8stack.common import presets
from fp8stack.common.errors import UserError
from fp8stack.data import StepBatches, load_corpora, validation_windows
from fp8stack.model.config import load_config
from fp8stack.planning.run_config import RunConfig, parse_config, to_toml
from fp8stack.precision import Hardware, Recipe, load_recipe
from fp8stack.training.checkpoint.validation import can_go_on, has_weights, load_sound
from fp8stack.training.load import trained_run
from fp8stack.training.run_folder import RunFolder
from tests.faults.inputs.input_corruptions import NEWEST, rewrite

Example = Callable[[Path, Any], object]

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12),
    st.sampled_from([0, 1, -1, 2**31, 2**63, 10**30, "", "auto", "delayed", "nan", "../x", "\0"]),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
pieces = st.binary(max_size=4) | st.sampled_from(
    [
        *(b"\n", b"=", b"[", b"]", b'"', b"{", b"}", b"nan", b"-1", b"1e999", b"9" * 5000, b"\r"),
        *(b"[" * 3000, b'{"a":' * 3000, b"NaN", b"Infinity", b"null", b"\0", b"\x1b[2J", b"\xff"),
    ]
)


def mutated(content: bytes) -> st.SearchStrategy[bytes]:
    """`content` with a few parts replaced, cut out or put in."""
    edit = st.tuples(st.integers(0, len(content)), st.integers(0, 30), pieces)

    def apply(edits: list[tuple[int, int, bytes]]) -> bytes:
        result = content
        for start, length, new in edits:
            result = result[:start] + new + result[start + length :]
        return result

    return st.lists(edit, min_size=1, max_size=4).map(apply)


def edited(table: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """`table` with a few values, at any depth, replaced by any others."""
    paths = list(_paths(table))

    def apply(edits: list[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(json.dumps(table))
        for path, value in edits:
            inner: Any = result
            for key in path[:-1]:
                inner = inner.get(key) if isinstance(inner, dict) else None
            if isinstance(inner, dict):
                inner[path[-1]] = value
        return result

    edit = st.tuples(st.sampled_from(paths), values)
    return st.lists(edit, min_size=1, max_size=3).map(apply)


def _paths(table: dict[str, Any], outer: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    paths: list[tuple[str, ...]] = [(*outer, "another")]
    for key, value in table.items():
        paths.append((*outer, key))
        if isinstance(value, dict):
            paths += _paths(value, (*outer, key))
    return paths


def _in_file(name: str, load: Callable[[str], object]) -> Example:
    def example(place: Path, content: bytes) -> None:
        path = place / name
        path.write_bytes(content)
        load(str(path))

    return example


def _flags(place: Path, table: dict[str, Any]) -> None:
    parse_config(None, table)


def _sets(place: Path, words: list[str]) -> None:
    parse_config(None, {}, words)


def _recipe(place: Path, table: dict[str, Any]) -> None:
    presets.parse(Recipe, table, "here")


def configs() -> dict[str, tuple[st.SearchStrategy[Any], Example]]:
    """Ways to make a configuration, and who reads it."""
    run_file = to_toml(RunConfig(data="a.txt", out="r", what_if=("mxfp8",))).encode()
    keys = st.sampled_from([*RunConfig.model_fields, "guard.window", "recipe_overrides.margin"])
    model = b'vocabulary = 256\ncontext = 64\nlayers = 1\nwidth = 32\nheads = 2\nnorm = "rmsnorm"\n'
    recipe = b'like = "delayed"\nmargin = 0\nexclude = ["a.*"]\nhistory_length = 16\n'
    config = _in_file("run.toml", lambda name: parse_config(name, {}))
    words = st.lists(st.builds("{}={}".format, keys, st.text(max_size=9) | values))
    return {
        "run files": (mutated(run_file) | st.binary(max_size=80), config),
        "flags": (st.dictionaries(keys, values, max_size=5), _flags),
        "settings": (words, _sets),
        "models": (mutated(model), _in_file("mine.toml", load_config)),
        "recipe tables": (edited(tomllib.loads(recipe.decode())), _recipe),
        "recipes": (mutated(recipe), _in_file("mine.toml", load_recipe)),
    }


def _train_on(place: Path, case: tuple[str, bytes, int]) -> None:
    name, content, vocabulary = case
    path = place / name
    path.write_bytes(content)
    train, held_out = load_corpora(str(path), vocabulary)
    batch = StepBatches(train, batch=2, context=4, seed=0, vocabulary=vocabulary)[1]
    windows = validation_windows(held_out, count=2, context=4, vocabulary=vocabulary)
    for tokens in (batch, windows):
        assert 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary


def data_files() -> dict[str, tuple[st.SearchStrategy[Any], Example]]:
    """Data with headers of many formats, mutated."""
    array = io.BytesIO()
    np.save(array, np.arange(200, dtype="<u2"))
    llm = np.array([20240520, 1, 200, *[0] * 253], "<i4").tobytes()
    text = "to be or not to be, ünd so weiter\n".encode() * 5
    heads = [
        *(array.getvalue(), llm + bytes(400), np.arange(300, dtype="<u2").tobytes(), text),
        *(b"MMIDIDX\0\0" + bytes(90), b"PAR1" + bytes(80), b"\x1f\x8b\x08" + bytes(80)),
        *(np.arange(99, dtype="<u4").tobytes(), b"\xff\xfea\0b\0" * 30, bytes(200)),
    ]
    content = st.sampled_from(heads).flatmap(mutated) | st.binary(max_size=100)
    names = st.sampled_from(["a.bin", "a.txt", "a.BIN", "a", "a.npy"])
    sizes = st.sampled_from([1, 16, 255, 256, 300, 50257, 65536, 65537, 2**31])
    return {"data": (st.tuples(names, content, sizes), _train_on)}


def run_files(pristine: Path) -> dict[str, tuple[st.SearchStrategy[Any], Example]]:
    """The files of a run, mutated: for reports, and for going on."""

    def lines(name: str) -> tuple[st.SearchStrategy[Any], Example]:
        content = (pristine / name).read_bytes()

        def example(place: Path, changed: bytes) -> None:
            run = place / "run"
            (run / "checkpoints").mkdir(parents=True, exist_ok=True)
            for small in SMALL_FILES:
                shutil.copyfile(pristine / small, run / small)
            (run / name).write_bytes(changed)
            with redirect_stdout(io.StringIO()):
                report.show(run)
            RunFolder(run).forget_after(2)

        return mutated(content), example

    manifest = json.loads((pristine / "checkpoints" / NEWEST / "checkpoint.json").read_text())
    del manifest["sha256"]

    def going_on(place: Path, body: dict[str, Any]) -> None:
        folder = place / "manifest" / NEWEST
        if not folder.exists():
            shutil.copytree(pristine / "checkpoints" / NEWEST, folder)
            (folder / "checkpoint.json").write_text(json.dumps({"sha256": ""}))

        def change(old: dict[str, Any]) -> None:
            old.clear()
            old.update(body)

        rewrite(folder, change)
        for check in (can_go_on, has_weights):
            checkpoint = load_sound(folder, check)
        model = trained_run(checkpoint, folder)
        assert model.config is not None
        assert model.recorded_tokenizer is None or model.recorded_tokenizer.name
        for recipe in ("fp32", model.recipe):
            model.plan(recipe, Hardware("cpu"), "auto")

    strategies = {name: lines(name) for name in SMALL_FILES}
    strategies["manifests"] = edited(manifest), going_on
    return strategies


SMALL_FILES = ("metrics.jsonl", "telemetry.jsonl", "plan.json", "run.toml")


def fuzz(place: Path, strategy: st.SearchStrategy[Any], example: Example, count: int) -> int:
    """Try `count` examples in the folder `place`, and return how many there were.

    Raises:
        AssertionError: one was neither taken nor refused in one line; any other exception too.
    """
    tried = 0

    usual: dict[str, Any] = {
        "derandomize": True,
        "database": None,
        "suppress_health_check": list(HealthCheck),
    }

    @settings(max_examples=count, deadline=None, phases=[Phase.generate], **usual)
    @given(strategy)
    def run_example(data: Any) -> None:
        nonlocal tried
        tried += 1
        try:
            example(place, data)
        except UserError as error:
            if len(str(error).splitlines()) != 1:
                raise AssertionError(f"not one line: {error}") from error

    run_example()
    return tried
