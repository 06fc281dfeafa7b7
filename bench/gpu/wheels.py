"""List the packages that a machine without a registry lacks, and download their wheels elsewhere.

    python bench/gpu/wheels.py missing               # on the machine with the GPU, from a checkout
    python bench/gpu/wheels.py download .whl         # where there is a registry

This script needs only the standard library, since it runs where fp8stack cannot be imported yet.
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
# Packages that images with torch usually lack; they have the other dependencies.
USUALLY_MISSING = ("pydantic", "rich", "torchao")
# Packages that the tests on a GPU need besides the package's dependencies.
TESTS = ("pytest", "pytest-xdist", "hypothesis", "ml_dtypes")
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")


def dependencies() -> list[str]:
    """The requirements of fp8stack and of its tests on a GPU, as pyproject.toml has them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *TESTS]


def missing(
    requirements: Iterable[str], requires: Callable[[str], list[str] | None] = metadata.requires
) -> Iterator[str]:
    """Yield the packages that are not installed, including missing dependencies of installed
    packages. Dependencies of a missing package are unknown here: its METADATA lists them."""
    visited: set[str] = set()
    remaining = list(requirements)
    while remaining:
        requirement = remaining.pop(0)
        name, marker = _name(requirement), requirement.partition(";")[2]
        if name in visited or "extra" in marker or not _applies(marker):
            continue
        visited.add(name)
        try:
            remaining += requires(name) or []
        except metadata.PackageNotFoundError:
            yield name


def _name(requirement: str) -> str:
    match = re.match(r"[\w.-]+", requirement.strip())
    assert match is not None, requirement
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def _applies(marker: str) -> bool:
    """Whether a marker may hold here: markers for other systems and older Pythons do not."""
    system = re.search(r"""(platform_system|sys_platform|os_name)\s*==\s*["'](\w+)""", marker)
    if system and system[2].lower() not in ("linux", "posix"):
        return False
    old = re.search(r"""python_version\s*<(=?)\s*["']3\.(\d+)""", marker)
    return old is None or sys.version_info < (3, int(old[2]) + (old[1] == "="))


def download(folder: Path, names: Iterable[str], python: str) -> list[str]:
    """The command that downloads wheels, including dependencies, for Linux and this version of
    Python, in the versions of constraints.txt."""
    command = [sys.executable, "-m", "pip", "download", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp"]
    for platform in PLATFORMS:
        command += ["--platform", f"{platform}_x86_64"]
    return [*command, "-c", str(ROOT / "constraints.txt"), "-d", str(folder), *names]


def main() -> int:
    """Print the missing packages, or download: see the module's docstring."""
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
    names = list(missing(dependencies()))
    print(*names, sep="\n")
    return 1 if names else 0


if __name__ == "__main__":
    raise SystemExit(main())
