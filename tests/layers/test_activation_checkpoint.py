"""Activation checkpointing: the same numbers to the bit, fewer bytes, nothing recorded twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from fp8stack import GPT, build_backend, fp8_state, load_config
from fp8stack.layers import activation_checkpoint
from fp8stack.model.config import plan_for
from fp8stack.model.gpt import Recompute
from fp8stack.precision import Hardware
from tests.support.backend_models import history, same
from tests.support.cases import case
from tests.support.live_bytes import kept_bytes
from tests.support.operators import Operators, counting
from tests.support.small_loop import SmallLoop

pytestmark = pytest.mark.usefixtures("one_thread")

# Widths that every FP8 GEMM takes, those of 128 x 128 blocks too.
TINY = {"layers": 2, "width": 128, "heads": 4, "mlp_width": 128, "context": 64}
LLAMA = {
    "norm": "rmsnorm", "activation": "swiglu", "positions": "rope", "bias": False, "kv_heads": 2,
    "tied": False, "qk_norm": True,
}  # fmt: skip
MODES: tuple[Recompute, ...] = get_args(Recompute)
WAYS = [
    *((recipe, "reference") for recipe in ("fp32", "bf16", "fp16")),
    *((recipe, "emulate") for recipe in ("delayed", "current", "block", "mxfp8", "rowwise")),
    *((recipe, "torch") for recipe in ("delayed", "current", "rowwise")),
]


SHAPES: dict[str, dict[str, Any]] = {"gpt": {}, "dropout": {"dropout": 0.2}, "llama": LLAMA}
FEW = [("fp32", "reference"), ("delayed", "emulate"), ("delayed", "torch")]
# Most with dropout, which is where running again is hardest; the others are slow.
CASES = [
    case(*way, shape, quick=way in (FEW if shape == "dropout" else FEW[1:2]))
    for way in WAYS
    for shape in SHAPES
]


def gpt(recipe: str, backend: str, recompute: Recompute = "none", **more: Any) -> GPT:
    config = load_config("gpt-nano", TINY | more)
    plan = plan_for(config, recipe, Hardware("cpu"), backend)
    assert plan.recipe.name == recipe
    model = GPT(config, build_backend(plan))
    model.recompute = recompute
    return model


@pytest.mark.capability("D2")
@pytest.mark.parametrize(("recipe", "backend", "shape"), CASES)
@pytest.mark.full
def test_losses_gradients_and_fp8_state_are_the_same_to_the_bit(recipe, backend, shape):
    more = SHAPES[shape]
    expected = history(gpt(recipe, backend, **more))
    for mode in ("selective", "block"):
        assert same(history(gpt(recipe, backend, mode, **more)), expected)


@pytest.mark.capability("D2")
@pytest.mark.parametrize(("recipe", "backend"), [*FEW, ("mxfp8", "emulate"), ("rowwise", "torch")])
def test_selective_keeps_less_than_none_and_block_less_than_selective(recipe, backend):
    model = gpt(recipe, backend, layers=1, dropout=0.2)
    tokens = torch.zeros(2, 33, dtype=torch.int64)
    sizes = {}
    for mode in MODES:
        model.recompute = mode
        sizes[mode] = kept_bytes(model, tokens)
    assert sizes["block"] < sizes["selective"] < sizes["none"]


@pytest.mark.parametrize(("recipe", "backend"), [("fp32", "reference"), ("delayed", "emulate")])
def test_selective_keeps_what_gemms_and_attention_give_and_the_input(recipe, backend):
    """A block keeps its input, attention's statistic, and qkv, attention, output, up and down."""
    model = gpt(recipe, backend)
    B, T, D = 2, 32, 128
    tokens = torch.zeros(B, T + 1, dtype=torch.int64)
    bytes_of = {}
    for mode in MODES:
        model.recompute = mode
        bytes_of[mode] = kept_bytes(model, tokens)
    floats = B * T * (3 * D + D + D + 2 * 128 + D) + B * 4 * T
    assert bytes_of["selective"] - bytes_of["block"] == 2 * 4 * floats


@pytest.mark.parametrize("mode", ["selective", "block"])
def test_which_operators_run_again(mode: Recompute) -> None:
    """Selective checkpointing runs no GEMM and no attention again in the backward pass."""
    model = gpt("fp32", "reference", recompute=mode)
    tokens = torch.zeros(2, 33, dtype=torch.int64)
    loss = model(tokens[:, :-1], tokens[:, 1:])
    with Operators() as operators:
        loss.backward()
    calls = Counter(operators.names)
    attention = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    # Two GEMMs for each of 2 x 4 linears and the head, more if forward GEMMs run again.
    assert (calls[attention] == 0) is (mode == "selective")
    assert (calls["aten.mm.default"] <= 2 * (4 * 2 + 1)) is (mode == "selective")


@pytest.mark.parametrize("name", sorted(map(str, activation_checkpoint.ATTENTION)))
def test_attention_that_draws_a_mask_runs_again(name: str) -> None:
    """Left out, it would not draw, and the dropout after it would draw other numbers."""
    operator = next(op for op in activation_checkpoint.ATTENTION if str(op) == name)
    context: Any = None  # not looked at
    at = [argument.name for argument in operator._schema.arguments].index("dropout_p")
    keep, again = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
    before = [None] * at
    assert activation_checkpoint.policy(context, operator, *before) is keep
    assert activation_checkpoint.policy(context, operator, *before, 0.0) is keep
    assert activation_checkpoint.policy(context, operator, *before, 0.1) is again
    assert activation_checkpoint.policy(context, operator, *before[:3], dropout_p=0.1) is again


# Compiled. Blocks of elements take long to compile.
COMPILED = [
    case("delayed", "torch", "gpt", quick=True),
    case("delayed", "emulate", "dropout", quick=False),
    case("rowwise", "torch", "gpt", quick=False),
    case("bf16", "reference", "llama", quick=False),
    *(case(recipe, "emulate", "gpt", quick=False) for recipe in ("mxfp8", "nvfp4")),
    *(case(recipe, "emulate", "llama", quick=False) for recipe in ("current", "block")),
]


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("recipe", "backend", "shape"), COMPILED)
@pytest.mark.full
def test_compiled_selective_checkpointing_changes_no_bit_either(recipe, backend, shape):
    """Amaxes are recorded once, and stochastic rounding draws the same numbers again. One
    compilation serves equal blocks."""
    expected = history(gpt(recipe, backend, **SHAPES[shape]))
    model = gpt(recipe, backend, recompute="selective", **SHAPES[shape])
    counter = counting("aot_eager")
    model.compile_blocks(counter)
    assert same(history(model), expected)
    assert counter.frame_count == 2  # a block, and the loss


def saved_by_block(model: GPT) -> int:
    """The bytes of the activations that a model's compiled block saves, without its parameters and
    its input."""
    x = torch.zeros(2, 32, 128, requires_grad=True)
    y = model.blocks[0](x, None)
    excluded = {value.untyped_storage().data_ptr() for value in (x, *model.parameters())}
    sizes = {}
    for value in y.grad_fn.saved_tensors:
        storage = value.untyped_storage()
        if storage.data_ptr() not in excluded:
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.full
def test_a_compiled_block_saves_what_its_backward_pass_reads_of_gemms_and_attention() -> None:
    """The mode may change after the compilation."""
    model = gpt("fp32", "reference", layers=1)
    model.compile_blocks("aot_eager")
    B, T, D = 2, 32, 128
    sizes = {}
    for mode in ("none", "selective"):
        model.recompute = mode
        with torch.enable_grad():
            model(torch.zeros(B, T, dtype=torch.int64)).sum().backward()  # sets the block's mode
        sizes[mode] = saved_by_block(model)
    # qkv, attention and its statistic, output, up; not down, which no gradient depends on.
    assert 4 * (B * T * (3 * D + D + D + 128) + B * 4 * T) <= sizes["selective"] < sizes["none"]


@pytest.mark.parametrize("recipe", ["delayed", "fp16"])
@pytest.mark.full
def test_a_run_with_telemetry_is_the_same_to_the_bit(tmp_path: Path, recipe: str) -> None:
    """Telemetry looks inside of blocks: what it computes there is not taken for the model's."""
    ends = []
    for mode in MODES:
        flags: dict[str, Any] = {"activation_checkpointing": mode, "accumulate": 2}
        small = SmallLoop(tmp_path / mode, recipe, telemetry_every=2, what_if=["current"], **flags)
        assert small.run.model.recompute == mode
        small.advance(3)
        ends.append(small.state() | fp8_state(small.run.model))
    assert all(same(end, ends[0]) for end in ends[1:])
