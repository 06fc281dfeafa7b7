"""Runs a preparation: sources are read in blocks, which are tokenized and written to shards. After
an interruption it continues from the last whole shard."""

import hashlib
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from itertools import islice
from typing import Any

from fp8stack.common.errors import UserError
from fp8stack.common.hub import fetch_tokenizer
from fp8stack.common.tables import counted
from fp8stack.common.terminal import say
from fp8stack.common.version import __version__
from fp8stack.data.prepare.inputs import Settings, Source, find_sources
from fp8stack.data.prepare.output_folder import OutputFolder, manifest_of, summary
from fp8stack.data.prepare.readers import Text, read
from fp8stack.data.prepare.shards import Writer
from fp8stack.data.prepare.train_bpe import train_bpe
from fp8stack.data.tokenizer import Tokenizer, load_tokenizer, save_tokenizer

BLOCK_CHARACTERS = 2**20
DOCUMENT_CHARACTERS = 2**8  # added for each document: many may be empty
LINE_EVERY_S = 10.0
SAVED = "Stopped. The same command continues from the last whole shard."


def prepare(settings: Settings, overwrite: bool = False) -> dict[str, Any]:
    """Prepare the folder that `settings` describe, or continue an interrupted preparation, and
    return its manifest. `overwrite` first removes an existing preparation, unless that is this one
    and unfinished.

    Raises:
        UserError: datasets is missing; inputs, the tokenizer or the folder cannot be used.
        StorageError: the disk is full or cannot be written.
    """
    sources = find_sources(settings)
    tokenizer = None if settings.train_bpe is not None else _load(settings)
    folder = OutputFolder(settings.out)
    with folder.claimed():
        folder.require_own()
        is_finished = folder.manifest_path.exists()
        if overwrite and (is_finished or folder.progress().get("settings") != settings.of_output()):
            folder.clear()
        manifest, speed = folder.manifest(), ""
        if manifest is not None:
            folder.require_same(manifest, settings, sources, tokenizer)
            folder.remove_scratch()
            say(f"{settings.out} is finished already.")
        else:
            if progress := folder.progress():
                folder.require_settings(progress["settings"], settings)
            manifest, speed = _prepare(folder, settings, sources, tokenizer)
        say(*summary(settings, manifest, speed))
        return manifest


def _load(settings: Settings) -> Tokenizer:
    name = settings.tokenizer
    if name.startswith("hf:"):
        name = str(fetch_tokenizer(name))
    return load_tokenizer(name, settings.end_of_text)


def _prepare(
    folder: OutputFolder,
    settings: Settings,
    sources: Sequence[Source],
    tokenizer: Tokenizer | None,
) -> tuple[dict[str, Any], str]:
    """The manifest, once the folder is finished, and the speed for the summary."""
    started = time.monotonic()
    folder.begin()
    try:
        tokenizer = tokenizer or _train(settings, sources)
        if tokenizer.end_of_text is None:
            say(
                f"note: {tokenizer.name} names no token that ends a text, so none stands between "
                "documents. Name one by --end-of-text."
            )
        if tokenizer.leaves_out:
            say(f"note: {tokenizer.name} leaves out characters that it has no token for.")
        writer = Writer(folder.path, tokenizer, settings.shard_tokens, settings.held_out)
        tokens = _write_all(folder, settings, sources, tokenizer, writer)
        writer.finish()
        if not writer.states["train"].bytes:
            raise UserError("There is no text in the inputs. Give files with text in them.")
    except UserError:
        if not folder.progress():
            folder.clear()  # another command may use it
        raise
    save_tokenizer(tokenizer, folder.path)
    manifest = manifest_of(settings, sources, tokenizer, writer)
    folder.finish(manifest)
    speed = tokens / max(time.monotonic() - started, 1e-9)
    return manifest, f", {speed / 1e3:,.0f}k tokens/s" if tokens else ""


def _train(settings: Settings, sources: Sequence[Source]) -> Tokenizer:
    """A new tokenizer of the size that `settings` ask for."""
    size = settings.train_bpe or 0
    say(f"training a tokenizer of {size} tokens")
    tokenizer, text_bytes = train_bpe(sources, size, settings.text_key)
    if tokenizer.vocabulary < size:
        fewer = tokenizer.vocabulary
        say(f"note: the text gives {fewer} tokens and no more; give more text for {size}")
    say(f"trained {tokenizer.name} on {text_bytes / 1e6:,.1f} MB of text")
    return tokenizer


def _write_all(
    folder: OutputFolder,
    settings: Settings,
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    writer: Writer,
) -> int:
    """Tokenize and write all documents, and return the number of tokens."""
    begin = {
        "settings": settings.of_output(),
        "version": __version__,
        "tokenizer": [tokenizer.sha256, tokenizer.end_of_text],
    }
    progress, beginning, source, skip = folder.progress(), writer.place(), 0, 0
    if (
        begin.items() <= progress.items()
        and progress["listing"] == _listing(sources[: progress["source"] + 1])
        and writer.go_to(progress["written"])
    ):
        source, skip = progress["source"], progress["skip"]
        say(f"going on after {counted(writer.counts['documents'], 'document')}")
    else:
        folder.remove_scratch()
        folder.begin()
        writer.go_to(beginning)
    tokens, size = 0, sum(source.size for source in sources)
    started_s = printed_s = time.monotonic()
    with closing(_blocks(sources, settings.text_key, source, skip)) as blocks:
        for texts, source, skip, on_disk in blocks:
            shards = writer.shards
            tokens += writer.add(texts)
            if writer.shards > shards:
                place = {"source": source, "skip": skip, "written": writer.place()}
                folder.record(begin | place | {"listing": _listing(sources[: source + 1])})
            if (now_s := time.monotonic()) - printed_s >= LINE_EVERY_S:
                printed_s, speed = now_s, tokens / max(now_s - started_s, 1e-9)
                line = f"prepared | {tokens / 1e6:,.1f}M tokens | {speed / 1e3:,.0f}k tok/s"
                say(line + f" | {on_disk / 1e6:,.1f} of {size / 1e6:,.1f} MB" * (size > 0))
    return tokens


def _listing(sources: Sequence[Source]) -> str:
    """A hash of the paths, sizes and times of sources."""
    return hashlib.sha256(repr(sources).encode()).hexdigest()


def _blocks(
    sources: Sequence[Source], text_key: str, begin: int, skip: int
) -> Generator[tuple[list[Text], int, int, int], None, None]:
    """Yield the documents and pieces after the first `skip` of source `begin`, in blocks, and the
    place after each: the index of the source, the number of its texts, and the bytes of all files
    (packed) up to there."""
    texts, size, number, count = list[Text](), 0, begin, skip
    done = sum(source.size for source in sources[:begin])
    for number, source in enumerate(sources[begin:], begin):
        count = skip
        with closing(read(source, text_key)) as source_texts:
            for count, text in enumerate(islice(source_texts, skip, None), skip + 1):
                texts.append(text)
                size += len(text.text) + DOCUMENT_CHARACTERS
                if size >= BLOCK_CHARACTERS:
                    yield texts, number, count, done + text.on_disk
                    texts, size = [], 0
        done, skip = done + source.size, 0
    if texts:
        yield texts, number, count, done
