"""nanoGPT's and llm.c's files of tokens, `.bin`. No torch here.

llm.c's format, which modded-nanogpt also reads, begins with 256 int32: a magic number, a version,
the number of tokens, zeros. Its tokenizer's end-of-text token begins each document.
https://github.com/karpathy/llm.c/blob/master/dev/data/data_common.py
"""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fp8stack.common.errors import UserError
from fp8stack.data import megatron
from fp8stack.data.corpus import Segment, Separator, map_tokens
from fp8stack.data.files import head_and_size
from fp8stack.data.nanogpt import characters_beside

UINT16_VALUES = 2**16
HEADER_BYTES = 1024
LLMC_QUESTIONS = 20240522  # HellaSwag and MMLU


# llm.c's formats by their magic number: the version, the type of the tokens, the token that begins
# each document, and the size of the vocabulary.
LLMC = {
    20240520: (1, "<u2", 50256, 50257),  # GPT-2's tokenizer
    20240801: (7, "<u4", 128000, 128256),  # Llama 3's
}


def is_bin(path: Path) -> bool:
    """Whether the path names a `.bin` file of tokens."""
    return path.suffix.lower() == ".bin"


def bin_segment(path: Path, vocabulary: int, end_of_text: int | None = None) -> Segment:
    """The tokens of a `.bin` file, memory-mapped: Megatron's if it has an `.idx`, llm.c's if it has
    the header, else nanoGPT's little-endian uint16, in which `end_of_text` ends documents. Raises a
    UserError if the file is of another format, damaged, or does not fit the vocabulary."""
    if megatron.index_of(path).exists():
        return megatron.segment(path)
    head, size = head_and_size(path)
    magic = _int32(head, 0)
    if magic in LLMC:
        return _llmc(path, head, size)
    if size % 2:
        raise UserError(
            f"{path} has {size} bytes, an odd number: it does not hold whole uint16 tokens. "
            "Write or copy it again."
        )
    if problem := _foreign_format(head):
        raise UserError(f"{path} {problem}.")
    if vocabulary > UINT16_VALUES:
        raise UserError(
            f"{path} holds uint16 tokens, and of a vocabulary of {vocabulary} those above 65535 "
            f"would have wrapped. Use a model with at most {UINT16_VALUES} tokens, or give text."
        )
    documents = None if end_of_text is None else Separator(token=end_of_text)
    return Segment(path=path, tokens=map_tokens(path, "<u2"), documents=documents)


def vocabulary_of(path: Path) -> int | None:
    """The vocabulary size that llm.c's header, or nanoGPT's `meta.pkl`, gives a `.bin` file; None
    if neither is there. Raises what `characters_beside` raises."""
    if (size := llmc_vocabulary_of(path)) is not None:
        return size
    characters = None if megatron.index_of(path).exists() else characters_beside(path)
    return None if characters is None else characters.vocabulary


def llmc_vocabulary_of(path: Path) -> int | None:
    """The vocabulary size that llm.c's header gives a `.bin` file; None if it has none."""
    magic = _int32(head_and_size(path)[0], 0)
    return LLMC[magic][3] if magic in LLMC else None


def _int32(head: bytes, index: int) -> int:
    return int.from_bytes(head[4 * index : 4 * index + 4], "little", signed=True)


def _llmc(path: Path, head: bytes, size: int) -> Segment:
    """The tokens after llm.c's header."""
    again = "Write or copy it again."
    if size < HEADER_BYTES:
        raise UserError(f"{path} ends within llm.c's header of {HEADER_BYTES} bytes. {again}")
    magic, version, count = (_int32(head, index) for index in range(3))
    known_version, dtype, first, _ = LLMC[magic]
    if version != known_version:
        raise UserError(
            f"{path} is of version {version} of llm.c's format, and only {known_version} is known "
            f"of the kind that begins with {magic}. {again}"
        )
    width = np.dtype(dtype).itemsize
    if count < 1 or size != HEADER_BYTES + count * width:
        raise UserError(
            f"{path} should hold {count} tokens by its header, {HEADER_BYTES + count * width} "
            f"bytes, and has {size} bytes. {again}"
        )
    start, documents = HEADER_BYTES // width, Separator(token=first, leads=True)
    tokens = map_tokens(path, dtype, start, count)
    return Segment(path=path, tokens=tokens, start=start, documents=documents)


def _foreign_format(head: bytes) -> str:
    """The reason that a `.bin` file is not headerless uint16; "" if it is."""
    if head.startswith(b"\x93NUMPY"):
        return "is a .npy file. Write its tokens with `array.astype('<u2').tofile(path)`"
    if _int32(head, 0) == LLMC_QUESTIONS:
        return "holds llm.c's multiple-choice questions and not a text. Give a file of tokens"
    tokens = np.frombuffer(head[: len(head) // 4 * 4], dtype="<u2")
    low, high = tokens[0::2], tokens[1::2]
    if not high.any() and len(np.unique(low)) > 16:
        return "holds wider tokens than uint16 (every other one is 0). Write it as '<u2'"
    return ""


def named_splits(files: Sequence[Path]) -> tuple[list[Path], list[Path]] | None:
    """llm.c's training and validation files among `files`; None unless they are named so.

    Its scripts write `fineweb_train_000001.bin` and `fineweb_val_000000.bin`, or
    `tiny_shakespeare_train.bin` and `tiny_shakespeare_val.bin`. Raises a UserError if such files
    are mixed with others.
    """
    by_name: dict[str, list[Path]] = {"train": [], "val": [], "": []}
    for path in files:
        match = re.search(r"_(train|val)(_\d+)?\.bin$", path.name.lower())
        by_name[match[1] if match else ""].append(path)
    train, val, unnamed = by_name.values()
    if not (train and val and _int32(head_and_size(train[0])[0], 0) in LLMC):
        return None
    if unnamed:
        raise UserError(
            f"{unnamed[0]} is beside files that are named as training and validation data "
            f"({train[0].name}, {val[0].name}) and is neither. Move it elsewhere."
        )
    return train, val
