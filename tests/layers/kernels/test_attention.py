"""Attention within documents: logits, gradients, and the kernels that it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention

from fp8stack.layers.kernels import attention
from fp8stack.model.config import GPTConfig
from fp8stack.model.gpt import GPT
from tests.model.test_gpt import MODERN, TINY, assert_close, backend_for, build, tokens
from tests.support.backend_models import grad

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = ((5, 8, 3), (1, 14, 1), (16,))  # of the documents in each of three rows
SHAPES = {"gpt2": {}, "llama": MODERN | {"kv_heads": 2}, "qwen3": MODERN | {"qk_norm": True}}


def documents() -> Tensor:
    return torch.tensor([[i for i, n in enumerate(row) for _ in range(n)] for row in LENGTHS])


def alone(model: GPT, row: Tensor, start: int, length: int) -> Tensor:
    """The logits of a document by itself, at the places that it has in its row."""
    window = row[None, start : start + length]
    if model.config.positions == "rope":  # which knows distances alone
        return model(window)[0]
    weight = model.position_embedding.weight
    saved = weight.data.clone()
    with torch.no_grad():
        weight.copy_(saved.roll(-start, 0))
        logits = model(window)[0]
        weight.copy_(saved)
    return logits


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_document_gives_the_same_logits_in_a_window_as_by_itself(shape):
    model, rows = build(init_std=0.2, **shape).eval(), tokens()
    with torch.no_grad():
        together = model(rows, None, documents())
        for row, lengths, logits in zip(rows, LENGTHS, together, strict=True):
            start = 0
            for length in lengths:
                expected = alone(model, row, start, length)
                assert_close(logits[start : start + length], expected, 1e-5)
                start += length
        assert (together[0] - model(rows)[0]).abs().max() > 0.1  # else nothing was masked


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "float32 attention", "delayed", "mxfp8"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_document_does_not_move_the_logits_of_another_by_a_bit(shape, recipe):
    if recipe == "float32 attention":
        config = GPTConfig(**TINY | shape)
        model = GPT(config, backend_for(config, "bf16", attention="fp32")).eval()
        assert model.backend.attention_dtype == torch.float32
    else:
        model = build(recipe, **shape).eval()
    rows, changed_rows = tokens(), tokens()
    changed_rows[0, :5] = (changed_rows[0, :5] + 7) % 61
    with torch.no_grad():
        before, after = model(rows, None, documents()), model(changed_rows, None, documents())
        assert torch.equal(before[0, 5:], after[0, 5:])
        assert not torch.equal(before[0, :5], after[0, :5])
        # without documents, else nothing was hidden
        assert not torch.equal(model(rows)[0, 5:], model(changed_rows)[0, 5:])


def test_without_documents_or_with_a_single_one_attention_is_plain_and_causal(monkeypatch):
    model = build(init_std=0.2).eval()
    single_document = torch.zeros(3, 16, dtype=torch.int64)
    with torch.no_grad():
        assert_close(model(tokens(), None, single_document), model(tokens()), 1e-6)
    mask_arguments = []
    real = F.scaled_dot_product_attention

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        mask_arguments.append((kwargs["attn_mask"], kwargs["is_causal"]))
        return real(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    build()(tokens(), tokens(seed=2))
    assert mask_arguments == [(None, True)] * 2


def trained(model: GPT) -> list[Tensor]:
    torch.manual_seed(1)
    loss = model(tokens(), tokens(seed=2), documents())
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("recipe", ["fp32", "delayed"])
def test_blocks_that_run_again_give_the_same_to_the_bit(recipe, dropout):
    results = []
    for mode in ("none", "selective", "block"):
        model = build(recipe, dropout=dropout)
        model.recompute = mode
        results.append(trained(model))
    for recomputed in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], recomputed, strict=True))


def test_all_blocks_share_one_mask():
    saved = set()

    def pack(tensor: Tensor) -> Tensor:
        if tensor.shape == (3, 1, 16, 16):
            saved.add((tensor.data_ptr(), tensor.dtype))
        return tensor

    model = build(layers=3)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved_tensor: saved_tensor):
        model(tokens(), tokens(seed=2), documents())
    assert {dtype for _, dtype in saved} == {torch.float32}
    assert len(saved) == 1


# On a GPU


@pytest.fixture
def as_on_a_gpu(monkeypatch) -> None:
    """Attention takes the code paths of a GPU. Flex attention has no kernel for CPUs: torch
    composes it of other operators, gradients included."""
    real = attention.kernels_for_masks
    monkeypatch.setattr(attention, "kernels_for_masks", lambda device: real(torch.device("cuda")))
    monkeypatch.setattr(attention, "skips_blocks", lambda device: True)
    monkeypatch.setattr(attention, "_compiled_flex", lambda: flex_attention.flex_attention)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)


WIDE = {"width": 64, "heads": 4}  # heads of 16, the narrowest that flex attention takes


class Graphs(list):
    """The graphs that a model's blocks are compiled to, and run by aot_eager."""

    def compile(self, model: GPT) -> None:
        torch._dynamo.reset()
        model.compile_blocks(self._add)

    def _add(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        from torch._dynamo.backends.debugging import aot_eager

        self.append(graph)
        return aot_eager(graph, inputs)


@pytest.mark.parametrize(
    ("shape", "gpu", "compiled"),
    [*((shape, True, False) for shape in SHAPES.values()), (SHAPES["qwen3"], True, True),
     ({}, False, True)],
    ids=[*SHAPES, "qwen3 compiled", "gpt2 compiled by a dense mask"],
)  # fmt: skip
@pytest.mark.full
def test_blocks_of_scores_and_compiled_code_give_the_dense_masks_losses_and_gradients(
    shape, gpu, compiled, monkeypatch, request
):
    if gpu:
        request.getfixturevalue("as_on_a_gpu")
    shape = shape | WIDE | {"init_std": 0.2}
    dense, sparse, graphs = build(**shape), build(**shape), Graphs()
    if compiled:
        graphs.compile(sparse)
    for step in range(2):
        batch = tokens(seed=step), tokens(seed=step + 1), documents().roll(step, 0)
        with monkeypatch.context() as patch:
            patch.setattr(attention, "skips_blocks", lambda device: False)
            expected = dense(*batch)
        loss = sparse(*batch)
        assert_close(loss, expected, 1e-5)
        expected.backward()
        loss.backward()
        for parameter, dense_parameter in zip(sparse.parameters(), dense.parameters(), strict=True):
            assert_close(grad(parameter), grad(dense_parameter), 1e-4)
    # One graph for all blocks and one for the loss: other documents compile no more.
    assert len(graphs) == (2 if compiled else 0)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("change", "blocks"),
    [({}, True), ({"dropout": 0.1}, False), ({"heads": 8}, False), ("selective", False)],
    ids=str,
)
def test_scores_are_skipped_where_flex_attention_serves(change, blocks):
    selective = change == "selective"
    model = build(**WIDE | ({} if selective else change))
    model.recompute = "selective" if selective else "none"
    mask = model._mask(16, documents(), None, torch.device("cpu"))
    assert isinstance(mask, flex_attention.BlockMask) == blocks
    model(tokens(), tokens(seed=2), documents()).backward()


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.full
def test_cudnn_gets_no_mask(compiled, monkeypatch):
    monkeypatch.setattr(attention, "skips_blocks", lambda device: False)
    cudnn_enabled, real = [], F.scaled_dot_product_attention

    def listen(*args: Any, **kwargs: Any) -> Tensor:
        cudnn_enabled.append(torch.backends.cuda.cudnn_sdp_enabled())
        return real(*args, **kwargs)

    class Run(torch.fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            return super().call_function(listen if target is real else target, args, kwargs)

    model = build()
    if compiled:
        torch._dynamo.reset()
        model.compile_blocks(lambda graph, inputs: Run(graph).run)
    else:
        monkeypatch.setattr(F, "scaled_dot_product_attention", listen)
    for batch in ((tokens(), tokens(), documents()), (tokens(), tokens())):
        with torch.no_grad():
            model(*batch)
    assert cudnn_enabled == [False, False, True, True]
    assert torch.backends.cuda.cudnn_sdp_enabled()
