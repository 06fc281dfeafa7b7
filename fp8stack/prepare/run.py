"""Runs a preparation: blocks are tokenized in groups, which stay on the disk, and shards are
written when all groups are there. After an interruption the groups are what is not done again."""

import itertools
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8stack.data.order import GOLDEN, mixed
from fp8stack.errors import UserError, quoted
from fp8stack.io import storage_errors
from fp8stack.prepare.blocks import BLOCK_BYTES, Block, Place, Reader, may_be_cut
from fp8stack.prepare.encode import Encoder
from fp8stack.prepare.folder import Folder, describe_inputs, manifest_of, summary
from fp8stack.prepare.inputs import Settings, Source, find_sources, listings, require_none
from fp8stack.prepare.progress import Display
from fp8stack.prepare.shards import SplitWriter
from fp8stack.prepare.tables import encode, encoded, last_row, library
from fp8stack.prepare.train import sample_of, train_bpe
from fp8stack.tables import counted
from fp8stack.terminal import say
from fp8stack.tokenizer import (
    NAMED,
    TOKENIZER_FILE,
    Tokenizer,
    load_tokenizer,
    save_tokenizer,
)
from fp8stack.version import __version__

GROUP_BYTES = 2**23  # for each process
SAVED = "Stopped. Progress is saved; the same command continues."

Stopping = Callable[[str], AbstractContextManager[object]]
"""A context within which a request to stop is answered with these words."""


def prepare(
    settings: Settings, overwrite: bool = False, stopping: Stopping = nullcontext
) -> dict[str, Any]:
    """Prepare the folder that `settings` describe, or continue an interrupted preparation, and
    return its manifest. `overwrite` first removes an existing preparation. What begins anew if it
    is stopped runs in a context of `stopping`.

    Raises:
        UserError: datasets is missing; inputs, the tokenizer or the folder cannot be used.
        StorageError: the disk is full or cannot be written.
        RankLost: a process that tokenizes died.
    """
    settings.check()
    library()
    sources = find_sources(settings)
    folder = Folder(settings.out)
    with folder.claimed():
        is_own = folder.is_own
        if overwrite:
            folder.clear()
        manifest, speed = folder.manifest(), ""
        if manifest is not None:
            _require_same(folder, settings, sources, manifest)
            folder.sweep()
            say(f"{settings.out} is finished already.")
        else:
            if not is_own:
                folder.require_empty()
            folder.require_settings(folder.begun().get("settings"), settings)
            manifest, speed = _prepare(folder, settings, sources, stopping)
        say(*summary(settings, manifest, speed))
        return manifest


def _require_same(
    folder: Folder, settings: Settings, sources: Sequence[Source], manifest: dict[str, Any]
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
    if from_file and _load(settings).sha256 != manifest["tokenizer"]["sha256"]:
        raise UserError(
            f"{name} was prepared with another tokenizer of that name. Give another --out, or "
            "prepare it again with --overwrite."
        )


def _load(settings: Settings) -> Tokenizer:
    name = settings.tokenizer
    if name.startswith("hf:"):
        from fp8stack.hf.hub import fetch_tokenizer  # imports torch

        name = str(fetch_tokenizer(name))
    return load_tokenizer(name, settings.end_of_text)


def _prepare(
    folder: Folder, settings: Settings, sources: Sequence[Source], stopping: Stopping
) -> tuple[dict[str, Any], str]:
    """The manifest, once the folder is finished, and the speed for the summary."""
    started = time.monotonic()
    reader = Reader(text_key=settings.text_key, scratch=folder.scratch / "table", size=BLOCK_BYTES)
    begin: dict[str, Any] = {"settings": settings.of_output(), "version": __version__}
    begin |= {"block": BLOCK_BYTES}
    if settings.train_bpe is None:
        tokenizer = _load(settings)
        folder.begin(begin | {"tokenizer": tokenizer.sha256, "end": tokenizer.end_of_text})
    else:
        trained, begin = folder.scratch / "trained", begin | {"inputs": listings(sources)[-1]}
        if folder.begun() != begin or not (trained / TOKENIZER_FILE).is_file():
            with stopping("Stopped. The same command trains the tokenizer anew."):
                try:
                    tokenizer = _train(settings, sources, reader)
                except BaseException:
                    folder.sweep()
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
    reader = replace(reader, cut_texts=may_be_cut(tokenizer))
    encoder = Encoder(tokenizer=tokenizer, text_key=settings.text_key)
    tokens = _encode_all(folder, settings, sources, reader, encoder, stopping)
    with stopping(SAVED):
        counts, splits = _write(folder, settings, tokenizer)
    if not splits["train"].text_bytes:
        folder.sweep()
        raise UserError("There is no text in the inputs. Give files with text in them.")
    save_tokenizer(tokenizer, folder.path)
    manifest = manifest_of(settings, sources, tokenizer, counts, splits)
    folder.finish(manifest)
    speed = tokens / max(time.monotonic() - started, 1e-9)
    return manifest, f", {speed / 1e3:,.0f}k tokens/s" if tokens else ""


def _train(settings: Settings, sources: Sequence[Source], reader: Reader) -> Tokenizer:
    """A new tokenizer of the size that `settings` ask for."""
    size = settings.train_bpe or 0
    say(f"training a tokenizer of {size} tokens")
    with closing(Display("read", _size(source for source, _ in sample_of(sources)))) as display:
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


def _groups(folder: Folder) -> list[Path]:
    """The groups of tokens that are done."""
    return [path for path in sorted(folder.scratch.iterdir()) if path.name.isdigit()]


def _resume(folder: Folder, sources: Sequence[Source]) -> Place:
    """The place after the groups that are done. Groups of inputs that have changed since are
    removed."""
    listing, place, valid = listings(sources), Place(), True
    for path in _groups(folder):
        row = last_row(path)
        at = Place(source=row["source"], offset=row["offset"], state=row["state"])
        valid = valid and at.source < len(sources) and row["listing"] == listing[at.source]
        if valid:
            place = at
        else:
            shutil.rmtree(path)
    if place != Place():
        say(f"going on after {counted(len(_groups(folder)), 'group')} of tokens")
    return place


def _encode_all(
    folder: Folder,
    settings: Settings,
    sources: Sequence[Source],
    reader: Reader,
    encoder: Encoder,
    stopping: Stopping,
) -> int:
    """Tokenize all blocks in groups, and return the number of tokens. Raises one UserError for
    all sources that cannot be read: once there is one, the others are only looked through."""
    place = _resume(folder, sources)
    problems: dict[int, str] = {}
    number = len(_groups(folder))
    tokens, total, workers = 0, _size(sources), settings.workers
    done = sum(source.size for source in sources[: place.source])
    if total:  # an idle process would cost its start
        workers = max(1, min(workers, -(-(total - done) // BLOCK_BYTES)))
    started = time.monotonic()
    with (
        closing(Display("prepared", total, done)) as display,
        closing(reader.blocks(sources, place)) as blocks,
    ):
        while group := _group(blocks, GROUP_BYTES * workers):
            path = folder.scratch / f"{number:08d}"
            with stopping(SAVED):  # also a request that was lost while processes started
                encode(group, encoder, path, workers)
            for row in encoded(path, ("source", "problem", "lengths")):
                if row["problem"]:
                    problems.setdefault(row["source"], row["problem"])
                tokens += int(np.frombuffer(row["lengths"], np.int64).sum())
            if problems:
                shutil.rmtree(path)
                encoder = replace(encoder, tokenizer=None)
            number += 1
            speed = tokens / max(time.monotonic() - started, 1e-9)
            line = f"{tokens / 1e6:,.1f}M tokens | {speed / 1e3:,.0f}k tok/s"
            display.update(group[-1].on_disk, line)
    if problems and not _groups(folder) and settings.train_bpe is None:
        folder.sweep()  # what holds nothing yet must not bind the folder to these inputs
    require_none(list(problems.values()))
    return tokens


def _group(blocks: Iterator[Block], size: int) -> list[Block]:
    """The next blocks, of `size` bytes together."""
    group = list[Block]()
    for block in blocks:
        group.append(block)
        size -= sum(map(len, block.content))
        if size <= 0:
            break
    return group


def _write(
    folder: Folder, settings: Settings, tokenizer: Tokenizer
) -> tuple[dict[str, int], dict[str, SplitWriter]]:
    """Write all groups to shards, each document to its split. Returns counts, and the splits."""
    splits = {
        name: SplitWriter(folder.path, name, settings.shard_tokens) for name in ("train", "val")
    }
    counts = dict.fromkeys(("documents", "empty", "replaced", "cut_words"), 0)
    with storage_errors(folder.path):
        folder.remove_shards()
    for row in itertools.chain.from_iterable(map(encoded, _groups(folder))):
        lengths, sizes = (np.frombuffer(row[key], np.int64) for key in ("lengths", "text_bytes"))
        tokens = np.frombuffer(row["tokens"], tokenizer.dtype)
        begun = counts["documents"] - row["continues"]
        held = held_out(np.arange(begun, begun + len(lengths)), settings.held_out)
        finished = len(lengths) - row["unfinished"]
        for name, chosen in (("train", ~held), ("val", held)):
            if chosen.any():
                part = slice(None) if chosen.all() else chosen.repeat(lengths)
                of_finished = lengths[:finished][chosen[:finished]]
                splits[name].add(tokens[part], of_finished, int(sizes[chosen].sum()))
        counts["documents"] = begun + len(lengths)
        counts["empty"] += int((sizes[row["continues"] : finished] == 0).sum())
        counts["replaced"] += row["replaced"]
        counts["cut_words"] += row["inside_a_word"]
    for split in splits.values():
        split.finish()
    return counts, splits


def held_out(places: npt.NDArray[np.int64], share: float) -> npt.NDArray[np.bool_]:
    """Which documents are held out, by their indices among the inputs: a share chosen by SplitMix64
    hashes of the indices. Document 0 never is."""
    x = mixed(places.astype(np.uint64) * np.uint64(GOLDEN))
    below: npt.NDArray[np.bool_] = (x >> np.uint64(11)).astype(np.float64) < share * 2.0**53
    return below & (places > 0)
