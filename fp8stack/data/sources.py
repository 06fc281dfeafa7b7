"""Open `--data`: detect its format, read it and split it. No torch here."""

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from fp8stack.common.errors import UserError
from fp8stack.data import megatron, prepared
from fp8stack.data.bins import bin_segment, is_bin, llmc_vocabulary_of, named_splits
from fp8stack.data.bins import vocabulary_of as vocabulary_of_bin
from fp8stack.data.corpus import Corpus, Segment
from fp8stack.data.datatrove import ds_segment, is_beside_ds, is_ds
from fp8stack.data.files import is_empty, is_saved, status_of, walk
from fp8stack.data.nanogpt import META, characters_beside
from fp8stack.data.parquet import is_parquet, parquet_segments
from fp8stack.data.source_mixture import mixture_of, weighted
from fp8stack.data.texts import (
    STANDARD_LIBRARY,
    encoded,
    joined,
    refuse_unprepared,
    require_bytes_fit,
    standard_library,
    text,
)
from fp8stack.data.tokenizer import Tokenizer, load_tokenizer
from fp8stack.data.tokenizer.byte_level import ByteTokenizer

Segments = tuple[Segment, ...]


def load_corpora(
    data: str | None,
    vocabulary: int,
    held_out: float = 0.1,
    *,
    end_of_text: int | None = None,
    texts: Tokenizer | None = None,
) -> tuple[Corpus, Corpus]:
    """The training and the validation split of `data`.

    Args:
        data: None for the source of the running Python's standard library; a folder that `fp8stack
            prepare` wrote; a text file; a parquet file with a text
            column; a `.bin` file of little-endian uint16 tokens, or with llm.c's header;
            Megatron-LM's `.bin` and `.idx`, by either name or their stem; datatrove's `.ds` with
            its index; a folder with `train.bin` and `val.bin`; or a folder of files of one format,
            concatenated in path order, in which llm.c's names of the two splits are recognized.
            Hidden files and links to folders are skipped. `WEIGHT:PATH,WEIGHT:PATH` is a mixture.
        vocabulary: the size of the model's vocabulary.
        held_out: the share of the tokens, at the end, that becomes the validation split, if the
            data have none.
        end_of_text: the token after each document in `.bin` files that do not record it.
        texts: the tokenizer for text; None for its bytes.

    Raises:
        UserError: the data cannot be used; the message names the file and the remedy.
    """
    if not 0 < held_out < 1:
        raise UserError(f"Cannot hold out {held_out} of the data. Use a share between 0 and 1.")
    loader = _Loader(vocabulary=vocabulary, held_out=held_out, end_of_text=end_of_text, texts=texts)
    pieces = None if data is None else weighted(data)
    if pieces is None:
        return loader.splits(data)
    tokenizer_of(data, texts)
    weights = [weight for weight, _ in pieces]
    train, val = zip(*(loader.splits(path) for _, path in pieces), strict=True)
    return (
        mixture_of(f"{data} (training part)", weights, train),
        mixture_of(f"{data} (held-out part)", weights, val),
    )


def holds_text(data: str | None) -> bool:
    """Whether `data`, or a source of the mixture, is text. Raises a UserError if it does not
    exist."""
    return any(_is_text(path) for path in _paths(data))


def tokenizer_of(data: str | None, texts: Tokenizer | None = None) -> Tokenizer | None:
    """The tokenizer that made the tokens of `data`; None if the data do not record it.

    Text and parquet files are tokenized by `texts`, or as bytes if it is None; a prepared folder
    records its tokenizer; the sources of a mixture must have the same tokenizer. Raises a UserError
    if the data do not exist, if the sources differ, or if a prepared folder's tokenizer.json is not
    the tokenizer that made its tokens.
    """
    tokenizers = [(path, _tokenizer_of_one(path, texts)) for path in _paths(data)]
    for (path, tokenizer), (other_path, other_tokenizer) in pairwise(tokenizers):
        if (tokenizer and tokenizer.sha256) != (other_tokenizer and other_tokenizer.sha256):
            raise UserError(
                f"{path} is {_tokens_of(tokenizer)} and {other_path} is "
                f"{_tokens_of(other_tokenizer)}: they cannot be mixed. Make both with `fp8stack "
                "prepare` and one --tokenizer."
            )
    if tokenizers[0][1] is None and len(tokenizers) > 1:
        _require_one_vocabulary({path: _vocabulary_of_one(path) for path, _ in tokenizers})
    return tokenizers[0][1]


def _require_one_vocabulary(sizes: Mapping[str | None, int | None]) -> None:
    """Raise a UserError if files that do not name their tokenizer record vocabularies of different
    `sizes`, as llm.c's of GPT-2 and Llama 3 do."""
    first_of_size = dict[int, str | None]()
    for path, size in sizes.items():
        if size is not None:
            first_of_size.setdefault(size, path)
    if len(first_of_size) > 1:
        of = " and ".join(f"{path} of {size}" for size, path in first_of_size.items())
        raise UserError(f"The tokens of {of} are not the same: they cannot be mixed.")


def _paths(data: str | None) -> list[str | None]:
    """`data`, or the sources of a mixture."""
    pieces = None if data is None else weighted(data)
    return [data] if pieces is None else [path for _, path in pieces]


def _tokens_of(tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return "of a tokenizer that it does not name"
    return f"of the tokenizer {tokenizer.name} ({tokenizer.sha256[:8]})"


def vocabulary_of(data: str | None) -> int | None:
    """The largest vocabulary size that the sources of `data` record, in a prepared folder, llm.c's
    header or nanoGPT's `meta.pkl`; None if a source records none or is text. Raises what
    `load_corpora` raises."""
    sizes = [_vocabulary_of_one(path) for path in _paths(data)]
    recorded = [size for size in sizes if size is not None]
    return max(recorded) if len(recorded) == len(sizes) else None


def _vocabulary_of_one(data: str | None) -> int | None:
    if data is None or _is_text(data):
        return None
    path = _path_of(data)
    if prepared.is_prepared(path):
        return prepared.read_manifest(path).tokenizer.vocabulary
    file = _first_bin(path)
    return None if file is None else vocabulary_of_bin(file)


def _first_bin(path: Path) -> Path | None:
    """The first `.bin` file at `path` or below it; None if there is none."""
    files = sorted(walk(path)) if path.is_dir() else [path]
    return next(filter(is_bin, files), None)


def _tokenizer_of_one(data: str | None, texts: Tokenizer | None) -> Tokenizer | None:
    if data is None or _is_text(data):
        return texts or load_tokenizer("bytes")
    path = _path_of(data)
    if prepared.is_prepared(path):
        return prepared.tokenizer_of_prepared(path)
    file = _first_bin(path)
    characters = (
        None if file is None or vocabulary_of_bin(file) is None else characters_beside(file)
    )
    return None if characters is None else characters.tokenizer


def _is_text(data: str | None) -> bool:
    path = None if data is None else _path_of(data)
    if path is None or not path.is_dir():
        return path is None or not (is_bin(path) or is_ds(path))
    tokens = prepared.is_prepared(path) or any(is_bin(f) or is_ds(f) for f in walk(path))
    return not tokens


def _path_of(data: str) -> Path:
    """The folder or file that `data`, which is no mixture, names."""
    status = status_of(data)
    folder = status is not None and stat.S_ISDIR(status.st_mode)
    tokens = None if folder else megatron.bin_of(data)
    if status is None and tokens is None:
        raise UserError(
            f"No data at {data!r}. Give a file or a folder with --data, or leave it out."
        )
    return tokens or Path(data)


@dataclass(frozen=True, kw_only=True)
class _Loader:
    """Loads sources of data with the same options; see `load_corpora`."""

    vocabulary: int
    held_out: float
    end_of_text: int | None
    texts: Tokenizer | None

    @property
    def _of_bytes(self) -> int | None:
        """The vocabulary for text whose tokens are its bytes; None if a tokenizer makes them."""
        is_bytes = self.texts is None or isinstance(self.texts, ByteTokenizer)
        return self.vocabulary if is_bytes else None

    def splits(self, data: str | None) -> tuple[Corpus, Corpus]:
        """The splits of data that are no mixture."""
        if data is None:
            segments = self._text(STANDARD_LIBRARY, standard_library(self._of_bytes))
            return self._cut(STANDARD_LIBRARY, segments)
        path = _path_of(data)
        if not path.is_dir():
            if is_bin(path):
                segments = self._bins([path])
            elif is_ds(path):
                segments = (ds_segment(path),)
            elif is_parquet(path):
                segments = self._tables(str(path), [path])
            else:
                segments = self._text(str(path), [text(path, self._of_bytes)])
            return self._cut(data, segments)
        if prepared.is_prepared(path):
            train, val = prepared.prepared_segments(path, self.vocabulary)
            return _named(data, train, val) if val else self._cut(data, train)
        files = path / "train.bin", path / "val.bin"
        if all(map(os.path.exists, files)):
            first, second = self._bins(files)
            return (
                Corpus(name=str(files[0]), segments=(first,)),
                Corpus(name=str(files[1]), segments=(second,)),
            )
        return self._folder(data)

    def _cut(self, name: str, segments: Segments) -> tuple[Corpus, Corpus]:
        corpus = Corpus(name=name, segments=segments)
        return _named(name, *corpus.split(len(corpus) - int(len(corpus) * self.held_out)))

    def _bins(self, paths: Sequence[Path]) -> Segments:
        _require_one_vocabulary({str(path): llmc_vocabulary_of(path) for path in paths})
        return tuple(bin_segment(path, self.vocabulary, self.end_of_text) for path in paths)

    def _tables(self, name: str, paths: list[Path]) -> Segments:
        require_bytes_fit(self._of_bytes, name)
        return self._text(name, list(parquet_segments(paths)))

    def _text(self, name: str, segments: list[Segment]) -> Segments:
        """The segments of text files or tables: their bytes concatenated, or their tokens."""
        if self.texts is not None and self._of_bytes is None:
            return encoded(name, segments, self.texts)
        if all(segment.documents is None for segment in segments):
            return joined(segments)
        return tuple(segments)

    def _folder(self, data: str) -> tuple[Corpus, Corpus]:
        """The splits of a folder of `.bin`, `.ds`, parquet or text files."""
        folder = Path(data)
        if is_saved(folder):
            refuse_unprepared(folder, "holds a dataset that save_to_disk wrote")
        files = sorted(walk(folder), key=lambda path: path.relative_to(folder).as_posix())
        prepared.refuse_unfinished(folder, files)
        bins = [path for path in files if is_bin(path)]
        datatrove = [path for path in files if is_ds(path)]
        indices = {megatron.index_of(path) for path in bins}
        indices |= {path.parent / META for path in bins} | set(filter(is_beside_ds, files))
        tables = [path for path in files if is_parquet(path)]
        text_files = [p for p in files if p not in {*bins, *datatrove, *indices, *tables}]
        kinds = {".bin files": bins, ".ds files": datatrove, "parquet files": tables}
        kinds["others"] = text_files
        present = [(kind, paths[0].name) for kind, paths in kinds.items() if paths]
        if len(present) > 1:
            (kind, name), (other_kind, other_name) = present[:2]
            raise UserError(
                f"{folder} mixes {kind} ({name}) with {other_kind} ({other_name}). "
                "Give a folder with one kind, or name one file."
            )
        if bins:
            if named := named_splits(bins):
                segments = self._bins([path for split in named for path in split])
                return _named(data, segments[: len(named[0])], segments[len(named[0]) :])
            segments = self._bins(bins)
        elif datatrove:  # an empty one is of a task without documents
            segments = tuple(ds_segment(path) for path in datatrove if not is_empty(path))
        elif tables:
            segments = self._tables(data, tables)
        else:
            # An empty text is harmless; an empty .bin is a shard that was not written.
            text_segments = [
                text(path, self._of_bytes) for path in text_files if not is_empty(path)
            ]
            segments = self._text(data, text_segments)
        if not segments:
            raise UserError(f"{folder} holds no data. Put .bin or text files into it.")
        return self._cut(data, segments)


def _named(name: str, train: Segments, val: Segments) -> tuple[Corpus, Corpus]:
    return (
        Corpus(name=f"{name} (training part)", segments=train),
        Corpus(name=f"{name} (held-out part)", segments=val),
    )
