"""Whole runs on this GPU: they learn, they resume to the bit, and compiled code does the same."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fp8stack.common.errors import UserError
from fp8stack.common.formats import fp8_format
from fp8stack.layers import Backend, build_backend, fp8_state
from fp8stack.model.config import GPTConfig, plan_for
from fp8stack.model.gpt import GPT
from fp8stack.precision import load_recipe
from tests.conftest import losses, metrics
from tests.gpu.machine import CONTEXT, require_plan

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
RECIPES = ("delayed", "current", "block", "mxfp8")
ARMS = [("reference", "bf16"), ("reference", "tf32")] + [
    (backend, recipe) for backend in ("te", "torch", "emulate") for recipe in RECIPES
]
ARMS += [(backend, "nvfp4") for backend in ("te", "torch", "emulate")]
# Sizes that every FP8 GEMM takes, 128 x 128 blocks included. 320 tokens are several tiles of
# attention, whose gradients are added up in any order by kernels that do not repeat.
FLAGS = [
    "--steps", "12", "--batch", "4", "--context", "320", "--eval-every", "6", "--save-every", "4",
    "--set", "model_overrides.layers=1", "--set", "eval_windows=4", "--set", "sample_tokens=8",
    "--set", "warmup_steps=2", "--set", "model_overrides.heads=2",
    "--set", "model_overrides.context=320", "--set", "deterministic=true",
]  # fmt: skip
SMALL = GPTConfig(vocabulary=256, context=64, layers=2, width=128, heads=2)


def saved(run: Path) -> dict[str, Tensor]:
    """All tensors of the last checkpoint."""
    folder = run / "checkpoints" / "step-000012"
    return {
        f"{file.name} {name}": tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def require_resumed(command: Callable[..., int], run: Path, *flags: str) -> None:
    """A run learns, and resumes to the bit after its last checkpoint is lost."""
    assert command("pretrain", "--out", "r", *FLAGS, *flags) == 0
    uninterrupted, tensors = losses(run), saved(run)
    assert uninterrupted[-1][1] < uninterrupted[0][1]
    shutil.rmtree(run / "checkpoints" / "step-000012")
    assert command("pretrain", "--resume", "auto", "--out", "r") == 0
    assert losses(run) == uninterrupted
    again = saved(run)
    assert again.keys() == tensors.keys()
    assert [name for name in tensors if not torch.equal(again[name], tensors[name])] == []


@pytest.mark.parametrize(("backend", "recipe"), ARMS)
def test_a_run_learns_and_resumes_to_the_bit(backend, recipe, command, tmp_path):
    require_plan(backend, recipe)
    require_resumed(command, tmp_path / "r", "--recipe", recipe, "--backend", backend)
    if backend != "reference":  # compiled code does not count
        rows = metrics(tmp_path / "r")
        assert all(row["fp8_gemms"] is None or row["fp8_gemms"] > 0 for row in rows)


@pytest.mark.parametrize("accumulate", ["1", "2"])
@pytest.mark.parametrize("recipe", ["bf16", "fp16", "delayed", "current", "nvfp4"])
def test_passes_replayed_as_cuda_graphs_are_those_of_eager_code(
    recipe, accumulate, command, tmp_path, capsys
):
    require_plan("reference" if recipe in ("bf16", "fp16") else "torch", recipe)
    flags = ["--recipe", recipe, *FLAGS, "--accumulate", accumulate, "--compile"]
    for graphs in ("true", "false"):
        assert command("pretrain", "--out", graphs, "--set", f"cuda_graphs={graphs}", *flags) == 0
        replayed = "replayed from the third step on" in capsys.readouterr().out
        assert replayed == (graphs == "true")
    assert losses(tmp_path / "true") == losses(tmp_path / "false")
    with_graphs, without = saved(tmp_path / "true"), saved(tmp_path / "false")
    assert [name for name in without if not torch.equal(with_graphs[name], without[name])] == []


# The recipe, and its attention in FP8, which not all GPUs have.
ATTENTION = [
    *(("delayed", "delayed"), ("current", "delayed"), ("mxfp8", "delayed")),
    *(("delayed", "current"), ("mxfp8", "current"), ("mxfp8", "mxfp8"), ("nvfp4", "mxfp8")),
]
HEADS_OF_128 = GPTConfig(vocabulary=256, context=256, layers=1, width=512, heads=4, kv_heads=2)


def attending(recipe: str, attention: str) -> Backend:
    """Transformer Engine's backend with this attention; the test is skipped where it is refused."""
    require_plan("te", recipe)
    try:
        chosen = load_recipe(recipe, {"attention": attention})
        return build_backend(plan_for(HEADS_OF_128, chosen, CONTEXT.hardware, "te"))
    except UserError as refused:
        pytest.skip(str(refused))


@pytest.mark.parametrize(("recipe", "attention"), ATTENTION)
def test_attention_in_fp8_is_near_that_in_bf16(recipe: str, attention: str) -> None:
    model = GPT(HEADS_OF_128, attending(recipe, attention)).to(CONTEXT.device)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (2, 257), generator=generator).to(CONTEXT.device)
    for _ in range(2):  # until the scales are found
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    delayed = {name: x for name, x in fp8_state(model).items() if name.count(".") == 4}
    delayed = {name: x for name, x in delayed.items() if ".attention." in name}
    scales = {name: float(x) for name, x in delayed.items() if name.endswith(".scale")}
    assert len(scales) == {"delayed": 6, "current": 2, "mxfp8": 0}[attention]
    assert all(scale > 0 and scale != 1 for scale in scales.values()), scales
    if scales:  # the first token attends to itself alone
        assert scales["blocks.0.attention.S.scale"] == pytest.approx(448, rel=0.01)
    qkv = [
        torch.randn(2, heads, 256, 128, generator=generator).to(CONTEXT.device, torch.bfloat16)
        for heads in (4, 2, 2)
    ]
    backend, path = model.backend, "blocks.0.attention"
    y, *grads = in_bf16 = _attention_and_gradients(backend, qkv, None)
    most = {
        "QKV": largest(qkv),
        "S": 1.0,
        "O": largest([y]),
        "dO": DY,
        "dP": 2 * DY * float(qkv[2].float().abs().sum(-1).max()),  # at most
        "dQKV": largest(grads),
    }
    for operand, quantizer in backend.plan.recipe.attention_slots.items():
        scale = fp8_format(quantizer.format).max / most[operand]
        backend.delayed.history.scale(f"{path}.{operand}").fill_(scale)
        backend.delayed.copy_scales_out()
    for low, high in zip(_attention_and_gradients(backend, qkv, path), in_bf16, strict=True):
        assert 0 < float((low - high).norm() / high.norm()) < 0.2


DY = 1e-3


def largest(tensors: list[Tensor]) -> float:
    return max(float(x.abs().max()) for x in tensors)


def _attention_and_gradients(backend: Any, qkv: list[Tensor], path: str | None) -> list[Tensor]:
    """The output and gradients in float32 of attention in FP8, or in bf16 if `path` is None."""
    leaves = [x.clone().requires_grad_() for x in qkv]
    y = backend.attention(*leaves, dropout=0.0, path=path)
    y.backward(torch.full_like(y, DY))
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    assert len(gradients) == 3
    return [x.detach().float() for x in (y, *gradients)]


@pytest.mark.parametrize(("recipe", "attention"), ATTENTION)
def test_a_run_with_attention_in_fp8_learns_and_resumes_to_the_bit(
    recipe, attention, command, tmp_path
):
    attending(recipe, attention)
    if (torch.backends.cudnn.version() or 0) < 91900:
        pytest.skip("attention in FP8 that repeats to the bit needs cuDNN 9.19")
    flags = ["--recipe", recipe, "--backend", "te", "--context", "256"]
    flags += ["--set", f"recipe.attention={attention}"]
    flags += ["--set", "model_overrides.width=256"]  # 2 heads of 128
    require_resumed(command, tmp_path / "r", *flags)


def mean_and_error_of_dx(backend: str) -> tuple[Tensor, Tensor]:
    """The mean of the gradient of a linear's input, and its standard error, over 256 passes that
    differ only in random bits."""
    plan = plan_for(SMALL, load_recipe("nvfp4"), CONTEXT.hardware, backend)
    layer_backend = build_backend(plan)
    torch.manual_seed(0)
    layer = layer_backend.linear("blocks.0.mlp.up", 128, 512, False)
    layer_backend.attach(layer)
    layer.to(CONTEXT.device)
    dy = torch.randn(64, 512).to(CONTEXT.device, torch.bfloat16)
    x = torch.randn(64, 128).to(CONTEXT.device).requires_grad_()
    drawn = []
    for _ in range(256):
        layer(x).backward(dy)
        assert x.grad is not None
        drawn.append(x.grad)
        x.grad = None
    samples = torch.stack(drawn)
    return samples.mean(0), samples.std(0) / 16


def test_gradients_that_transformer_engine_draws_have_the_emulators_mean() -> None:
    require_plan("te", "nvfp4")
    mean, error = mean_and_error_of_dx("te")
    emulated_mean, emulated_error = mean_and_error_of_dx("emulate")
    assert float(error.min()) > 0
    deviations = (mean - emulated_mean) / (error**2 + emulated_error**2).sqrt()
    assert float(deviations.abs().max()) < 6


def trained(backend: str, recipe: str, compiler: str | None) -> tuple[list[float], GPT]:
    """The losses of six steps, and the model."""
    plan = plan_for(SMALL, load_recipe(recipe), CONTEXT.hardware, backend)
    model = GPT(SMALL, build_backend(plan)).to(CONTEXT.device)
    call: Callable[..., Tensor] = model
    if compiler is not None:
        torch._dynamo.reset()
        call = torch.compile(model, fullgraph=True, backend=compiler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(256, (4, 65), generator=generator).to(CONTEXT.device)
        loss = call(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, model


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gpt_compiles_as_one_graph_that_has_the_scales_and_losses_of_eager_mode(recipe):
    """The compiler keeps eager mode's kernels: the graph is the same to the bit."""
    require_plan("torch", recipe)
    torch.use_deterministic_algorithms(True)
    expected, eager = trained("torch", recipe, None)
    compiled_losses, compiled = trained("torch", recipe, "aot_eager")
    assert compiled_losses == expected
    states = fp8_state(compiled), fp8_state(eager)
    assert states[0].keys() == states[1].keys()
    assert bool(states[0]) == (recipe == "delayed")
    odd = [name for name in states[1] if not torch.equal(states[0][name], states[1][name])]
    assert odd == []


FRESH = """
import sys, torch
from fp8stack.layers import build_backend
from fp8stack.model.config import GPTConfig, plan_for
from fp8stack.model.gpt import GPT
from fp8stack.precision import Hardware
config = GPTConfig(vocabulary=256, context=64, layers=1, width=128, heads=2)
hardware = Hardware("cuda", torch.cuda.get_device_capability())
model = GPT(config, build_backend(plan_for(config, sys.argv[1], hardware, "torch"))).cuda()
tokens = torch.zeros(4, 64, dtype=torch.long, device="cuda")
torch.compile(model, fullgraph=True, backend="aot_eager")(tokens, tokens).backward()
"""


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_gpt_compiles_in_a_process_where_nothing_ran_before(recipe: str) -> None:
    require_plan("torch", recipe)
    command = [sys.executable, "-c", FRESH, recipe]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gpt_compiled_by_inductor_learns_as_in_eager_mode(recipe: str) -> None:
    """Fused kernels round less often, so that scales and losses are near, and not the same."""
    require_plan("torch", recipe)
    expected, eager = trained("torch", recipe, None)
    compiled_losses, compiled = trained("torch", recipe, "inductor")
    assert compiled_losses == pytest.approx(expected, rel=0.02)
    states = fp8_state(compiled), fp8_state(eager)
    for name, value in states[1].items():
        if name.endswith(".scale"):
            torch.testing.assert_close(states[0][name], value, rtol=0.25, atol=0.0)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_backends_agree_on_the_loss(recipe: str) -> None:
    expected, _ = trained("emulate", recipe, None)
    compared = []
    for backend in ("te", "torch"):
        if plan_for(SMALL, load_recipe(recipe), CONTEXT.hardware, backend).backend == backend:
            backend_losses, _ = trained(backend, recipe, None)
            assert backend_losses == pytest.approx(expected, rel=0.02), backend
            compared.append(backend)
    if not compared:
        pytest.skip(f"nothing but the emulator runs {recipe} here")
