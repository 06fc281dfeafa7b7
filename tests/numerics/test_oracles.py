"""Quantizers against other people's: ml_dtypes, gfloat, torchao, Transformer Engine, microxcaling.

The quick form compares 100 thousand values of each, the slow one 10 million, and writes its counts
to bench/results/cpu/oracles.md where FP8STACK_WRITE_RESULTS is 1. microxcaling is no package on
PyPI: put a clone of it (github.com/microsoft/microxcaling) on PYTHONPATH.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.gpu.references import installed
from fp8stack.analysis.conform.check_inputs import NVFP4
from fp8stack.common.formats import FormatName, Quantizer
from fp8stack.numerics import dequantize, quantize
from tests.support.oracles import codes
from tests.support.peers import PEERS, Compared

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/golden/oracles.npz"
CASES = [(peer, name) for peer, (_, quantizers) in PEERS.items() for name in quantizers]

pytestmark = pytest.mark.usefixtures("one_thread")


def skip_without(peer: str) -> None:
    if peer == "Transformer Engine" and installed() is None:
        pytest.skip("transformer_engine is not installed")
    if peer == "microxcaling" and importlib.util.find_spec("mx") is None:
        pytest.skip("microxcaling (a folder mx) is not on the path")


def values(dtype: torch.dtype, seed: int, rows: int = 256, columns: int = 512) -> Tensor:
    """Normal values, a row's magnitudes up to 2^16 apart; every fourth row on a grid of ties."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x = x * 2.0 ** torch.randint(-8, 8, (rows, 1), generator=generator)
    x = x * 2.0 ** torch.randint(-4, 5, (rows, columns), generator=generator)
    x[::4] = torch.randint(-96, 97, (len(x[::4]), columns), generator=generator) / 16
    return x.to(dtype)


def compared(peer: str, name: str, matrices: Iterator[Tensor]) -> Compared:
    function, quantizers = PEERS[peer]
    counts = [function(x, quantizers[name]) for x in matrices]
    return Compared(*map(sum, zip(*counts, strict=True)))


@pytest.mark.parametrize(("peer", "name"), CASES)
def test_a_hundred_thousand_values_are_those_of_the_peer(peer, name):
    skip_without(peer)
    blocks_alone = PEERS[peer][1][name].scale == "e8m0"
    for dtype in (torch.float32, torch.bfloat16):
        x = values(dtype, 0)
        matrices = [x, x[:32] * 2.0**-80, x[:32] * 2.0**90] if blocks_alone else [x]
        counts = compared(peer, name, iter(matrices))
        assert counts.differing == 0
        assert counts.excluded < 0.1 * counts.compared


@pytest.mark.slow
def test_ten_million_values_are_those_of_every_peer():
    rows, wrong = [], []
    for peer, name in CASES:
        try:
            skip_without(peer)
        except pytest.skip.Exception as missing:
            rows.append(f"| {peer} | {name} | | | not compared: {missing} |")
            continue
        matrices = (
            values([torch.float32, torch.bfloat16][seed % 2], seed, 1024, 1024)
            for seed in range(1, 11)
        )
        counts = compared(peer, name, matrices)
        rows.append(
            f"| {peer} | {name} | {counts.compared:,} | {counts.differing} | {counts.excluded:,} |"
        )
        if counts.differing:
            wrong.append((peer, name, counts))
    if os.environ.get("FP8STACK_WRITE_RESULTS") == "1":
        (ROOT / "bench/results/cpu/oracles.md").write_text(table(rows))
    assert not wrong


def table(rows: list[str]) -> str:
    heading = (
        "# Quantizers against their peers\n\n"
        "Codes and scales, or values, of about ten million elements each, half float32, half\n"
        "bfloat16, with many ties; every one compared for equality. FP4 of Transformer Engine and\n"
        "torchao is counted in bytes, two codes each. What is left out, and why, is in\n"
        "`tests/support/peers.py`.\n"
        "Written by `FP8STACK_WRITE_RESULTS=1 python -m pytest -m slow "
        "tests/numerics/test_oracles.py`.\n\n"
        "| peer | quantizer | compared | differing | left out |\n|---|---|---|---|---|\n"
    )
    return heading + "\n".join(rows) + "\n"


# Saved results of the peers, for machines without them


def golden_cases() -> dict[str, Quantizer]:
    return {
        "te 1x16": NVFP4,
        "te 16x16": Quantizer(format="e2m1", block=(16, 16), scale="e4m3"),
        **{
            f"microxcaling {name}": Quantizer(
                format=name, block=(1, 32), scale="e8m0", scale_rounding="floor"
            )
            for name in get_args(FormatName)
        },
    }


@pytest.mark.parametrize("name", golden_cases())
def test_the_golden_vectors_of_peers_are_met(name):
    with np.load(GOLDEN) as golden:
        x = torch.from_numpy(golden["x"])
        quantized = quantize(x, golden_cases()[name], 1)
        if name.startswith("te"):
            np.testing.assert_array_equal(quantized.data.numpy(), golden[f"{name} data"])
            blocks = golden_cases()[name].blocks
            assert blocks is not None
            scales = codes(quantized.scales).repeat(blocks[0], 0)
            np.testing.assert_array_equal(scales, golden[f"{name} scales"])
        else:
            np.testing.assert_array_equal(dequantize(quantized).numpy(), golden[name])
