"""Transformer Engine gets torch's cuDNN: on a folder like that of torch's wheel."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fp8stack import layers
from fp8stack.analysis.conform.checks import Context, Skipped
from fp8stack.layers import build_backend
from fp8stack.layers.cudnn import load_cudnn
from fp8stack.precision import Hardware, load_recipe, resolve
from tests.support.te.te_stand_in import installed

PARTS = ("libcudnn.so.9", "libcudnn_adv.so.9", "libcudnn_graph.so.9", "libcudnn_ops.so.9")


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Path, int]]]:
    """The libraries that were loaded, and how."""
    libraries: list[tuple[Path, int]] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode=0: libraries.append((Path(name), mode)))
    for name in ("CUDNN_HOME", "CUDNN_PATH"):
        # Set first: what the function sets is removed afterwards.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    load_cudnn.cache_clear()
    yield libraries
    load_cudnn.cache_clear()


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of cuDNN beside torch's."""
    folder = tmp_path / "nvidia" / "cudnn"
    (folder / "lib").mkdir(parents=True)
    for name in (*PARTS, "libcudnn.a", "libother.so.9"):
        (folder / "lib" / name).touch()
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    return folder


def test_the_libraries_beside_torch_are_loaded_once_and_named_to_transformer_engine(wheel, loaded):
    load_cudnn()
    load_cudnn()
    assert sorted(path.name for path, _ in loaded) == sorted(PARTS)
    assert loaded[0] == (wheel / "lib" / "libcudnn_graph.so.9", ctypes.RTLD_GLOBAL)
    assert {path.parent for path, _ in loaded} == {wheel / "lib"}
    assert os.environ["CUDNN_HOME"] == str(wheel)


def test_a_cudnn_that_the_user_names_is_left_to_transformer_engine(wheel, loaded, monkeypatch):
    monkeypatch.setenv("CUDNN_PATH", "/opt/cudnn")
    load_cudnn()
    assert loaded == []
    assert "CUDNN_HOME" not in os.environ


def test_it_is_loaded_before_transformer_engine_is_imported(wheel, loaded, monkeypatch):
    imported: list[bool] = []

    def load() -> None:
        imported.append("fp8stack.layers.te" in sys.modules)
        load_cudnn()

    monkeypatch.setattr(layers, "load_cudnn", load)
    plan = resolve(load_recipe("delayed"), Hardware("cuda", (9, 0), has_te=True), "te")
    with installed():
        build_backend(plan.for_layers({"linear": (128, 128)}))
    assert imported == [False]
    assert loaded


def test_conform_loads_it_before_it_asks_transformer_engine(wheel, loaded, monkeypatch):
    monkeypatch.setattr(
        "fp8stack.analysis.conform.te_casts.serves", lambda scaling: str(len(loaded))
    )
    with pytest.raises(Skipped, match="4"):
        Context(Hardware("cuda", (9, 0), has_te=True)).need_te("delayed")
