"""The Hadamard transform against SciPy's matrix in float64, and NumPy's sums in float32."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fp8stack.analysis.conform import oracles
from fp8stack.numerics.hadamard import hadamard
from tests.support.oracles import FLOAT_DTYPES, every_value, to_numpy

SIGNS = {16: [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], 32: [1] * 32}
SIZES = [16, 32]


def uneven(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator) * 2.0 ** torch.randint(
        -12, 12, shape, generator=generator
    )


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_it_equals_the_sums_and_differences_of_numpy(dtype):
    for shape, dim in (((33,), 0), ((50, 64), -2), ((2, 48, 5), 1), ((0, 32), 1), ((600, 512), 1)):
        x = uneven(*shape).to(dtype)
        before = x.clone()
        for size in SIZES:
            expected = oracles.hadamard(to_numpy(x), size, dim)
            for matrix in (x, x.mT.contiguous().mT if x.ndim > 1 else x):
                transformed = hadamard(matrix, size, dim)
                assert (transformed.dtype, transformed.is_contiguous()) == (torch.float32, True)
                np.testing.assert_array_equal(transformed.numpy(), expected)
        assert torch.equal(x, before)


@pytest.mark.parametrize("size", SIZES)
def test_it_is_the_matrix_with_signed_rows(size):
    from scipy.linalg import hadamard as sylvester

    x = uneven(64, size).bfloat16()
    matrix = np.diag(SIGNS[size]) @ sylvester(size) / math.sqrt(size)
    exact = to_numpy(x).astype(np.float64) @ matrix
    transformed = hadamard(x, size, 1).double().numpy()
    error = np.abs(transformed - exact)
    assert (
        error <= np.abs(exact) * 2**-8 + np.abs(to_numpy(x)).max(1, keepdims=True) * 2**-19
    ).all()


@pytest.mark.slow
def test_compiled_code_rounds_every_magnitude_to_bfloat16():
    torch.compiler.reset()
    compiled = torch.compile(hadamard, fullgraph=True)
    bits = np.random.default_rng(0).integers(0, 2**32, 2**18, dtype=np.uint32)
    x = torch.from_numpy(bits.view(np.float32)).view(-1, 64)
    x = torch.cat([x, every_value(torch.bfloat16).float().view(-1, 64)])
    np.testing.assert_array_equal(compiled(x, 16, 1).numpy(), hadamard(x, 16, 1).numpy())
