"""`Hardware` values: probed on this machine and on fake ones, or assumed."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import platform
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from fp8stack.common.errors import UserError
from fp8stack.precision import Hardware, assumed, doctor, hardware, probe, resolve
from fp8stack.precision.gpus import find_gpu
from fp8stack.precision.hardware import TE_MINIMUM, TE_REMEDY, find_te
from fp8stack.precision.native_gemms import TORCH_MINIMUM
from tests.conftest import refusal

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

    def fake(
        name: str,
        capability: tuple[int, int],
        gib: float,
        cuda: str | None,
        te: str | None,
        problem: str = "",
    ):
        properties = SimpleNamespace(
            name=name,
            major=capability[0],
            minor=capability[1],
            total_memory=int(gib * 2**30),
        )
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: [])
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(hardware, "find_te", lambda: (te, problem))

    return fake


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Makes a version of Transformer Engine count as installed."""

    def install(version: str | None) -> None:
        def find(name: str) -> str:
            assert name == "transformer-engine"
            if version is None:
                raise metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(metadata, "version", find)

    return install


@pytest.fixture
def import_ends(monkeypatch: pytest.MonkeyPatch):
    """Makes the process that imports Transformer Engine end in some way; gives its calls."""

    def end(code: int = 0, stderr: str = "", error: Exception | None = None) -> list:
        calls = []

        def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
            calls.append((command, options))
            if error is not None:
                raise error
            return subprocess.CompletedProcess(command, code, "some output", stderr)

        monkeypatch.setattr(subprocess, "run", run)
        return calls

    return end


@pytest.fixture
def fake_te(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a `transformer_engine.pytorch` of some source on the path of new processes."""

    def write(source: str, fake_torch: bool = True) -> None:
        site = tmp_path / "site"
        (site / "transformer_engine").mkdir(parents=True)
        (site / "transformer_engine" / "__init__.py").write_text("")
        (site / "transformer_engine" / "pytorch.py").write_text(source)
        if fake_torch:  # the real one takes seconds
            (site / "torch.py").write_text("")
        folder = tmp_path / "here"
        folder.mkdir()
        monkeypatch.chdir(folder)
        monkeypatch.setenv("PYTHONPATH", str(site))
        monkeypatch.setattr(hardware, "_te_version", lambda: "2.20.0")

    return write


@pytest.fixture
def cpuinfo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_cuda: None):
    """Replaces /proc/cpuinfo."""

    def write(text: str | bytes | None) -> None:
        monkeypatch.delenv(hardware.CPU_BF16, raising=False)
        path = tmp_path / "cpuinfo"
        if text is not None:
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
        monkeypatch.setattr(hardware, "Path", lambda _: path)

    return write


# This machine


def test_a_machine_without_cuda_is_its_cpu(no_cuda):
    machine = probe()
    assert machine == probe("cpu")
    assert (machine.device, machine.capability, machine.has_te) == ("cpu", None, False)
    assert machine.cuda_version is None
    assert machine.name
    assert 0.1 < machine.memory_gib < 1e5
    assert machine.torch_version == torch.__version__
    assert machine.name in str(machine)


# A fake GPU


def test_an_unknown_device_is_refused_and_an_absent_one_with_a_way_out(no_cuda):
    for device in ("gpu", "cuda:0", ""):
        assert refusal(probe, device) == f"No device '{device}'. Known: auto, cpu, cuda, xpu."
    for device in ("cuda", "xpu"):
        message = f"No {device.upper()} GPU is usable by this torch. Use --device cpu."
        assert refusal(probe, device) == message


@pytest.mark.parametrize("cuda", ["12.9", "12.10", "12.4.1", None])
def test_an_h100_is_read_from_what_torch_says(fake_gpu, cuda):
    name = "NVIDIA H100 80GB HBM3"
    for te, problem in (("2.20.0", ""), (None, ""), ("2.20.0", "it is broken: mend it")):
        fake_gpu(name, (9, 0), 79.19, cuda, te, problem)
        assert probe() == probe("cuda")
        assert probe() == Hardware(
            "cuda",
            (9, 0),
            has_te=te is not None and not problem,
            cuda_version=None if cuda is None else (12, int(cuda.split(".")[1])),
            name=name,
            memory_gib=79.2,
            torch_version=torch.__version__,
            te_version=te,
            te_problem=problem,
        )


def test_the_cpu_is_probed_without_a_look_at_the_gpu_or_at_te(fake_gpu, installed, monkeypatch):
    fake_gpu("a GPU", (9, 0), 80.0, "12.9", "2.20.0")
    installed("2.20.0")

    def touched(*args: object) -> None:
        raise AssertionError("it was asked")

    for module, name in (
        (torch.cuda, "get_device_properties"),
        (hardware, "find_te"),
        (subprocess, "run"),
    ):
        monkeypatch.setattr(module, name, touched)
    machine = probe("cpu")
    assert (machine.device, machine.capability, machine.has_te) == ("cpu", None, False)
    assert (machine.te_version, machine.te_problem) == ("2.20.0", "")


# Before torch is imported

# Each machine is looked at by a process of its own, which has imported no torch.
ASK = """
import os, sys
from fp8stack.precision import Hardware, hardware, probe
hardware._te_version = lambda: None
for site, driver, device in {cases}:
    if os.fork() == 0:
        sys.path.insert(0, site)
        hardware._has_driver = lambda: driver
        print(repr(probe(device)), "torch" in sys.modules, sep="|", flush=True)
        os._exit(0)
    os.wait()
"""
# A torch that knows what it was built for, and what its CUDA says.
BUILD = "__version__ = '2.99.0+fake'\ncuda = {cuda!r}\nhip = {hip!r}\n"
SAYS = """
from types import SimpleNamespace as Some
from torch import version
__version__ = version.__version__
gpu = Some(
    name="a GPU", major=9, minor=0, total_memory=80 * 2**30, gcnArchName="gfx942:sramecc+:xnack-"
)
cuda = Some(
    is_available=lambda: {available}, get_device_properties=lambda index: gpu, get_arch_list=list
)
"""


# The torch and the machine of each case, and whether torch is asked and finds a GPU.
FAKE_TORCHES: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "no CUDA": ({"cuda": None}, False, False),
    "ROCm": ({"cuda": None, "hip": "6.4"}, True, True),
    "ROCm and no GPU": ({"cuda": None, "hip": "6.4", "available": False}, True, False),
    "no driver": ({"driver": False}, False, False),
    "not asked for": ({"device": "cpu"}, False, False),
    "a GPU": ({}, True, True),
    "a driver and no GPU": ({"available": False}, True, False),
}


@pytest.mark.full
def test_torch_is_imported_and_asked_where_it_may_find_a_gpu_alone(tmp_path):
    cases = []
    for number, (options, *_) in enumerate(FAKE_TORCHES.values()):
        folder = tmp_path / str(number) / "torch"
        folder.mkdir(parents=True)
        build = BUILD.format(cuda=options.get("cuda", "12.9"), hip=options.get("hip"))
        (folder / "version.py").write_text(build)
        (folder / "__init__.py").write_text(SAYS.format(available=options.get("available", True)))
        device = options.get("device", "auto")
        cases.append((str(folder.parent), options.get("driver", True), device))
    command = [sys.executable, "-c", ASK.format(cases=cases)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for (case, (_, imports, finds)), line in zip(FAKE_TORCHES.items(), lines, strict=True):
        text, imported = line.split("|")
        machine = eval(text, {"Hardware": Hardware})
        assert (imported == "True") == imports, case
        assert (machine.device, machine.torch_version) == (
            "cuda" if finds else "cpu",
            "2.99.0+fake",
        )
        if finds:
            assert (machine.name, machine.memory_gib) == ("a GPU", 80.0)
        kind = (machine.capability, machine.cuda_version, machine.other_gpu)
        nvidia = ((9, 0), (12, 9), "") if finds else (None, None, "")
        assert kind == ((None, None, "AMD GPU") if case == "ROCm" else nvidia)


def test_the_driver_is_the_library_that_cuda_loads_where_its_name_is_known(monkeypatch):
    loaded: list[str] = []
    monkeypatch.setattr(ctypes, "CDLL", loaded.append)
    monkeypatch.setattr(sys, "platform", "linux")
    assert hardware._has_driver()
    assert loaded == ["libcuda.so.1"]
    monkeypatch.setattr(ctypes, "CDLL", lambda name: ctypes.PyDLL("no such library"))
    assert not hardware._has_driver()
    monkeypatch.setattr(sys, "platform", "win32")
    assert hardware._has_driver()


# GPUs of other makers


@pytest.fixture
def fake_amd(monkeypatch: pytest.MonkeyPatch, no_te: None):
    """Makes torch report a GPU of AMD, as its builds for ROCm do."""

    def fake(name: str) -> None:
        properties = SimpleNamespace(name=name, major=9, minor=4, total_memory=192 * 2**30)
        monkeypatch.setattr(torch.version, "hip", "7.1.25424")
        monkeypatch.setattr(torch.version, "cuda", None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)

    return fake


@pytest.fixture
def fake_intel(monkeypatch: pytest.MonkeyPatch, no_te: None, no_cuda: None):
    """Makes torch report a GPU of Intel."""

    def fake(name: str, has_fp64: bool = True) -> None:
        properties = SimpleNamespace(name=name, total_memory=128 * 2**30, has_fp64=has_fp64)
        monkeypatch.setattr(torch.version, "xpu", "20260000")
        monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
        monkeypatch.setattr(torch.xpu, "get_device_properties", lambda index: properties)

    return fake


@pytest.fixture
def apple(monkeypatch: pytest.MonkeyPatch, no_te: None, no_cuda: None) -> None:
    """Makes this machine a Mac with a processor of Apple."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")


@pytest.fixture
def no_te(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_te_version", lambda: None)


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_gpu_of_amd_is_named_and_not_taken_for_one_of_nvidia(fake_amd, device):
    fake_amd("AMD Instinct MI300X")
    machine = probe(device)
    assert (machine.device, machine.capability, machine.other_gpu) == ("cuda", None, "AMD GPU")
    assert (machine.memory_gib, machine.cuda_version, machine.has_te) == (192.0, None, False)
    assert str(machine) == "AMD Instinct MI300X (AMD GPU)"
    assert probe("cpu").other_gpu == ""


@pytest.mark.parametrize("device", ["auto", "xpu"])
def test_a_gpu_of_intel_is_named(fake_intel, device):
    fake_intel("Intel(R) Data Center GPU Max 1550")
    machine = probe(device)
    assert (machine.device, machine.capability, machine.other_gpu) == ("xpu", None, "Intel GPU")
    assert str(machine) == "Intel(R) Data Center GPU Max 1550 (Intel GPU)"
    assert refusal(probe, "cuda") == "No CUDA GPU is usable by this torch. Use --device cpu."


def test_a_gpu_of_intel_without_float64_is_named_and_the_cpu_runs(fake_intel):
    fake_intel("Intel(R) Arc(TM) A770 Graphics", has_fp64=False)
    machine = probe()
    assert machine.device == "cpu"
    problem = "Intel(R) Arc(TM) A770 Graphics has no float64, which training needs"
    assert machine.gpu_problem == problem
    assert refusal(probe, "xpu") == f"{problem}. Use --device cpu."


def test_auto_stays_on_the_cpu_of_a_mac_and_says_so(apple):
    machine = probe()
    assert (machine.device, machine.other_gpu) == ("cpu", "")
    problem = "Apple's GPU has no float64, which training needs"
    for recipe in ("auto", "delayed", "bf16"):
        plan = resolve(recipe, machine)
        assert (plan.device, plan.reasons[0]) == ("cpu", f"{problem}; the CPU runs")
        message = refusal(resolve, recipe, machine, strict=True)
        assert message.endswith(f"{problem}; the CPU runs. Use --device cpu to choose it.")
        assert problem not in str(resolve(recipe, probe("cpu")))
    assert refusal(probe, "mps") == f"{problem}. Use --device cpu."


SHOWN = ["auto", "delayed", "current", "block", "mxfp8", "rowwise", "nvfp4", "bf16", "tf32"]
DOCTOR = {
    "9.0": "te te te te em torch em bf16 tf32",
    "amd": "bf16 em em em em em em bf16 fp32",
    "apple": "fp32 em em em em em em bf16 fp32",
}


@pytest.mark.capability("B11")
@pytest.mark.parametrize("machine", DOCTOR)
def test_doctor_tells_how_each_recipe_runs_on_a_gpu_that_is_not_here(machine, request, monkeypatch):
    monkeypatch.setattr(hardware, "cpu_multiplies_bf16", lambda: False)
    if machine == "amd":
        request.getfixturevalue("fake_amd")("AMD Instinct")
    elif machine == "apple":
        request.getfixturevalue("apple")
    else:
        request.getfixturevalue("fake_gpu")("a GPU", (9, 0), 80.0, "13.2", "2.20.2")
        monkeypatch.setattr(hardware, "_torch_build", lambda: NEWEST)
    recipes = doctor.as_json(probe())["recipes"]
    words = []
    for plan in map(recipes.get, SHOWN):
        is_emulated, plain = plan["backend"] == "emulate", plan["backend"] == "reference"
        words.append("em" if is_emulated else plan["compute_dtype" if plain else "backend"])
        assert plain or plan["native"] == (not is_emulated)
    assert words == DOCTOR[machine].split()


NEWEST = {"__version__": "2.15.0+cu132", "cuda": "13.2", "hip": None, "xpu": None}


# Transformer Engine

LEAST = "2.20"
UPGRADE = "pip install --upgrade --no-build-isolation 'transformer-engine[pytorch]>=2.20'"
AGAIN = (
    "pip install --force-reinstall --no-cache-dir --no-build-isolation "
    "'transformer-engine[pytorch]=={}'"
)
TRACEBACK = """Traceback (most recent call last):
  File "<string>", line 1, in <module>
{}

"""


@pytest.mark.parametrize("version", ["2.19.0", "1.99", "2", "stable", ""])
def test_a_te_that_is_too_old_is_named_with_the_remedy_and_not_imported(
    installed, import_ends, version
):
    installed(version)
    calls = import_ends(0)
    problem = f"Transformer Engine {version} is older than {LEAST}: {UPGRADE}"
    assert find_te() == (version, problem)
    installed(None)
    assert find_te() == (None, "")
    assert calls == []


@pytest.mark.parametrize("version", ["2.20", "2.20.0.dev0+1a2b3c", "2.100", "3.0.0"])
def test_a_te_is_imported_by_this_python_in_a_safe_path_and_with_a_time_limit(
    installed, import_ends, version
):
    installed(version)
    calls = import_ends(0, stderr="UserWarning: something\n")
    assert find_te() == find_te(timeout_s=7) == (version, "")
    for command, _ in calls:
        assert command[:3] == [sys.executable, "-P", "-c"]
        assert "import torch, transformer_engine.pytorch" in command[3]
    assert [options["timeout"] for _, options in calls] == [180, 7]


@pytest.mark.parametrize(
    ("code", "stderr", "error", "reason"),
    [
        (1, TRACEBACK.format("  OSError: indented\t"), None, "failed (OSError: indented)"),
        (1, "A\r\nB\r\n\r\n", None, "failed (B)"),
        (3, " \n\n", None, "exit code 3"),
        (1, "\x1b[31mImportError: \x07red\x1b[0m\n", None, "ImportError"),
        (1, "ImportError: " + "x" * 10_000, None, "failed (ImportError: xxx"),
        (0, "", subprocess.TimeoutExpired("python", 180.0), "took more than 180 s"),
    ],
    ids=["indented", "lines", "nothing", "colors", "long", "time"],
)
def test_a_te_that_cannot_be_imported_is_one_line_with_why_and_the_remedy(
    installed, import_ends, code, stderr, error, reason
):
    installed("2.31")
    import_ends(code, stderr, error)
    version, problem = find_te()
    assert version == "2.31"
    assert problem.startswith("importing Transformer Engine 2.31 ")
    assert reason in problem
    assert problem.endswith(f": {AGAIN.format('2.31')}")
    assert problem.isprintable()
    assert len(problem) < 360


GOOD = "def autocast(): ...\nclass Linear: ...\n"
# The source of a fake `transformer_engine.pytorch`, and its problem in words.
BROKEN = {
    "no Linear": ("def autocast(): ...", "Linear"),
    "no text": (
        "import os; os.write(2, b'caf\\xe9'); os.write(1, b'\\xff'); raise ImportError('why')",
        "ImportError: why",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_real_te_that_is_broken_does_not_break_us_and_says_why(fake_te, case):
    source, reason = BROKEN[case]
    fake_te(source)
    version, problem = find_te()
    assert version == "2.20.0"
    assert problem.startswith("importing Transformer Engine 2.20.0 ")
    assert reason in problem
    assert problem.endswith(AGAIN.format("2.20.0"))
    assert problem.isprintable()


def test_a_real_te_that_hangs_is_given_up_and_ended(fake_te):
    fake_te("import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(60)")
    version, problem = find_te(timeout_s=2)
    assert version == "2.20.0"
    assert problem.startswith("importing Transformer Engine 2.20.0 took more than 2 s: pip install")
    with pytest.raises(ProcessLookupError):
        os.kill(int(Path("pid").read_text()), 0)


def test_a_real_te_that_works_is_found_and_not_imported_here(fake_te, capfd):
    fake_te("import sys; print('noise', file=sys.stderr)\n" + GOOD)
    assert find_te() == ("2.20.0", "")
    assert "transformer_engine" not in sys.modules
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "fake_torch", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["fake", "real"]
)
def test_a_real_te_is_imported_after_torch(fake_te, fake_torch):
    fake_te("import sys\nassert 'torch' in sys.modules\n" + GOOD, fake_torch)
    assert find_te() == ("2.20.0", "")


def test_files_of_the_working_directory_are_not_taken_for_te(fake_te):
    fake_te(GOOD)
    for name in ("torch.py", "transformer_engine.py"):
        Path(name).write_text("raise ImportError('this is the file beside the run')")
    assert find_te() == ("2.20.0", "")


def test_the_least_versions_are_those_that_the_package_asks_for():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    te = "transformer-engine[pytorch]>={}.{}".format(*TE_MINIMUM)
    assert project["optional-dependencies"]["te"] == [te]
    assert re.search(rf"'{re.escape(te)}'$", TE_REMEDY)
    assert "torch>={}.{}".format(*TORCH_MINIMUM) in project["dependencies"]


# A fake CPU


@pytest.mark.parametrize("text", [XEON, GRAVITON], ids=["xeon", "graviton"])
@pytest.mark.parametrize(
    ("flags", "expected"),
    [("avx512_bf16 amx_tile", True), ("bf16", True), ("", False), ("ebf16x not_bf16", False)],
)
def test_bf16_hardware_is_read_from_the_flags_of_the_first_cpu(
    cpuinfo, monkeypatch, text, flags, expected
):
    cpuinfo(text.format(flags=flags))
    assert probe("cpu").cpu_bf16 is expected
    for setting, by_setting in (("yes", True), ("no", False), ("", expected)):
        monkeypatch.setenv("FP8STACK_CPU_BF16", setting)
        assert probe("cpu").cpu_bf16 is by_setting
    monkeypatch.setenv("FP8STACK_CPU_BF16", "true")
    with pytest.raises(UserError, match=r"FP8STACK_CPU_BF16 is 'true'\. Set it to yes or no"):
        probe("cpu")


@pytest.mark.parametrize(
    ("flags", "expected"), [("amx_bf16 amx_int8", True), ("amx_int8 amx_fp16", False)]
)
def test_scaled_mm_is_slow_on_cpus_with_amx_that_have_no_fp8_gemm(
    cpuinfo, monkeypatch, flags, expected
):
    monkeypatch.delenv("FP8STACK_SLOW_SCALED_MM", raising=False)
    cpuinfo(XEON.format(flags=flags))
    assert probe("cpu").slow_scaled_mm is expected
    for setting in ("yes", "no"):
        monkeypatch.setenv("FP8STACK_SLOW_SCALED_MM", setting)
        assert probe("cpu").slow_scaled_mm is (setting == "yes")


@pytest.mark.parametrize("text", [None, b"\xff\xfe\x00", "nothing : known\n", XEON], ids=str)
def test_a_machine_that_does_not_describe_its_cpu_is_still_a_value(cpuinfo, monkeypatch, text):
    cpuinfo(text)
    assert (probe("cpu").name == "Intel(R) Xeon(R) Platinum 8480+") == (text == XEON)

    def refuse(name: str) -> int:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(os, "sysconf", refuse)
    machine = probe("cpu")
    assert (machine.device, machine.cpu_bf16, machine.memory_gib) == ("cpu", False, 0.0)
    assert isinstance(machine.name, str)


# Assumed machines


CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@pytest.mark.parametrize(
    ("capability", "built_for", "cuda", "runs"),
    [
        ((7, 0), CUDA_13, (13, 0), False),
        ((7, 2), ["sm_70"], (12, 6), True),
        ((8, 9), CUDA_13, (13, 0), True),
        ((8, 0), ["sm_86"], (13, 0), False),
        ((11, 0), CUDA_13, (13, 0), False),
        ((13, 0), CUDA_13, (13, 0), True),  # by PTX
        ((10, 0), ["sm_90", "sm_90a"], (12, 4), False),
        ((7, 0), [], (13, 0), False),
        ((7, 0), [], None, True),
    ],
)
def test_a_torch_runs_on_the_gpus_that_it_was_built_for(capability, built_for, cuda, runs):
    assert hardware.has_kernels(capability, built_for, cuda) == runs


def test_a_v100_is_planned_for_only_with_a_torch_that_has_code_for_it(fake_gpu, monkeypatch):
    fake_gpu("Tesla V100-SXM2-16GB", (7, 0), 16, "12.6", None)
    assert resolve("delayed", probe()).compute_dtype == "fp16"
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: CUDA_13)
    machine = probe()
    assert (machine.device, machine.capability) == ("cpu", None)
    remedy = (
        "pip install --force-reinstall --index-url https://download.pytorch.org/whl/cu126 torch"
    )
    problem = machine.gpu_problem
    assert problem.startswith(f"torch {torch.__version__} has no kernels for Tesla V100")
    assert problem.endswith(remedy)
    plan = resolve("fp32", machine)
    assert plan.reasons == (f"{problem}; the CPU runs",)
    with pytest.raises(UserError, match="has no kernels for Tesla V100"):
        resolve("fp32", machine, strict=True)
    with pytest.raises(UserError, match=r"cu126 torch, or use --device cpu\.$"):
        probe("cuda")


def test_doctor_says_once_why_the_gpu_cannot_be_used(capsys):
    problem = "torch 2.13.0+cu130 has no kernels for Tesla V100: pip install another"
    doctor.show(Hardware("cpu", gpu_problem=problem), Console(width=200))
    assert capsys.readouterr().out.count(problem) == 1


def test_without_numba_the_plan_says_that_casts_on_a_cpu_are_slower(monkeypatch):
    monkeypatch.setattr(hardware, "find_spec", lambda name: None)
    machine = probe("cpu")
    assert machine.numba_problem == "numba is not installed: pip install numba"
    slower = f"its casts are slower than they could be: {machine.numba_problem}"
    assert resolve("mxfp8", machine).reasons[-1] == slower
    assert resolve("delayed", machine, "emulate").reasons[-1] == slower
    assert slower not in resolve("fp32", machine).reasons
    assert slower not in resolve("mxfp8", dataclasses.replace(machine, numba_problem="")).reasons


@pytest.mark.parametrize(("capability", "cuda"), [("9.0", (12, 9)), ("none", None)])
def test_an_assumed_machine_can_be_without_te_as_every_cpu_is(capability, cuda):
    machine = assumed(capability, has_te=False)
    assert (machine.has_te, machine.te_version, machine.cuda_version) == (False, None, cuda)
    cpu = assumed("none", has_te=True)
    assert (cpu.device, cpu.capability, cpu.cpu_bf16, cpu.has_te) == ("cpu", None, False, False)


@pytest.mark.parametrize(
    ("text", "name"),
    [("9.0", "H200 or H100"), ("12.0", "RTX 5090"), ("7.0", "V100"), ("8.7", "GPU")],
)
def test_an_assumed_gpu_is_a_usual_one_of_its_generation_with_current_software(text, name):
    machine, capability = assumed(text), tuple(map(int, text.split(".")))
    assert (machine.device, machine.capability) == ("cuda", capability)
    assert (machine.has_te, machine.te_version, machine.te_problem) == (True, LEAST, "")
    assert machine.cuda_version == ((12, 6) if capability < (7, 5) else (12, 9))
    assert machine.torch_version == hardware.ASSUMED_TORCH
    assert str(machine) == f"assumed {name} (compute capability {text})"
    assert (find_gpu(machine.name) is None) == (name == "GPU")


def test_assuming_asks_nothing_of_this_machine(monkeypatch):
    def touched(*args: object) -> None:
        raise AssertionError("the machine was asked")

    for name in ("is_available", "get_device_properties", "get_device_capability"):
        monkeypatch.setattr(torch.cuda, name, touched)
    for name in ("_te_version", "find_te", "_cpuinfo", "system_memory_gib"):
        monkeypatch.setattr(hardware, name, touched)
    assert assumed("9.0") == assumed("9.0")
    assert assumed("none") == assumed("none")


@pytest.mark.parametrize("text", ["", "90", "9.x", "9.0.1", "-1.0", " 9.0", "sm_90", "cpu", "9.²"])
def test_what_is_no_compute_capability_is_refused_in_one_line(text):
    message = refusal(assumed, text)
    assert "is no compute capability" in message
    assert "8.0 or 9.0, or none" in message


# The value itself


@pytest.mark.parametrize(
    ("machine", "text"),
    [
        (Hardware(), "CPU (without bf16 instructions)"),
        (Hardware("cpu", cpu_bf16=True, name="Zen 4"), "Zen 4 (with bf16 instructions)"),
        (Hardware("cuda", (9, 0)), "CUDA GPU (compute capability 9.0)"),
    ],
)
def test_hardware_reads_as_its_name_and_what_decides_the_plan(machine, text):
    assert str(machine) == text
    with pytest.raises(ValueError, match="compute capability"):
        Hardware("cuda")
    assert "A CPU has no compute capability" in refusal(Hardware, capability=(9, 0))
