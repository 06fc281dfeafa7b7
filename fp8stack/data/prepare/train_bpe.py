"""A byte-level BPE trained on the inputs."""

from collections.abc import Iterator, Sequence
from contextlib import closing

from fp8stack.common.errors import UserError
from fp8stack.data.prepare.inputs import Source
from fp8stack.data.prepare.readers import read
from fp8stack.data.prepare.shards import bytes_of
from fp8stack.data.tokenizer import END_OF_TEXT, Tokenizer, tokenizer_from_json

# bytes of text, at most: more changes little, and the sample and its words are in memory
SAMPLE_BYTES = 2**28


def train_bpe(sources: Sequence[Source], vocabulary: int, text_key: str) -> tuple[Tokenizer, int]:
    """Train a byte-level BPE that splits words like GPT-2's; return it with the bytes of text read.

    It is trained on all the text or, if that exceeds 256 MiB, on the beginning of every source in
    proportion to its size. The tokenizer depends on the sources only. `vocabulary` includes
    `<|endoftext|>` and the 256 bytes; the result is smaller if the text yields no more pairs.
    Raises a UserError if sources cannot be read, or there is no text.
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
    texts = [
        text
        for source, budget in sample_of(sources)
        for text in _beginning(source, budget, text_key)
    ]
    if not any(texts):
        raise UserError("There is no text in the inputs to train a tokenizer on. Give other files.")
    library.train_from_iterator(texts, trainer=trainer)
    name = f"bpe-{library.get_vocab_size()}"
    tokenizer = tokenizer_from_json(library.to_str(pretty=True) + "\n", name)
    return tokenizer, sum(map(bytes_of, texts))


def sample_of(sources: Sequence[Source]) -> list[tuple[Source, int]]:
    """The sources, with the bytes of text to train a tokenizer on from each; a stream counts as
    much as all files together."""
    files = sum(source.size for source in sources)
    weights = [source.size or max(files, 1) for source in sources]
    total = sum(weights)
    budgets = [max(1, SAMPLE_BYTES * weight // total) for weight in weights]
    return list(zip(sources, budgets, strict=True))


def _beginning(source: Source, budget: int, text_key: str) -> Iterator[str]:
    """Yield about the first `budget` bytes of text of a source."""
    with closing(read(source, text_key)) as texts:
        for text in texts:
            if budget <= 0:
                return
            yield text.text[:budget]
            budget -= bytes_of(text.text)
