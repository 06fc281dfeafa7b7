"""Runs a preparation: sources are read in blocks, which are tokenized and written to shards. After
an interruption it continues from the last place in the journal."""

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fp8stack.common.errors import UserError, quoted
from fp8stack.common.hub import fetch_tokenizer
from fp8stack.common.io import TEMPORARY
from fp8stack.common.tables import counted
from fp8stack.common.terminal import say
from fp8stack.common.version import __version__
from fp8stack.data.prepare.encode import Place, TextBlock, encode_blocks
from fp8stack.data.prepare.inputs import Settings, Source, find_sources, listings, require_none
from fp8stack.data.prepare.output_folder import OutputFolder, describe_inputs, manifest_of, summary
from fp8stack.data.prepare.progress_display import ProgressDisplay
from fp8stack.data.prepare.readers import Reader, Text, may_be_cut
from fp8stack.data.prepare.shards import Writer
from fp8stack.data.prepare.train import sample_of, train_bpe
from fp8stack.data.tokenizer import (
    NAMED,
    TOKENIZER_FILE,
    Tokenizer,
    load_tokenizer,
    save_tokenizer,
)

BLOCK_BYTES = 2**20
DOCUMENT_BYTES = 2**8  # added for each document: many may be empty
GROUP_BYTES = 2**23  # of text per process between two entries of the journal
SAVED = "Stopped. Progress is saved; the same command continues."

Stopping = Callable[[str], AbstractContextManager[object]]
"""A context in which a request to stop is answered with this message."""


def prepare(
    settings: Settings, overwrite: bool = False, stopping: Stopping = nullcontext
) -> dict[str, Any]:
    """Prepare the folder that `settings` describe, or continue an interrupted preparation, and
    return its manifest. `overwrite` first removes an existing preparation, unless that is this one
    and unfinished. Steps that start over if they are stopped run in a context of `stopping`.

    Raises:
        UserError: datasets is missing; inputs, the tokenizer or the folder cannot be used.
        StorageError: the disk is full or cannot be written.
        RankLost: a process that tokenizes died.
    """
    settings.check()
    sources = find_sources(settings)
    folder = OutputFolder(settings.out)
    with folder.claimed():
        is_own = folder.is_own
        begun = {} if folder.manifest_path.exists() else folder.unfinished_content()
        if overwrite and begun.get("settings") != settings.of_output():
            _require_usable(settings, sources)
            folder.clear()
        manifest, speed = folder.manifest(), ""
        if manifest is not None:
            _require_same(folder, settings, sources, manifest)
            folder.remove_scratch()
            say(f"{settings.out} is finished already.")
        else:
            if not is_own:
                folder.require_empty()
            folder.require_settings(folder.unfinished_content().get("settings"), settings)
            manifest, speed = _prepare(folder, settings, sources, stopping)
        say(*summary(settings, manifest, speed))
        return manifest


def _require_usable(settings: Settings, sources: Sequence[Source]) -> None:
    """Raise a UserError if the tokenizer or the first source cannot be used, before an earlier
    preparation is removed."""
    if settings.train_bpe is None:
        _load(settings)
    with TemporaryDirectory(dir=settings.out, prefix=f"{TEMPORARY}table-", suffix="-0") as scratch:
        reader = _reader(settings, Path(scratch))
        with closing(reader.read(sources[0])) as texts:
            next(texts, None)


def _reader(settings: Settings, scratch: Path) -> Reader:
    return Reader(text_key=settings.text_key, scratch=scratch / "table", size=BLOCK_BYTES)


def _require_same(
    folder: OutputFolder, settings: Settings, sources: Sequence[Source], manifest: dict[str, Any]
) -> None:
    """Raise a UserError unless a finished folder has these settings, inputs and tokenizer."""
    folder.require_settings(manifest["settings"], settings)
    name = quoted(str(settings.out))
    if manifest["inputs"] != describe_inputs(settings.inputs, sources):
        raise UserError(
            f"The inputs have changed since {name} was prepared. Give another --out, or prepare "
            "them again with --overwrite."
        )
    from_file = settings.train_bpe is None and settings.tokenizer not in NAMED
    now, then = _load(settings) if from_file else None, manifest["tokenizer"]
    if now and (now.sha256, now.end_of_text) != (then["sha256"], then["end_of_text"]):
        raise UserError(
            f"{name} was prepared with another tokenizer of that name. Give another --out, or "
            "prepare it again with --overwrite."
        )


def _load(settings: Settings) -> Tokenizer:
    name = settings.tokenizer
    if name.startswith("hf:"):
        name = str(fetch_tokenizer(name))
    return load_tokenizer(name, settings.end_of_text)


def _prepare(
    folder: OutputFolder, settings: Settings, sources: Sequence[Source], stopping: Stopping
) -> tuple[dict[str, Any], str]:
    """The manifest, once the folder is finished, and the speed for the summary."""
    started = time.monotonic()
    reader = _reader(settings, folder.scratch)
    begin: dict[str, Any] = {"settings": settings.of_output(), "version": __version__}
    begin |= {"block": BLOCK_BYTES}
    if settings.train_bpe is None:
        tokenizer = _load(settings)
        folder.begin(begin | {"tokenizer": tokenizer.sha256, "end": tokenizer.end_of_text})
    else:
        trained, begin = folder.scratch / "trained", begin | {"inputs": listings(sources)[-1]}
        if folder.unfinished_content() != begin or not (trained / TOKENIZER_FILE).is_file():
            with stopping("Stopped. The same command trains the tokenizer anew."):
                try:
                    tokenizer = _train(settings, sources, reader)
                except BaseException:
                    folder.remove_unfinished()  # shards of an earlier tokenizer, too
                    raise
            folder.begin(begin)
            save_tokenizer(tokenizer, trained)
        tokenizer = load_tokenizer(str(trained), settings.end_of_text)
        tokenizer.name = f"bpe-{tokenizer.vocabulary}"
    if tokenizer.end_of_text is None:
        say(
            f"note: {tokenizer.name} names no token that ends a text, so none stands between "
            "documents. Name one by --end-of-text."
        )
    if tokenizer.leaves_out:
        say(f"note: {tokenizer.name} leaves out characters that it has no token for.")
    reader = replace(reader, cut_texts=may_be_cut(tokenizer))
    writer = Writer(folder.path, tokenizer.dtype.itemsize, settings.shard_tokens, settings.held_out)
    tokens = _encode_all(folder, settings, sources, reader, tokenizer, writer)
    writer.finish()
    if not writer.splits["train"].text_bytes:
        folder.remove_unfinished()
        raise UserError("There is no text in the inputs. Give files with text in them.")
    save_tokenizer(tokenizer, folder.path)
    manifest = manifest_of(settings, sources, tokenizer, writer.counts, writer.splits)
    folder.finish(manifest)
    speed = tokens / max(time.monotonic() - started, 1e-9)
    return manifest, f", {speed / 1e3:,.0f}k tokens/s" if tokens else ""


def _train(settings: Settings, sources: Sequence[Source], reader: Reader) -> Tokenizer:
    """A new tokenizer of the size that `settings` ask for."""
    size = settings.train_bpe or 0
    say(f"training a tokenizer of {size} tokens")
    with closing(
        ProgressDisplay("read", _size(source for source, _ in sample_of(sources)))
    ) as display:
        tokenizer, read_bytes = train_bpe(sources, size, reader, display.update)
    if tokenizer.vocabulary < size:
        fewer = tokenizer.vocabulary
        say(f"note: the text gives {fewer} tokens and no more; give more text for {size}")
    say(f"trained {tokenizer.name} on {read_bytes / 1e6:,.1f} MB of text")
    return tokenizer


def _size(sources: Iterable[Source]) -> int:
    """The bytes of all sources; 0 if that is unknown."""
    sizes = [source.size for source in sources]
    return sum(sizes) if all(sizes) else 0


def _resume(folder: OutputFolder, listing: Sequence[str], writer: Writer) -> Place:
    """The last place in the journal up to which the sources, of which `listing` has the hashes,
    have not changed since."""

    def is_valid(entry: dict[str, Any]) -> bool:
        number = entry["place"]["source"]
        unchanged = number < len(listing) and entry["listing"] == listing[number]
        return unchanged and writer.has(entry["written"])

    entry = folder.return_to(is_valid)
    writer.go_to(writer.begin if entry is None else entry["written"])
    if entry is None:
        return Place()
    say(f"going on after {counted(writer.counts['documents'], 'document')}")
    return Place(**entry["place"])


def _encode_all(
    folder: OutputFolder,
    settings: Settings,
    sources: Sequence[Source],
    reader: Reader,
    tokenizer: Tokenizer,
    writer: Writer,
) -> int:
    """Tokenize and write all documents, and return the number of tokens. Raises one UserError for
    all sources that cannot be read: after the first, the others are only looked through."""
    listing, problems = listings(sources), list[str]()
    begin = place = _resume(folder, listing, writer)
    tokens, unrecorded, total, workers = 0, 0, _size(sources), settings.workers
    done = sum(source.size for source in sources[: begin.source])
    if total:  # do not start processes that would be idle
        workers = max(1, min(workers, -(-(total - done) // BLOCK_BYTES)))

    started = time.monotonic()
    with (
        closing(ProgressDisplay("prepared", total, done)) as display,
        closing(_blocks(sources, reader, begin, problems)) as blocks,
        closing(encode_blocks(tokenizer, blocks, workers)) as encoded_blocks,
    ):
        for block, encoded in encoded_blocks:
            writer.add(block.texts, encoded)
            tokens += len(encoded.tokens)
            unrecorded += sum(len(text.text) + DOCUMENT_BYTES for text in block.texts)
            if unrecorded >= GROUP_BYTES * workers:
                place, unrecorded = block.place, 0
                entry = {"place": vars(place), "listing": listing[place.source]}
                folder.record(entry | {"written": writer.place()})
            speed = tokens / max(time.monotonic() - started, 1e-9)
            line = f"{tokens / 1e6:,.1f}M tokens | {speed / 1e3:,.0f}k tok/s"
            display.update(block.on_disk, line)
    if problems and place == Place() and settings.train_bpe is None:
        folder.remove_unfinished()  # no progress is recorded: settings may change
    require_none(problems)
    return tokens


def _blocks(
    sources: Sequence[Source], reader: Reader, begin: Place, problems: list[str]
) -> Generator[TextBlock, None, None]:
    """Yield all documents from a place on, in blocks. Once a source cannot be read, which is added
    to `problems`, no more blocks follow."""
    texts, size, done = list[Text](), 0, sum(source.size for source in sources[: begin.source])
    place, on_disk = begin, 0
    for number, source in enumerate(sources[begin.source :], begin.source):
        if problems and source.path.startswith("hf:"):
            continue  # looking through it could take days
        skip, state = (begin.texts, begin.state) if number == begin.source else (0, "")
        try:
            with closing(reader.read(source, skip, state)) as source_texts:
                for count, text in enumerate(source_texts, skip + 1):
                    if problems:
                        continue
                    texts.append(text)
                    size += len(text.text) + DOCUMENT_BYTES
                    place = Place(source=number, texts=count, state=text.state)
                    on_disk = done + text.on_disk
                    if size >= reader.size:
                        yield TextBlock(texts=texts, place=place, on_disk=on_disk)
                        texts, size = [], 0
        except UserError as error:
            problems.append(str(error))
            if number + 1 < len(sources) and len(problems) == 1:
                say(f"note: {error} The other files are looked through for more problems.")
        done += source.size
    if texts:
        yield TextBlock(texts=texts, place=place, on_disk=on_disk)
