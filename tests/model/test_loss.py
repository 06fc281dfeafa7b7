"""The head's loss in chunks of rows: what it equals, what it leaves alone, what it never holds."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8stack.layers import Backend, build_backend, fp8_state
from fp8stack.model import loss as head_module
from fp8stack.model.config import GPTConfig, padded_vocabulary
from fp8stack.model.gpt import GPT
from fp8stack.model.loss import chunk_rows, head_loss
from fp8stack.precision import load_recipe, resolve
from fp8stack.precision.recipe import ComputeDtype
from tests.support.backend_models import CPU, grad, gradients, same

TINY = {"vocabulary": 61, "context": 60, "layers": 1, "width": 32, "heads": 2}
ROWS = 8 * 60  # three chunks of 128 and one of 96
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PLAIN = [(dtype, "reference", dtype) for dtype in DTYPES]
FP8 = [("current", "emulate", "fp32"), ("delayed", "torch", "bf16")]
BY_NAME = {"-".join(kind): kind for kind in [*PLAIN, *FP8]}


@pytest.fixture
def chunked(monkeypatch) -> None:
    """Chunks are as small as they get: 128 rows."""
    set_chunks(monkeypatch, 1)


def set_chunks(monkeypatch, size: int) -> None:
    """Set the bytes of a chunk's logits."""
    monkeypatch.setattr(head_module, "CHUNK_BYTES", size)


def backend_for(recipe: str, backend: str, dtype: ComputeDtype, shapes: Any) -> Backend:
    loaded = load_recipe(recipe)
    if loaded.is_fp8:
        loaded = loaded.model_copy(update={"head": True})
    plan = dataclasses.replace(resolve(loaded, CPU, backend), compute_dtype=dtype)
    if isinstance(shapes, GPTConfig):
        shapes = shapes.linear_shapes(padded_vocabulary(shapes, plan.vocabulary_multiple))
    return build_backend(plan.for_layers(shapes))


def gpt(
    recipe: str = "fp32", backend: str = "auto", dtype: ComputeDtype = "fp32", **shape: object
) -> GPT:
    config = GPTConfig.model_validate(TINY | shape)
    return GPT(config, backend_for(recipe, backend, dtype, config))


def batch(seed: int = 1, ignored: int = 70) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(61, (2, 8, 60), generator=generator)
    targets.view(-1)[5 : 5 + ignored] = -100
    return tokens, targets


def head_of(recipe: str, backend: str, dtype: ComputeDtype, *, outputs: int = 64) -> nn.Linear:
    built = backend_for(recipe, backend, dtype, {"lm_head": (32, outputs)})
    torch.manual_seed(0)
    layer = built.linear("lm_head", 32, outputs, False)
    built.attach(layer)
    assert isinstance(layer, nn.Linear)
    return layer


def head_inputs(rows: int = ROWS, vocabulary: int = 61) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1, rows, 32, generator=generator).requires_grad_()
    targets = torch.randint(vocabulary, (1, rows), generator=generator)
    targets[0, 200:240] = -100
    return x, targets


def error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest element."""
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max())


# The numbers


@pytest.mark.parametrize(
    ("factor", "tied"), [(1.0, False), (1.0, True), (1 / 3, False)], ids=["one", "tied", "third"]
)
@pytest.mark.parametrize("kind", BY_NAME.values(), ids=BY_NAME)
def test_chunks_change_no_gradient_and_no_fp8_state(monkeypatch, kind, factor, tied):
    """All rows at once are torch's own cross-entropy. Only sums over rows change: the gradient of
    the head's weight, by its rounding. Where gradients are found before what scales the loss is
    known, that rounds them once more."""
    if kind[0] == "fp16":  # most gradients are below its smallest normal number
        factor *= 1024
    models, losses = [], []
    for size in (2**40, 1):
        set_chunks(monkeypatch, size)
        models.append(gpt(*kind, tied=tied))
        for step in range(2):
            loss = models[-1](*batch(step))
            (loss * factor).backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    model = models[1].eval()
    expected = model(*batch()).item()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert model(*batch()).item() == expected
    unchunked, chunked = models
    assert same(fp8_state(unchunked), fp8_state(chunked))
    once_more = factor < 1 and kind[0] in ("fp32", "bf16")
    for name, gradient in gradients(unchunked).items():
        actual = grad(chunked.get_parameter(name))
        if once_more or name in ("lm_head.weight", "embedding.weight"):
            rounding = {"fp32": 2e-6}.get(kind[2], 2**-6)
            assert error(actual, gradient) < rounding, name
        else:
            assert torch.equal(actual, gradient), name


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("kind", [PLAIN[0], PLAIN[1], FP8[0]], ids=["fp32", "bf16", "fp8"])
def test_a_batch_without_targets_has_the_loss_and_gradients_of_torch(kind):
    head = head_of(*kind)
    head.eval()
    x, targets = head_inputs()
    nothing = torch.full_like(targets, -100)
    loss = head_loss(head, x, nothing, 61)
    loss.backward()
    assert math.isnan(loss.item())
    logits = torch.randn(3, 61, requires_grad=True)
    F.cross_entropy(logits, nothing[0, :3]).backward()
    assert not logits.grad.any()  # so torch has it
    assert not x.grad.any()


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("kind", PLAIN, ids=DTYPES)
def test_a_target_in_the_padding_is_refused_and_a_graph_that_is_kept_gives_the_gradient_again(kind):
    head, (x, targets) = head_of(*kind), head_inputs()
    loss = head_loss(head, x, targets, 61)
    loss.backward(retain_graph=True)
    once = grad(x).clone(), grad(head.weight).clone()
    loss.backward()
    assert torch.equal(grad(x), 2 * once[0])
    assert torch.equal(grad(head.weight), 2 * once[1])
    targets[0, 300] = 61
    with pytest.raises(IndexError, match="out of bounds"):  # as torch refuses it
        head_loss(head, x, targets, 61)


# Hooks, checkpointing, autocast


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("kind", [PLAIN[1], FP8[0]], ids=["bf16", "fp8"])
def test_frozen_parts_get_no_gradient(kind):
    x, targets = head_inputs()
    for frozen in ("head", "body", "both"):
        head = head_of(*kind)
        head.eval()
        head.weight.requires_grad_(frozen == "body")
        x = x.detach().requires_grad_(frozen == "head")
        loss = head_loss(head, x, targets, 61)
        assert loss.requires_grad == (frozen != "both")
        if loss.requires_grad:
            loss.backward()
        assert (x.grad is not None) == (frozen == "head")
        assert (head.weight.grad is not None) == (frozen == "body")


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("kind", [PLAIN[0], FP8[0]], ids=["fp32", "fp8"])
def test_hooks_run(kind):
    """A hook of the head sees all rows, or those of each chunk; a hook of a parameter its full
    gradient, once."""
    model, rows, weight_gradients = gpt(*kind, tied=False), list[int](), list[Tensor]()
    model.lm_head.register_forward_hook(lambda *args: rows.append(args[1][0][..., 0].numel()))
    weight = model.get_parameter("lm_head.weight")
    weight.register_hook(weight_gradients.append)
    model(*batch()).backward()
    assert rows == ([128, 128, 128, 96] if kind[0] == "fp32" else [ROWS])
    assert len(weight_gradients) == 1
    assert torch.equal(weight_gradients[0], grad(weight))


@pytest.mark.usefixtures("chunked")
def test_a_plain_head_keeps_its_precision_under_autocast():
    """fp16 gradients must wait for the loss scale there too."""
    head, input_gradients = head_of("fp32", "reference", "fp32"), []
    for dtype in (torch.float32, torch.float16):
        x, targets = head_inputs()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = head_loss(head, x, targets, 61)
        (1024 * loss).backward()
        input_gradients.append(grad(x))
    assert error(input_gradients[1], input_gradients[0]) < 2**-9


# Tensors that are not allocated


class Largest(TorchDispatchMode):
    """The largest float32 tensor that an operation gave."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.dtype == torch.float32:
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize("trains", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("kind", PLAIN[:2], ids=["fp32", "bf16"])
def test_no_float32_tensor_has_the_size_of_all_logits(monkeypatch, kind, trains):
    set_chunks(monkeypatch, 4 * 2**20)
    head = head_of(*kind, outputs=4096).eval()
    x, targets = head_inputs(2048, vocabulary=4090)
    with Largest() as largest, torch.set_grad_enabled(trains):
        loss = head_loss(head, x, targets, 4090)
        if trains:
            loss.backward()
    assert chunk_rows(4090) == 256
    assert 256 * 4090 <= largest.numel <= 256 * 4096


def test_a_chunk_is_a_multiple_of_128_rows():
    for vocabulary in (1, 61, 256, 50_257, 128_256, 2**31):
        rows, bytes_ = chunk_rows(vocabulary), vocabulary * 4
        assert rows % 128 == 0
        assert rows == 128 or rows * bytes_ <= 128 * 2**20 < (rows + 128) * bytes_
