"""GPUs of other makers than NVIDIA: the operators that a training step runs on them, and their
memory, generators and events, by modules that take the place of torch.cuda and torch.xpu.

Tensors on "meta" take a GPU's paths, and no memory.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8stack.analysis.benchmark import timing
from fp8stack.layers import build_backend
from fp8stack.layers.compiler import is_compiled
from fp8stack.layers.kernels import attention, replay
from fp8stack.layers.kernels.grouped_gemm import takes_grouped_mm
from fp8stack.model.config import load_config, plan_for
from fp8stack.model.gpt import GPT
from fp8stack.numerics import fused
from fp8stack.precision import Hardware
from fp8stack.precision.system_memory import available_memory
from fp8stack.training.checkpoint import state
from fp8stack.training.checkpoint.saver import HostCopy
from fp8stack.training.metrics.throughput import peak_memory_gib
from tests.support.operators import Operators

H100 = Hardware("cuda", (9, 0), cuda_version=(13, 0))
AMD = Hardware("cuda", other_gpu="AMD GPU", name="AMD Instinct MI300X")
INTEL = Hardware("xpu", other_gpu="Intel GPU", name="Intel(R) Data Center GPU Max 1550")


def operators(model: str, recipe: str, machine: Hardware) -> set[str]:
    """The operators of a forward and a backward pass."""
    config = load_config(model, {"layers": 1, "width": 64, "heads": 2, "context": 32})
    plan = plan_for(config, recipe, machine, "emulate" if recipe != "bf16" else "auto")
    with Operators() as recorded, torch.device("meta"):
        gpt = GPT(config, build_backend(plan)).to("meta")
        tokens = torch.zeros(2, 32, dtype=torch.int64)
        gpt(tokens, tokens).backward()
    return set(recorded.names)


# Operators that torch has for certain on GPUs of NVIDIA alone.
NVIDIAS = {"aten.mm.dtype", "aten._scaled_mm.default", "aten._scaled_mm_v2.default"}


@pytest.mark.capability("B11")
@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("machine", [AMD, INTEL], ids=str)
@pytest.mark.full
def test_emulated_fp8_runs_by_operators_that_every_gpu_has(recipe, machine, monkeypatch):
    monkeypatch.setattr(fused, "implementation", lambda x: None)  # as for tensors on a GPU
    has_kernel: Any = torch._C._dispatch_has_kernel_for_dispatch_key
    names = operators("gpt-nano", recipe, machine)
    assert NVIDIAS.isdisjoint(names)
    assert "aten.mm.default" in names
    for name in names:
        if not name.startswith("aten."):
            operator = name.removesuffix(".default").replace(".", "::")
            assert has_kernel(operator, "CompositeExplicitAutograd"), name
    assert "aten.mm.dtype" in operators("gpt-nano", recipe, H100)


def test_kernels_of_nvidia_are_not_called_on_a_gpu_that_rocm_calls_cuda(monkeypatch):
    cuda = torch.device("cuda")
    a: Any = SimpleNamespace(
        is_cuda=True, dtype=torch.bfloat16, shape=(16, 16), device=cuda, numel=lambda: 256
    )
    ends = torch.tensor([16], dtype=torch.int32)
    # A gfx942 calls itself 9.4.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 4))
    monkeypatch.setattr(attention, "TRITON_RUNS", True)
    for hip, runs in ((None, True), ("7.1", False)):
        monkeypatch.setattr(torch.version, "hip", hip)
        assert takes_grouped_mm(a, a, ends) == runs
        assert replay.records(cuda) == runs
        assert attention.skips_blocks(cuda) == runs
    assert not replay.records(torch.device("xpu"))


@pytest.mark.parametrize("machine", [AMD, INTEL], ids=str)
def test_training_is_compiled_there_on_request_alone(machine):
    config = load_config("gpt-nano", {"layers": 1})
    plan = plan_for(config, "delayed", machine)
    compiled, note = is_compiled(None, plan, machine)
    assert not compiled
    assert note.endswith(f"has run on an {machine.other_gpu}; --compile turns it on")
    assert is_compiled(True, plan, machine) == (True, "")


# The modules of the devices


class Gpu:
    """Takes the place of torch.cuda or torch.xpu."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.generator = torch.zeros(16, dtype=torch.uint8)

    def is_available(self) -> bool:
        return True

    def synchronize(self, device: object = None) -> None:
        self.calls.append("synchronize")

    def mem_get_info(self) -> tuple[int, int]:
        return 3 * 2**30, 4 * 2**30

    def memory_allocated(self) -> int:
        return 2**30

    def max_memory_allocated(self, device: object = None) -> int:
        return 5 * 2**29

    def reset_peak_memory_stats(self, device: object = None) -> None:
        self.calls.append("reset")

    def get_rng_state(self) -> Tensor:
        return self.generator.clone()

    def set_rng_state(self, state: Tensor) -> None:
        self.generator = state

    def Event(self) -> Any:
        return SimpleNamespace(
            record=lambda: self.calls.append("record"),
            synchronize=lambda: self.calls.append("wait"),
        )


@pytest.fixture(params=["cuda", "xpu"])
def gpu(request, monkeypatch) -> tuple[str, Gpu]:
    """The type of a device, and what takes the place of its module."""
    module = Gpu()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    for name in ("cuda", "xpu"):
        is_here = name == request.param
        monkeypatch.setattr(getattr(torch, name), "is_available", lambda is_here=is_here: is_here)
    return request.param, module


def test_memory_is_asked_of_the_module_of_the_device(gpu):
    name, module = gpu
    assert available_memory(name) == 3 * 2**30
    assert peak_memory_gib(torch.device(name)) == 2.5
    assert timing._peak_gib(lambda: module.calls.append("arm"), name) == 1.5
    assert module.calls == ["synchronize", "reset", "arm", "synchronize"]


def test_the_generator_of_any_gpu_is_saved_and_restored(gpu):
    name, module = gpu
    module.generator = torch.arange(16, dtype=torch.uint8)
    saved = state.random_state()
    assert saved.keys() == {"cpu", name}
    module.generator = torch.zeros(16, dtype=torch.uint8)
    state.restore_random_state(saved)
    assert module.generator.tolist() == list(range(16))
    state.restore_random_state({"cpu": saved["cpu"], "another": saved[name]})
    assert module.generator.tolist() == list(range(16))


def test_copies_from_any_gpu_are_pinned_and_waited_for_by_an_event(gpu, monkeypatch):
    name, module = gpu
    pinned = []
    empty = torch.empty

    def in_host_memory(shape: Any, *, dtype: torch.dtype, pin_memory: bool) -> Tensor:
        pinned.append(pin_memory)
        return empty(shape, dtype=dtype)

    class OnGpu(Tensor):
        """A tensor that says it is on the GPU."""

        device = torch.device(name)

        def detach(self) -> Any:
            return self

    monkeypatch.setattr(torch, "empty", in_host_memory)
    host = HostCopy()
    value = torch.arange(3.0).as_subclass(OnGpu)
    host.take({"model": {"weight": value}})
    assert (pinned, module.calls) == ([True], ["record"])
    assert host.values()["model"]["weight"].tolist() == [0.0, 1.0, 2.0]
    assert module.calls == ["record", "wait"]
    host.take({"model": {"weight": torch.zeros(3)}})
    assert host.values()["model"]["weight"].tolist() == [0.0, 0.0, 0.0]
    assert module.calls == ["record", "wait"]
