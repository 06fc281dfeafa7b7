"""What a machine is, as a value: asked of this one, of a fake one, or assumed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fp8stack.errors import UserError
from fp8stack.precision import Hardware, assumed, hardware, probe

XEON = """processor\t: 0
vendor_id\t: GenuineIntel
model\t\t: 143
model name\t: Intel(R) Xeon(R) Platinum 8480+
flags\t\t: fpu sse2 avx512f {flags}
vmx flags\t: vnmi preemption_timer

processor\t: 1
model name\t: another
flags\t\t: fpu avx512_bf16
"""
GRAVITON = """processor\t: 0
BogoMIPS\t: 2100.00
Features\t: fp asimd {flags}
CPU implementer\t: 0x41
"""


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch):
    """Makes torch report a GPU."""

    def fake(name: str, capability: tuple[int, int], gib: float, cuda: str | None, te: str | None):
        properties = SimpleNamespace(
            name=name,
            major=capability[0],
            minor=capability[1],
            total_memory=int(gib * 2**30),
        )
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(hardware, "_te_version", lambda: te)

    return fake


@pytest.fixture
def cpuinfo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_cuda: None):
    """Replaces /proc/cpuinfo."""

    def write(text: str | bytes | None) -> None:
        path = tmp_path / "cpuinfo"
        if text is not None:
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
        monkeypatch.setattr(hardware, "Path", lambda asked: path)

    return write


# This machine


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_a_machine_without_cuda_is_its_cpu(no_cuda, device):
    found = probe(device)
    assert (found.device, found.capability, found.has_te) == ("cpu", None, False)
    assert found.cuda_version is None
    assert found.name
    assert 0.1 < found.memory_gib < 1e5
    assert found.torch_version == torch.__version__
    assert isinstance(found.cpu_bf16, bool)
    assert found.name in str(found)


def test_probing_twice_gives_the_same_value(no_cuda):
    assert probe() == probe()


def test_cuda_that_is_asked_for_and_absent_is_refused_with_a_way_out(no_cuda):
    with pytest.raises(UserError, match="No CUDA GPU") as caught:
        probe("cuda")
    assert "--device cpu" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("device", ["gpu", "CUDA", "cuda:0", "mps", "", "xpu"])
def test_an_unknown_device_is_refused(device):
    with pytest.raises(UserError) as caught:
        probe(device)
    assert str(caught.value) == f"No device '{device}'. Known: auto, cpu, cuda."


# A fake GPU


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_an_h100_is_read_from_what_torch_says(fake_gpu, device):
    fake_gpu("NVIDIA H100 80GB HBM3", (9, 0), 79.19, "12.9", "2.20.0")
    assert probe(device) == Hardware(
        "cuda",
        (9, 0),
        has_te=True,
        cuda_version=(12, 9),
        name="NVIDIA H100 80GB HBM3",
        memory_gib=79.2,
        torch_version=torch.__version__,
        te_version="2.20.0",
    )


@pytest.mark.parametrize(
    ("cuda", "expected"),
    [("12.8", (12, 8)), ("13.0", (13, 0)), ("12.10", (12, 10)), ("12.4.1", (12, 4)), (None, None)],
)
def test_the_cuda_version_is_read_as_two_numbers(fake_gpu, cuda, expected):
    fake_gpu("a GPU", (8, 9), 24.0, cuda, None)
    assert probe().cuda_version == expected


def test_a_gpu_without_te_says_so(fake_gpu):
    fake_gpu("a GPU", (9, 0), 80.0, "12.9", None)
    found = probe()
    assert (found.has_te, found.te_version) == (False, None)


def test_the_cpu_is_probed_without_a_look_at_the_gpu(fake_gpu, monkeypatch):
    fake_gpu("a GPU", (9, 0), 80.0, "12.9", "2.20.0")

    def touched(*args: object) -> None:
        raise AssertionError("the GPU was asked")

    monkeypatch.setattr(torch.cuda, "get_device_properties", touched)
    found = probe("cpu")
    assert (found.device, found.capability, found.has_te) == ("cpu", None, False)


# A fake CPU


@pytest.mark.parametrize("text", [XEON, GRAVITON], ids=["xeon", "graviton"])
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("amx_bf16", True),
        ("avx512_bf16 amx_tile", True),
        ("bf16", True),
        ("", False),
        ("avx512vl amx_int8 amx_tile", False),
        ("ebf16x not_bf16", False),
    ],
)
def test_bf16_hardware_is_read_from_the_flags_of_the_first_cpu(cpuinfo, text, flags, expected):
    cpuinfo(text.format(flags=flags))
    assert probe("cpu").cpu_bf16 is expected


def test_the_cpus_name_is_read(cpuinfo):
    cpuinfo(XEON.format(flags=""))
    assert probe("cpu").name == "Intel(R) Xeon(R) Platinum 8480+"


@pytest.mark.parametrize("text", [None, "", b"\xff\xfe\x00", "flags", "nothing : known\n"], ids=str)
def test_a_machine_that_does_not_describe_its_cpu_is_still_a_value(cpuinfo, text):
    cpuinfo(text)
    found = probe("cpu")
    assert (found.device, found.cpu_bf16) == ("cpu", False)
    assert isinstance(found.name, str)


def test_unknown_memory_counts_as_none(no_cuda, monkeypatch):
    def refuse(name: str) -> int:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(hardware.os, "sysconf", refuse)
    assert probe("cpu").memory_gib == 0.0


# Assumed machines


@pytest.mark.parametrize(
    ("text", "capability"),
    [("6.0", (6, 0)), ("7.5", (7, 5)), ("8.9", (8, 9)), ("9.0", (9, 0)), ("12.1", (12, 1))],
)
def test_an_assumed_gpu_has_current_software(text, capability):
    found = assumed(text)
    assert (found.device, found.capability) == ("cuda", capability)
    assert (found.has_te, found.te_version) == (True, "2.20")
    assert found.cuda_version is not None
    assert found.cuda_version >= (12, 9)
    assert text in str(found)


def test_an_assumed_gpu_can_be_without_te():
    found = assumed("9.0", has_te=False)
    assert (found.has_te, found.te_version) == (False, None)


@pytest.mark.parametrize("has_te", [True, False])
def test_an_assumed_cpu_has_no_capability_and_no_bf16(has_te):
    found = assumed("none", has_te)
    assert (found.device, found.capability, found.cpu_bf16) == ("cpu", None, False)
    assert (found.has_te, found.te_version, found.cuda_version) == (False, None, None)


def test_assuming_asks_nothing_of_this_machine(monkeypatch):
    def touched(*args: object) -> None:
        raise AssertionError("the machine was asked")

    for name in ("is_available", "get_device_properties", "get_device_capability"):
        monkeypatch.setattr(torch.cuda, name, touched)
    for name in ("_te_version", "_cpu_flags", "_cpu_name", "_system_memory_gib"):
        monkeypatch.setattr(hardware, name, touched)
    assert assumed("9.0") == assumed("9.0")
    assert assumed("none") == assumed("none")


# fmt: off
NO_CAPABILITIES = [
    "", " ", "9", "90", "x.y", "9.x", "9.0.1", ".", "9.", ".0", "-1.0", "9.-1", "+9.0", " 9.0",
    "9.0 ", "9.0\n", "sm_90", "9,0", "None", "NONE", "cpu", "1e1.0", "9.²", "100.0", "9.100",
    "9.0a",
]
# fmt: on


@pytest.mark.parametrize("text", NO_CAPABILITIES, ids=repr)
def test_what_is_no_compute_capability_is_refused_in_one_line(text):
    with pytest.raises(UserError, match="is no compute capability") as caught:
        assumed(text)
    assert "8.0 or 9.0, or none" in str(caught.value)
    assert "\n" not in str(caught.value)


# The value itself


def test_a_cuda_device_has_a_capability():
    with pytest.raises(ValueError, match="compute capability"):
        Hardware("cuda")


def test_hardware_is_never_mutated():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Hardware().has_te = True


def test_hardware_is_equal_and_hashed_by_value():
    one, other = (Hardware("cuda", (9, 0), has_te=True) for _ in range(2))
    assert one == other
    assert len({one, other, Hardware()}) == 2


@pytest.mark.parametrize(
    ("machine", "text"),
    [
        (Hardware(), "CPU (without bf16 instructions)"),
        (Hardware("cpu", cpu_bf16=True, name="Zen 4"), "Zen 4 (with bf16 instructions)"),
        (Hardware("cuda", (9, 0)), "CUDA GPU (compute capability 9.0)"),
        (Hardware("cuda", (12, 1), name="GB10"), "GB10 (compute capability 12.1)"),
    ],
)
def test_hardware_reads_as_its_name_and_what_decides_the_plan(machine, text):
    assert str(machine) == text
