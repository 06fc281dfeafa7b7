"""Runs a preparation, from the inputs to the manifest."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8stack.data.order import GOLDEN, mixed
from fp8stack.errors import StorageError, UserError, quoted
from fp8stack.io import write_atomically
from fp8stack.prepare.encode import Encoded, encode_all
from fp8stack.prepare.folder import (
    Counts,
    Folder,
    Journal,
    describe_inputs,
    listing_of,
    manifest_of,
    summary,
)
from fp8stack.prepare.inputs import Settings, Source, find_sources
from fp8stack.prepare.progress import Display
from fp8stack.prepare.read import ITEM_BYTES, Item, Items, Position, Reading, may_be_cut, read_items
from fp8stack.prepare.shards import SplitWriter
from fp8stack.prepare.train import sample_of, train_bpe
from fp8stack.tables import counted
from fp8stack.terminal import say
from fp8stack.tokenizer import NAMED, Tokenizer, load_tokenizer, tokenizer_from_json

SAVE_EVERY_S = 2.0


Stopping = Callable[[str], AbstractContextManager[object]]
"""A context within which a request to stop is answered with these words."""


def prepare(
    settings: Settings, overwrite: bool = False, stopping: Stopping = nullcontext
) -> dict[str, Any]:
    """Prepare the folder that `settings` describe, or continue an interrupted preparation, and
    return its manifest. `overwrite` first removes an existing preparation. What begins anew if it
    is stopped runs in a context of `stopping`.

    Raises:
        UserError: an input, the tokenizer or the folder cannot be used.
        StorageError: the disk is full or cannot be written.
        RankLost: a process that tokenizes died.
    """
    settings.check()
    sources = find_sources(settings)
    folder = Folder(settings.out)
    with folder.claimed():
        cleared = overwrite and folder.clear()
        manifest, journal = folder.manifest(), folder.journal()
        if manifest is not None:
            _require_same(folder, settings, sources, manifest)
            folder.drop_journal()
            say(f"{settings.out} is finished already.", *summary(settings, manifest))
            return manifest
        if journal is not None:
            folder.require_settings(journal.settings, settings)
        elif not cleared:
            folder.require_empty()
        trains = settings.train_bpe is not None and not (journal and folder.tokenizer_path.exists())
        words = "Stopped. The same command trains the tokenizer anew."
        with stopping(words) if trains else nullcontext():
            tokenizer, journal = _begin(folder, settings, sources, journal, trains)
        preparation = _Preparation(folder, settings, sources, tokenizer, journal)
        try:
            manifest, speed = preparation.run()
        except UserError:
            # What holds nothing yet must not bind the folder to these inputs. A tokenizer that was
            # trained is worth keeping.
            if preparation.position == Position() and settings.train_bpe is None:
                folder.clear()
            raise
        say(*summary(settings, manifest, speed))
        return manifest


def _require_same(
    folder: Folder, settings: Settings, sources: Sequence[Source], manifest: dict[str, Any]
) -> None:
    """Raise a UserError unless a finished folder is complete and has these settings."""
    folder.require_settings(manifest["settings"], settings)
    name = quoted(str(settings.out))
    if manifest["inputs"] != describe_inputs(settings.inputs, sources):
        raise UserError(
            f"The inputs have changed since {name} was prepared. Give another --out, or prepare "
            "them again with --overwrite."
        )
    folder.require_shards(manifest)
    read_from_file = settings.train_bpe is None and settings.tokenizer not in NAMED
    made_with = manifest["tokenizer"]["sha256"]
    if read_from_file and load_tokenizer(settings.tokenizer).sha256 != made_with:
        raise UserError(
            f"{name} was prepared with another tokenizer of that name. Give another --out, or "
            "prepare it again with --overwrite."
        )


def _begin(
    folder: Folder,
    settings: Settings,
    sources: Sequence[Source],
    journal: Journal | None,
    trains: bool,
) -> tuple[Tokenizer, Journal]:
    """The tokenizer, which it `trains` if asked, and the existing or a new journal; both are
    saved."""
    trained_on = None
    if settings.train_bpe is None:
        tokenizer = load_tokenizer(settings.tokenizer)
    elif not trains:
        text = folder.tokenizer_path.read_bytes().decode(errors="replace")
        tokenizer = tokenizer_from_json(text, f"bpe-{settings.train_bpe}")
    else:
        tokenizer, trained_on = _train(settings, sources, settings.train_bpe)
    if tokenizer.end_of_text is None:
        raise UserError(
            f"Tokenizer {quoted(tokenizer.name)} has no special token that ends a text, such as "
            "<|endoftext|> or </s>, and nothing else can stand between documents. Add one to its "
            "added_tokens, or give another."
        )
    if journal is None:
        output = settings.of_output()
        journal = Journal(settings=output, tokenizer=tokenizer.sha256, read=listing_of([]))
        folder.save_journal(journal)
    elif journal.tokenizer != tokenizer.sha256:
        raise UserError(
            f"{quoted(str(folder.path))} was begun with another tokenizer of that name. Give "
            "another --out, or start over with --overwrite."
        )
    write_atomically(folder.tokenizer_path, tokenizer.to_json().encode())
    if trained_on is not None:
        say(f"trained {tokenizer.name} on {trained_on / 1e6:,.1f} MB of text")
    return tokenizer, journal


def _train(settings: Settings, sources: Sequence[Source], size: int) -> tuple[Tokenizer, int]:
    """A tokenizer of `size` tokens, and the bytes of text that it was trained on."""
    total = sum(source.size for source, _ in sample_of(sources))
    total = 0 if _streams(sources) else total
    say(f"training a tokenizer of {size} tokens")
    reading = Reading(text_key=settings.text_key)
    with closing(Display("read", total, 0)) as display:
        trained, read_bytes = train_bpe(sources, size, reading, display.update)
    if trained.vocabulary < size:
        fewer = trained.vocabulary
        say(f"note: the text gives {fewer} tokens and no more; give more text for {size}")
    return trained, read_bytes


def _streams(sources: Sequence[Source]) -> bool:
    """Whether a source's size is unknown."""
    return any(source.kind == "hf" for source in sources)


class _Preparation:
    """Writes documents to shards, from the journal's position on."""

    def __init__(
        self,
        folder: Folder,
        settings: Settings,
        sources: Sequence[Source],
        tokenizer: Tokenizer,
        journal: Journal,
    ) -> None:
        self.folder, self.settings, self.sources = folder, settings, sources
        self.tokenizer, self.journal = tokenizer, journal
        self.position, self.counts = journal.position, journal.counts
        done = sources[: self.position.source]
        if len(done) < self.position.source or listing_of(done) != journal.read:
            raise UserError(
                f"Inputs that were read already have changed since {quoted(str(folder.path))} was "
                "begun. Put them back as they were, or start over with --overwrite."
            )
        self.writers = {
            name: SplitWriter(folder.path, name, tokenizer.dtype, settings.shard_tokens, state)
            for name, state in (("train", journal.train), ("val", journal.val))
        }
        self.before = self.tokens

    @property
    def tokens(self) -> int:
        """The number of tokens written, including earlier sessions."""
        states = [writer.state for writer in self.writers.values()]
        return sum(s.tokens + sum(shard.tokens for shard in s.shards) for s in states)

    def run(self) -> tuple[dict[str, Any], str]:
        """Process the remaining items, and return the manifest and the speed."""
        started = time.monotonic()
        how = Reading(
            text_key=self.settings.text_key,
            cut_texts=may_be_cut(self.tokenizer),
            item_bytes=ITEM_BYTES,
        )
        if self.position != Position():
            say(f"going on after {counted(self.counts.documents, 'document')}")
        try:
            with closing(read_items(self.sources, self.position, how)) as items:
                self._take_all(items)
        except StorageError:  # only what the journal describes is sure to be on the disk
            raise
        except UserError:
            self._save()
            raise
        finally:
            for writer in self.writers.values():
                writer.close()
        splits = {name: writer.state for name, writer in self.writers.items()}
        if not splits["train"].bytes:
            raise UserError("There is no text in the inputs. Give files with text in them.")
        manifest = manifest_of(self.settings, self.sources, self.tokenizer, self.counts, splits)
        self.folder.finish(manifest)
        seconds = max(time.monotonic() - started, 1e-9)
        return manifest, f", {(self.tokens - self.before) / seconds / 1e3:,.0f}k tokens/s"

    def _take_all(self, items: Items) -> None:
        done = sum(source.size for source in self.sources[: self.position.source])
        workers, total = self.settings.workers, 0
        if not _streams(self.sources):  # an idle worker would cost its start
            total = sum(source.size for source in self.sources)
            workers = max(1, min(workers, -(-(total - done) // ITEM_BYTES)))
        saved = time.monotonic()
        with (
            closing(Display("prepared", total, done)) as display,
            closing(encode_all(items, self.tokenizer, self.settings.text_key, workers)) as results,
        ):
            for item, result in results:
                self._take(item, result)
                speed = (self.tokens - self.before) / max(display.elapsed_s, 1e-9)
                display.update(
                    item.on_disk,
                    f"{counted(self.counts.documents, 'document')} | "
                    f"{self.tokens / 1e6:,.1f}M tokens | {speed / 1e3:,.0f}k tok/s",
                )
                if time.monotonic() - saved >= SAVE_EVERY_S:
                    self._save()
                    saved = time.monotonic()
            for writer in self.writers.values():
                writer.finish()

    def _take(self, item: Item, found: Encoded) -> None:
        """Write the documents of an item, each to its split."""
        begun = self.counts.documents - item.before.continues
        places = np.arange(begun, begun + len(found.lengths))
        held = held_out(places, self.settings.held_out)
        whole = len(found.lengths) - item.unfinished
        for name, chosen in (("train", ~held), ("val", held)):
            if chosen.any():
                some = slice(None) if chosen.all() else chosen.repeat(found.lengths)
                lengths = found.lengths[:whole][chosen[:whole]]
                text_bytes = int(found.text_bytes[chosen].sum())
                self.writers[name].add(found.tokens[some], lengths, text_bytes)
        self.counts = Counts(
            documents=begun + len(found.lengths),
            empty=self.counts.empty
            + int((found.text_bytes[item.before.continues : whole] == 0).sum()),
            replaced=self.counts.replaced + found.replaced,
            cut_words=self.counts.cut_words + item.inside_a_word,
        )
        self.position = item.after

    def _save(self) -> None:
        """Write the journal, after syncing the shards that it describes."""
        for writer in self.writers.values():
            writer.sync()
        changes: dict[str, Any] = {"position": self.position, "counts": self.counts}
        changes |= {name: writer.state for name, writer in self.writers.items()}
        changes["read"] = listing_of(self.sources[: self.position.source])
        self.folder.save_journal(self.journal.model_copy(update=changes))


def held_out(places: npt.NDArray[np.int64], share: float) -> npt.NDArray[np.bool_]:
    """Which documents are held out, by their indices among the inputs: a share chosen by SplitMix64
    hashes of the indices. Document 0 never is."""
    x = mixed(places.astype(np.uint64) * np.uint64(GOLDEN))
    below: npt.NDArray[np.bool_] = (x >> np.uint64(11)).astype(np.float64) < share * 2.0**53
    return below & (places > 0)
