"""Shuffles of any length as functions of a seed and a position, without state. No torch here.
They are computed by splitmix64's mixing function and a Feistel network, so they do not change with
numpy's generators."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

BLOCK = 4096  # rows of a mixture that hold every source in its exact share
ROUNDS = 8
_MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def mixed(words: Words) -> Words:
    """Mix the bits of each word, a permutation of all words: uint64, the same shape. The output
    function of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators,
    OOPSLA 2014; https://prng.di.unimi.it/splitmix64.c)."""
    words = words + np.uint64(GOLDEN)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def key(*numbers: int) -> int:
    """A 64-bit word that depends on `numbers` and their order."""
    word = np.zeros(1, dtype=np.uint64)
    for number in numbers:
        word = mixed(word ^ np.array([number & _MASK], dtype=np.uint64))
    return int(word[0])


def shuffled(places: Ints, length: int, word: int) -> Ints:
    """The values at `places` of `range(length)`, shuffled by the key `word`: int64 [n].

    A balanced Feistel network permutes the next power of four; results outside the range are
    permuted again until they are inside (cycle walking; Black, Rogaway: Ciphers with Arbitrary
    Finite Domains, 2002). That takes fewer than four rounds on average, and no memory.
    """
    assert length > 0
    if length == 1:
        return np.zeros_like(places)
    half = np.uint64(((length - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << int(half)) - 1)
    keys = mixed(np.arange(ROUNDS, dtype=np.uint64) ^ mixed(np.array([word], dtype=np.uint64)))
    values = places.astype(np.uint64)
    outside = np.ones(len(values), dtype=np.bool_)
    while outside.any():
        upper, lower = values[outside] >> half, values[outside] & mask
        for round_key in keys:
            upper, lower = lower, upper ^ (mixed(lower ^ round_key) & mask)
        values[outside] = (upper << half) | lower
        outside = values >= np.uint64(length)
    return values.astype(np.int64)


def shares(weights: tuple[float, ...], total: int) -> tuple[int, ...]:
    """`total` divided in proportion to `weights`; the largest remainders are rounded up."""
    most = max(weights)  # whose sum may be too large for a float
    relative = [weight / most for weight in weights]
    exact = [weight / sum(relative) * total for weight in relative]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda at: counts[at] - exact[at])
    for at in by_remainder[: total - sum(counts)]:
        counts[at] += 1
    return tuple(counts)


def sources_of(rows: Ints, counts: tuple[int, ...], seed: int) -> tuple[Ints, Ints]:
    """The source of each row of a run, and how many rows of that source precede it: int64 [n]. Rows
    below 0 precede the run's first. Of every `BLOCK` rows, each source has its `counts`, in an
    order that depends on `seed`."""
    if len(counts) == 1:
        return np.zeros_like(rows), rows
    blocks, places = np.divmod(rows, BLOCK)
    sources, numbers = np.empty_like(rows), np.empty_like(rows)
    for block in np.unique(blocks).tolist():
        in_block = blocks == block
        source, rank = _block(block, counts, seed)
        sources[in_block] = source[places[in_block]]
        numbers[in_block] = rank[places[in_block]]
    numbers += blocks * np.array(counts, dtype=np.int64)[sources]
    return sources, numbers


@lru_cache(maxsize=8)
def _block(block: int, counts: tuple[int, ...], seed: int) -> tuple[Ints, Ints]:
    """The source of each row of a block, and its number among that source's rows there."""
    drawn = mixed(np.arange(BLOCK, dtype=np.uint64) ^ np.uint64(key(seed, block)))
    unshuffled = np.repeat(np.arange(len(counts)), counts)
    source = np.empty(BLOCK, dtype=np.int64)
    source[np.argsort(drawn, kind="stable")] = unshuffled
    rank = np.empty(BLOCK, dtype=np.int64)
    for index, count in enumerate(counts):
        rank[source == index] = np.arange(count)
    return source, rank


def epoch_starts(numbers: Ints, length: int, context: int, seed: int, source: int) -> Ints:
    """The starts of these windows (numbered from 0) in a source of a mixture, if each window is
    read once per epoch: int64 [n].

    Windows of `context` tokens, and the label of the last, are adjacent. Each epoch has its own
    order and its own offset of the first window, so that the tokens left over at the end vary.
    Sources of equal length get different orders.
    """
    windows = windows_of_epoch(length, context)
    spare = (length - 1) % context
    epochs, places = np.divmod(numbers, windows)
    starts = np.empty_like(numbers)
    for epoch in np.unique(epochs).tolist():
        in_epoch = epochs == epoch
        word = key(seed, source, epoch)
        shift = key(word, ROUNDS) % (spare + 1)
        starts[in_epoch] = shift + context * shuffled(places[in_epoch], windows, word)
    return starts


def windows_of_epoch(length: int, context: int) -> int:
    """The number of adjacent windows of `context` tokens, each with a label after it."""
    return (length - 1) // context
