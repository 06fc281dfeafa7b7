"""A folder that `fp8stack prepare` wrote: token shards with their documents. No torch here."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationError

from fp8stack.common.errors import UserError
from fp8stack.common.io import TEMPORARY, read_json
from fp8stack.data.corpus import Ends, Segment, ascends, map_tokens
from fp8stack.data.files import unreadable
from fp8stack.data.tokenizer import TOKENIZER_FILE, Tokenizer, end_token_in, tokenizer_from_json

MANIFEST = "manifest.json"
ENDS = ".ends"
UNFINISHED = f"{TEMPORARY}prepare"  # a folder in a folder that is being prepared
DTYPES = {"uint16": "<u2", "uint32": "<u4"}
DtypeName = Literal["uint16", "uint32"]
Count = Annotated[int, Field(ge=0, lt=2**63)]


class Shard(BaseModel, frozen=True, strict=True):
    """A file of tokens, with the SHA-256 of it and of the file of document ends."""

    # A plain name: a manifest from elsewhere must not lead out of its folder.
    file: Annotated[str, Field(pattern=r"^\w[\w.-]*\.bin$")]
    tokens: Annotated[Count, Field(ge=1)]
    documents: Annotated[Count, Field(ge=1)]
    sha256: str = ""
    ends_sha256: str = ""


class Split(BaseModel, frozen=True, strict=True):
    """The files of the training or of the validation data."""

    shards: tuple[Shard, ...] = Field(strict=False)


class TokenizerOf(BaseModel, frozen=True, strict=True):
    """The tokenizer that made the tokens."""

    name: str
    sha256: str
    vocabulary: Annotated[Count, Field(ge=1)]


class ShardManifest(BaseModel, frozen=True, strict=True):
    """The keys of a manifest.json that are read; the others are information."""

    format: Literal[1]
    tokenizer: TokenizerOf
    dtype: DtypeName
    splits: Mapping[Literal["train", "val"], Split]


def is_prepared(folder: Path) -> bool:
    """Whether the folder is a finished output of `fp8stack prepare`."""
    return os.path.exists(folder / MANIFEST)


def refuse_unfinished(folder: Path, files: Sequence[Path]) -> None:
    """Raise a UserError if `files`, of a folder without a manifest, are an unfinished output of
    `fp8stack prepare`."""
    ends = [path.name for path in files if path.suffix == ENDS]
    if ends or (folder / UNFINISHED).is_dir():
        raise UserError(
            f"{folder} has {(ends or [UNFINISHED])[0]} and no {MANIFEST}: `fp8stack prepare` did "
            "not finish it. Run the same command again."
        )


def read_manifest(folder: Path) -> ShardManifest:
    """The manifest of a prepared folder. Raises a UserError that names the key if it cannot be read
    or is invalid."""
    path = folder / MANIFEST
    try:
        return ShardManifest.model_validate(read_json(path))
    except ValueError as error:
        if isinstance(error.__cause__, OSError):
            raise  # such as a lack of permission: the manifest may be sound
        reason = str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            where = ".".join(str(key) for key in first["loc"]) or "its whole"
            reason = f"{where}: {first['msg']}"
        raise UserError(
            f"{path} is not a manifest of prepared data: {' '.join(reason.split())}. Run `fp8stack "
            "prepare` again, or remove it to read the folder's files as they are."
        ) from error


def prepared_segments(
    folder: Path, vocabulary: int
) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
    """The training and the validation shards, memory-mapped; the latter may be empty. Raises a
    UserError if the model's vocabulary is too small, or a file differs from the manifest."""
    manifest = read_manifest(folder)
    made_for = manifest.tokenizer
    if made_for.vocabulary > vocabulary:
        raise UserError(
            f"{folder} was made with the tokenizer {made_for.name}, which has "
            f"{made_for.vocabulary} tokens, and the model has {vocabulary}. Use a model with as "
            f"many, for example with --set model.vocabulary={made_for.vocabulary}."
        )
    segments = {
        name: tuple(_segment(folder, shard, DTYPES[manifest.dtype]) for shard in split.shards)
        for name, split in manifest.splits.items()
    }
    if not segments.get("train"):
        raise UserError(f"{folder} holds no training data. Run `fp8stack prepare` with more text.")
    return segments["train"], segments.get("val", ())


def _segment(folder: Path, shard: Shard, dtype: str) -> Segment:
    path = folder / shard.file
    width = int(dtype[-1])
    _require_bytes(path, shard.tokens * width, f"{shard.tokens} tokens")
    index = path.with_suffix(ENDS)
    _require_bytes(index, shard.documents * 8, f"the ends of {shard.documents} documents")
    ends = map_tokens(index, "<u8")
    if int(ends[-1]) != shard.tokens or not ascends(ends):
        raise UserError(
            f"{index}: the last document ends at token {int(ends[-1])} of {shard.tokens}, or one "
            "ends before it begins. Run `fp8stack prepare` again."
        )
    documents = Ends(index=Segment(path=index, tokens=ends))
    return Segment(path=path, tokens=map_tokens(path, dtype), documents=documents)


def _require_bytes(path: Path, expected: int, content: str) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        unreadable(path, error)
    if size != expected:
        raise UserError(
            f"{path} should hold {content} by {MANIFEST}, {expected} bytes, and has {size} bytes. "
            "Run `fp8stack prepare` again, or copy the folder again."
        )


def tokenizer_of_prepared(folder: Path) -> Tokenizer:
    """The tokenizer that made the tokens. Raises a UserError if the folder's tokenizer.json is
    missing or differs from the manifest."""
    manifest = read_manifest(folder).tokenizer
    path = folder / TOKENIZER_FILE
    try:
        content = path.read_bytes()
    except OSError as error:
        unreadable(path, error)
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != manifest.sha256:
        raise UserError(
            f"{path} is not the tokenizer that made the tokens beside it: its SHA-256 begins with "
            f"{sha256[:8]}, that of {MANIFEST} with {manifest.sha256[:8]}. Copy the folder again."
        )
    text = content.decode(errors="replace")
    return tokenizer_from_json(text, manifest.name, end_token_in(folder))
