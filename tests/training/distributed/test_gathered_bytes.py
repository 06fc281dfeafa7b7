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

from fp8stack.layers import build_backend
from fp8stack.model.config import GPTConfig, plan_for
from fp8stack.model.gpt import GPT
from fp8stack.precision import Hardware
from fp8stack.training.distributed.parallelize import _fully_shard, full_tensor
from fp8stack.training.distributed.process_group import join
from tests.faults.processes import in_ranks

WIDTH, VOCABULARY = 32, 64
CONFIG = GPTConfig(
    vocabulary=VOCABULARY, context=16, layers=2, width=WIDTH, heads=2, positions="rope",
    norm="rmsnorm", activation="swiglu", bias=False, tied=False,
)  # fmt: skip
LINEARS = CONFIG.linear_shapes()
IN_BLOCK = sum(i * o for name, (i, o) in LINEARS.items() if name.startswith("blocks.0."))
OUT_ROWS = sum(o for name, (_, o) in LINEARS.items() if name.startswith("blocks.0."))
NORMS = 4 * 2 * WIDTH  # bytes, of a block


def _model(recipe: str, backend: str, compiled: str | None) -> GPT:
    plan = plan_for(CONFIG, recipe, Hardware("cpu"), backend)
    model = GPT(CONFIG, build_backend(plan))
    model.backend.weights.only_tracked_changes = True
    if compiled:
        model.compile_blocks(compiled)
    return model


def _train(model: GPT, tokens: Tensor, scale: int) -> tuple[list[float], list[Tensor]]:
    """Losses and weights of steps on the same tokens on each rank; `scale` times the gradients."""
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5 * scale)
    for step in range(3):
        loss = model(tokens[step, :, :-1], tokens[step, :, 1:])
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if model.backend.delayed is not None:
            model.backend.delayed.apply_pending_update()
    return losses, [full_tensor(parameter.detach()).clone() for parameter in model.parameters()]


class _Counter(DefaultAllGather):
    """FSDP2's all-gather; `sent` has the bytes that this rank gave to each."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **keys: Any) -> Any:
        self.sent.append(input_tensor.nbytes)
        return super().__call__(output_tensor, input_tensor, *args, **keys)


def _gathered(rank: int, *, recipe: str, backend: str, compiled: str | None) -> dict[str, Any]:
    """Whether a sharded model trains as one that is not, and the bytes that a rank gave to each
    all-gather of the first training step."""
    join("cpu", 60)
    torch.use_deterministic_algorithms(True)
    tokens = torch.randint(VOCABULARY, (3, 2, 17), generator=torch.Generator().manual_seed(0))
    alone = _model(recipe, backend, compiled)
    if alone.backend.delayed is not None:
        alone.backend.delayed.sharing.group = None
    expected = _train(alone, tokens, 2)
    model = _model(recipe, backend, compiled)
    accelerator: Any = SimpleNamespace(device=torch.device("cpu"), num_processes=2)
    _fully_shard(model, model.backend, accelerator)
    counter = _Counter()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(counter)
    losses, weights = _train(model, tokens, 1)
    assert losses == expected[0], (losses, expected[0])
    names = [name for name, _ in model.named_parameters()]
    changed = [n for n, a, b in zip(names, weights, expected[1], strict=True) if not a.equal(b)]
    return {"changed": changed, "sent": counter.sent}


def element_bytes(recipe: str, backend: str) -> tuple[float, int]:
    """The bytes per element of a block's linears, and of the head."""
    if backend == "torch":
        scales = 4 * OUT_ROWS / IN_BLOCK
        return {"delayed": 1, "current": 1, "rowwise": 2 + scales}[recipe], 4
    return {"fp32": (4, 4), "bf16": (2, 2), "fp16": (2, 2)}.get(recipe, (4, 4))


def require_bytes(answers: list[dict[str, Any]], recipe: str, backend: str) -> None:
    in_block, in_head = element_bytes(recipe, backend)
    block = (in_block * IN_BLOCK + NORMS) / 2
    root = ((4 + in_head) * VOCABULARY * WIDTH + 4 * WIDTH) / 2
    for answer in answers:
        assert answer["changed"] == []
        # Forward and backward pass: the last block and the root stay gathered in between.
        assert set(answer["sent"]) == {block, root}
        assert answer["sent"][:3] == [root, block, block]


CASES = [
    ("fp32", "reference"), ("bf16", "reference"), ("delayed", "torch"), ("current", "torch"),
    ("rowwise", "torch"), ("delayed", "emulate"),
]  # fmt: skip


@pytest.mark.parametrize("compiled", [None, "aot_eager"])
@pytest.mark.parametrize(("recipe", "backend"), CASES)
def test_a_sharded_model_gathers_few_bytes_and_trains_as_one_that_is_not(recipe, backend, compiled):
    work = partial(_gathered, recipe=recipe, backend=backend, compiled=compiled)
    require_bytes(in_ranks(work, 2), recipe, backend)
