"""What FSDP2 gathers: FP8 bytes or the compute dtype, with the results of a model that is not
sharded, to the bit."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.optim import Optimizer

from fp8stack.layers import build_backend
from fp8stack.model.config import GPTConfig, plan_for
from fp8stack.model.gpt import GPT
from fp8stack.precision import Hardware, Recipe, load_recipe
from fp8stack.training.distributed.parallelize import full_tensor, fully_shard_model
from fp8stack.training.distributed.process_group import join
from tests.faults.processes import in_ranks

LAYERS, WIDTH, VOCABULARY = 2, 32, 64
CONFIG = GPTConfig(
    vocabulary=VOCABULARY, context=16, layers=LAYERS, width=WIDTH, heads=2, positions="rope",
    norm="rmsnorm", activation="swiglu", bias=False, tied=False,
)  # fmt: skip
LINEARS = CONFIG.linear_shapes()
IN_BLOCK = sum(i * o for name, (i, o) in LINEARS.items() if name.startswith("blocks.0."))
OUT_ROWS = sum(o for name, (_, o) in LINEARS.items() if name.startswith("blocks.0."))
NORMS = 4 * 2 * WIDTH  # bytes, of a block


def model_of(
    recipe: str | Recipe, backend: str, compiled: str | None = None, width: int = WIDTH
) -> GPT:
    """A model on the CPU, compiled by a backend of torch.compile if it is given."""
    config = CONFIG.model_copy(update={"width": width})
    model = GPT(config, build_backend(plan_for(config, recipe, Hardware("cpu"), backend)))
    model.backend.weights.only_tracked_changes = True
    if compiled:
        model.compile_blocks(compiled)
    return model


def train(
    model: GPT, tokens: Tensor, ranks: int, optimizer: Optimizer | None = None
) -> tuple[list[float], list[Tensor]]:
    """Losses and weights of steps on the same tokens on each of so many ranks."""
    losses = []
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        loss = model(tokens[step, :, :-1], tokens[step, :, 1:])
        loss.backward()
        losses.append(loss.item())
        for parameter in model.parameters() if ranks > 1 else ():
            assert parameter.grad is not None
            parameter.grad *= ranks  # ranks sum their gradients
        optimizer.step()
        optimizer.zero_grad()
        if model.backend.delayed is not None:
            model.backend.delayed.apply_pending_update()
    return losses, [full_tensor(parameter.detach()).clone() for parameter in model.parameters()]


def sharded(model: GPT) -> GPT:
    """The model, sharded over two ranks."""
    accelerator: Any = SimpleNamespace(device=torch.device("cpu"), num_processes=2)
    fully_shard_model(model, accelerator)
    return model


class _Counter(DefaultAllGather):
    """FSDP2's all-gather; `sent` has the bytes that this rank gave to each."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **keys: Any) -> Any:
        self.sent.append(input_tensor.nbytes)
        return super().__call__(output_tensor, input_tensor, *args, **keys)


def _gathered(
    rank: int, *, recipe: str | Recipe, backend: str, compiled: str | None
) -> dict[str, Any]:
    """Whether a sharded model trains as one that is not, and the bytes that a rank gave to each
    all-gather of the first training step."""
    join("cpu", 60)
    torch.use_deterministic_algorithms(True)
    tokens = torch.randint(VOCABULARY, (3, 2, 17), generator=torch.Generator().manual_seed(0))
    expected: Any = None
    if rank == 0:
        alone = model_of(recipe, backend, compiled)
        if alone.backend.delayed is not None:
            alone.backend.delayed.sharing.group = None
        expected = train(alone, tokens, 2)
    model = sharded(model_of(recipe, backend, compiled))
    counter = _Counter()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(counter)
    losses, weights = train(model, tokens, 1)
    answer: dict[str, Any] = {"sent": counter.sent, "losses": losses}
    if expected is not None:
        pairs = zip(model.named_parameters(), weights, expected[1], strict=True)
        answer["changed"] = [name for (name, _), a, b in pairs if not torch.equal(a, b)]
        answer["expected"] = expected[0]
    return answer


HEAD = load_recipe("current", {"head": True})


def element_bytes(recipe: str | Recipe, backend: str) -> tuple[float, int]:
    """The bytes per element of a block's linears, and of the head."""
    if isinstance(recipe, Recipe):
        return 1, 1
    if backend == "torch":
        scales = 4 * OUT_ROWS / IN_BLOCK
        return {"delayed": 1, "current": 1, "rowwise": 2 + scales}[recipe], 4
    return {"fp32": (4, 4), "bf16": (2, 2), "fp16": (2, 2)}.get(recipe, (4, 4))


FULL, SLOW = pytest.mark.full, pytest.mark.slow


@pytest.mark.parametrize(
    ("recipe", "backend", "compiled"),
    [
        ("delayed", "torch", None),
        pytest.param("bf16", "reference", None, marks=FULL),
        pytest.param("rowwise", "torch", None, marks=FULL),
        pytest.param(HEAD, "torch", None, marks=FULL),
        pytest.param("delayed", "torch", "aot_eager", marks=FULL),
        pytest.param("delayed", "emulate", None, marks=SLOW),
        pytest.param("fp32", "reference", "aot_eager", marks=SLOW),
        pytest.param("current", "torch", "aot_eager", marks=SLOW),
    ],
)
def test_a_sharded_model_gathers_few_bytes_and_trains_as_one_that_is_not(recipe, backend, compiled):
    work = partial(_gathered, recipe=recipe, backend=backend, compiled=compiled)
    answers = in_ranks(work, 2, timeout_s=500)
    assert answers[0]["changed"] == []
    assert answers[0]["losses"] == answers[1]["losses"] == answers[0]["expected"]
    in_block, in_head = element_bytes(recipe, backend)
    block = (in_block * IN_BLOCK + NORMS) / 2
    root = ((4 + in_head) * VOCABULARY * WIDTH + 4 * WIDTH) / 2
    for answer in answers:
        assert set(answer["sent"]) == {block, root}
        assert answer["sent"][: 1 + LAYERS] == [root, *[block] * LAYERS]
