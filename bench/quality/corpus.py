"""Linux's source as bytes, from Debian's package linux-source-6.1, which the study's larger models
train on.

Models of 3 and 10 million parameters need more text than Python's standard library has. The
package's version and hash are fixed, so that all runs of the study have the same text.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from fp8stack.common.errors import UserError
from fp8stack.common.io import write_atomically
from fp8stack.data.prepare.inputs import Settings
from fp8stack.data.prepare.pipeline import prepare

VERSION = "6.1.192-3"
SHA256 = "5259c57ca92092da39bd2ea803046da0e3c28f2b6a11ea20f6297468188ceb67"
PACKAGE, ARCHIVE = "linux-source-6.1", "usr/src/linux-source-6.1.tar.xz"
FOLDERS = (
    "arch", "block", "crypto", "fs", "include", "ipc", "kernel", "lib", "mm", "net", "security",
    "sound", "virt",
)  # fmt: skip
"""Folders of the source to read. Most of the rest is tables of registers, in headers of drivers."""
PATTERNS = ("*.c", "*.h", "*.S")
TOKENS, NAME = "tokens", "corpus.json"
IDENTITY = f"{PACKAGE} {VERSION} ({SHA256[:16]})"
"""The corpus in words."""


def require(folder: Path) -> None:
    """Build the corpus in this folder, unless it is there.

    Raises:
        UserError: a program of Debian's is missing or fails, the package is another one, or the
            folder holds another corpus.
    """
    path = folder / NAME
    if not path.is_file():
        _build(folder)
    built_from = json.loads(path.read_text()).get("sha256")
    if built_from != SHA256:
        raise UserError(f"{folder} holds another corpus than {IDENTITY}. Give another --corpus.")


def _build(folder: Path) -> None:
    print(f"building the corpus {folder} from Debian's {PACKAGE}", flush=True)
    scratch = folder / "source"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    package = folder / f"{PACKAGE}_{VERSION}_all.deb"
    if not package.is_file():
        _output(["apt-get", "download", f"{PACKAGE}={VERSION}"], scratch)
        package = next(scratch.glob("*.deb"))
    if hashlib.sha256(package.read_bytes()).hexdigest() != SHA256:
        raise UserError(f"{package} is not {IDENTITY}: its SHA-256 is another one.")
    _output(["dpkg-deb", "--extract", str(package), str(scratch)], scratch)
    members = [f"{PACKAGE}/{name}" for name in FOLDERS]
    _output(["tar", "-xJf", str(scratch / ARCHIVE), *members], scratch)
    settings = Settings(
        inputs=(str(scratch / PACKAGE),),
        tokenizer="bytes",
        train_bpe=None,
        text_key="text",
        held_out=0.01,
        shard_tokens=100_000_000,
        out=folder / TOKENS,
        include=PATTERNS,
    )
    manifest = prepare(settings, overwrite=True)
    shutil.rmtree(scratch)
    corpus = {
        "package": PACKAGE,
        "version": VERSION,
        "sha256": SHA256,
        "folders": FOLDERS,
        "tokens": manifest["splits"]["train"]["tokens"],
    }
    write_atomically(folder / NAME, (json.dumps(corpus, indent=1) + "\n").encode())


def _output(command: Sequence[str], folder: Path) -> str:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except FileNotFoundError as error:
        raise UserError(
            f"{command[0]} is missing. The corpus is built with Debian's apt-get and dpkg-deb."
        ) from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
        remedy = ""
        if command[0] == "apt-get":
            remedy = (
                " Try again after apt-get update. Debian keeps old packages at "
                "https://snapshot.debian.org/package/linux: put "
                f"{PACKAGE}_{VERSION}_all.deb into {folder.parent}."
            )
        raise UserError(
            f"{command[0]} failed while building the corpus: {last}.{remedy}"
        ) from error
    return done.stdout.strip()
