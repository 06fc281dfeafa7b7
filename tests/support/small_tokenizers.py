"""Small tokenizers, built by the tokenizers and tiktoken libraries."""

import json
from typing import Any

import tiktoken
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

CORPUS = [
    "def total(values):\n    return sum(v for v in values)  # adds them up\n",
    "It's the 3rd time: we'll see what they've done, won't we?\n\n\tTabs, and   spaces.",
    "Grüße aus Köln! Привет, мир. 你好,世界。 😀👩‍👩‍👧 naïve café",
] * 3


def trained(size: int = 420, **options: Any) -> tokenizers.Tokenizer:
    """A byte-level BPE as the library trains it."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        **{"special_tokens": ["<|endoftext|>"]} | options,
    )
    library.train_from_iterator(CORPUS, trainer)
    return library


def metaspace() -> tokenizers.Tokenizer:
    """A tokenizer whose ids decode by their neighbours: Llama 2's kind, with byte fallback."""
    library = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]
    )
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    library.train_from_iterator(["Hello there, hello world. " * 3], trainer)
    content = json.loads(library.to_str())
    vocabulary = content["model"]["vocab"]
    for spelled in bytes_:
        vocabulary.setdefault(spelled, len(vocabulary))
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def small_encoding() -> tiktoken.Encoding:
    """A tiktoken encoding of GPT-2's kind with few tokens, from merges that were really learned."""
    library = trained(600, special_tokens=[])
    content = json.loads(library.to_str())
    characters = byte_characters()
    ranks = {bytes([byte]): number for number, byte in enumerate(range(256))}
    for first, second in content["model"]["merges"]:
        token = bytes(characters[char] for char in first + second)
        ranks.setdefault(token, len(ranks))
    return tiktoken.Encoding(
        "small",
        pat_str=r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": len(ranks)},
    )


def byte_characters() -> dict[str, int]:
    """The byte of each character in the alphabet of byte-level vocabularies, as GPT-2's encoder
    has it: printable bytes are Latin-1, the others follow from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + number): byte for number, byte in enumerate(shifted)
    }
