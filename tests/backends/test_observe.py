"""What is seen of a pass, against what the layers are given; and that looking changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8stack.backends import build_backend, fp8_state
from fp8stack.backends.observe import fp8_linears, observing, scale_of
from fp8stack.model.config import GPTConfig, padded_vocabulary, plan_for
from fp8stack.model.convert import convert
from fp8stack.model.gpt import GPT
from fp8stack.precision import Hardware, load_recipe, resolve
from tests.support import te_stand_in

RECIPES = ["delayed", "current", "block", "mxfp8"]
PARTS = ("attention.qkv", "attention.output", "mlp.up", "mlp.down")
CONFIG = GPTConfig(vocabulary=64, context=32, layers=2, width=128, heads=4)
LINEARS = [f"blocks.{i}.{part}" for i in range(2) for part in PARTS]
GPUS = {name: Hardware("cuda", (9, 0), has_te=True) for name in RECIPES}
GPUS["mxfp8"] = Hardware("cuda", (10, 0), has_te=True)

pytestmark = pytest.mark.usefixtures("one_thread")
Seen = list[tuple[str, str, Tensor]]


def gpt(recipe: str, backend: str = "emulate", **model: Any) -> GPT:
    config = CONFIG.model_copy(update=model)
    if backend == "te":
        plan = resolve(recipe, GPUS[recipe], "te")
        multiple = 32 if recipe == "mxfp8" else 16
        shapes = config.linear_shapes(padded_vocabulary(config, multiple))
        plan = replace(plan.for_layers(shapes), device="cpu")
    else:
        plan = plan_for(config, recipe, Hardware("cpu"), backend)
    assert plan.backend == backend
    return GPT(config, build_backend(plan))


def loss_of(model: nn.Module, seed: int) -> Tensor:
    tokens = torch.randint(64, (2, 33), generator=torch.Generator().manual_seed(seed))
    return model(tokens[:, :-1], tokens[:, 1:])


def keep(seen: Seen) -> Callable[..., None]:
    def see(path: str, layer: nn.Module, operand: str, tensor: Tensor) -> None:
        assert not tensor.requires_grad
        assert tensor.ndim == 2
        assert not torch.is_grad_enabled()
        seen.append((path, operand, tensor.clone()))

    return see


def checkpointed(model: GPT, use_reentrant: bool) -> GPT:
    for block in model.blocks:
        inner = block.forward
        block.forward = lambda x, rotation, inner=inner: checkpoint(
            inner, x, rotation, use_reentrant=use_reentrant
        )
    return model


@pytest.fixture
def te() -> Iterator[None]:
    with te_stand_in.installed():
        yield


# What is seen


def test_operands_come_in_the_order_of_execution() -> None:
    model, seen = gpt("current"), []
    with observing(model, keep(seen)):
        loss_of(model, 0).backward()
    forward = [(name, operand) for name in LINEARS for operand in ("input", "weight")]
    backward = [(name, "grad_output") for name in reversed(LINEARS)]
    assert [(path, operand) for path, operand, _ in seen] == forward + backward


def test_outputs_come_where_they_are_computed() -> None:
    model, seen = gpt("current", layers=1), []
    with observing(model, keep(seen), outputs=True):
        loss_of(model, 0).backward()
    names = [f"blocks.0.{part}" for part in PARTS]
    forward = [(name, operand) for name in names for operand in ("input", "weight", "output")]
    backward = [(n, operand) for n in reversed(names) for operand in ("grad_output", "grad_input")]
    assert [(path, operand) for path, operand, _ in seen] == forward + backward


class Pair(nn.Module):
    """Two linears that read the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 16), nn.Linear(32, 48, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(input=x)


def test_tensors_are_those_of_each_linear_alone() -> None:
    torch.manual_seed(0)
    model = Pair()
    seen: Seen = []
    x = torch.randn(2, 5, 32, requires_grad=True)
    da, db = torch.randn(2, 5, 16), torch.randn(2, 5, 48)
    layers = {"a": model.a, "b": model.b}
    with observing(model, keep(seen), outputs=True, layers=layers):
        torch.autograd.backward(model(x), (da, db))
    found = {(path, operand): tensor for path, operand, tensor in seen}
    rows = x.detach().view(10, 32)
    for path, dy in (("a", da), ("b", db)):
        layer, dy = layers[path], dy.view(10, -1)
        assert torch.equal(found[path, "input"], rows)
        assert torch.equal(found[path, "weight"], layer.weight)
        assert torch.equal(found[path, "output"], layer(rows))
        assert torch.equal(found[path, "grad_output"], dy)
        torch.testing.assert_close(found[path, "grad_input"], dy @ layer.weight)
    assert len(found) == len(seen) == 10


def test_operands_have_the_dtype_that_is_cast() -> None:
    plan = replace(plan_for(CONFIG, "current", Hardware("cpu"), "emulate"), compute_dtype="bf16")
    model, seen = GPT(CONFIG, build_backend(plan)), []
    with observing(model, keep(seen), outputs=True):
        loss_of(model, 0).backward()
    dtypes = {(operand, tensor.dtype) for _, operand, tensor in seen}
    others = ("input", "grad_output", "output", "grad_input")
    assert dtypes == {("weight", torch.float32), *((name, torch.bfloat16) for name in others)}


def test_a_transposed_weight_is_seen_as_out_by_in() -> None:
    from transformers.pytorch_utils import Conv1D

    model = nn.Sequential(Conv1D(48, 32))
    convert(model, resolve("current", Hardware("cpu")))
    seen: Seen = []
    with observing(model, keep(seen)):
        model(torch.randn(4, 32))
    assert torch.equal(seen[1][2], model[0].weight.t())


def test_a_linear_that_is_not_in_fp8_is_not_seen() -> None:
    model, seen = gpt("current"), []
    model.blocks[1].mlp.up.in_fp8 = False
    assert list(fp8_linears(model)) == [name for name in LINEARS if name != "blocks.1.mlp.up"]
    with observing(model, keep(seen)):
        loss_of(model, 0).backward()
    assert "blocks.1.mlp.up" not in {path for path, _, _ in seen}
    assert len(seen) == 3 * (len(LINEARS) - 1)


def test_nothing_is_seen_after_the_context() -> None:
    model, seen = gpt("current"), []
    with observing(model, keep(seen)):
        loss = loss_of(model, 0)
    count = len(seen)
    loss.backward()
    loss_of(model, 0).backward()
    assert len(seen) == count == 2 * len(LINEARS)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in fp8_linears(model).values())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_block_that_is_recomputed_is_seen_once(use_reentrant: bool) -> None:
    model, plain = checkpointed(gpt("delayed"), use_reentrant), gpt("delayed")
    found: list[Seen] = []
    for each in (model, plain):
        seen: Seen = []
        with observing(each, keep(seen), outputs=True):
            loss_of(each, 0).backward()
        found.append(seen)
    assert [entry[:2] for entry in found[0]] == [entry[:2] for entry in found[1]]
    assert all(torch.equal(a[2], b[2]) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("backend", ["emulate", "torch"])
def test_the_scale_is_that_of_the_cast(recipe: str, backend: str) -> None:
    model = gpt(recipe, backend)
    rules = load_recipe(recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):  # delayed scaling has seen amaxes by then
        loss_of(model, step).backward()
        optimizer.step()
    scales: dict[str, float] = {}
    amaxes: dict[str, float] = {}

    def see(path: str, layer: nn.Module, operand: Any, x: Tensor) -> None:
        scales[f"{path}.{operand}"] = float(scale_of(path, layer, operand, x, rules))
        amaxes[f"{path}.{operand}"] = float(x.abs().max())

    before = {n: float(t) for n, t in fp8_state(model).items() if n.endswith(".scale")}
    with observing(model, see):
        loss_of(model, 5).backward()
    assert len(scales) == 3 * len(LINEARS)
    for name, scale in scales.items():
        limit = 57344.0 if name.endswith("grad_output") else 448.0
        if recipe == "delayed":
            assert scale == before[f"{name}.scale"] != 1.0
        else:
            assert scale == pytest.approx(limit / amaxes[name], rel=1e-6)


# Nothing changes


def trained(model: GPT, see: Callable[..., None] | None, accumulate: int = 1) -> list[Tensor]:
    """Losses, gradients, FP8 state and counters of three steps, of which the second is observed."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(3):
        optimizer.zero_grad()
        for part in range(accumulate):
            if see is not None and step == 1 and part == 0:
                with observing(model, see, outputs=True):
                    loss = loss_of(model, step + 10 * part)
                    loss.backward()
            else:
                loss = loss_of(model, step + 10 * part)
                loss.backward()
            found.append(loss.detach())
        optimizer.step()
        found += [p.grad.clone() for p in model.parameters()]
        found += list(fp8_state(model).values())
        found.append(torch.tensor(model.blocks[0].backend.fp8_gemms()))
    return found


def assert_same(first: list[Tensor], second: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("recipe", "backend"),
    [*((r, "emulate") for r in RECIPES), ("delayed", "torch"), ("current", "torch")],
)
def test_a_run_is_the_same_to_the_bit(recipe: str, backend: str, accumulate: int) -> None:
    seen: Seen = []
    observed = trained(gpt(recipe, backend), keep(seen), accumulate)
    assert_same(observed, trained(gpt(recipe, backend), None, accumulate))
    assert len(seen) == 5 * len(LINEARS)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_with_checkpointed_blocks_is_the_same(recipe: str, use_reentrant: bool) -> None:
    seen: Seen = []
    observed = trained(checkpointed(gpt(recipe), use_reentrant), keep(seen))
    assert_same(observed, trained(checkpointed(gpt(recipe), use_reentrant), None))
    assert {path for path, _, _ in seen} == set(LINEARS)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_by_transformer_engine_is_the_same(te: None, recipe: str) -> None:
    seen: Seen = []
    observed = trained(gpt(recipe, "te"), keep(seen), 2)
    assert_same(observed, trained(gpt(recipe, "te"), None, 2))
    shown = {(path, operand) for path, operand, _ in seen}
    assert shown >= {(n, o) for n in LINEARS for o in ("input", "weight", "grad_output")}


# Transformer Engine's fused modules


def near(x: Tensor, reference: Tensor, tolerance: float) -> bool:
    return bool((x.float() - reference.float()).norm() <= tolerance * reference.float().norm())


@pytest.mark.parametrize("activation", ["gelu_tanh", "relu2", "swiglu"])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_fused_modules_show_the_operands_of_an_unfused_model(
    te: None, recipe: str, activation: str
) -> None:
    shape = {"activation": activation, "bias": activation == "gelu_tanh"}
    fused, plain = gpt(recipe, "te", **shape), gpt(recipe, "te", **shape)
    plain.blocks[0].backend._fuses = lambda x, norm: False
    found: list[dict[tuple[str, str], Tensor]] = []
    for model in (fused, plain):
        for step in range(2):  # delayed scaling learns the sizes of the operands
            loss_of(model, step).backward()
        model.zero_grad()
        seen: Seen = []
        with observing(model, keep(seen)):
            loss_of(model, 7).backward()
        order = [(path, operand) for path, operand, _ in seen]
        assert len(set(order)) == len(order) == 3 * len(LINEARS)
        found.append({(path, operand): tensor for path, operand, tensor in seen})
    for key, tensor in found[0].items():
        assert tensor.shape == found[1][key].shape
        assert near(tensor, found[1][key], 0.2), key  # FP8's noise between the linears
    assert near(found[0][LINEARS[0], "input"], found[1][LINEARS[0], "input"], 0.01)


def test_the_input_of_a_fused_norm_has_the_amax_that_is_recorded(te: None) -> None:
    model = gpt("delayed", "te")
    seen: Seen = []
    with observing(model, keep(seen)):
        loss_of(model, 0).backward()
    state = fp8_state(model)
    recomputed = {("mlp.down", "input"), ("mlp.up", "grad_output")}
    compared = 0
    for path, operand, tensor in seen:
        if (path.split(".", 2)[2], operand) not in recomputed:
            largest = state[f"{path}.{operand}.amax_history"].max()
            assert float(tensor.abs().max()) == pytest.approx(float(largest), rel=1e-6)
            compared += 1
    assert compared == 20


@pytest.mark.parametrize("norm_by", ["TE", "cuDNN", "cuDNN, but for whole tiles alone"])
def test_an_mxfp8_norm_is_rounded_unless_its_kernel_casts(
    te: None, norm_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is shown is what Transformer Engine casts, to the bit: by its rule, of its source."""
    monkeypatch.setenv("NVTE_NORM_FWD_USE_CUDNN", str(int("cuDNN" in norm_by)))
    cast: list[Tensor] = []
    real = te_stand_in.Module.quantize

    def noted(module: Any, x: Tensor, gemm: int, kind: str) -> Any:
        if kind == "input" and type(module) is not te_stand_in.Linear and gemm == 1:
            cast.append(x.float())
        return real(module, x, gemm, kind)

    monkeypatch.setattr(te_stand_in.Module, "quantize", noted)
    model, seen = gpt("mxfp8", "te"), []
    sequences = 3 if "alone" in norm_by else 4  # of 32 tokens
    tokens = torch.randint(64, (sequences, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), observing(model, keep(seen)):
        model(tokens)
    normed = ("attention.qkv", "mlp.up")
    shown = [x.float() for path, operand, x in seen if operand == "input" and path[9:] in normed]
    assert len(shown) == len(cast) == 4
    assert all(torch.equal(a, b) for a, b in zip(shown, cast, strict=True))
    rounded = all(torch.equal(x, x.bfloat16().float()) for x in cast)
    assert rounded == (norm_by != "cuDNN")


def test_a_backend_is_observed_by_the_inner_context_and_then_the_outer(te: None) -> None:
    model = gpt("current", "te")
    outer: Seen = []
    inner: Seen = []
    with observing(model, keep(outer)):
        with observing(model, keep(inner)):
            loss_of(model, 0)
        before = len(outer)
        loss_of(model, 0)
        assert len(outer) > before
    assert {path for path, _, _ in inner} == set(LINEARS)
    assert model.blocks[0].backend.observer is None


# Compiled code


@pytest.mark.parametrize("recipe", ["delayed", pytest.param("mxfp8", marks=pytest.mark.slow)])
def test_a_pass_of_a_compiled_model_is_observed_eagerly(recipe: str) -> None:
    model, eager = gpt(recipe), gpt(recipe)
    model.compile_blocks(backend="aot_eager")
    loss_of(model, 0).backward()
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    seen: Seen = []
    with torch.compiler.set_stance("force_eager"), observing(model, keep(seen)):
        loss_of(model, 1).backward()
    loss_of(model, 2).backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled
    wanted: Seen = []
    loss_of(eager, 0).backward()
    with observing(eager, keep(wanted)):
        loss_of(eager, 1).backward()
    assert [entry[:2] for entry in seen] == [entry[:2] for entry in wanted]
    assert all(near(a[2], b[2], 1e-3) for a, b in zip(seen, wanted, strict=True))


def test_recomputing_between_fused_linears_gives_the_gradient_of_the_activation() -> None:
    from fp8stack.backends.observe import Observer

    torch.manual_seed(0)
    up, down = nn.Linear(16, 32), nn.Linear(32, 16)
    x, dy = torch.randn(8, 16), torch.randn(8, 16)
    hidden = up(x)
    hidden.retain_grad()
    y = down(F.gelu(hidden, approximate="tanh"))
    y.backward(dy)
    seen: Seen = []
    observer = Observer(keep(seen), {"up": up, "down": down}, False)
    shown = y.detach().requires_grad_()
    observer.fused_mlp(up, down, "gelu_tanh", x, shown, torch.float32)
    shown.backward(dy)
    found = {(path, operand): tensor for path, operand, tensor in seen}
    torch.testing.assert_close(found["up", "grad_output"], hidden.grad)
    torch.testing.assert_close(found["down", "input"], F.gelu(hidden, approximate="tanh"))
    assert torch.equal(found["down", "grad_output"], dy)
