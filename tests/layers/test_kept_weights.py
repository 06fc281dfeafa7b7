"""The torch backend's weights where one kernel casts them all: the bytes of layer by layer."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from fp8stack.layers import build_backend, fp8_state
from fp8stack.layers import torch as torch_backend
from fp8stack.layers.kernels import fused_casts
from fp8stack.layers.kernels import variants as kernels
from fp8stack.layers.kernels import weight_casts as weights
from fp8stack.layers.kernels.variants import KernelVariant
from fp8stack.layers.kernels.weight_casts import KeptWeights
from fp8stack.layers.linear import QuantizedLinear
from fp8stack.layers.weight_cache import CachedWeight
from fp8stack.model.config import GPTConfig, plan_for
from fp8stack.model.gpt import GPT
from fp8stack.precision import Hardware

pytestmark = pytest.mark.usefixtures("one_thread")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

CPU = Hardware("cpu")
H200, B200 = (Hardware("cuda", of, cuda_version=(13, 0)) for of in ((9, 0), (10, 0)))


def gpt(recipe: str, hardware: Hardware = CPU, **sizes: int) -> GPT:
    shape: dict[str, Any] = {"vocabulary": 128, "context": 16, "width": 32, "heads": 2, "layers": 2}
    config = GPTConfig(**(shape | sizes))
    return GPT(config, build_backend(plan_for(config, recipe, hardware, "torch")))


def loss_of(model: GPT, step: int) -> Tensor:
    tokens = torch.randint(128, (2, 17), generator=torch.Generator().manual_seed(step))
    return model(tokens[:, :-1], tokens[:, 1:])


def cached_of(layer: QuantizedLinear) -> CachedWeight | None:
    cached: CachedWeight | None = layer.quantizers["weight"].cached
    return cached


def kept(model: GPT) -> dict[str, Tensor]:
    """The bytes and inverse scales of all weights."""
    found = {}
    for name, part in model.named_modules():
        if isinstance(part, QuantizedLinear) and (cached := cached_of(part)) is not None:
            for which, one in enumerate(cached.copies):
                found[f"{name} {which}"] = one.data.view(torch.uint8).clone()
                found[f"{name} {which} inverse"] = one.inv_scale.clone()
    return found


def everything(recipe: str) -> dict[str, Tensor]:
    """What three steps of two micro-batches, with an evaluation in between, leave."""
    model, found = gpt(recipe), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for part in range(2):
            loss = loss_of(model, 2 * step + part)
            with torch.no_grad():
                model.eval()
                found[f"{step} {part} evaluated"] = loss_of(model, 99)
                model.train()
            loss.backward()
            found[f"{step} {part}"] = loss.detach()
            found |= {f"{step} {part} {name}": value for name, value in kept(model).items()}
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            model.blocks[1].mlp.up.in_fp8 = False
    return found | fp8_state(model) | dict(model.state_dict())


def blocks_only(recipe: str, hardware: Hardware) -> dict[str, Tensor]:
    """The copies of a recipe of blocks, whose GEMMs a CPU lacks."""
    model = gpt(recipe, hardware, width=128)
    hooks(model)
    return kept(model)


def turned() -> dict[str, Tensor]:
    """The copies of weights that are stored as [in, out]."""
    model = gpt("delayed", layers=1)
    up = up_of(model)
    up.transposed = True
    up.weight = torch.nn.Parameter(up.weight.detach().t().contiguous())
    loss_of(model, 0)
    return kept(model)


def up_of(model: GPT) -> QuantizedLinear:
    up = model.get_submodule("blocks.0.mlp.up")
    assert isinstance(up, QuantizedLinear)
    return up


def few_differences() -> list[str]:
    return interpreted_differences("delayed", "block", "mxfp8")


def interpreted_differences(*names: str) -> list[str]:
    """Where layer by layer, without the kernels, and with them is not the same; of all forms, or of
    those that are named."""
    makers: dict[str, Callable[[], dict[str, Tensor]]]
    makers = {name: partial(everything, name) for name in ("delayed", "current")}
    makers |= {"block": lambda: blocks_only("block", H200), "turned": turned}
    makers["mxfp8"] = lambda: blocks_only("mxfp8", B200)
    makers = {name: makers[name] for name in names or makers}
    wrong = []
    for name, make in makers.items():
        expected = make()
        # Of the others, activations within casts are rounded in other places.
        modules = (kernels, torch_backend, *([fused_casts] if name == "mxfp8" else []))
        for module in modules:
            module.has_kernel = lambda device: True  # type: ignore[attr-defined]
        launches = _count_launches()
        found = make()
        for module in modules:
            module.has_kernel = lambda device: False  # type: ignore[attr-defined]
        if not launches:
            wrong.append(f"{name}: the kernel did not run")
        wrong += [f"{name}: {key}" for key in expected if not _same(found.get(key), expected[key])]
        if found.keys() != expected.keys():
            wrong.append(f"{name}: other keys")
    return wrong


def _count_launches() -> list[int]:
    made: list[int] = []
    real = weights.launch_weights

    def launch(
        tiles: int, operands: tuple[Tensor, ...], variant: KernelVariant, options: dict[str, Any]
    ) -> None:
        made.append(tiles)
        real(tiles, operands, variant, options)

    weights.launch_weights = launch
    launch_cast = fused_casts._launch

    def cast(*given: Any, **options: Any) -> None:
        made.append(1)
        launch_cast(*given, **options)

    fused_casts._launch = cast
    return made


def _same(one: Tensor | None, other: Tensor) -> bool:
    if one is None or not torch.equal(one, other):
        return False
    along = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(here == there for size, here, there in along if size > 1)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tiles of each launch; none is made, and the copies are made layer by layer."""
    made: list[int] = []
    monkeypatch.setattr(torch_backend, "has_kernel", lambda device: True)
    monkeypatch.setattr(weights, "launch_weights", lambda tiles, *_: made.append(tiles))
    return made


@pytest.fixture
def stand_in(launches: list[int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What is launched fills the copies, one after another."""
    made, cast, given = KeptWeights.__init__, KeptWeights.cast, {}

    def remember(self: KeptWeights, of: Any, quantizer: Any, places: Any = ()) -> None:
        made(self, of, quantizer, places)
        given[self] = of, places

    def fill(self: KeptWeights, scales: Any = None, amaxes: Any = None) -> None:
        cast(self, scales, amaxes)
        of, places = given[self]
        for weight, (along, across), place in zip(of, self.copies, places, strict=True):
            data, transposed, largest = fused_casts.cast_transpose(weight, scales[place])
            along.data.view(torch.uint8).data.copy_(data.view(torch.uint8))
            across.data.view(torch.uint8).data.copy_(transposed.view(torch.uint8))
            for one in (along, across):
                one.inv_scale.data.copy_(1 / scales[place])
            if amaxes is not None:
                assert largest is not None
                amaxes[place] = torch.maximum(amaxes[place], largest)

    monkeypatch.setattr(KeptWeights, "__init__", remember)
    monkeypatch.setattr(KeptWeights, "cast", fill)
    return launches


def losses_of(model: GPT) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(3):
        for part in range(2):
            loss = loss_of(model, 2 * step + part)
            loss.backward()
            found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return found


@needs_triton
@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_compiled_blocks_read_the_copies_and_are_compiled_once_for_all(stand_in, compiler) -> None:
    torch._dynamo.reset()
    expected = losses_of(gpt("delayed", layers=3))
    backend, model = CompileCounterWithBackend(compiler), gpt("delayed", layers=3)
    stand_in.clear()
    model.compile_blocks(backend=backend)
    assert losses_of(model) == pytest.approx(expected, rel=1e-5)
    assert len(stand_in) == 3  # once for two micro-batches
    assert backend.frame_count == 2  # a block, and the loss
    torch._dynamo.reset()


@needs_triton
def test_a_copy_of_a_model_and_a_model_that_moved_have_copies_of_their_own_weights(
    launches,
) -> None:
    model = gpt("delayed")
    hooks(model)
    up = up_of(model)
    first = cached_of(up)
    hooks(model)
    assert cached_of(up) is first
    other = copy.deepcopy(model)
    assert cached_of(up_of(other)) is None
    hooks(other)
    data = [
        layer.quantizers["weight"].cached.copies[0].data.data_ptr() for layer in (up, up_of(other))
    ]
    assert data[0] != data[1]
    up.weight.data = up.weight.data.clone()
    hooks(model)
    assert cached_of(up) is not first


@needs_triton
def test_weights_that_change_before_the_backward_pass_are_an_error_and_an_evaluation_is_none(
    stand_in,
) -> None:
    model = gpt("delayed")
    loss = loss_of(model, 0)
    model.eval()
    with torch.no_grad():
        loss_of(model, 1)
    loss.backward()
    model.train()
    loss = loss_of(model, 0)
    with torch.no_grad():
        up_of(model).weight.mul_(2)
    loss_of(model, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def hooks(model: GPT) -> None:
    """What comes before a forward pass."""
    for hook in model._forward_pre_hooks.values():
        hook(model, ())


@needs_triton
def test_all_weights_of_192_linears_are_one_launch_and_little_host_time(launches) -> None:
    model = gpt("delayed", layers=48)
    backend, times = model.backend, []
    assert isinstance(backend, torch_backend.TorchBackend)
    for _ in range(12):
        backend.weights.mark()
        backend.delayed._before_forward(model, ())
        before = time.process_time()
        backend._keep_weights(model, ())
        times.append(time.process_time() - before)
    assert launches == [240] * 12
    assert min(times) < 4e-3  # 0.6 ms where nothing else runs; layer by layer 23 ms on a GPU


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_model_casts_weights_by_rows_in_one_graph_for_each_shape(
    monkeypatch, backend
) -> None:
    """They are 80 to 90 launches for each weight else, and several times the memory traffic."""
    model = gpt("rowwise", B200, width=128)
    hooks(model)
    expected = kept(model)
    monkeypatch.setattr(torch_backend, "has_kernel", lambda device: True)
    torch._dynamo.reset()
    torch_backend._compiled_copies.cache_clear()
    counter = CompileCounterWithBackend(backend)
    model.compile_blocks(backend=counter)
    model.backend.weights.mark()
    hooks(model)
    found = kept(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert counter.frame_count == len(
        {part.weight.shape for part in model.blocks.modules() if isinstance(part, QuantizedLinear)}
    )
