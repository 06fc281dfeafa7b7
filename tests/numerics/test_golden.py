"""fp8stack on a CPU against results of Transformer Engine, by its Python references or captured on
GPUs.

The comparison itself is tested as well: on a file that the capturing code makes of the stand-in,
and on that file with one number changed.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from bench.gpu import golden
from fp8stack.analysis.conform import oracles
from fp8stack.analysis.conform.checks import Context
from fp8stack.analysis.conform.golden import FOLDER
from fp8stack.common.errors import UserError
from fp8stack.precision import Hardware
from tests.support.golden_checks import check, load
from tests.support.oracles import fp8_codes, to_numpy
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


# The comparison, on a file of the stand-in


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that `bench.gpu.golden` captures from the stand-in, with the weight's bytes added: the
    stand-in does not show them."""
    folder = tmp_path_factory.mktemp("golden")
    with te_with_quantizers():
        facts = golden.captured(Context(MACHINE), folder)
    assert facts["holds"], facts
    assert not facts["refused"]
    path = folder / facts["file"]
    description, tensors = load(path)
    for case in description["cases"]:
        if case["kind"] == "module" and case["module"] == "Linear":
            tensors |= _weight(case, tensors["inputs/Linear weight"])
    golden.write(path, description, tensors)
    return path


def _weight(case: dict, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    if case["scaling"] not in ("delayed", "current"):
        return {}
    scale = oracles.scale_of(to_numpy(weight.abs().max()), "e4m3")
    data = torch.from_numpy(fp8_codes(to_numpy(weight), scale, "e4m3"))
    inverse = torch.tensor(1.0) / torch.tensor(scale)
    return {f"{case['name']}/weight bytes": data, f"{case['name']}/weight inverse": inverse}


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


CHANGES = [
    ("cast bf16 e4m3", "bytes"),
    ("cast fp32 e4m3", "inverses"),
    ("cast bf16 e5m2", "amax"),
    ("history 1 most_recent margin 1", "scales"),
    ("history 16 max margin 0", "histories"),
    ("current special bf16: e4m3, tensor, float32, eps 0", "bytes along"),
    ("block special bf16: e4m3, (1, 128), float32, eps 0", "scales across"),
    ("mxfp8 ordinary bf16: e4m3, (1, 32), e8m0, eps 0", "bytes across"),
    ("module Linear bf16 delayed", "weight bytes"),
    ("module Linear fp32 current", "weight inverse"),
    ("module Linear fp32 delayed", "amax_history gemm1.grad_output"),
    ("module LayerNormMLP bf16 delayed", "scale gemm2.grad_output"),
]


@pytest.mark.parametrize(("name", "field"), CHANGES)
@pytest.mark.full
def test_one_changed_bit_is_found(captured: Path, name: str, field: str) -> None:
    description, tensors = loaded(captured)
    (case,) = [case for case in description["cases"] if case["name"] == name]
    for last in (False, True):
        changed = tensors[f"{name}/{field}"].clone()
        bits = changed.view(-1).view(torch.uint8)
        bits[-changed.element_size() if last else 0] ^= 1
        with pytest.raises(AssertionError):
            check(case, tensors | {f"{name}/{field}": changed})


@pytest.mark.full
def test_a_file_without_a_cases_tensors_is_no_golden_file(captured: Path) -> None:
    description, tensors = loaded(captured)
    case = description["cases"][0]
    remaining = {
        name: value for name, value in tensors.items() if not name.startswith(case["name"])
    }
    with pytest.raises(UserError, match="no tensors"):
        check(case, remaining)


@pytest.mark.full
def test_outputs_that_are_two_percent_off_are_found(captured: Path) -> None:
    description, tensors = loaded(captured)
    for scaling, field in (("delayed", "y"), ("block", "dx"), ("mxfp8", "d weight")):
        name = f"module Linear bf16 {scaling}"
        (case,) = [case for case in description["cases"] if case["name"] == name]
        with pytest.raises(AssertionError, match="dB"):
            check(case, tensors | {f"{name}/{field}": tensors[f"{name}/{field}"] * 1.02})
