"""The folder that is written: the journal of what is done, the manifest at the end, and what the
user is told of it.
"""

import hashlib
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, NonNegativeInt, ValidationError

import fp8stack
from fp8stack.data.prepared import MANIFEST
from fp8stack.errors import UserError, quoted
from fp8stack.io import TEMPORARY, lock, storage_errors, sync_folder, write_atomically
from fp8stack.prepare.inputs import Settings, Source
from fp8stack.prepare.read import Position
from fp8stack.prepare.shards import OWN_FILE, SplitState
from fp8stack.tokenizer import TOKENIZER_FILE, Tokenizer

FORMAT = 1
JOURNAL = "progress.json"
GPT2_IDS = 50257
ROUNDED_TO = 16  # FP8 GEMMs want sizes that 16 divides
NOTES = {
    "empty": "{:,} empty documents, an end token each",
    "replaced": "{:,} pieces that are not Unicode became U+FFFD",
    "cut_words": "{:,} cuts within a text without spaces; tokens there may differ",
}

KEYS = frozenset({"dtype", "tokenizer", "splits", "documents", "inputs", "settings"})
"""Of a manifest, those that are read again."""


class Counts(BaseModel, frozen=True, extra="forbid"):
    """What was met among the documents."""

    documents: NonNegativeInt = 0  # how many began
    empty: NonNegativeInt = 0  # of those, without text: their end token alone
    replaced: NonNegativeInt = 0  # how many U+FFFD took the place of what was not Unicode
    # How often a text without any space was cut where its tokens may differ from the whole text's.
    cut_words: NonNegativeInt = 0


class Journal(BaseModel, frozen=True, extra="forbid"):
    """What is done, and from where to go on."""

    format: int = FORMAT
    settings: dict[str, Any]  # `Settings.of_output`
    tokenizer: str  # its SHA-256
    read: str  # the SHA-256 of the paths and sizes of the sources that were read to their end
    position: Position = Position()
    counts: Counts = Counts()
    train: SplitState = SplitState()
    val: SplitState = SplitState()


class Folder:
    """A folder of shards, which need not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal_path = path / JOURNAL
        self.manifest_path = path / MANIFEST
        self.tokenizer_path = path / TOKENIZER_FILE

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Within, no other command writes here. Raises a UserError if another one does, or there is
        a file in its place, and a StorageError if it cannot be made."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{quoted(str(self.path))} is a file. Give a folder as --out.")
        with storage_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            # A folder can be opened on POSIX alone.
            descriptor = os.open(self.path, os.O_RDONLY) if os.name == "posix" else None
        try:
            if descriptor is not None and not lock(descriptor):
                raise UserError(
                    f"Another command prepares {quoted(str(self.path))}. Wait for it or give "
                    "another --out."
                )
            yield
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def clear(self) -> bool:
        """Remove what a preparation wrote, finished or not, if there is one; other files stay.
        Whether there was. Raises a UserError if what is there is another program's, and a
        StorageError if a file cannot be removed."""
        if not (self.journal_path.exists() or self.manifest_path.exists()):
            return False
        for path in (self.manifest_path, self.journal_path):
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError, RecursionError):  # none, or damaged: it may be ours
                continue
            if not isinstance(content, dict) or "settings" not in content:
                raise UserError(
                    f"{quoted(str(path))} is not of fp8stack prepare: nothing is removed. Give "
                    "another --out."
                )
        with storage_errors(self.path):
            if self.manifest_path.exists():  # without it nothing takes what is left for finished
                self.manifest_path.replace(self.journal_path)
            for path in sorted(self.path.iterdir()):
                if OWN_FILE.fullmatch(path.name) or path.name.startswith(TEMPORARY):
                    path.unlink()
            # What makes it a preparation goes last: cut short, it can be cleared again.
            for path in (self.tokenizer_path, self.journal_path, self.manifest_path):
                path.unlink(missing_ok=True)
        return True

    def manifest(self) -> dict[str, Any] | None:
        """The manifest; None if there is none. Raises a UserError if it cannot be read."""
        if not self.manifest_path.exists():
            return None
        try:
            content = json.loads(self.manifest_path.read_text(encoding="utf-8"))
            if not isinstance(content, dict) or content.get("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            if missing := sorted(KEYS - content.keys()):
                raise ValueError(f"it has no {missing[0]!r}")
        except (OSError, ValueError, RecursionError) as error:
            raise _broken(self.manifest_path, error) from error
        return content

    def journal(self) -> Journal | None:
        """The journal; None if there is none. Raises a UserError if it cannot be read."""
        if not self.journal_path.exists():
            return None
        try:
            return Journal.model_validate_json(self.journal_path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            first = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
            raise _broken(self.journal_path, first) from error

    def save_journal(self, journal: Journal) -> None:
        """Write the journal, whole or not at all. Raises a StorageError if that fails."""
        write_atomically(self.journal_path, (json.dumps(journal.model_dump()) + "\n").encode())

    def finish(self, manifest: dict[str, Any]) -> None:
        """Write the manifest, and with it finish the folder; or raise a StorageError."""
        write_atomically(self.manifest_path, (json.dumps(manifest, indent=1) + "\n").encode())
        self.drop_journal()

    def drop_journal(self) -> None:
        """Remove the journal of what is finished."""
        with storage_errors(self.path):
            self.journal_path.unlink(missing_ok=True)
            sync_folder(self.path)

    def require_settings(self, found: dict[str, Any], settings: Settings) -> None:
        """Raise a UserError that names the first difference between the settings, if there is
        one."""
        output = settings.of_output()
        # A tokenizer that was trained is told by its size: nobody named one.
        for key, asked in sorted(output.items(), key=lambda item: item[0] == "tokenizer"):
            if found.get(key) != asked:
                flag = "the inputs" if key == "inputs" else "--" + key.replace("_", "-")
                there, now = _shown(found.get(key)), _shown(asked)
                raise UserError(
                    f"{quoted(str(self.path))} was prepared otherwise: {flag} there {there}, now "
                    f"{now}. Give the same command to go on, another --out, or --overwrite."
                )

    def require_empty(self) -> None:
        """Raise a UserError unless nothing is here, hidden files apart."""
        for path in sorted(self.path.iterdir()):
            if not path.name.startswith("."):
                raise UserError(
                    f"{quoted(str(self.path))} holds {quoted(path.name)}, which is no preparation "
                    "of fp8stack's. Give an empty or a new folder as --out."
                )

    def require_shards(self, manifest: dict[str, Any]) -> None:
        """Raise a UserError unless every shard that the manifest names is here, and whole."""
        width = np.dtype(manifest["dtype"]).itemsize
        for shard in (one for split in manifest["splits"].values() for one in split["shards"]):
            path, ends = self.path / shard["file"], 8 * shard["documents"]
            sizes = {path: shard["tokens"] * width, path.with_suffix(".ends"): ends}
            for file, size in sizes.items():
                if not file.is_file() or file.stat().st_size != size:
                    raise UserError(
                        f"{quoted(str(file))} is missing or has another size than {MANIFEST} says. "
                        "Begin anew with --overwrite."
                    )


def _broken(path: Path, why: object) -> UserError:
    reason = quoted(" ".join(str(why).split()))
    return UserError(
        f"{quoted(str(path))} cannot be read ({reason}). Begin anew with --overwrite, or give "
        "another --out."
    )


def _shown(value: object) -> str:
    if isinstance(value, list):
        return quoted(", ".join(str(part) for part in value))
    return "none" if value is None else quoted(str(value))


def listing_of(sources: Sequence[Source]) -> str:
    """The SHA-256 of the paths and sizes of these sources, in hexadecimal."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(f"{source.size} {source.path}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def describe_inputs(inputs: Sequence[str], sources: Sequence[Source]) -> list[dict[str, Any]]:
    """Each input as the manifest has it: its files, their bytes, and `listing_of` them."""
    found = []
    for number, name in enumerate(inputs):
        own = [source for source in sources if source.given == number]
        size = sum(source.size for source in own)
        listing = listing_of(own)
        found.append({"input": name, "files": len(own), "bytes": size, "listing_sha256": listing})
    return found


def manifest_of(
    settings: Settings,
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    counts: Counts,
    splits: Mapping[str, SplitState],
) -> dict[str, Any]:
    """The manifest of a finished folder; it depends on the inputs and the settings alone."""
    return {
        "format": FORMAT,
        "made_by": f"fp8stack {fp8stack.__version__}",
        "tokenizer": {
            "name": tokenizer.name,
            "sha256": tokenizer.sha256,
            "vocabulary": tokenizer.vocabulary,
            "end_of_text": tokenizer.end_of_text,
        },
        "dtype": tokenizer.dtype.name,
        "splits": {
            name: {
                "tokens": sum(shard.tokens for shard in state.shards),
                "documents": sum(shard.documents for shard in state.shards),
                "bytes": state.bytes,
                "shards": [shard.model_dump() for shard in state.shards],
            }
            for name, state in splits.items()
        },
        "documents": counts.model_dump(),
        "inputs": describe_inputs(settings.inputs, sources),
        "settings": settings.of_output(),
    }


def summary(settings: Settings, manifest: Mapping[str, Any], speed: str = "") -> list[str]:
    """What was made, in some lines, and the command that trains on it; `speed` ends the first."""
    train, val = manifest["splits"]["train"], manifest["splits"]["val"]
    documents, tokens, size = (train[key] + val[key] for key in ("documents", "tokens", "bytes"))
    per_token = size / max(1, tokens - documents)
    held = (
        f"{val['documents']:,} of them held out ({val['tokens']:,} tokens)"
        if val["documents"]
        else "none of them held out: training will hold out the last tokens"
    )
    tokenizer, counts = manifest["tokenizer"], manifest["documents"]
    return [
        f"{settings.out}: {tokens:,} tokens of {tokenizer['name']}, {per_token:.2f} bytes per token"
        f"{speed}",
        f"documents: {documents:,}, {held}",
        *(f"note: {note.format(counts[key])}" for key, note in NOTES.items() if counts[key]),
        f"next: {_next_command(settings, tokenizer['vocabulary'])}",
    ]


def as_json(settings: Settings, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What was made, as JSON data."""
    splits, tokenizer = manifest["splits"], manifest["tokenizer"]
    total = {
        key: sum(splits[name][key] for name in ("train", "val"))
        for key in ("tokens", "documents", "bytes")
    }
    held = splits["val"]
    files = [shard["file"] for name in ("train", "val") for shard in splits[name]["shards"]]
    return {
        "out": str(settings.out),
        "shards": files,
        **total,
        "tokenizer": {key: tokenizer[key] for key in ("name", "sha256", "vocabulary")},
        "held_out": {key: held[key] for key in ("tokens", "documents", "bytes")},
        "notes": {key: manifest["documents"][key] for key in NOTES if manifest["documents"][key]},
    }


def _next_command(settings: Settings, vocabulary: int) -> str:
    """The command that trains on the folder: with a model whose vocabulary fits, or is made to."""
    words = ["fp8stack", "pretrain", "--data", str(settings.out)]
    if vocabulary == GPT2_IDS:
        words += ["--model", "gpt2-124m"]
    elif vocabulary > 256:  # gpt-nano's
        rounded = -(-vocabulary // ROUNDED_TO) * ROUNDED_TO
        words += ["--set", f"model_overrides.vocabulary={rounded}"]
    return shlex.join(words)
