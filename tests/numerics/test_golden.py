"""fp8stack on a CPU against results of Transformer Engine, by its Python references or captured on
GPUs.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from bench.gpu import golden
from fp8stack.analysis.conform.checks import Context
from fp8stack.analysis.conform.golden import FOLDER
from fp8stack.common.errors import UserError
from fp8stack.precision import Hardware
from tests.support.golden_checks import check, load
from tests.support.te.te_quantizers import te_with_quantizers

FILES = sorted(FOLDER.glob("*.safetensors"))
MACHINE = Hardware("cpu", has_te=True, te_version="2.20.2", name="Stand-In")
MOST_BYTES = 2_000_000

pytestmark = pytest.mark.usefixtures("one_thread")

loaded = functools.lru_cache(load)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_cpu_computes_what_transformer_engine_did(path: Path) -> None:
    description, tensors = loaded(path)
    wrong = {}
    for case in description["cases"]:
        try:
            check(case, tensors)
        except AssertionError as error:
            wrong[case["name"]] = str(error)[:500]
    assert not wrong, wrong


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_golden_file_is_small_and_says_how_it_came_about(path: Path) -> None:
    description, _ = loaded(path)
    assert path.stat().st_size < MOST_BYTES
    assert not description.get("failed")
    assert {"made_by", "command", "gpu", "versions"} <= description.keys()
    assert description["made_by"] == (
        f"TE on {description['gpu']}" if description["gpu"] else "TE's Python references"
    )
    version = description["versions"]["transformer-engine"].partition("+")[0]
    assert path.name.startswith(f"te-{version}-")


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that `bench.gpu.golden` captures from the stand-in."""
    folder = tmp_path_factory.mktemp("golden")
    with te_with_quantizers():
        facts = golden.captured(Context(MACHINE), folder)
    assert facts["holds"], facts
    assert not facts["refused"]
    return folder / facts["file"]


@pytest.mark.full
def test_what_is_captured_of_the_stand_in_compares_well_and_is_small(captured: Path) -> None:
    description, tensors = loaded(captured)
    for case in description["cases"]:
        check(case, tensors)
    kinds = [case["kind"] for case in description["cases"]]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "cast": 4, "history": 16, "quantizer": 24, "module": 24,
    }  # fmt: skip
    assert captured.stat().st_size < MOST_BYTES
    assert captured.name == "te-2.20.2-stand-in.safetensors"
    assert description["refused"] == description["failed"] == {}


@pytest.mark.full
def test_a_file_without_a_cases_tensors_is_no_golden_file(captured: Path) -> None:
    description, tensors = loaded(captured)
    case = description["cases"][0]
    remaining = {
        name: value for name, value in tensors.items() if not name.startswith(case["name"])
    }
    with pytest.raises(UserError, match="no tensors"):
        check(case, remaining)
