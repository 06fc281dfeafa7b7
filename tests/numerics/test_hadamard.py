"""The Hadamard transform against SciPy's matrix in float64, and NumPy's sums in float32."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard as sylvester

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
@pytest.mark.parametrize(
    ("shape", "dim"),
    [((33,), 0), ((40, 64), 1), ((40, 64), 0), ((64, 50), -1), ((50, 64), -2), ((1, 7), 1),
     ((2, 48, 5), 1), ((2, 3, 70), -1), ((0, 32), 1), ((32, 0), 0), ((600, 512), 1),
     ((600, 512), 0)],
)  # fmt: skip
def test_it_equals_the_sums_and_differences_of_numpy(shape, dim, dtype):
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
    x = uneven(64, size).bfloat16()
    matrix = np.diag(SIGNS[size]) @ sylvester(size) / math.sqrt(size)
    exact = to_numpy(x).astype(np.float64) @ matrix
    transformed = hadamard(x, size, 1).double().numpy()
    error = np.abs(transformed - exact)
    assert (
        error <= np.abs(exact) * 2**-8 + np.abs(to_numpy(x)).max(1, keepdims=True) * 2**-19
    ).all()


@pytest.mark.parametrize("size", SIZES)
def test_the_transforms_of_two_operands_cancel(size):
    x, w = torch.randn(24, 70), torch.randn(40, 70)
    product = hadamard(x, size, 1) @ hadamard(w, size, 1).T
    torch.testing.assert_close(product, x @ w.T, atol=0.1, rtol=0.02)
    across_rows = hadamard(x.T.contiguous(), size, 0).T @ hadamard(w.T.contiguous(), size, 0)
    torch.testing.assert_close(across_rows, product, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("size", SIZES)
def test_what_is_not_finite_stays_in_its_block(size):
    x = torch.ones(4, 3 * size)
    x[0, 3], x[1, 5], x[2, 0], x[2, 1] = math.nan, math.inf, math.inf, math.inf
    transformed = hadamard(x, size, 1)
    clean = hadamard(torch.ones(4, 3 * size), size, 1)
    assert not transformed[:3, :size].isfinite().any()
    assert torch.equal(transformed[:, size:], clean[:, size:])
    assert torch.equal(transformed[3], clean[3])


@pytest.mark.slow
def test_compiled_code_gives_the_same_bits():
    """Each size with each dimension and dtype; a cast of a Hadamard transform is compiled in
    test_quantized.py."""
    cases = list(itertools.product(SIZES, (0, 1), range(len(FLOAT_DTYPES))))
    torch.compiler.reset()

    def transform_all(xs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [hadamard(xs[place], size, dim) for size, dim, place in cases]

    x = uneven(48, 100)
    x[0, 0], x[1, 1], x[2], x[3, 5] = math.nan, math.inf, 0.0, -0.0
    xs = [x.to(dtype) for dtype in FLOAT_DTYPES]
    for fast, eager in zip(
        torch.compile(transform_all, fullgraph=True)(xs), transform_all(xs), strict=True
    ):
        np.testing.assert_array_equal(fast.numpy(), eager.numpy())


@pytest.mark.slow
def test_compiled_code_rounds_every_magnitude_to_bfloat16():
    torch.compiler.reset()
    compiled = torch.compile(hadamard, fullgraph=True)
    bits = np.random.default_rng(0).integers(0, 2**32, 2**18, dtype=np.uint32)
    x = torch.from_numpy(bits.view(np.float32)).view(-1, 64)
    x = torch.cat([x, every_value(torch.bfloat16).float().view(-1, 64)])
    np.testing.assert_array_equal(compiled(x, 16, 1).numpy(), hadamard(x, 16, 1).numpy())
