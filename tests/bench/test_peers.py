"""Models that are benchmarked against ours compute the same, or the same recipe."""

from __future__ import annotations

from weakref import WeakSet

import pytest
import torch

from bench import peers
from bench.cost import emulation
from bench.peers import torchao
from bench.peers.plain_gpt import PlainGPT
from fp8stack.analysis.benchmark.step_timing import StepWork, arms, build_step
from fp8stack.layers import weight_changes as weights
from fp8stack.model.config import GPTConfig, load_config
from fp8stack.model.gpt import GPT
from fp8stack.precision import Hardware
from tests.support.clock import Operations

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"vocabulary": 100, "context": 24, "layers": 2, "width": 32, "heads": 4, "init_std": 0.5}
LLAMA = {"kv_heads": 2, "mlp_width": 48, "norm": "rmsnorm", "activation": "swiglu",
         "positions": "rope", "bias": False, "tied": False}  # fmt: skip


@pytest.mark.parametrize(
    "more", [{}, LLAMA, LLAMA | {"qk_norm": True}], ids=["gpt2", "llama", "qk_norm"]
)
def test_the_plain_gpt_has_our_parameters_and_our_loss(more):
    config = GPTConfig(**SIZES | more)
    gpt, plain = GPT(config, seed=3), PlainGPT(peers.shape_of(config))
    plain.load_state_dict(gpt.state_dict())
    counts = [sum(p.numel() for p in model.parameters()) for model in (gpt, plain)]
    assert counts == [config.parameters()] * 2
    tokens = torch.randint(100, (3, 25), generator=torch.Generator().manual_seed(0))
    losses = [model(tokens[:, :-1], tokens[:, 1:]) for model in (gpt, plain)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0)
    for loss in losses:
        loss.backward()
    gradients = [model.embedding.weight.grad for model in (plain, gpt)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_a_step_of_gpt_nano_takes_fewer_operations_than_a_plain_gpts(monkeypatch):
    # Otherwise the optimizer's step also marks the models of other tests.
    monkeypatch.setattr(weights, "_WATCHES", WeakSet())
    work = StepWork(model="gpt-nano", config=load_config("gpt-nano"), batch=2, context=16)
    hardware = Hardware("cpu")
    (arm,) = arms(hardware, ["fp32"], ())
    steps = {"ours": build_step(arm, work, hardware), "plain": peers.step(work, "cpu", "", False)}
    counts = {}
    for name, step in steps.items():
        step()  # the first step creates state that later steps reuse
        with Operations() as operations:
            step()
        counts[name] = operations.count
    assert counts["ours"] <= 850  # torch 2.13: 842
    assert counts["ours"] < counts["plain"]


def test_torchaos_linear_in_the_benchmark_computes_what_ours_does():
    peer, linear = torchao.TorchaoMxfp8(64, 96), emulation.fp8stack_linear("mxfp8", 64, 96)
    linear.load_state_dict(peer.state_dict())
    results = []
    for layer in (peer, linear):
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        y = layer(x)
        y.backward(torch.ones_like(y) / 7)
        results.append((y.detach(), x.grad, layer.weight.grad))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp8"])
def test_torchaos_model_has_fp8_linears_everywhere_but_in_the_head(recipe):
    work = emulation.tiny_work()
    plain = PlainGPT(peers.shape_of(work.config))
    batch = work.batch_of("cpu")
    exact = plain(*batch).item()
    model = torchao.with_torchao(plain, recipe, "cpu")
    kinds = {name: type(m).__name__ for name, m in model.named_modules() if hasattr(m, "weight")}
    assert kinds.pop("lm_head") == "Linear"
    fp8 = [name for name, kind in kinds.items() if kind in ("Float8Linear", "TorchaoMxfp8")]
    assert len(fp8) == 4 * work.config.layers
    loss = model(*batch).item()
    assert loss == pytest.approx(exact, rel=0.01)
    assert loss != exact
