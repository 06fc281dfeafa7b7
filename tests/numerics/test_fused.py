"""Casts in one sweep: the same bits from threads at once and from forks."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8stack.analysis.conform.check_inputs import uneven
from fp8stack.numerics import Quantizer, RandomBits, fused
from fp8stack.numerics.rounding import Rounded, rounding
from fp8stack.numerics.scales import given_scale
from tests.support.casts import WAYS, cast_by
from tests.support.operators import Operators
from tests.support.quantizers import EVERY

DRAWN = RandomBits(1, 2, torch.tensor(2**33 + 3), 5)


def rounded(x: Tensor, name: str, dims: tuple[int, ...] = (1,), **options) -> list[Rounded]:
    quantizer = EVERY[name]
    return rounding(quantizer, dims).round(x, DRAWN if quantizer.stochastic else None, **options)


def assert_equal(results: list[Rounded], expected: list[Rounded]) -> None:
    """Equal bits, except for the sign of zero."""
    for result, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(result.values, reference.values, rtol=0, atol=0, equal_nan=True)
        assert (result.factor is None) == (reference.factor is None)
        if result.factor is not None:
            torch.testing.assert_close(
                result.factor, reference.factor, rtol=0, atol=0, equal_nan=True
            )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("before", "counts", "after"),
    [(0.0, None, 7.5), (9.0, None, 9.0), (float("nan"), None, 7.5), (2.0, False, 2.0)],
)
def test_delayed_scaling_records_the_amax_that_counts(before, counts, after, way):
    x = uneven(40, 300).clamp(-7, 7)
    x[3, 4], x[5, 6] = -7.5, float("nan")
    recorded = torch.tensor(before)
    flag = None if counts is None else torch.tensor(counts)
    quantizer = Quantizer(amax="delayed")
    with cast_by(way):
        (recorded_cast,) = rounding(quantizer, [1]).round(
            x, None, torch.tensor(3.0), recorded, flag
        )
    assert recorded.item() == after
    assert recorded_cast.factor == given_scale(torch.tensor(3.0)).factor


def test_threads_may_cast_at_once(monkeypatch):
    monkeypatch.setattr(fused, "_ALONE", 0)
    matrices = [uneven(100 + i, 200, seed=i) for i in range(16)]
    expected = [rounded(x, "mxfp8 e5m2 floor", (1, 0)) for x in matrices]
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda x: rounded(x, "mxfp8 e5m2 floor", (1, 0)), matrices)
        for result, reference in zip(results, expected, strict=True):
            assert_equal(result, reference)


FIRST_CASTS = """
import threading, time, torch
from fp8stack.numerics import Quantizer, fused, round_to

quantizers = [Quantizer(block=b, scale=s) for b in ((1, 32), (1, 128)) for s in ("e8m0", "float32")]
start, results = threading.Barrier(8), {}

def cast(number):
    start.wait()
    time.sleep(0.02 * number)  # while those before import
    x = torch.arange(256.0).view(2, 128) * 1.1
    results[number] = round_to(x, quantizers[number % 4], 1).values

threads = [threading.Thread(target=cast, args=(number,), daemon=True) for number in range(8)]
for thread in threads:
    thread.start()
until = time.monotonic() + 90
for thread in threads:
    thread.join(max(0.0, until - time.monotonic()))
assert len(results) == 8, "threads wait for each other"
assert fused.why_not() is None, fused.why_not()
x = torch.arange(256.0).view(2, 128) * 1.1
for number, values in results.items():
    assert torch.equal(values, round_to(x, quantizers[number % 4], 1).values), number
"""


@pytest.mark.full
def test_the_first_casts_of_a_process_may_be_those_of_many_threads():
    """They imported numba at once, and waited for each other for ever or went without it."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CASTS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def in_a_fork(x: Tensor, expected: list[Rounded]) -> None:
    torch.set_num_threads(1)  # as DataLoader's workers have
    assert_equal(rounded(x, "nvfp4"), expected)


def test_a_fork_may_cast_after_its_parent_has():
    x = uneven(200, 300)
    process = multiprocessing.get_context("fork").Process(
        target=in_a_fork, args=(x, rounded(x, "nvfp4"))
    )
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_what_looks_at_operators_sees_one_and_its_shapes():
    with FakeTensorMode():
        x = torch.empty(30, 50)
        (transformed,) = rounded(x, "hadamard nvfp4")
        assert transformed.values.shape == (30, 64)
        assert transformed.factor.shape == ()
        rowwise, columnwise = rounded(x, "row", (1, 0))
        assert (rowwise.factor.shape, columnwise.factor.shape) == ((30,), (50,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cast_to_bfloat16_copies_nothing_before_or_after_its_sweep(dtype):
    x = uneven(32, 64).to(dtype)
    with Operators() as operators:
        rounded(x, "mxfp8", (1, 0), bf16=True)
    assert operators.names == ["fp8stack.round.default"]


@pytest.mark.full
def test_where_numba_is_missing_or_fails_the_expressions_serve_and_it_is_said():
    code = (
        "import sys, torch\n"
        "sys.modules['numba'] = None\n"
        "from fp8stack.numerics import fused, round_to, Quantizer\n"
        "assert 'numba cannot be imported' in fused.why_not(), fused.why_not()\n"
        "print(round_to(torch.tensor([[1.05, 448.0]]), Quantizer(), 1).values.tolist())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[[1.0, 448.0]]\n"
    assert done.stderr.startswith("Casts are slower than they could be: numba cannot be imported (")


COMPILE = "from fp8stack.numerics import fused; assert fused.why_not() is None, fused.why_not()"


def messages_of_a_new_process(**environment):
    command, more = [sys.executable, "-c", COMPILE], os.environ | environment
    return subprocess.run(command, capture_output=True, text=True, check=True, env=more).stderr


@pytest.mark.slow
def test_that_numba_compiles_the_casts_is_said_once_on_a_machine(tmp_path):
    messages = [messages_of_a_new_process(NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(2)]
    assert messages == ["Compiling the casts for this CPU, once: about 10 s.\n", ""]
