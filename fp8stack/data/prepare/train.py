"""A byte-level BPE trained on the inputs."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace

from fp8stack.common.errors import UserError
from fp8stack.data.prepare.encode import bytes_of
from fp8stack.data.prepare.inputs import Source, require_none
from fp8stack.data.prepare.readers import Reader
from fp8stack.data.tokenizer import END_OF_TEXT, Tokenizer, tokenizer_from_json

# bytes of text, at most: more changes little, and words are counted in memory
SAMPLE_BYTES = 2**28
MOST_SOURCES = 4096
SMALL_BYTES = SAMPLE_BYTES // MOST_SOURCES


def train_bpe(
    sources: Sequence[Source], vocabulary: int, reader: Reader, report: Callable[[int], None]
) -> tuple[Tokenizer, int]:
    """Train a byte-level BPE that splits words like GPT-2's; return it with the bytes of text read.

    It is trained on all the text or, if that exceeds 256 MiB, on the beginning of every source in
    proportion to its size; with more than 4096 sources, on regularly spaced ones. The tokenizer
    depends on the sources only. `vocabulary` includes `<|endoftext|>` and the 256 bytes; the result
    is smaller if the text yields no more pairs. `report` is called with the bytes of the files
    done so far, from another thread. Raises a UserError if sources cannot be read, or there is no
    text.
    """
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    problems, stopped, read_bytes = list[str](), threading.Event(), 0

    def texts() -> Iterator[str]:
        nonlocal read_bytes
        done = 0
        for source, budget in sample_of(sources):
            begun = read_bytes
            try:
                for text, on_disk in _beginning(source, budget, reader):
                    if stopped.is_set():
                        raise InterruptedError
                    yield "" if problems else text
                    read_bytes += bytes_of(text)
                    share = min(1.0, (read_bytes - begun) / budget)
                    report(done + max(on_disk, round(source.size * share)))
            except UserError as error:
                problems.append(str(error))
            done += source.size

    _in_thread(lambda: library.train_from_iterator(texts(), trainer=trainer), stopped)
    require_none(problems)
    if read_bytes == 0:
        raise UserError("There is no text in the inputs to train a tokenizer on. Give other files.")
    name = f"bpe-{library.get_vocab_size()}"
    return tokenizer_from_json(library.to_str(pretty=True) + "\n", name), read_bytes


def _in_thread(train: Callable[[], None], stopped: threading.Event) -> None:
    """Call `train` in a thread, because its library answers no signal. If this thread gets one,
    the generator that reads the inputs is `stopped`; training itself ends with the process."""
    failures: list[Exception] = []

    def run() -> None:
        try:
            train()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.2)
    except BaseException:
        stopped.set()
        thread.join(0.5)
        raise
    if failures:
        raise failures[0]


def sample_of(sources: Sequence[Source]) -> list[tuple[Source, int]]:
    """The sources to train a tokenizer on, with the bytes of text from each; a stream counts as
    much as all files together."""
    files = sum(source.size for source in sources)
    every = 1
    if files > SAMPLE_BYTES:
        small = files / len(sources) < SMALL_BYTES
        every = -(-files // SAMPLE_BYTES) if small else -(-len(sources) // MOST_SOURCES)
    sampled = sources[::every]
    weights = [source.size or max(files, 1) for source in sampled]
    shares = [max(1, SAMPLE_BYTES * weight // sum(weights)) for weight in weights]
    return list(zip(sampled, shares, strict=True))


def _beginning(source: Source, budget: int, reader: Reader) -> Iterator[tuple[str, int]]:
    """Yield the first `budget` bytes of text of a source, up to the end of a document or of a piece
    of one, each with the bytes read from the file."""
    smaller = replace(reader, size=max(4096, min(reader.size, budget)))
    remaining = budget
    with closing(smaller.read(source)) as texts:
        for text in texts:
            if remaining <= 0:
                return
            remaining -= bytes_of(text.text)
            yield text.text, text.on_disk
