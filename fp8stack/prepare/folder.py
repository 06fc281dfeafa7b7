"""The output folder: its journal, its manifest, and its summary for the user."""

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
from fp8stack.data.prepared import MANIFEST, DtypeName, Split, TokenizerOf
from fp8stack.errors import UserError, quoted
from fp8stack.io import TEMPORARY, lock, storage_errors, sync_folder, write_atomically
from fp8stack.prepare.inputs import Settings, Source
from fp8stack.prepare.read import Position
from fp8stack.prepare.shards import OWN_FILE, SplitState
from fp8stack.tables import counted
from fp8stack.tokenizer import TOKENIZER_FILE, Tokenizer

FORMAT = 1
JOURNAL = "progress.json"
GPT2_IDS = 50257
ROUNDED_TO = 16  # FP8 GEMMs need sizes divisible by 16
NOTES = {
    "empty": ("empty document, an end token", "empty documents, an end token each"),
    "replaced": (
        "piece that is not Unicode became U+FFFD",
        "pieces that are not Unicode became U+FFFD",
    ),
    "cut_words": (
        "cut within a text without spaces; tokens there may differ",
        "cuts within a text without spaces; tokens there may differ",
    ),
}


class Counts(BaseModel, frozen=True, extra="forbid"):
    """Counts of documents."""

    documents: NonNegativeInt = 0  # documents that began
    empty: NonNegativeInt = 0  # documents without text, which are an end token only
    replaced: NonNegativeInt = 0  # U+FFFD that replaced invalid Unicode
    # Cuts of a text without spaces, where tokens may differ from those of the whole text.
    cut_words: NonNegativeInt = 0


class Journal(BaseModel, frozen=True, extra="forbid"):
    """The progress, from which an interrupted preparation continues."""

    format: int = FORMAT
    settings: dict[str, Any]  # `Settings.of_output`
    tokenizer: str  # its SHA-256
    read: str  # the SHA-256 of paths and sizes of the sources that were read completely
    position: Position = Position()
    counts: Counts = Counts()
    train: SplitState = SplitState()
    val: SplitState = SplitState()


class _Split(Split, frozen=True, strict=True):
    tokens: NonNegativeInt
    documents: NonNegativeInt
    bytes: NonNegativeInt


class _Splits(BaseModel, frozen=True, strict=True):
    train: _Split
    val: _Split


class _ReadAgain(BaseModel, frozen=True, strict=True):
    """Of a manifest, what is read again."""

    tokenizer: TokenizerOf
    dtype: DtypeName
    splits: _Splits
    documents: Counts
    inputs: list[dict[str, Any]]
    settings: dict[str, Any]


class Folder:
    """A folder of shards; it need not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal_path = path / JOURNAL
        self.manifest_path = path / MANIFEST
        self.tokenizer_path = path / TOKENIZER_FILE

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """A context in which no other command writes to the folder. Raises a UserError if another
        one does, or if a file is in its place, and a StorageError if it cannot be created."""
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
        """Remove a preparation's files, finished or not; other files stay. Returns whether there
        were any. Raises a UserError if the folder belongs to another program, and a StorageError if
        a file cannot be removed."""
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
            if self.manifest_path.exists():  # without it the rest does not count as finished
                self.manifest_path.replace(self.journal_path)
            for path in sorted(self.path.iterdir()):
                if OWN_FILE.fullmatch(path.name) or path.name.startswith(TEMPORARY):
                    path.unlink()
            # The marks of a preparation go last, so that an interrupted removal can be repeated.
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
            if missing := sorted(_ReadAgain.model_fields.keys() - content.keys()):
                raise ValueError(f"it has no {missing[0]!r}")
            _ReadAgain.model_validate(content)
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
            raise _broken(self.journal_path, error) from error

    def save_journal(self, journal: Journal) -> None:
        """Write the journal, whole or not at all. Raises a StorageError if that fails."""
        write_atomically(self.journal_path, (json.dumps(journal.model_dump()) + "\n").encode())

    def finish(self, manifest: dict[str, Any]) -> None:
        """Write the manifest, which marks the folder as finished. Raises a StorageError if that
        fails."""
        write_atomically(self.manifest_path, (json.dumps(manifest, indent=1) + "\n").encode())
        self.drop_journal()

    def drop_journal(self) -> None:
        """Remove the journal of a finished folder."""
        with storage_errors(self.path):
            self.journal_path.unlink(missing_ok=True)
            sync_folder(self.path)

    def require_settings(self, found: dict[str, Any], settings: Settings) -> None:
        """Raise a UserError that names the first difference between the settings, if there is
        one."""
        output = settings.of_output()
        # A trained tokenizer has no name: show its size.
        for key, value in sorted(output.items(), key=lambda item: item[0] == "tokenizer"):
            if found.get(key) != value:
                flag = "the inputs" if key == "inputs" else "--" + key.replace("_", "-")
                there, now = _shown(found.get(key)), _shown(value)
                raise UserError(
                    f"{quoted(str(self.path))} was prepared with other settings: {flag} was "
                    f"{there}, now {now}. Give the same command to continue, another --out, or "
                    "--overwrite."
                )

    def require_empty(self) -> None:
        """Raise a UserError if there are files other than hidden ones."""
        for path in sorted(self.path.iterdir()):
            if not path.name.startswith("."):
                raise UserError(
                    f"{quoted(str(self.path))} holds {quoted(path.name)}, which is no preparation "
                    "of fp8stack's. Give an empty or a new folder as --out."
                )

    def require_shards(self, manifest: dict[str, Any]) -> None:
        """Raise a UserError unless every shard in the manifest exists and is complete."""
        width = np.dtype(manifest["dtype"]).itemsize
        for shard in (one for split in manifest["splits"].values() for one in split["shards"]):
            path, ends = self.path / shard["file"], 8 * shard["documents"]
            sizes = {path: shard["tokens"] * width, path.with_suffix(".ends"): ends}
            for file, size in sizes.items():
                if not file.is_file() or file.stat().st_size != size:
                    raise UserError(
                        f"{quoted(str(file))} is missing or has another size than {MANIFEST} says. "
                        "Start over with --overwrite."
                    )


def _broken(path: Path, error: Exception) -> UserError:
    why = str(error)
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        why = f"{where}: {first['msg']}" if where else first["msg"]
    reason = quoted(" ".join(why.split()))
    return UserError(
        f"{quoted(str(path))} cannot be read ({reason}). Start over with --overwrite, or give "
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
    """The inputs for the manifest: the files and bytes of each, and `listing_of` them."""
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
    """The manifest of a finished folder. It depends only on the inputs and the settings."""
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
    """A summary in a few lines, `speed` at the end of the first, and the command that trains on the
    folder."""
    found = as_json(settings, manifest)
    documents, tokens, held_out = found["documents"], found["tokens"], found["held_out"]
    held = (
        f"{held_out['documents']:,} of them held out ({counted(held_out['tokens'], 'token')})"
        if held_out["documents"]
        else "none of them held out: training will hold out the last tokens"
    )
    tokenizer, per_token = found["tokenizer"], found["bytes"] / max(1, tokens - documents)
    return [
        f"{settings.out}: {tokens:,} tokens of {tokenizer['name']}, {per_token:.2f} bytes per token"
        f"{speed}",
        f"documents: {documents:,}, {held}",
        *(f"note: {counted(count, *NOTES[key])}" for key, count in found["notes"].items()),
        f"next: {_next_command(settings, tokenizer['vocabulary'])}",
    ]


def as_json(settings: Settings, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The summary as JSON data."""
    splits, tokenizer = manifest["splits"], manifest["tokenizer"]
    sizes, counts = ("tokens", "documents", "bytes"), manifest["documents"]
    both = [splits[name] for name in ("train", "val")]
    return {
        "out": str(settings.out),
        "shards": [shard["file"] for split in both for shard in split["shards"]],
        **{key: sum(split[key] for split in both) for key in sizes},
        "tokenizer": {key: tokenizer[key] for key in ("name", "sha256", "vocabulary")},
        "held_out": {key: splits["val"][key] for key in sizes},
        "notes": {key: counts[key] for key in NOTES if counts.get(key)},
    }


def _next_command(settings: Settings, vocabulary: int) -> str:
    """The command that trains on the folder, with a model whose vocabulary fits, or is set to
    fit."""
    words = ["fp8stack", "pretrain", "--data", str(settings.out)]
    if vocabulary == GPT2_IDS:
        words += ["--model", "gpt2-124m"]
    elif vocabulary > 256:  # gpt-nano's
        rounded = -(-vocabulary // ROUNDED_TO) * ROUNDED_TO
        words += ["--set", f"model_overrides.vocabulary={rounded}"]
    return shlex.join(words)
