"""The loss of a quantized head in chunks: an oracle in float64, one GEMM over all rows, memory, and
compiled code."""

from __future__ import annotations

import dataclasses
import re
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import run_fw_bw_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8stack import numerics
from fp8stack.common.formats import Quantizer
from fp8stack.common.quantizer_table import Operand
from fp8stack.layers import build_backend, fp8_state
from fp8stack.layers.chunked_loss import Chunks, cross_entropy
from fp8stack.layers.compiler import compiled
from fp8stack.layers.linear import QuantizedLinear
from fp8stack.layers.observe import observing
from fp8stack.precision import load_recipe, resolve
from fp8stack.precision.recipe import ComputeDtype
from tests.support.backend_models import CPU, LOW, grad, same, saved_tensors

D, V, P = 64, 181, 256  # width, vocabulary, outputs of the head
ROWS, N = 128, 300  # two chunks and 44 rows
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
KINDS = [
    *((recipe, "emulate", "fp32") for recipe in LOW),
    *(("delayed", "emulate", "bf16"), ("mxfp8", "emulate", "bf16")),
    *(("delayed", "torch", "fp32"), ("current", "torch", "fp32"), ("delayed", "torch", "bf16")),
]
BY_NAME: dict[str, Any] = {"-".join(kind): kind for kind in KINDS}
# Scales that follow from several rows are those of a chunk.
OF_CHUNKS = (
    *("current", "rowwise", "rowwise_wgrad_hp", "nvfp4", "nvfp4_forward_high", "served:nvfp4"),
)
LIKE_ONE_GEMM = {name: kind for name, kind in BY_NAME.items() if kind[0] not in OF_CHUNKS}

pytestmark = pytest.mark.usefixtures("one_thread")


class Head(nn.Module):
    """A head and its loss; with `rows`, in chunks."""

    def __init__(
        self, recipe: str, backend: str, dtype: ComputeDtype, *, rows: int = ROWS, **options: Any
    ) -> None:
        super().__init__()
        overrides = {"head": True, **options}
        plan = resolve(load_recipe(recipe, overrides), CPU, backend)
        plan = dataclasses.replace(plan, compute_dtype=dtype).for_layers({"lm_head": (D, P)})
        self.built = build_backend(plan)
        torch.manual_seed(0)
        layer = self.built.linear("lm_head", D, P, False)
        assert isinstance(layer, QuantizedLinear)
        self.lm_head = layer
        self.built.attach(self)
        self.rows = rows
        self.loss: Any = self.run  # or compiled

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.loss(self.lm_head, x, targets)
        return loss

    def run(self, head: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
        if not self.rows:
            logits = head(x)[..., :V].float()
            return F.cross_entropy(logits.flatten(0, -2), targets.flatten())
        chunks = Chunks(V, self.rows, 64)
        loss: Tensor = head(x, partial(cross_entropy, targets=targets.flatten(), chunks=chunks))
        return loss


def inputs(seed: int = 0, rows: int = N) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, rows, D, generator=generator).requires_grad_()
    targets = torch.randint(V, (1, rows), generator=generator)
    targets[0, 120:140] = -100
    return x, targets


def error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest element."""
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max())


@dataclass(frozen=True)
class Oracle:
    """The two copies of an operand in float64, by `numerics.quantize`."""

    layer: QuantizedLinear
    scales: dict[tuple[Operand, bool], Tensor]

    def copy(self, name: Operand, x: Tensor, across: bool, first_row: int = 0) -> Tensor:
        x = x.detach()
        quantizers = self.layer.operands.quantizers
        quantizer: Any = quantizers.across(name) if across else quantizers.along(name)
        if quantizer is None:
            return x.double()
        assert isinstance(quantizer, Quantizer)
        bits = None
        if quantizer.stochastic:
            draws: Any = self.layer.operands.draws
            bits = dataclasses.replace(draws.bits(name, across, N), first_row=first_row)
        dim = 0 if across and not quantizer.per_tensor else 1
        scale = self.scales.get((name, across))
        return numerics.dequantize(numerics.quantize(x, quantizer, dim, bits, scale=scale)).double()


# The numbers


@pytest.mark.parametrize("kind", BY_NAME.values(), ids=BY_NAME)
def test_loss_and_gradients_equal_an_oracle_in_float64(kind):
    model, dtype = Head(*kind), DTYPES[kind[2]]
    model(*inputs(1)).backward()  # delayed scales become those of this pass
    model.zero_grad()
    weight = model.lm_head.weight.detach()
    x, targets = inputs()
    gradients_NP: list[Tensor] = []

    def see(path: str, layer: nn.Module, place: str, tensor: Tensor) -> None:
        if place == "grad_output":
            gradients_NP.append(tensor.clone())

    with observing(model, see):
        loss = model(x, targets)
        scales = {key: s.scale().clone() for key, s in model.lm_head.operands.slots.items()}
        counter: Any = getattr(model.lm_head.operands.draws, "counter", None)
        before = None if counter is None else counter.clone()
        (loss / 3).backward()
    if before is not None:
        assert counter.item() == before.item() + 1  # once per backward pass, not per chunk
        counter.copy_(before)
    copy = Oracle(model.lm_head, scales).copy
    rounded = x.detach()[0].to(dtype)
    starts = range(0, N, ROWS)
    logits = (
        torch.cat([copy("input", rounded[at : at + ROWS], False) for at in starts])
        @ copy("weight", weight, False).t()
    )
    logits = logits.to(dtype)[:, :V].double().requires_grad_()
    expected = F.cross_entropy(logits, targets[0])
    (expected / 3).backward()
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    assert loss.item() == pytest.approx(
        expected.item(), rel=1e-5 if dtype == torch.float32 else 1e-3
    )
    dy = torch.cat(gradients_NP)[:N]
    assert not dy[:, V:].any()
    assert not dy[targets[0] == -100].any()
    assert error(dy[:, :V], grad(logits)) < tolerance
    dx, dw = [], torch.zeros(P, D, dtype=torch.float64)
    for at in starts:
        dy_chunk = dy[at : at + ROWS]
        dx.append(copy("grad_output", dy_chunk, False, at) @ copy("weight", weight, True))
        x_chunk = rounded[at : at + ROWS]
        dw += copy("grad_output", dy_chunk, True, at).t() @ copy("input", x_chunk, True)
    assert error(grad(x)[0], torch.cat(dx)) < tolerance
    assert error(grad(model.lm_head.weight), dw) < 1e-5


@pytest.mark.parametrize("kind", LIKE_ONE_GEMM.values(), ids=LIKE_ONE_GEMM)
def test_chunks_equal_one_gemm_over_all_rows(kind):
    """To the bit, except sums over all rows: the loss and the gradient of the weight."""
    models = [Head(*kind, rows=rows) for rows in (0, ROWS)]
    for step in range(2):
        gradients = []
        for model in models:
            x, targets = inputs(step, 480)  # for other numbers of rows, GEMMs sum in other orders
            loss = model(x, targets)
            (loss / 3).backward()
            gradients.append((loss.detach(), grad(x), grad(model.lm_head.weight)))
        (loss_of_all, dx_of_all, dw_of_all), (loss, dx, dw) = gradients
        assert loss.item() == pytest.approx(loss_of_all.item(), rel=1e-6)
        assert torch.equal(dx, dx_of_all)
        assert error(dw, dw_of_all) < 2e-6
    assert same(fp8_state(models[0]), fp8_state(models[1]))


def test_stochastic_rounding_draws_the_bits_of_one_gemm():
    table: Any = {"quantizer": {"rounding": "stochastic"}}
    models = [Head("mxfp8", "emulate", "fp32", rows=rows, **table) for rows in (0, ROWS)]
    results = []
    for model in models:
        for step in range(2):
            x, targets = inputs(step, 480)
            model(x, targets).backward()
        results.append((fp8_state(model), grad(x), grad(model.lm_head.weight)))
    assert same(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert error(results[1][2], results[0][2]) < 2e-6


@pytest.mark.parametrize("backend", ["emulate", "torch"])
def test_another_forward_pass_may_precede_the_backward_pass(backend):
    """Operands that were cast in a forward pass serve its backward pass, whatever the scales are by
    then."""
    gradients = []
    for between in (False, True):
        model = Head("delayed", backend, "fp32")
        model(*inputs(1)).backward()
        x, targets = inputs(2)
        loss = model(x, targets)
        if between:
            model(4 * inputs(3)[0], targets)
        loss.backward()
        gradients.append((grad(x), grad(model.lm_head.weight)))
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("kind", [KINDS[0], ("delayed", "torch", "fp32")], ids=str)
def test_frozen_parts_get_no_gradient(kind):
    for frozen in ("head", "body"):
        model = Head(*kind)
        model.lm_head.weight.requires_grad_(frozen == "body")
        x, targets = inputs()
        x.requires_grad_(frozen == "head")
        model(x, targets).backward()
        assert (x.grad is not None) == (frozen == "head")
        assert (model.lm_head.weight.grad is not None) == (frozen == "body")


def test_gradients_of_micro_batches_are_added():
    model, total = Head("mxfp8", "emulate", "fp32"), torch.zeros(P, D)
    for seed in range(2):
        (model(*inputs(seed)) / 2).backward()
        alone = Head("mxfp8", "emulate", "fp32")
        (alone(*inputs(seed)) / 2).backward()
        total += grad(alone.lm_head.weight)
    assert torch.equal(grad(model.lm_head.weight), total)


def test_a_graph_that_is_kept_gives_the_gradient_again():
    model, (x, targets) = Head("mxfp8", "emulate", "fp32"), inputs()
    loss = model(x, targets)
    loss.backward(retain_graph=True)
    once = grad(x).clone()
    loss.backward()
    assert torch.equal(grad(x), 2 * once)


def test_an_observer_sees_the_chunks_and_changes_no_bit():
    results, places = [], list[tuple[str, int]]()

    def see(path: str, layer: nn.Module, place: str, tensor: Tensor) -> None:
        places.append((place, len(tensor)))

    for observes in (False, True):
        model, (x, targets) = Head("delayed", "emulate", "fp32"), inputs()
        with observing(model, see, outputs=True) if observes else nullcontext():
            model(x, targets).backward()
        results.append((grad(x), grad(model.lm_head.weight)))
    assert all(map(torch.equal, *results))
    chunks = [128, 128, 44]
    assert places == [
        ("input", N),
        ("weight", P),
        *(("output", rows) for rows in chunks),
        *(("grad_output", rows) for rows in chunks),
        ("grad_input", N),
    ]


# Memory


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operation gave."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.numel = max(self.numel, *sizes, 0)
        return out


@pytest.mark.parametrize("trains", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("kind", BY_NAME.values(), ids=BY_NAME)
def test_no_tensor_has_the_size_of_all_logits(kind, trains):
    rows = 8 * ROWS
    model, (x, targets) = Head(*kind), inputs(rows=rows)
    with Largest() as largest, torch.set_grad_enabled(trains):
        loss = model(x, targets)
        if trains:
            loss.backward()
    assert ROWS * P <= largest.numel < rows * V


# Compiled code


@pytest.mark.parametrize(
    "kind",
    [("delayed", "torch", "bf16"), ("current", "torch", "fp32"), ("mxfp8", "emulate", "fp32")],
    ids="-".join,
)
def test_compiled_code_equals_eager_code_and_saves_no_logits(kind):
    """`aot_eager_decomp_partition` has inductor's graphs and eager kernels."""
    models = [Head(*kind), Head(*kind)]
    models[1].loss = compiled(models[1].run, "aot_eager_decomp_partition")
    for step in range(2):
        x, targets = inputs(step)
        y, _ = inputs(step)
        loss = models[0](x, targets)
        loss.backward()
        with saved_tensors() as of_forward:
            compiled_loss = models[1](y, targets)
        compiled_loss.backward()
        assert compiled_loss.item() == pytest.approx(loss.item(), rel=1e-6)
        if kind[2] == "fp32":
            assert error(grad(y), grad(x)) < 1e-6
        assert of_forward
        assert max(tensor.numel() for tensor in of_forward) < ROWS * V


def most_alive(code: str) -> int:
    """The most buffers of the size of a chunk's logits that exist at the same time."""
    alive, most = set[str](), 0
    for line in code.splitlines():
        if allocated := re.match(r" +(buf\d+) = empty_strided_cpu\(\((\d+), (\d+)\)", line):
            if int(allocated[2]) * int(allocated[3]) == ROWS * P:
                alive.add(allocated[1])
        elif reused := re.match(r" +(buf\d+) = .*; del (buf\d+)  # reuse", line):
            if reused[2] in alive:
                alive ^= {reused[1], reused[2]}
        elif deleted := re.match(r" +del (buf\d+)", line):
            alive.discard(deleted[1])
        most = max(most, len(alive))
    return most


@pytest.mark.slow
def test_inductors_code_has_the_logits_of_one_chunk_alone():
    model, (x, targets) = Head("delayed", "torch", "bf16"), inputs(rows=5 * ROWS)
    model.loss = compiled(model.run, "inductor")
    loss, codes = run_fw_bw_and_get_code(lambda: model(x, targets))
    shapes = re.findall(
        r"= empty_strided_cpu\(\((\d+), (\d+)\), .*?, torch\.(\w+)\)", "".join(codes)
    )
    of_logits = [
        (int(rows) * int(columns), dtype)
        for rows, columns, dtype in shapes
        if {int(rows), int(columns)} & {V, P} and D not in (int(rows), int(columns))
    ]
    assert {numel for numel, _ in of_logits} == {ROWS * P}
    assert "float32" not in {dtype for _, dtype in of_logits}
    # The logits of a chunk and both FP8 copies of their gradient, never those of two chunks.
    assert 1 <= max(map(most_alive, codes)) <= 3
    eager = Head("delayed", "torch", "bf16")
    assert loss.item() == pytest.approx(eager(x, targets).item(), rel=1e-3)
