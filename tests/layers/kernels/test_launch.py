"""Launches that skip Triton's `run` pass to a compiled kernel what Triton itself passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from fp8stack.common.formats import Quantizer
from fp8stack.layers.kernels import fused_casts, variants
from fp8stack.layers.kernels.fused_casts import FusedInput

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


class Launches:
    """Launches that reach a compiled kernel on a stand-in for a GPU.

    Attributes:
        passed: for each launch, the kernel and the arguments of its launcher, tensors by address.
        by_triton: the number of calls of Triton's `run`.
        devices: the devices that were made the current one.
    """

    def __init__(self) -> None:
        self.passed: list[tuple[Any, ...]] = []
        self.by_triton = 0
        self.devices: list[int] = []

    def load(self, kernel: Any) -> None:
        """Replaces `CompiledKernel._init_handles`."""
        kernel.function = 4321  # the handle that the driver would give
        kernel._run = lambda *arguments: self.passed.append(
            (kernel, *(x.data_ptr() if hasattr(x, "data_ptr") else x for x in arguments))
        )

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        """Replaces `torch.cuda.device`."""
        self.devices.append(index)
        yield


@pytest.fixture
def launches(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.compiler import CompiledKernel
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from fp8stack.layers.kernels import triton_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    recorder, run = Launches(), JITFunction.run

    def counted(self: Any, *arguments: Any, **options: Any) -> Any:
        recorder.by_triton += 1
        return run(self, *arguments, **options)

    stand_in = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 77 + device,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    kernels = triton_kernels.transpose_bytes, triton_kernels.cast_product
    for module in (fused_casts, variants):
        monkeypatch.setattr(module, "has_kernel", lambda device: True)
    monkeypatch.setattr(torch.cuda, "device", recorder.device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(CUDABackend, "make_cubin", lambda *arguments: b"")  # slow, and never run
    monkeypatch.setattr(JITFunction, "run", counted)
    monkeypatch.setattr(CompiledKernel, "_init_handles", lambda kernel: recorder.load(kernel))
    with patch.object(driver, "_active", stand_in):
        _forget(kernels)
        yield recorder
    _forget(kernels)


def _forget(kernels: Any) -> None:
    for kernel in kernels:
        kernel.device_caches.clear()
    fused_casts._KERNELS.clear()
    variants._transpose.cache_clear()


def transposes() -> Any:
    return variants.transpose_bytes(torch.zeros(48, 80, dtype=torch.uint8))


def product(name: str, *dtypes: torch.dtype) -> FusedInput:
    x, *dy = (torch.zeros(32, 256, dtype=dtype) for dtype in dtypes)
    if name == "swiglu" and dy:
        dy = [dy[0][:, :128].contiguous()]
    return FusedInput(name, x, *dy)


def cast() -> Any:
    options = {"columnwise": True, "record": True, "sums": True}
    x = product("gelu", torch.bfloat16, torch.bfloat16)
    return fused_casts.cast_product(x, torch.ones(()), "e5m2", **options)


def cast_in_blocks() -> Any:
    quantizer = Quantizer(block=(1, 128), scale="power_of_two")
    x = product("swiglu", torch.bfloat16, torch.float32)
    return fused_casts.cast_blocks(x, quantizer, columnwise=True, sums=False)


def amax() -> Any:
    return fused_casts.product_amax(product("relu2", torch.bfloat16))


CALLS: list[Any] = [transposes, cast, cast_in_blocks, amax]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_an_operator_reaches_tritons_own_launch_once_for_each_kernel(call, launches):
    call()
    first = launches.by_triton
    call()
    assert first == len(launches.passed) / 2 == launches.by_triton
    kernels = [arguments[0] for arguments in launches.passed]
    assert kernels[:first] == kernels[first:]


def aligned(size: int, dtype: torch.dtype, offset: int = 0) -> Tensor:
    """A tensor whose address is `offset` bytes above a multiple of 16."""
    memory = torch.zeros(size * dtype.itemsize + 32, dtype=torch.uint8)
    start = -memory.data_ptr() % 16 + offset
    return memory[start : start + size * dtype.itemsize].view(dtype)


def launch_of(name: str) -> tuple[Any, list[Tensor]]:
    """A launch of a kernel, and its tensors."""
    from fp8stack.layers.kernels import triton_kernels
    from fp8stack.layers.kernels.launch import KernelLaunch

    kernel: Any
    variant: Any
    constants: dict[str, Any]
    numbers: tuple[int, ...]
    if name == "transpose_bytes":
        tensors = [aligned(4096, torch.float8_e4m3fn) for _ in range(2)]
        kernel, numbers = triton_kernels.transpose_bytes, (64, 64, 64, 1)
        constants = {"SIZE": 128, "IN_GROUP": 4}
    else:
        variant = fused_casts.product_variant(
            product("gelu", torch.bfloat16), Quantizer(), exact=True, record=True
        )
        dtypes = [torch.bfloat16, torch.bfloat16, torch.float32, *[torch.float8_e4m3fn] * 2]
        tensors = [aligned(4096, dtype) for dtype in (*dtypes, *[torch.float32] * 4)]
        kernel, constants, numbers = triton_kernels.cast_product, {"HOW": variant}, (16, 4096)
    return KernelLaunch(kernel, 3, numbers, constants, {"num_warps": 16}), tensors


@pytest.mark.parametrize("name", ["transpose_bytes", "cast_product"])
def test_a_later_launch_passes_what_tritons_own_passes(name, launches):
    launch, tensors = launch_of(name)
    for _ in range(2):
        launch(tensors)
    by_triton, by_us = launches.passed
    assert launches.by_triton == 1
    # Triton passes the chains of hooks, which are empty, and what they would read.
    hooks = slice(7, 10)
    assert by_us[hooks] == (None, None, None)
    assert by_us[: hooks.start] == by_triton[: hooks.start]
    assert by_us[1:6] == (3, 1, 1, 77, 4321)
    assert by_us[hooks.stop :] == by_triton[hooks.stop :]
    assert by_us[hooks.stop :][: len(tensors)] == tuple(x.data_ptr() for x in tensors)


def test_tensors_of_another_alignment_have_a_kernel_of_their_own(launches):
    launch, (data, transposed) = launch_of("transpose_bytes")
    shifted = aligned(4096, torch.float8_e4m3fn, offset=8)
    for tensors in ([data, transposed], [shifted, transposed], [data, shifted]) * 2:
        launch(tensors)
    assert launches.by_triton == 3
    kernels = [arguments[0] for arguments in launches.passed]
    assert kernels[:3] == kernels[3:]
    assert len({id(kernel) for kernel in kernels}) == 3


def test_a_hook_sees_every_launch(launches):
    from triton import knobs

    launch, tensors = launch_of("transpose_bytes")
    for _ in range(2):
        launch(tensors)
    hooked: list[Any] = []
    for chain in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        chain.add(hooked.append)
        try:
            launch(tensors)
        finally:
            chain.remove(hooked.append)
        _, metadata, enter, leave, *_ = launches.passed[-1][6:]
        assert chain in (enter, leave)
        assert metadata.get()["name"] == "transpose_bytes"
    launch(tensors)
    assert launches.by_triton == 3
    assert len(launches.passed) == 5


class OnGpu:
    """A tensor on a GPU."""

    dtype = torch.uint8

    def __init__(self, index: int) -> None:
        self.index = index

    def get_device(self) -> int:
        """Its number."""
        return self.index

    def data_ptr(self) -> int:
        """Its address."""
        return 2**20

    def view(self, dtype: torch.dtype) -> OnGpu:
        """Itself."""
        return self


def test_a_launch_makes_the_tensors_gpu_the_current_one_and_each_has_a_kernel(launches):
    launch, _ = launch_of("transpose_bytes")
    for index in (0, 1, 0, 1):
        launch([OnGpu(index), OnGpu(index)])
    assert launches.devices == [1, 1]
    assert launches.by_triton == 2
    assert launches.passed[3][4] == 78  # the stream of the second GPU
