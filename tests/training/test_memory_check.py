"""The settings of allocators, and the refusal of a run that cannot fit into the memory."""

import os
import re
import resource
from unittest.mock import patch

import pytest
import torch

from fp8stack.common.errors import UserError
from fp8stack.model.config import load_config, plan_for
from fp8stack.planning.run_config import RunConfig, parse_config
from fp8stack.precision import Hardware, system_memory
from fp8stack.precision.system_memory import available_memory
from fp8stack.training.memory_check import (
    Footprint,
    expand_segments,
    keep_freed_memory,
    require_memory,
)
from fp8stack.training.metrics import allocations
from fp8stack.training.run_plans import plan_run
from fp8stack.training.setup import build
from tests.faults.processes import in_ranks
from tests.support.small_loop import SmallLoop

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


def check(of: Footprint, plans: list, hardware: Hardware, free: int | None, **keys: bool) -> None:
    """`require_memory` where so many bytes are free."""
    with patch.object(system_memory, "available_memory", lambda device: free):
        require_memory(of, plans, hardware, **keys)


@pytest.mark.capability("D1")
@pytest.mark.parametrize(("hardware", "ranks"), [(CPU, 1), (H100, 4)])
def test_a_batch_that_cannot_fit_is_refused_with_one_that_does(hardware, ranks):
    of, plans, _ = footprint(hardware, ranks)
    free = 20 * 2**30
    with pytest.raises(UserError, match="enough for") as caught:
        check(of, plans, hardware, free)
    match = re.search(r"--batch 512 --accumulate (\d+), or --batch (\d+)\. ", str(caught.value))
    assert match is not None
    accumulate, batch = map(int, match.groups())
    for keys in ({"accumulate": accumulate}, {"batch": batch}):
        fitting, plans, peak = footprint(hardware, ranks, **keys)
        assert peak <= free
        check(fitting, plans, hardware, free)
    assert footprint(hardware, ranks, batch=batch + ranks)[2] > free


@pytest.mark.parametrize("model", ["gpt2-124m", "gpt2-1.5b", "llama-1b", "olmoe-7b"])
@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
def test_the_micro_batches_of_presets_fit_into_80_gb(model, recipe):
    ranks, parallel = (8, "fsdp") if model == "olmoe-7b" else (1, "ddp")
    config = parse_config(None, {"model": model, "recipe": recipe, "parallel": parallel})
    planned = plan_run(config, H100, ranks, will_train=False)
    of = Footprint(planned.config, planned.model, planned.context, ranks)
    sequences = planned.config.batch // planned.config.accumulate // ranks
    assert of.peak(planned.trained, "none", sequences) <= 80e9


def test_where_no_batch_fits_the_weights_are_named(monkeypatch):
    of, plans, peak = footprint(batch=4, ranks=4)
    with pytest.raises(UserError, match=r"weights, gradients and optimizer of 124,439,808 param"):
        check(of, plans, CPU, 2**30)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # ranks on a CPU share its memory
    check(of, plans, CPU, 2 * peak)
    with pytest.raises(UserError, match="left for each rank"):
        check(of, plans, CPU, peak)


MEMORY = "MemTotal: 9000 kB\nMemAvailable: 8000 kB\nSwapFree: 5 kB\n"
OF_GROUP = {"memory.current": "700000", "memory.stat": "anon 600000\ninactive_file 100000"}


@pytest.mark.parametrize(
    ("groups", "folder", "files", "free"),
    [
        ("0::/job/step\n", "job/step/", OF_GROUP | {"memory.max": "1000000"}, 400000),
        ("0::/gone\n", "", OF_GROUP | {"memory.max": "1000000"}, 400000),  # in a container
        ("0::/\n", "", {}, 8000 * 1024),
    ],
)
def test_a_control_groups_limit_counts_and_its_droppable_pages_do_not(
    groups, folder, files, free, tmp_path
):
    system = {f"sys/fs/cgroup/{folder}{name}": text for name, text in files.items()}
    system |= {"proc/meminfo": MEMORY, "proc/self/cgroup": groups}
    system |= {"sys/fs/cgroup/job/memory.max": "max\n"}
    for name, text in system.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_memory("cpu", tmp_path) == free + 5 * 1024
    assert available_memory("cpu", tmp_path / "none") is None


@pytest.mark.capability("D9")
@pytest.mark.parametrize(
    ("device", "cuda", "begun", "environment", "done"),
    [
        ("auto", "13.0", False, {}, True),
        ("cpu", "13.0", False, {}, False),
        ("auto", None, False, {}, False),
        ("auto", "13.0", True, {}, False),
        ("auto", "13.0", False, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, False),
        ("auto", "13.0", False, {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, False),
    ],
)
def test_segments_expand_unless_the_user_says_otherwise(
    monkeypatch, device, cuda, begun, environment, done
):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: begun)
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for name in names:  # set first, so that what is set within is taken back
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert expand_segments(device) is done
    expected = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if done else environment
    assert {name: os.environ[name] for name in names if name in os.environ} == expected


def faults_before_and_after(rank: int) -> tuple[int, int]:
    """How often memory is faulted in before and after `keep_freed_memory`."""

    def work() -> None:
        held = [torch.ones(24, 2**18) for _ in range(4)]  # 24 MiB each
        del held

    def faults() -> int:
        work()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            work()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    without = faults()
    assert keep_freed_memory()
    return without, faults()


@pytest.mark.capability("D9")
@pytest.mark.skipif(allocations.heap_bytes() is None, reason="not glibc 2.33 or later")
@pytest.mark.skipif(any(name.startswith("MALLOC_") for name in os.environ), reason="set outside")
@pytest.mark.full
def test_freed_memory_is_kept_and_not_faulted_in_again():
    ((before, after),) = in_ranks(faults_before_and_after, 1)
    assert before >= 10 * 48  # 96 MiB each time, in pages of 2 MiB at most
    assert after < before / 10
    assert after < 100


def test_a_run_on_a_cpu_keeps_freed_memory(tmp_path, monkeypatch):
    called: list[bool] = []
    monkeypatch.setattr(build, "keep_freed_memory", lambda: called.append(True))
    SmallLoop(tmp_path / "r", "fp32")
    assert called == [True]
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert not keep_freed_memory()  # the environment sets the allocator


def test_a_close_call_is_let_through_and_so_is_whoever_insists():
    of, plans, peak = footprint(batch=8)
    check(of, plans, CPU, round(peak * 0.91))
    check(of, plans, CPU, None)
    with pytest.raises(UserError, match="check_memory=false"):
        check(of, plans, CPU, round(peak * 0.89))
    check(footprint(batch=8, check_memory=False)[0], plans, CPU, 1)
    check(of, plans, CPU, round(peak * 0.6), compiled=True)
