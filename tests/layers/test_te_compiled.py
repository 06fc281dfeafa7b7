"""The te backend in compiled code: Transformer Engine's modules run as they do eagerly, and what is
between them is compiled. Their stand-in is closed to torch.compile as they are; no GPU is used."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8stack.layers import fp8_state
from tests.support import backend_models
from tests.support.backend_models import machine, train
from tests.support.cases import case
from tests.support.small_loop import changed
from tests.support.te.te_stand_in import StandIn

pytestmark = pytest.mark.usefixtures("one_thread")

LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rope", "bias": False}
GPT2 = {"norm": "layernorm", "activation": "gelu", "positions": "learned", "bias": True}
LONG = {"width": 64, "heads": 2, "context": 128}  # as attention in FP8 takes it
MIXTURE = {"experts": {"count": 4, "per_token": 2, "width": 32}}


class Graphs:
    """A backend of torch.compile that runs the graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.operators: list[set[str]] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        calls = (node for node in graph.graph.nodes if node.op.startswith("call"))
        self.operators.append({getattr(n.target, "__name__", str(n.target)) for n in calls})
        return graph.forward

    @property
    def all(self) -> set[str]:
        """The names of all operators in the graphs."""
        return set().union(*self.operators)


def trained(
    te: StandIn, graphs: Graphs | None, recipe: str, model: dict[str, Any], **options: Any
) -> tuple[list[float], dict[str, Tensor], list[Any]]:
    """Losses, weights and FP8 state, and TE's calls of two steps of two micro-batches."""
    torch._dynamo.reset()
    torch.manual_seed(0)  # of the stand-in's stochastic rounding
    hardware = options.pop("hardware", machine(recipe))
    gpt = backend_models.gpt(recipe, "te", model, hardware=hardware, **options)
    assert gpt.backend.plan.backend == "te"
    if graphs is not None:
        gpt.compile_blocks(graphs)
    te.calls.clear()
    te.casts.clear()
    losses = train(gpt, range(3), accumulate=2)
    state = dict(gpt.state_dict()) | fp8_state(gpt)
    calls = [(type(call.module).__name__, *call[1:]) for call in te.calls]
    return losses, state, [*calls, *(operand for _, operand in te.casts)]


def require_equal_runs(te: StandIn, *arguments: Any, **options: Any) -> Graphs:
    graphs = Graphs()
    losses, state, calls = trained(te, graphs, *arguments, **options)
    eager_losses, eager_state, eager_calls = trained(te, None, *arguments, **options)
    assert losses == eager_losses
    assert changed(state, eager_state) == []
    assert calls == eager_calls
    return graphs


@pytest.mark.parametrize(
    ("recipe", "model"),
    [
        case(recipe, model, quick=recipe == "delayed")
        for recipe in ("delayed", "current", "block", "mxfp8", "nvfp4")
        for model in (LLAMA, GPT2)
    ],
)
@pytest.mark.full
def test_compiled_training_calls_te_as_eager_training_does(te, recipe, model):
    graphs = require_equal_runs(te, recipe, model)
    assert {"scaled_dot_product_attention", "cross_entropy", "add"} <= graphs.all
    assert "silu" not in graphs.all  # in TE's LayerNormMLP


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (LLAMA | {"qk_norm": True}, {}),
        (LLAMA | LONG, {"hardware": backend_models.B200, "attention": "delayed"}),
        (LLAMA | LONG, {"hardware": backend_models.B200, "attention": "current"}),
    ],
    ids=["bf16 attention", "delayed attention", "current attention"],
)
@pytest.mark.full
def test_blocks_share_what_is_compiled(te, model, options):
    counts = []
    for layers in (2, 5):
        graphs = require_equal_runs(te, "delayed", model | {"layers": layers}, **options)
        counts.append(len(graphs.operators))
        in_graphs = sum("scaled_dot_product_attention" in names for names in graphs.operators)
        assert in_graphs == (0 if options else 1)
    assert counts[0] == counts[1]


@pytest.mark.full
def test_layers_that_te_does_not_compute_are_compiled(te):
    graphs = require_equal_runs(te, "delayed", LLAMA, exclude=["blocks.*.mlp.*"])
    kinds = Counter(name for operators in graphs.operators for name in operators)
    assert kinds["silu"] == 1
    assert kinds["linear"] >= 2


@pytest.mark.full
def test_experts_of_te_are_called_from_compiled_blocks(te):
    graphs = require_equal_runs(te, "delayed", LLAMA | MIXTURE)
    assert {"softmax", "argsort", "scaled_dot_product_attention"} <= graphs.all
