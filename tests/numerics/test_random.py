"""Philox4x32-10 against Random123's known answers; `fp8stack conform` has whole matrices."""

from __future__ import annotations

import operator
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fp8stack.analysis.conform.oracles import philox
from fp8stack.numerics import RandomBits
from fp8stack.numerics.random import philox4x32
from tests.support.cases import case

WORD = 2**32 - 1
# Random123, tests/kat_vectors, philox4x32 with 10 rounds: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((WORD,) * 4, (WORD,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
COUNTER = 0x0370734413198A2E
# Counters and first rows whose words, products or sums lie at a limit of int32, uint32 or int64.
EDGES = (0, 1, 2**31 - 5, 2**31 + 5, 2**32 - 1, 2**32, 2**62, 2**63 - 1, -1, -(2**31), -(2**63))
PLACES = [(counter, 2**31 + 5) for counter in EDGES] + [(2**63 - 1, first) for first in EDGES]

# Prints the code that inductor generates for a GPU; nothing compiles it.
_CODE_FOR_A_GPU = """
from unittest.mock import patch

from bench.gpu_code.pretend import CUDA, pretend

pretend((9, 0))
import torch
from torch._inductor.graph import GraphLowering
from torch._subclasses import FakeTensorMode

from fp8stack.numerics import RandomBits

class Generated(Exception):
    pass

def print_code(graph):
    print(graph.codegen()[0].value)
    raise Generated

def draw(stream, counter):
    return RandomBits(7, stream, counter).bits(64, 256)

with patch.object(GraphLowering, "compile_to_module", print_code), FakeTensorMode():
    words = [torch.zeros((), dtype=torch.int64, device=CUDA) for _ in range(2)]
    try:
        torch.compile(draw, fullgraph=True)(*words)
    except Exception as error:
        assert "Generated" in repr(error) + repr(error.__cause__), error
"""


class ExactInt64(TorchDispatchMode):
    """Asserts that sums, differences and products of integers are what they are without a limit."""

    checked = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").partition(".")[0].rstrip("_")
        exactly = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}.get(name)
        if exactly is not None:
            a, b = (x.numpy().astype(object) if isinstance(x, Tensor) else x for x in args)
            exact = np.asarray(exactly(a, b))
        result = func(*args, **(kwargs or {}))
        if exactly is not None:
            assert (exact == result.numpy().astype(object)).all(), name
            self.checked += 1
        return result


def random_bits(
    counter: int = COUNTER,
    seed: int = 0xA4093822,
    stream: int | Tensor = 0x299F31D0,
    first_row: int | Tensor = 0,
) -> RandomBits:
    return RandomBits(seed, stream, torch.tensor(counter), first_row)


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_the_known_answers_of_random123(counter, key, result):
    words = philox4x32(*map(torch.tensor, counter), *key)
    assert tuple(map(int, words)) == result


def test_seed_and_stream_count_modulo_2_to_the_32():
    bits = random_bits(seed=5, stream=-1).bits(4, 9)
    assert torch.equal(bits, random_bits(seed=5 + 2**32, stream=2**32 - 1).bits(4, 9))
    assert not torch.equal(bits, random_bits(seed=6, stream=-1).bits(4, 9))
    assert not torch.equal(bits, random_bits(seed=5, stream=-2).bits(4, 9))


def test_rows_in_parts_equal_the_whole():
    all_rows = random_bits(first_row=11).bits(700, 401)  # more than one chunk
    for start in (0, 1, 326, 699):
        for first in (torch.tensor(11 + start), 11 + start):
            last_rows = random_bits(first_row=first).bits(700 - start, 401)
            assert torch.equal(last_rows, all_rows[start:])


@pytest.mark.parametrize(("counter", "first"), PLACES)
def test_bits_at_the_limits_of_integers_are_those_of_the_oracle(counter, first):
    """And no product or sum exceeds int64, as overflow has no defined result in compiled code."""
    expected = philox(WORD, WORD, counter, 9, 150, first)
    for first_row in (first, torch.tensor(first)):
        with ExactInt64() as mode:
            drawn = random_bits(counter, seed=WORD, stream=WORD, first_row=first_row).bits(9, 150)
        np.testing.assert_array_equal(drawn, expected)
    assert mode.checked >= 2 * 10 * 3  # of two products in each of ten rounds


@pytest.mark.parametrize("width", [case(n, quick=n is None) for n in (None, 0, 256, 512)])
@pytest.mark.full
def test_compiled_bits_are_those_of_the_oracle_in_every_vector_width(width):
    """Bits in a register: what the CPU has by default; 0 is scalar code."""
    from torch._inductor import config as inductor
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    if width and width not in {isa.bit_width() for isa in valid_vec_isa_list()}:
        pytest.skip(f"This CPU has no vectors of {width} bits")

    def draw(stream: Tensor, counter: Tensor, first_row: Tensor) -> Tensor:
        return RandomBits(WORD, stream, counter, first_row).bits(9, 150)

    torch.compiler.reset()
    with inductor.patch({"cpp.simdlen": width}):
        compiled = torch.compile(draw, fullgraph=True)
        for counter, first in PLACES:
            for stream in (0, 0x299F31D0, WORD):
                drawn = compiled(*map(torch.tensor, (stream, counter, first)))
                expected = philox(WORD, stream, counter, 9, 150, first)
                np.testing.assert_array_equal(drawn, expected)


@pytest.mark.slow
def test_a_gpus_code_multiplies_no_index_that_is_int32():
    """Triton 3.6 compiles no product of an index with a constant that int32 does not hold."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _CODE_FOR_A_GPU],
        cwd=Path(__file__).parents[2], capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.lstrip().startswith("#")]
    assert any("tl.full([1], 3528531795, tl.int64)" in line for line in lines)
    assert not [line for line in lines if re.search(r"\d{10}\*[xyr]\w*\d", line)]
