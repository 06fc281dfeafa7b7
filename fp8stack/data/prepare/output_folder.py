"""The output folder: what earlier commands left there, its manifest, and a summary of it."""

import hashlib
import json
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

from fp8stack.common.errors import UserError, quoted
from fp8stack.common.io import claimed, storage_errors, sweep, sync_folder, write_atomically
from fp8stack.common.tables import counted
from fp8stack.common.version import __version__
from fp8stack.data.prepare.inputs import Settings, Source
from fp8stack.data.prepare.shards import SHARD_FILE, Writer
from fp8stack.data.prepared import MANIFEST, UNFINISHED, prepared_segments
from fp8stack.data.tokenizer import TOKENIZER_FILES, Tokenizer

GPT2_IDS = 50257
NOTES = {  # of each count, in the singular and the plural
    "empty": ("empty document", "empty documents"),
    "replaced": ("character is U+FFFD", "characters are U+FFFD"),
}


class OutputFolder:
    """A folder of shards. While they are written, a file in `scratch` holds how far they are."""

    def __init__(self, path: Path) -> None:
        self.path, self.scratch, self.name = path, path / UNFINISHED, quoted(str(path))
        self.manifest_path, self.progress_path = path / MANIFEST, self.scratch / "progress.json"

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """A context in which no other command writes to the folder. Raises a UserError if another
        one does, or if a file is in its place, and a StorageError if it cannot be created."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{self.name} is a file. Give a folder as --out.")
        busy = f"Another command prepares {self.name}. Wait for it or give another --out."
        with claimed(self.path, busy):
            yield

    def clear(self) -> None:
        """Remove a preparation's files, finished or not; other files stay. Raises a StorageError if
        a file cannot be removed."""
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

    def require_own(self) -> None:
        """Raise a UserError if the folder holds files, other than hidden ones, and no preparation
        was begun or finished there."""
        manifest = _object(self.manifest_path)
        is_finished = all(isinstance(manifest.get(key), dict) for key in ("documents", "settings"))
        if is_finished or (self.scratch.is_dir() and not self.manifest_path.exists()):
            return
        for path in sorted(self.path.iterdir()):
            if not path.name.startswith("."):
                raise UserError(
                    f"{self.name} holds {quoted(path.name)}, which is no preparation of "
                    "fp8stack's. Give an empty or a new folder as --out."
                )

    def manifest(self) -> dict[str, Any] | None:
        """The manifest, of shards that are all there; None if there is none. Raises a UserError if
        it is damaged, or a shard is missing or has another size."""
        if not self.manifest_path.exists():
            return None
        try:
            prepared_segments(self.path, 2**32)
        except UserError as error:
            reason = str(error).partition(". ")[0]
            raise UserError(
                f"{reason}. Start over with --overwrite, or give another --out."
            ) from error
        return _object(self.manifest_path)

    def progress(self) -> dict[str, Any]:
        """The record of the last whole shard; empty if there is none."""
        return _object(self.progress_path)

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

    def require_settings(self, earlier: Mapping[str, Any], settings: Settings) -> None:
        """Raise a UserError that names the first difference from the `earlier` settings."""
        output = settings.of_output()
        for key in sorted({*output, *earlier}, key=lambda key: key == "tokenizer"):
            if earlier.get(key) != output.get(key):  # a trained tokenizer has no name
                flag = "the inputs" if key == "inputs" else "--" + key.replace("_", "-")
                raise self._changed(
                    f"{flag} was {_shown(earlier.get(key))}, now {_shown(output.get(key))}"
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
        if manifest.get("inputs") != describe_inputs(settings.inputs, sources):
            raise self._changed("the inputs have changed since")
        made_by = manifest["tokenizer"]
        identity = made_by["sha256"], made_by.get("end_of_text")
        if tokenizer is not None and (tokenizer.sha256, tokenizer.end_of_text) != identity:
            raise self._changed("the tokenizer has changed since")

    def _changed(self, change: str) -> UserError:
        return UserError(
            f"{self.name} was prepared with other settings: {change}. Give the same command to "
            "continue, another --out, or --overwrite."
        )


def _object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _shown(value: object) -> str:
    if isinstance(value, list):
        return quoted(", ".join(map(str, value)))
    return "none" if value is None else quoted(str(value))


def describe_inputs(inputs: Sequence[str], sources: Sequence[Source]) -> list[dict[str, Any]]:
    """The inputs for the manifest: the files and bytes of each, and the SHA-256 of their paths and
    sizes."""
    described = []
    for number, group in groupby(sources, key=lambda source: source.input_index):
        name, files = inputs[number], list(group)
        listing = "".join(f"{source.size} {source.path}\n" for source in files)
        digest = hashlib.sha256(listing.encode(errors="surrogateescape")).hexdigest()
        size = sum(source.size for source in files)
        described.append(
            {"input": name, "files": len(files), "bytes": size, "listing_sha256": digest}
        )
    return described


def manifest_of(
    settings: Settings, sources: Sequence[Source], tokenizer: Tokenizer, writer: Writer
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
                "tokens": sum(shard.tokens for shard in state.shards),
                "documents": sum(shard.documents for shard in state.shards),
                "bytes": state.bytes,
                "shards": [shard.model_dump() for shard in state.shards],
            }
            for name, state in writer.states.items()
        },
        "documents": dict(writer.counts),
        "inputs": describe_inputs(settings.inputs, sources),
        "settings": settings.of_output(),
    }


def summary(settings: Settings, manifest: Mapping[str, Any], speed: str = "") -> list[str]:
    """A summary in a few lines, `speed` at the end of the first, and the command that trains."""
    data = as_json(settings, manifest)
    tokens, tokenizer, held_out = data["tokens"], data["tokenizer"], data["held_out"]
    held = "none of them held out: training will hold out the last tokens"
    if held_out["documents"]:
        count = counted(held_out["tokens"], "token")
        held = f"{held_out['documents']:,} of them held out ({count})"
    words = ["fp8stack", "pretrain", "--data", str(settings.out)]
    words += ["--model", "gpt2-124m"] if tokenizer["vocabulary"] == GPT2_IDS else []
    return [
        f"{settings.out}: {tokens:,} tokens of {tokenizer['name']}, "
        f"{data['bytes'] / max(1, tokens):.2f} bytes per token{speed}",
        f"documents: {data['documents']:,}, {held}",
        *(f"note: {counted(count, *NOTES[key])}" for key, count in data["notes"].items()),
        f"next: {shlex.join(words)}",
    ]


def as_json(settings: Settings, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The summary as JSON data."""
    tokenizer, counts = manifest["tokenizer"], manifest["documents"]
    train, held_out = (
        {"shards": [], "tokens": 0, "documents": 0, "bytes": 0} | manifest["splits"].get(name, {})
        for name in ("train", "val")
    )
    sizes = ("tokens", "documents", "bytes")
    return {
        "out": str(settings.out),
        "shards": [shard["file"] for shard in [*train["shards"], *held_out["shards"]]],
        **{key: train[key] + held_out[key] for key in sizes},
        "tokenizer": {key: tokenizer[key] for key in ("name", "sha256", "vocabulary")},
        "held_out": {key: held_out[key] for key in sizes},
        "notes": {key: counts[key] for key in NOTES if counts.get(key)},
    }
