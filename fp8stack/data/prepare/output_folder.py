"""The output folder: what earlier commands left there, its manifest, and a summary of it."""

import hashlib
import json
import os
import shlex
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fp8stack.common.errors import UserError, quoted
from fp8stack.common.io import lock, storage_errors, sweep, sync_folder, write_atomically
from fp8stack.common.tables import counted
from fp8stack.common.version import __version__
from fp8stack.data.prepare.inputs import Settings, Source
from fp8stack.data.prepare.shards import SHARD_FILE, SplitWriter
from fp8stack.data.prepared import MANIFEST, UNFINISHED, prepared_segments
from fp8stack.data.tokenizer import TOKENIZER_FILES, Tokenizer

GPT2_IDS = 50257
NOTES = {  # of each count, in the singular and the plural
    "empty": ("empty document, an end token", "empty documents, an end token each"),
    "replaced": (
        "piece that is not Unicode became U+FFFD",
        "pieces that are not Unicode became U+FFFD",
    ),
}


class OutputFolder:
    """A folder of shards. While they are written, a file in `scratch` holds how far they are."""

    def __init__(self, path: Path) -> None:
        self.path, self.scratch = path, path / UNFINISHED
        self.manifest_path, self.progress_path = path / MANIFEST, self.scratch / "progress.json"

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """A context in which no other command writes to the folder. Raises a UserError if another
        one does, or if a file is in its place, and a StorageError if it cannot be created."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{quoted(str(self.path))} is a file. Give a folder as --out.")
        with storage_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDONLY)
        try:
            if not lock(descriptor):
                raise UserError(
                    f"Another command prepares {quoted(str(self.path))}. Wait for it or give "
                    "another --out."
                )
            yield
        finally:
            os.close(descriptor)

    @property
    def is_own(self) -> bool:
        """Whether a preparation was begun or finished here."""
        return self.scratch.is_dir() or self.manifest_path.exists()

    def clear(self) -> None:
        """Remove a preparation's files, finished or not; other files stay. Raises a UserError if
        the folder belongs to another program, and a StorageError if a file cannot be removed."""
        if not self.is_own:
            return
        try:
            manifest = json.loads(self.manifest_path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):  # none, or damaged: it may be ours
            manifest = {"settings": None}
        if not isinstance(manifest, dict) or "settings" not in manifest:
            raise UserError(
                f"{quoted(str(self.manifest_path))} is not of fp8stack prepare: nothing is "
                "removed. Give another --out."
            )
        with storage_errors(self.path):
            self.scratch.mkdir(exist_ok=True)  # so that an interrupted removal can be repeated
            self.manifest_path.unlink(missing_ok=True)
            for path in sorted(self.path.iterdir()):
                if SHARD_FILE.fullmatch(path.name) or path.name in TOKENIZER_FILES:
                    path.unlink()
        self.remove_scratch()

    def remove_scratch(self) -> None:
        """Remove `scratch`, and files that were being written."""
        sweep(self.path)
        shutil.rmtree(self.scratch, ignore_errors=True)

    def manifest(self) -> dict[str, Any] | None:
        """The manifest, of shards that are all there; None if there is none. Raises a UserError if
        it cannot be read, or a shard is missing or has another size."""
        if not self.manifest_path.exists():
            return None
        try:
            prepared_segments(self.path, 2**32)
            manifest: dict[str, Any] = json.loads(self.manifest_path.read_text(encoding="utf-8"))
            for key, kind in (("documents", dict), ("inputs", list), ("settings", dict)):
                if not isinstance(manifest.get(key), kind):
                    raise UserError(f"{quoted(str(self.manifest_path))} has no valid {key}. ")
        except UserError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
                raise  # such as a lack of permission: the folder may be sound
            reason = str(error).partition(". ")[0]
            raise UserError(
                f"{reason}. Start over with --overwrite, or give another --out."
            ) from error
        return manifest

    def progress(self) -> dict[str, Any]:
        """The record of the last whole shard; empty if there is none."""
        try:
            content = json.loads(self.progress_path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}

    def begin(self) -> None:
        """Mark the folder as unfinished."""
        with storage_errors(self.path):
            self.scratch.mkdir(exist_ok=True)

    def record(self, progress: Mapping[str, Any]) -> None:
        """Write how far the shards are."""
        sync_folder(self.path)
        write_atomically(self.progress_path, json.dumps(progress).encode())

    def finish(self, manifest: dict[str, Any]) -> None:
        """Write the manifest, which marks the folder as finished. Raises a StorageError if that
        fails."""
        sync_folder(self.path)
        write_atomically(self.manifest_path, (json.dumps(manifest, indent=1) + "\n").encode())
        self.remove_scratch()

    def require_settings(self, earlier: dict[str, Any] | None, settings: Settings) -> None:
        """Raise a UserError that names the first difference from the `earlier` settings, if they
        are known."""
        output = settings.of_output()
        earlier = output if earlier is None else earlier
        for key in sorted({*output, *earlier}, key=lambda key: key == "tokenizer"):
            before, now = earlier.get(key), output.get(key)
            if before != now:  # a trained tokenizer has no name: its size comes before it
                flag = "the inputs" if key == "inputs" else "--" + key.replace("_", "-")
                raise UserError(
                    f"{quoted(str(self.path))} was prepared with other settings: {flag} was "
                    f"{_shown(before)}, now {_shown(now)}. Give the same command to continue, "
                    "another --out, or --overwrite."
                )

    def require_same(
        self,
        manifest: Mapping[str, Any],
        settings: Settings,
        sources: Sequence[Source],
        tokenizer: Tokenizer | None,
    ) -> None:
        """Raise a UserError unless the finished folder has these settings, inputs and tokenizer;
        None is one that would be trained."""
        self.require_settings(manifest["settings"], settings)
        name, earlier = quoted(str(self.path)), manifest["tokenizer"]
        if manifest["inputs"] != describe_inputs(settings.inputs, sources):
            raise UserError(
                f"The inputs have changed since {name} was prepared. Give another --out, or "
                "prepare them again with --overwrite."
            )
        identity = [earlier["sha256"], earlier["end_of_text"]]
        if tokenizer is not None and [tokenizer.sha256, tokenizer.end_of_text] != identity:
            raise UserError(
                f"{name} was prepared with another tokenizer of that name. Give another --out, or "
                "prepare it again with --overwrite."
            )

    def require_empty(self) -> None:
        """Raise a UserError if there are files other than hidden ones."""
        for path in sorted(self.path.iterdir()):
            if not path.name.startswith("."):
                raise UserError(
                    f"{quoted(str(self.path))} holds {quoted(path.name)}, which is no preparation "
                    "of fp8stack's. Give an empty or a new folder as --out."
                )


def _shown(value: object) -> str:
    if isinstance(value, list):
        return quoted(", ".join(map(str, value)))
    return "none" if value is None else quoted(str(value))


def describe_inputs(inputs: Sequence[str], sources: Sequence[Source]) -> list[dict[str, Any]]:
    """The inputs for the manifest: the files and bytes of each, and the SHA-256 of their paths and
    sizes."""
    described = []
    by_input: dict[int, list[Source]] = defaultdict(list)
    for source in sources:
        by_input[source.input_index].append(source)
    for number, name in enumerate(inputs):
        files = by_input[number]
        listing = "".join(f"{source.size} {source.path}\n" for source in files)
        digest = hashlib.sha256(listing.encode(errors="surrogateescape")).hexdigest()
        size = sum(source.size for source in files)
        described.append(
            {"input": name, "files": len(files), "bytes": size, "listing_sha256": digest}
        )
    return described


def manifest_of(
    settings: Settings,
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    counts: Mapping[str, int],
    splits: Mapping[str, SplitWriter],
) -> dict[str, Any]:
    """The manifest of a finished folder. It depends only on the inputs and the settings."""
    keys = ("name", "sha256", "vocabulary", "end_of_text")
    return {
        "format": 1,
        "made_by": f"fp8stack {__version__}",
        "tokenizer": {key: getattr(tokenizer, key) for key in keys},
        "dtype": tokenizer.dtype.name,
        "splits": {
            name: {
                "tokens": sum(shard.tokens for shard in split.shards),
                "documents": sum(shard.documents for shard in split.shards),
                "bytes": split.text_bytes,
                "shards": [shard.model_dump() for shard in split.shards],
            }
            for name, split in splits.items()
        },
        "documents": dict(counts),
        "inputs": describe_inputs(settings.inputs, sources),
        "settings": settings.of_output(),
    }


def summary(settings: Settings, manifest: Mapping[str, Any], speed: str = "") -> list[str]:
    """A summary in a few lines, `speed` at the end of the first, and the command that trains."""
    data = as_json(settings, manifest)
    documents, tokens, held_out = data["documents"], data["tokens"], data["held_out"]
    held = "none of them held out: training will hold out the last tokens"
    if held_out["documents"]:
        count = counted(held_out["tokens"], "token")
        held = f"{held_out['documents']:,} of them held out ({count})"
    tokenizer, ends = data["tokenizer"], manifest["tokenizer"]["end_of_text"] is not None
    per_token = data["bytes"] / max(1, tokens - documents if ends else tokens)
    notes = [counted(count, *NOTES[key]) for key, count in data["notes"].items()]
    if not ends:
        notes = [note.partition(", an end token")[0] for note in notes]
    words = ["fp8stack", "pretrain", "--data", str(settings.out)]
    words += ["--model", "gpt2-124m"] if tokenizer["vocabulary"] == GPT2_IDS else []
    return [
        f"{settings.out}: {tokens:,} tokens of {tokenizer['name']}, {per_token:.2f} bytes per token"
        f"{speed}",
        f"documents: {documents:,}, {held}",
        *(f"note: {note}" for note in notes),
        f"next: {shlex.join(words)}",
    ]


def as_json(settings: Settings, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The summary as JSON data."""
    tokenizer, counts = manifest["tokenizer"], manifest["documents"]
    splits = [manifest["splits"].get(name, {"shards": []}) for name in ("train", "val")]
    sizes = [
        {key: split.get(key, 0) for key in ("tokens", "documents", "bytes")} for split in splits
    ]
    return {
        "out": str(settings.out),
        "shards": [shard["file"] for split in splits for shard in split["shards"]],
        **{key: sum(split[key] for split in sizes) for key in sizes[0]},
        "tokenizer": {key: tokenizer[key] for key in ("name", "sha256", "vocabulary")},
        "held_out": sizes[1],
        "notes": {key: counts[key] for key in NOTES if counts.get(key)},
    }
