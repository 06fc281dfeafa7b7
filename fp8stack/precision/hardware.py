"""What the machine is. Decisions about precision are made from a `Hardware`, never by asking again.

torch is imported only where it may find a GPU: it takes seconds.
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
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fp8stack.errors import UserError, quoted
from fp8stack.ops.toolchain import find_triton_problem
from fp8stack.precision.gpus import gpu_named, gpu_of_capability


@dataclass(frozen=True)
class Hardware:
    """A machine as a plain value, so that a plan for any GPU can be made and tested on a CPU.

    `capability` is CUDA's compute capability, None on a CPU. `cuda_version` is the one torch was
    built for. `cpu_bf16` says whether the CPU multiplies bfloat16 in hardware (AMX, AVX512-BF16 or
    Arm's BF16 instructions). `has_te` says whether Transformer Engine can be used, `te_problem` why
    one that is installed cannot, and the remedy; `gpu_problem` why the GPU that is there cannot, so
    that this is the CPU, and the remedy; `numba_problem` why numba cannot compile the casts of
    emulated FP8 on a CPU, and the remedy; `compiler_problem` why torch.compile makes no code for
    the GPU, and the remedy.
    """

    device: str = "cpu"
    capability: tuple[int, int] | None = None
    _: KW_ONLY
    has_te: bool = False
    cuda_version: tuple[int, int] | None = None
    name: str = ""
    cpu_bf16: bool = False
    memory_gib: float = 0.0
    torch_version: str = ""
    te_version: str | None = None
    te_problem: str = ""
    gpu_problem: str = ""
    numba_problem: str = ""
    compiler_problem: str = ""

    def __post_init__(self) -> None:
        if self.device == "cuda" and self.capability is None:
            raise ValueError("A CUDA device has a compute capability: Hardware('cuda', (9, 0)).")

    def __str__(self) -> str:
        if self.device == "cpu":
            bf16 = "with" if self.cpu_bf16 else "without"
            return f"{self.name or 'CPU'} ({bf16} bf16 instructions)"
        assert self.capability is not None
        major, minor = self.capability
        return f"{self.name or 'CUDA GPU'} (compute capability {major}.{minor})"


def probe(device: str = "auto") -> Hardware:
    """What this machine is: its first CUDA GPU if there is one, else its CPU.

    Args:
        device: "auto", "cpu" or "cuda".

    Raises:
        UserError: an unknown device, or CUDA asked for where torch finds none.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"No device '{quoted(str(device))}'. Known: auto, cpu, cuda.")
    has_cuda = device != "cpu" and _has_cuda()
    if device == "cuda" and not has_cuda:
        raise UserError("No CUDA GPU is usable by this torch. Use --device cpu.")
    if not has_cuda:
        return _probe_cpu()
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


def _probe_cpu() -> Hardware:
    return Hardware(
        "cpu",
        name=_cpuinfo().get("model name") or platform.processor() or platform.machine(),
        cpu_bf16=_cpu_multiplies_bf16(),
        memory_gib=round(_system_memory_gib(), 1),
        torch_version=_torch_build()["__version__"],
        te_version=_te_version(),
        numba_problem="" if find_spec("numba") else "numba is not installed: pip install numba",
    )


def find_compiler_problem() -> str:
    """What torch.compile lacks to make code for a GPU here, and the remedy; "" if nothing."""
    return find_triton_problem() or missing_headers()


def missing_headers() -> str:
    """That Python's headers are missing, by which compilers build extensions; "" if not."""
    headers = Path(sysconfig.get_path("include"))
    # Elsewhere (macOS) the path that Python gives may not exist.
    if sys.platform != "linux" or (headers / "Python.h").exists():
        return ""
    return f"{headers} has no Python.h: install python3-dev on Debian and Ubuntu"


TURING = (7, 5)
"""The least compute capability of CUDA 13, and of torch 2.11 and later for CUDA 12.8."""


def has_kernels(
    capability: tuple[int, int], built_for: Sequence[str], cuda: tuple[int, int] | None
) -> bool:
    """Whether a torch runs on GPUs of a compute capability. `torch.cuda.get_arch_list()` gives what
    it is `built_for`, such as "sm_90" and "compute_120": code for one generation runs on later ones
    of the same major number, PTX on all later ones. Where that is empty, the `cuda` decides that
    torch was built for."""
    if not built_for:
        return capability >= TURING or cuda is None or cuda < (13, 0)
    for found in re.finditer(r"\b(sm|compute)_(\d+)(\d)", " ".join(built_for)):
        had = (int(found[2]), int(found[3]))
        if had <= capability and (found[1] == "compute" or had[0] == capability[0]):
            return True
    return False


def assumed(capability: str, has_te: bool = True) -> Hardware:
    """A machine that is not here, with current software: torch for CUDA 12.9 or later, TE 2.20.

    Its GPU is a usual one of that compute capability, by whose data sheet plans go where one is
    known. GPUs before Turing get torch for CUDA 12.6, the last that is built for them.

    Args:
        capability: "9.0" for a GPU of that compute capability, "none" for a CPU.

    Raises:
        UserError: not a compute capability.
    """
    if capability == "none":
        return Hardware("cpu", name="assumed CPU", torch_version=_torch_build()["__version__"])
    parts = capability.split(".")
    if len(parts) != 2 or not all(part.isdecimal() and len(part) <= 2 for part in parts):
        raise UserError(
            f"'{quoted(capability)}' is no compute capability. "
            "Give one such as 8.0 or 9.0, or none."
        )
    asked = (int(parts[0]), int(parts[1]))
    if asked not in CAPABILITIES:
        known = ", ".join(f"{major}.{minor}" for major, minor in CAPABILITIES)
        raise UserError(f"No GPU has compute capability {capability}. Known: {known}.")
    gpu = gpu_of_capability(asked)
    return Hardware(
        "cuda",
        asked,
        name=f"assumed {gpu.name if gpu else 'GPU'}",
        has_te=has_te,
        cuda_version=(12, 9) if asked >= TURING else (12, 6),
        torch_version=_torch_build()["__version__"],
        te_version="2.20" if has_te else None,
    )


def machine_for(
    capability: str | None, te: bool | None, device: str = "auto", gpu: str | None = None
) -> Hardware:
    """The machine that a command's `--capability`, `--te/--no-te` and `--gpu` mean: `probe(device)`
    where there is none of them, else one that is `assumed`, with Transformer Engine if nothing is
    said.

    Raises:
        UserError: what `probe` and `assumed` raise; `te` was given for this machine; no such GPU,
            or it has another compute capability.
    """
    if gpu is not None:
        found = gpu_named(gpu)
        own = "{}.{}".format(*found.capability)
        if capability not in (None, own):
            raise UserError(
                f"--gpu {found.name} has compute capability {own}, not {capability}. Leave "
                "--capability out."
            )
        return replace(assumed(own, has_te=te is not False), name=f"assumed {found.name}")
    if te is not None and capability is None:
        raise UserError(
            f"--{'' if te else 'no-'}te is about a GPU that is not here; this machine is asked "
            "itself. Give --capability too, such as 9.0."
        )
    return probe(device) if capability is None else assumed(capability, has_te=te is not False)


def _has_cuda() -> bool:
    """Whether torch can use a CUDA GPU."""
    build = _torch_build()
    if build["hip"] is not None:  # ROCm calls itself cuda
        return False
    if "torch" not in sys.modules and not (build["cuda"] and _has_driver()):
        return False  # as torch would say
    import torch

    return torch.cuda.is_available()


def _torch_build() -> dict[str, Any]:
    """What is in `torch.version`: `__version__`, and the `cuda` and `hip` that torch is built for.

    Read from its file, unless torch is imported already.
    """
    spec = None if "torch" in sys.modules else find_spec("torch")
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin).with_name("version.py")
        if path.is_file():
            return runpy.run_path(str(path))
    import torch

    return vars(torch.version)


def _has_driver() -> bool:
    """Whether CUDA's driver, which torch needs, can be loaded; assumed where its name varies."""
    if sys.platform != "linux":
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _te_version() -> str | None:
    """The version of Transformer Engine that is installed, not imported; None if there is none."""
    try:
        return metadata.version("transformer-engine")
    except metadata.PackageNotFoundError:
        return None


def find_te(timeout_s: float = 180.0) -> tuple[str | None, str]:
    """The version of Transformer Engine here, and why it cannot be used; "" if it can.

    It is imported in a process of its own: an extension that was built for another torch can kill
    the one that imports it.
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
    probing = [sys.executable, "-P", "-c", _IMPORT_TE]
    try:
        done = subprocess.run(
            probing, capture_output=True, text=True, errors="replace", timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        why = f"took more than {timeout_s:g} s"
    else:
        if done.returncode == 0:
            return version, ""
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        why = f"died: exit code {done.returncode}"
        if lines and done.returncode > 0:  # a signal says more than the last warning before it
            last = lines[-1] if len(lines[-1]) <= 120 else f"{lines[-1][:117]}..."
            why = f"failed ({quoted(last)})"
    public = version.partition("+")[0]  # a build of one's own is not on PyPI
    return version, (
        f"importing Transformer Engine {version} {why}: pip install --force-reinstall "
        f"--no-cache-dir --no-build-isolation 'transformer-engine[pytorch]=={public}'"
    )


# https://developer.nvidia.com/cuda-gpus, and the legacy list there.
CAPABILITIES = (
    *((3, 0), (3, 2), (3, 5), (3, 7), (5, 0), (5, 2), (5, 3), (6, 0), (6, 1), (6, 2)),
    *((7, 0), (7, 2), (7, 5), (8, 0), (8, 6), (8, 7), (8, 8), (8, 9), (9, 0)),
    *((10, 0), (10, 1), (10, 3), (11, 0), (12, 0), (12, 1)),
)
TE_MINIMUM = (2, 20)
TE_REMEDY = "pip install --no-build-isolation 'transformer-engine[pytorch]>=2.20'"
_IMPORT_TE = "import torch, transformer_engine.pytorch as te; te.autocast, te.Linear"


CPU_BF16 = "FP8STACK_CPU_BF16"
"""The environment variable that says, yes or no, whether the CPU has bf16 instructions, where its
flags are not known (macOS) or do not count."""


def version_pair(version: str | None) -> tuple[int, int] | None:
    """The first two numbers of a version; None if it does not begin with two."""
    found = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(found[1]), int(found[2])) if found else None


def _cpuinfo() -> dict[str, str]:
    """What Linux says of the first CPU, by name in lower case; empty elsewhere."""
    path = Path("/proc/cpuinfo")
    told: dict[str, str] = {}
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            told.setdefault(name.strip().lower(), value.strip())
    return told


def _cpu_multiplies_bf16() -> bool:
    said = os.environ.get(CPU_BF16, "")
    if said in ("yes", "no"):
        return said == "yes"
    if said:
        raise UserError(f"{CPU_BF16} is '{quoted(said)}'. Set it to yes or no, or leave it out.")
    told = _cpuinfo()
    flags = told.get("flags") or told.get("features") or ""
    return not {"amx_bf16", "avx512_bf16", "bf16"}.isdisjoint(flags.split())


def _system_memory_gib() -> float:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (ValueError, OSError, AttributeError):
        return 0.0


def available_memory(device: str, root: Path = Path("/")) -> int | None:
    """The bytes that this process can still have: of its GPU, or of the system's memory and swap
    within the limits of its control groups. None where the system does not say.

    Args:
        device: "cpu" or "cuda".
        root: where `proc` and `sys` are.
    """
    if device == "cuda":
        import torch

        return torch.cuda.mem_get_info()[0]
    try:
        text = (root / "proc/meminfo").read_text(encoding="utf-8")
        told = {words[0]: int(words[1]) * 1024 for words in map(str.split, text.splitlines())}
        left, swap = told["MemAvailable:"], told.get("SwapFree:", 0)
    except (OSError, KeyError, ValueError, IndexError):
        return None
    return min([left, *_left_in_groups(root)]) + swap


def require_free(size: int, wanted_by: str) -> None:
    """Raise a UserError, for `wanted_by`, if the system has fewer than `size` bytes of memory
    left."""
    left = available_memory("cpu")
    if left is not None and size > left:
        raise UserError(
            f"{wanted_by} needs {size / 2**30:,.1f} GiB of memory, and {left / 2**30:,.1f} GiB are "
            "left. Use a machine with more."
        )


def _left_in_groups(root: Path) -> Iterator[int]:
    """What each control group with a limit leaves this process, in bytes; pages of files that the
    kernel can drop do not count as used."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":  # version 2
            base, files = "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = "sys/fs/cgroup/memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        limit, usage, dropped = files
        inner = Path(name.lstrip("/"))
        for group in (inner, *inner.parents):
            folder = root / base / group
            try:
                most, used = (int((folder / file).read_text()) for file in (limit, usage))
                stat = (folder / "memory.stat").read_text().split()
            except (OSError, ValueError):  # no such group in a container, or no limit ("max")
                continue
            pages = dict(zip(stat[::2], stat[1::2], strict=False))
            yield max(0, most - used + int(pages.get(dropped, 0)))
