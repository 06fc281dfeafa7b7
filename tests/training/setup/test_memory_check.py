"""A run that cannot fit into the memory that is left is refused before its first step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fp8stack.config import RunConfig
from fp8stack.errors import UserError
from fp8stack.model.config import load_config, plan_for
from fp8stack.precision import Hardware
from fp8stack.precision.hardware import available_memory
from fp8stack.training.setup import build
from fp8stack.training.setup.memory_check import Footprint, require_memory
from tests.conftest import TINY

CPU = Hardware("cpu")
H100 = Hardware("cuda", (9, 0), has_te=True)


def footprint(hardware: Hardware = CPU, ranks: int = 1, **keys: object) -> tuple:
    """The footprint of gpt2-124m, its plan, and the peak of its micro-batch in bytes."""
    config = RunConfig.model_validate({"model": "gpt2-124m", "batch": 512, **keys})
    model = load_config(config.model)
    of = Footprint(config, model, model.context, ranks)
    plan = plan_for(model, "bf16", hardware)
    sequences = config.batch // config.accumulate // ranks
    return of, [plan], of.peak([plan], config.activation_checkpointing, sequences)


@pytest.mark.parametrize(("hardware", "ranks"), [(CPU, 1), (H100, 1), (H100, 4)])
def test_a_batch_that_cannot_fit_is_refused_with_one_that_does(hardware, ranks):
    of, plans, _ = footprint(hardware, ranks)
    left = 20 * 2**30
    with pytest.raises(UserError, match="enough for") as caught:
        require_memory(of, plans, hardware, left)
    found = re.search(r"--batch 512 --accumulate (\d+), or --batch (\d+)\.", str(caught.value))
    assert found is not None
    parts, batch = map(int, found.groups())
    for keys in ({"accumulate": parts}, {"batch": batch}):
        fitting, plans, peak = footprint(hardware, ranks, **keys)
        assert peak <= left
        require_memory(fitting, plans, hardware, left)
    assert footprint(hardware, ranks, batch=batch + ranks)[2] > left


def test_a_close_call_is_let_through_and_so_is_whoever_insists():
    of, plans, peak = footprint(batch=8)
    require_memory(of, plans, CPU, round(peak * 0.91))
    require_memory(of, plans, CPU, None)
    with pytest.raises(UserError, match="check_memory=false"):
        require_memory(of, plans, CPU, round(peak * 0.89))
    require_memory(footprint(batch=8, check_memory=False)[0], plans, CPU, 1)
    require_memory(footprint(batch=8, compile=True)[0], plans, CPU, round(peak * 0.6))


def test_where_no_batch_fits_the_weights_are_named():
    of, plans, _ = footprint(batch=1)
    with pytest.raises(UserError, match=r"weights, gradients and optimizer of 124,439,808 param"):
        require_memory(of, plans, CPU, 2**30)


def test_ranks_on_a_cpu_share_its_memory(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    of, plans, peak = footprint(ranks=4, batch=8)
    require_memory(of, plans, CPU, 2 * peak)
    with pytest.raises(UserError, match="left for each rank"):
        require_memory(of, plans, CPU, peak)


def test_the_command_refuses_in_one_line_and_writes_nothing(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(build, "available_memory", lambda device: 3 * 2**19)
    flags = ["pretrain", *TINY, "--recipe", "fp32", "--steps", "1", "--out", "r"]
    assert command(*flags) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "enough for 1. Give --batch 4 --accumulate 4, or --batch 1." in error
    assert not list(tmp_path.iterdir())
    assert command(*flags, "--set", "check_memory=false") == 0


GROUPS = {
    "version 2": ("0::/job/step\n", {"job/memory.max": "max", "job/step/memory.max": "1000000"}),
    "a container": ("0::/gone\n", {"memory.max": "1000000"}),
}


def system(root: Path, groups: str, files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\nSwapFree: 5 kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


@pytest.mark.parametrize("name", GROUPS)
def test_a_control_groups_limit_counts_and_its_droppable_pages_do_not(name, tmp_path):
    groups, files = GROUPS[name]
    folder = next(file for file, text in files.items() if text != "max").rpartition("memory")[0]
    files |= {f"{folder}memory.current": "700000"}
    files |= {f"{folder}memory.stat": "anon 600000\ninactive_file 100000"}
    root = system(tmp_path, groups, files)
    assert available_memory("cpu", root) == 1000000 - 700000 + 100000 + 5 * 1024


def test_groups_of_version_1_count_too(tmp_path):
    files = {"memory/a/memory.limit_in_bytes": "1000", "memory/a/memory.usage_in_bytes": "400"}
    files["memory/a/memory.stat"] = "total_inactive_file 30"
    root = system(tmp_path, "5:cpu:/a\n4:memory:/a/b\n", files)
    assert available_memory("cpu", root) == 630 + 5 * 1024


def test_without_a_limit_it_is_what_the_system_has(tmp_path):
    assert available_memory("cpu", system(tmp_path, "0::/\n", {})) == 8005 * 1024
    assert available_memory("cpu", tmp_path / "none") is None
