"""What a machine without a package registry lacks, and how to bring it: wheels in a folder.

    python bench/gpu/wheels.py missing               # on the machine with the GPU, from a checkout
    python bench/gpu/wheels.py download .whl         # where there is a registry

A script of the standard library alone, since it runs where fp8stack cannot be imported yet.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What images with torch lack, as a rule; they have the rest of the dependencies.
USUALLY_MISSING = ("pydantic",)
# For the tests on a GPU, beside the package's own dependencies.
TESTS = ("pytest", "hypothesis", "ml_dtypes")
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")


def dependencies() -> list[str]:
    """The requirements of fp8stack and of its tests on a GPU, as pyproject.toml has them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *TESTS]


def missing(
    requirements: Iterable[str], requires: Callable[[str], list[str] | None] = metadata.requires
) -> Iterator[str]:
    """The packages that are not installed, and those that installed ones want and do not have.
    What a missing one itself wants is not known here: its METADATA says it."""
    seen: set[str] = set()
    left = list(requirements)
    while left:
        requirement = left.pop(0)
        name, marker = _name(requirement), requirement.partition(";")[2]
        if name in seen or "extra" in marker or not _applies(marker):
            continue
        seen.add(name)
        try:
            left += requires(name) or []
        except metadata.PackageNotFoundError:
            yield name


def _name(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement.strip())
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def _applies(marker: str) -> bool:
    """Whether a marker may hold here: those of other systems and old Pythons do not."""
    other = re.search(r"""(platform_system|sys_platform|os_name)\s*==\s*["'](\w+)""", marker)
    if other and other[2].lower() not in ("linux", "posix"):
        return False
    old = re.search(r"""python_version\s*<(=?)\s*["']3\.(\d+)""", marker)
    return old is None or sys.version_info < (3, int(old[2]) + (old[1] == "="))


def download(folder: Path, names: Iterable[str], python: str) -> list[str]:
    """The command that downloads wheels for Linux and this version of Python, and of all that they
    need, in the versions of constraints.txt."""
    command = [sys.executable, "-m", "pip", "download", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp"]
    for platform in PLATFORMS:
        command += ["--platform", f"{platform}_x86_64"]
    return [*command, "-c", str(ROOT / "constraints.txt"), "-d", str(folder), *names]


def main() -> int:
    """Print what is missing, or download: see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    chosen = parser.add_subparsers(dest="what", required=True)
    chosen.add_parser("missing", help="print the packages that are not installed here")
    fetch = chosen.add_parser("download", help="download wheels")
    fetch.add_argument("folder", type=Path)
    fetch.add_argument("names", nargs="*", default=USUALLY_MISSING, help="(default: %(default)s)")
    fetch.add_argument("--python", default="3.12", help="there (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.what == "download":
        return subprocess.call(download(arguments.folder, arguments.names, arguments.python))
    found = list(missing(dependencies()))
    print(*found, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
