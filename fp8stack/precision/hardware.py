"""The machine as a `Hardware` value, from which all decisions about precision are made.

torch is imported only where it may find a GPU: the import takes seconds.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import runpy
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fp8stack.common.errors import UserError, described, quoted
from fp8stack.precision.gpus import assumed_name, gpu_named
from fp8stack.precision.system_memory import system_memory_gib
from fp8stack.precision.toolchain import find_triton_problem


@dataclass(frozen=True)
class Hardware:
    """A machine as a plain value, so that a plan for any GPU can be made and tested on a CPU.

    Attributes:
        device: "cpu", "cuda" (AMD's GPUs as well), or "xpu" (Intel's).
        capability: CUDA's compute capability; None without a GPU of NVIDIA.
        has_te: whether Transformer Engine can be used.
        cuda_version: the CUDA version that torch was built for.
        name: the name of the GPU or CPU.
        other_gpu: the kind of a GPU that is not NVIDIA's, "AMD GPU" or "Intel GPU", on which plain
            torch runs and FP8 is emulated; "" on other machines. No such GPU has run fp8stack.
        cpu_bf16: whether the CPU multiplies bfloat16 in hardware (AMX, AVX512-BF16 or Arm's BF16
            instructions).
        slow_scaled_mm: whether the CPU's `torch._scaled_mm` is oneDNN's reference code for two
            operands of one FP8 format with a scale per tensor, see `scaled_mm_is_slow`.
        memory_gib: the memory of the GPU, or the system's.
        torch_version: the installed version of torch.
        te_version: the installed version of Transformer Engine.
        te_problem: why the installed Transformer Engine cannot be used, and the remedy.
        gpu_problem: why the GPU cannot be used, so that this is the CPU, and the remedy.
        numba_problem: why numba cannot compile the casts of emulated FP8 on a CPU, and the remedy.
        compiler_problem: why torch.compile cannot generate code for the GPU, and the remedy.
    """

    device: str = "cpu"
    capability: tuple[int, int] | None = None
    _: KW_ONLY
    has_te: bool = False
    cuda_version: tuple[int, int] | None = None
    name: str = ""
    other_gpu: str = ""
    cpu_bf16: bool = False
    slow_scaled_mm: bool = False
    memory_gib: float = 0.0
    torch_version: str = ""
    te_version: str | None = None
    te_problem: str = ""
    gpu_problem: str = ""
    numba_problem: str = ""
    compiler_problem: str = ""

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda", "xpu"):
            raise UserError(f"No device {self.device!r}. Known: cpu, cuda, xpu.")
        if self.device == "cuda" and self.capability is None and not self.other_gpu:
            raise UserError("A CUDA device has a compute capability: Hardware('cuda', (9, 0)).")
        pair = self.capability
        is_pair = isinstance(pair, tuple) and [type(number) for number in pair] == [int, int]
        if pair is not None and not is_pair:
            raise UserError(f"A compute capability is a pair such as (9, 0), not {pair!r}.")
        if self.device == "cpu" and pair is not None:
            raise UserError("A CPU has no compute capability: Hardware('cuda', (9, 0)) is a GPU.")
        if self.device == "xpu" and not self.other_gpu:
            raise UserError("An xpu is of another maker: Hardware('xpu', other_gpu='Intel GPU').")

    def __str__(self) -> str:
        if self.device == "cpu":
            bf16 = "with" if self.cpu_bf16 else "without"
            return f"{self.name or 'CPU'} ({bf16} bf16 instructions)"
        if self.capability is None:
            return f"{self.name or 'GPU'} ({self.other_gpu})"
        major, minor = self.capability
        return f"{self.name or 'CUDA GPU'} (compute capability {major}.{minor})"


def probe(device: str = "auto") -> Hardware:
    """Detect this machine: its first GPU if it has a usable one, else its CPU.

    Args:
        device: "auto", "cpu", "cuda" (a GPU of NVIDIA or AMD) or "xpu" (of Intel).

    Raises:
        UserError: an unknown device, or a GPU where torch finds no usable one.
    """
    if device == "mps":
        raise UserError(f"{_NO_FLOAT64.format(_APPLE)}. Use --device cpu.")
    if device not in ("auto", "cpu", "cuda", "xpu"):
        raise UserError(f"No device '{quoted(str(device))}'. Known: auto, cpu, cuda, xpu.")
    if device == "cpu":
        return _probe_cpu()
    if device != "xpu" and _has_cuda():
        return _probe_nvidia(device)
    return _probe_other(device)


def _probe_nvidia(device: str) -> Hardware:
    """`probe` where torch finds a GPU of NVIDIA."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    capability = (properties.major, properties.minor)
    if not has_kernels(capability, torch.cuda.get_arch_list(), version_pair(torch.version.cuda)):
        old = " --force-reinstall --index-url https://download.pytorch.org/whl/cu126"
        problem = (
            f"torch {_torch_build()['__version__']} has no kernels for {properties.name} (compute "
            "capability {}.{}): pip install{} torch".format(
                *capability, old if capability < TURING else " --upgrade"
            )
        )
        if device == "cuda":
            raise UserError(f"{problem}, or use --device cpu.")
        return replace(_probe_cpu(), gpu_problem=problem)
    version, problem = find_te()
    return Hardware(
        "cuda",
        capability,
        name=properties.name,
        has_te=version is not None and not problem,
        cuda_version=version_pair(torch.version.cuda),
        memory_gib=round(properties.total_memory / 2**30, 1),
        torch_version=_torch_build()["__version__"],
        te_version=version,
        te_problem=problem,
        compiler_problem=find_compiler_problem(),
    )


_APPLE, _NO_FLOAT64 = "Apple's GPU", "{} has no float64, which training needs"


def _probe_other(device: str) -> Hardware:
    """`probe` where torch finds no GPU of NVIDIA."""
    name = _APPLE if sys.platform == "darwin" and platform.machine() == "arm64" else ""
    for where, variable, kind in (("cuda", "hip", "AMD GPU"), ("xpu", "xpu", "Intel GPU")):
        if device not in ("auto", where) or _torch_build().get(variable) is None:
            continue
        import torch

        module: Any = getattr(torch, where)
        if not module.is_available():
            continue
        properties = module.get_device_properties(0)
        name = properties.name
        if getattr(properties, "has_fp64", True):
            return Hardware(
                where,
                name=name,
                other_gpu=kind,
                memory_gib=round(properties.total_memory / 2**30, 1),
                torch_version=_torch_build()["__version__"],
                te_version=_te_version(),
                compiler_problem=find_compiler_problem(),
            )
    problem = _NO_FLOAT64.format(name) if name else ""
    if device != "auto":
        problem = problem or f"No {device.upper()} GPU is usable by this torch"
        raise UserError(f"{problem}. Use --device cpu.")
    return replace(_probe_cpu(), gpu_problem=problem)


def _probe_cpu() -> Hardware:
    return Hardware(
        "cpu",
        name=_cpuinfo().get("model name") or platform.processor() or platform.machine(),
        cpu_bf16=cpu_multiplies_bf16(),
        slow_scaled_mm=scaled_mm_is_slow(),
        memory_gib=round(system_memory_gib(), 1),
        torch_version=_torch_build()["__version__"],
        te_version=_te_version(),
        numba_problem="" if find_spec("numba") else "numba is not installed: pip install numba",
    )


def find_compiler_problem() -> str:
    """The reason that torch.compile cannot generate code for this GPU, with the remedy; or ""."""
    return find_triton_problem() or missing_headers()


def missing_headers() -> str:
    """The message that Python's headers, which compiled extensions need, are missing; or ""."""
    headers = Path(sysconfig.get_path("include"))
    # On macOS this path may not exist although the headers are installed.
    if sys.platform != "linux" or (headers / "Python.h").exists():
        return ""
    return f"{headers} has no Python.h: install python3-dev on Debian and Ubuntu"


TURING = (7, 5)
"""The lowest compute capability of CUDA 13, and of torch 2.11 and later for CUDA 12.8."""


def has_kernels(
    capability: tuple[int, int], built_for: Sequence[str], cuda: tuple[int, int] | None
) -> bool:
    """Whether a build of torch runs on GPUs of a compute capability.

    Args:
        capability: the GPU's compute capability.
        built_for: `torch.cuda.get_arch_list()`, such as "sm_90" and "compute_120". Binary code runs
            on later GPUs of the same major number, PTX ("compute") on all later GPUs.
        cuda: the CUDA version of the build, which decides where `built_for` is empty.
    """
    if not built_for:
        return capability >= TURING or cuda is None or cuda < (13, 0)
    for match in re.finditer(r"\b(sm|compute)_(\d+)(\d)", " ".join(built_for)):
        target = (int(match[2]), int(match[3]))
        if target <= capability and (match[1] == "compute" or target[0] == capability[0]):
            return True
    return False


def assumed(capability: str, has_te: bool = True) -> Hardware:
    """A hypothetical machine with current software: torch 2.15 for CUDA 12.9 or later, TE
    2.20.

    Its GPU is the usual one of that compute capability; plans use its data sheet if `GPUS` has one.
    GPUs before Turing get torch for CUDA 12.6, the last version that is built for them.

    Args:
        capability: a compute capability such as "9.0", or "none" for a CPU; "9" where only one
            begins with it.
        has_te: whether it has Transformer Engine.

    Raises:
        UserError: `capability` is no compute capability, or no GPU has it.
    """
    if not isinstance(capability, str):
        raise UserError(f"A compute capability is given as '9.0', not by {described(capability)}.")
    if capability == "none":
        return Hardware("cpu", name="assumed CPU", torch_version=_torch_build()["__version__"])
    minors = [minor for major, minor in CAPABILITIES if str(major) == capability]
    numbers = (f"{capability}.{minors[0]}" if len(minors) == 1 else capability).split(".")
    if len(numbers) != 2 or not all(text.isdecimal() and len(text) <= 2 for text in numbers):
        raise UserError(
            f"'{quoted(capability)}' is no compute capability. "
            "Give one such as 8.0 or 9.0, or none."
        )
    version = (int(numbers[0]), int(numbers[1]))
    if version not in CAPABILITIES:
        existing = ", ".join(f"{major}.{minor}" for major, minor in CAPABILITIES)
        raise UserError(f"No GPU has compute capability {capability}. Known: {existing}.")
    return Hardware(
        "cuda",
        version,
        name=f"assumed {assumed_name(version)}",
        has_te=has_te,
        cuda_version=(12, 9) if version >= TURING else (12, 6),
        torch_version=ASSUMED_TORCH,
        te_version="2.20" if has_te else None,
    )


def machine_for(
    capability: str | None, te: bool | None, device: str = "auto", gpu: str | None = None
) -> Hardware:
    """The machine for a command's `--capability`, `--te/--no-te` and `--gpu`.

    Without these options it is `probe(device)`, else an `assumed` one, which has Transformer Engine
    unless `te` is False.

    Raises:
        UserError: from `probe` and `assumed`; `te` was given for this machine; no such GPU, or it
            has another compute capability.
    """
    if gpu is not None:
        entry = gpu_named(gpu)
        gpu_capability = "{}.{}".format(*entry.capability)
        if capability and assumed(capability).capability != entry.capability:
            raise UserError(
                f"--gpu {entry.name} has compute capability {gpu_capability}, not {capability}. "
                "Leave --capability out."
            )
        machine = assumed(gpu_capability, has_te=te is not False)
        return replace(machine, name=f"assumed {entry.name}")
    if te is not None and capability is None:
        raise UserError(
            f"--{'' if te else 'no-'}te is about a GPU that is not here; this machine is asked "
            "itself. Give --capability too, such as 9.0."
        )
    return probe(device) if capability is None else assumed(capability, has_te=te is not False)


def _has_cuda() -> bool:
    """Whether torch can use a GPU of NVIDIA."""
    build = _torch_build()
    if build["hip"] is not None:  # AMD's GPUs are called cuda too
        return False
    if "torch" not in sys.modules and not (build["cuda"] and _has_driver()):
        return False  # the answer of torch.cuda.is_available(), without importing torch
    import torch

    return torch.cuda.is_available()


def _torch_build() -> dict[str, Any]:
    """The variables of `torch.version`: `__version__`, and `cuda`, `hip` and `xpu` of the build.

    They are read from its file, unless torch is imported already.
    """
    spec = None if "torch" in sys.modules else find_spec("torch")
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin).with_name("version.py")
        if path.is_file():
            return runpy.run_path(str(path))
    import torch

    return vars(torch.version)


def _has_driver() -> bool:
    """Whether CUDA's driver, which torch needs, can be loaded; True where its name varies."""
    if sys.platform != "linux":
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _te_version() -> str | None:
    """The installed version of Transformer Engine, without importing it; None without one."""
    try:
        return metadata.version("transformer-engine")
    except metadata.PackageNotFoundError:
        return None


def find_te(timeout_s: float = 180.0) -> tuple[str | None, str]:
    """The installed version of Transformer Engine, and why it cannot be used; "" if it can.

    A subprocess imports it: an extension that was built for another torch can kill its process.
    """
    version = _te_version()
    if version is None:
        return None, ""
    if (version_pair(version) or (0, 0)) < TE_MINIMUM:
        least = ".".join(map(str, TE_MINIMUM))
        return version, (
            f"Transformer Engine {version} is older than {least}: pip install --upgrade "
            f"--no-build-isolation 'transformer-engine[pytorch]>={least}'"
        )
    command = [sys.executable, "-P", "-c", _IMPORT_TE]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        failure = f"took more than {timeout_s:g} s"
    else:
        if process.returncode == 0:
            return version, ""
        lines = [line.strip() for line in process.stderr.splitlines() if line.strip()]
        failure = f"died: exit code {process.returncode}"
        if lines and process.returncode > 0:  # a signal says more than the last warning before it
            last = lines[-1] if len(lines[-1]) <= 120 else f"{lines[-1][:117]}..."
            failure = f"failed ({quoted(last)})"
    public = version.partition("+")[0]  # PyPI has no local versions
    return version, (
        f"importing Transformer Engine {version} {failure}: pip install --force-reinstall "
        f"--no-cache-dir --no-build-isolation 'transformer-engine[pytorch]=={public}'"
    )


# https://developer.nvidia.com/cuda-gpus, and the legacy list there.
CAPABILITIES = (
    *((3, 0), (3, 2), (3, 5), (3, 7), (5, 0), (5, 2), (5, 3), (6, 0), (6, 1), (6, 2)),
    *((7, 0), (7, 2), (7, 5), (8, 0), (8, 6), (8, 7), (8, 8), (8, 9), (9, 0)),
    *((10, 0), (10, 1), (10, 3), (11, 0), (12, 0), (12, 1)),
)
ASSUMED_TORCH = "2.15.0"  # the newest one
TE_MINIMUM = (2, 20)
TE_REMEDY = "pip install --no-build-isolation 'transformer-engine[pytorch]>=2.20'"
_IMPORT_TE = "import torch, transformer_engine.pytorch as te; te.autocast, te.Linear"


CPU_BF16 = "FP8STACK_CPU_BF16"
"""Environment variable, "yes" or "no": overrides whether the CPU has bf16 instructions, for systems
that do not list its flags (macOS) and for tests."""
SLOW_SCALED_MM = "FP8STACK_SLOW_SCALED_MM"
"""Environment variable, "yes" or "no": overrides `scaled_mm_is_slow`, for tests."""


def version_pair(version: str | None) -> tuple[int, int] | None:
    """The first two numbers of a version; None if it does not begin with two."""
    match = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(match[1]), int(match[2])) if match else None


def _cpuinfo() -> dict[str, str]:
    """The fields of the first CPU in /proc/cpuinfo, by name in lower case; empty without Linux."""
    path = Path("/proc/cpuinfo")
    fields: dict[str, str] = {}
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip().lower(), value.strip())
    return fields


def cpu_multiplies_bf16() -> bool:
    """Whether this CPU has instructions for products of bfloat16. Raises a UserError if the
    environment variable `CPU_BF16` is neither "yes" nor "no"."""
    setting = _yes_or_no(CPU_BF16)
    if setting is not None:
        return setting
    return not {"amx_bf16", "avx512_bf16", "bf16"}.isdisjoint(_cpu_flags())


def scaled_mm_is_slow() -> bool:
    """Whether `torch._scaled_mm` is slow on this CPU for operands of one format with a scale per
    tensor: on CPUs with AMX, torch calls oneDNN for them (`_scaled_mm_out_cpu` of torch 2.13),
    which has FP8 GEMMs from AMX-FP16 on, and else reference code of 0.1 GFLOP/s.

    Raises:
        UserError: the environment variable `SLOW_SCALED_MM` is neither "yes" nor "no".
    """
    setting = _yes_or_no(SLOW_SCALED_MM)
    if setting is not None:
        return setting
    flags = _cpu_flags()
    return "amx_int8" in flags and "amx_fp16" not in flags


def _yes_or_no(variable: str) -> bool | None:
    """The setting of an environment variable, "yes" or "no"; None if it is empty."""
    setting = os.environ.get(variable, "")
    if setting not in ("", "yes", "no"):
        raise UserError(f"{variable} is '{quoted(setting)}'. Set it to yes or no, or leave it out.")
    return setting == "yes" if setting else None


def _cpu_flags() -> list[str]:
    """The flags of the first CPU in /proc/cpuinfo."""
    fields = _cpuinfo()
    return (fields.get("flags") or fields.get("features") or "").split()
