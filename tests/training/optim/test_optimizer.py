"""SGD, Muon and AdamW with moments of 8 bits: what each takes, skipped steps, and resuming."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fp8stack.model.config import Experts, GPTConfig
from fp8stack.model.gpt import GPT
from fp8stack.planning.run_config import RunConfig
from fp8stack.planning.run_keys import OptimizerName
from fp8stack.precision import Hardware
from fp8stack.training.checkpoint.state import capture, restore
from fp8stack.training.optim.chained import optimizers_in, parameters_of, plain
from fp8stack.training.optim.optimizer import build_optimizer, require_optimizer
from tests.conftest import metrics, refusal
from tests.support.small_loop import SmallLoop

INF = math.inf
NAMES: tuple[OptimizerName, ...] = get_args(OptimizerName)
CHAINED = [name for name in NAMES if name not in ("adamw", "sgd")]
"""The optimizers of the matrices of the blocks; AdamW has the rest."""


@pytest.fixture(autouse=True)
def _uncompiled(request) -> Iterator[None]:
    """torchao compiles its step, for half a minute; here it runs as it is written."""
    if "slow" in request.keywords:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def state_of(small: SmallLoop) -> dict[str, Tensor]:
    """Copies of the weights and of all that the optimizers keep."""
    groups = capture(small.run.model, small.run.optimizer)
    named = {**groups["model"], **{f"{name} kept": v for name, v in groups["optimizer"].items()}}
    return {name: value.clone() for name, value in named.items()}


def bits(value: Tensor) -> Tensor:
    return value.contiguous().view(torch.uint8) if value.ndim else value


def differing(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[str]:
    assert before.keys() == after.keys()
    return [name for name in before if not torch.equal(bits(before[name]), bits(after[name]))]


def names_of(small: SmallLoop, place: int) -> set[str]:
    """The names of the parameters that an optimizer has."""
    names = {id(parameter): name for name, parameter in small.run.model.named_parameters()}
    return {
        names[id(parameter)]
        for parameter in parameters_of(optimizers_in(small.run.optimizer)[place])
    }


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_sgd_is_its_formula_and_a_skipped_first_step_leaves_no_trace(momentum):
    """b = m b + g + decay w; w = w - lr b, in float64; decay is for matrices alone."""
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    config = RunConfig(optimizer="sgd", lr=0.1, momentum=momentum, weight_decay=0.25)
    optimizer = build_optimizer(model, config)
    parameters = list(model.parameters())
    expected = [weight.detach().double() for weight in parameters]
    buffers = [torch.zeros_like(weight) for weight in expected]
    for step in range(4):
        optimizer.found_inf = torch.tensor(float(step == 0))  # type: ignore[attr-defined]
        gradients = [torch.randn_like(weight) for weight in parameters]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient * INF if step == 0 else gradient
        optimizer.step()
        if step == 0:
            continue
        for place, (weight, gradient) in enumerate(zip(expected, gradients, strict=True)):
            decayed = gradient.double() + (0.25 * weight if weight.ndim > 1 else 0)
            buffers[place] = momentum * buffers[place] + decayed
            weight -= 0.1 * buffers[place]
    for parameter, weight in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.double(), weight, rtol=1e-5, atol=1e-6)
    assert all(
        set(optimizer.state[weight]) == ({"momentum_buffer"} if momentum else set())
        for weight in parameters
    )


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_biases_of_experts_decay_no_more_than_others_and_are_no_matrix_for_muon(name):
    experts = Experts(count=4, per_token=2, width=16)
    sizes: dict[str, Any] = {"vocabulary": 64, "context": 16, "layers": 1, "width": 16, "heads": 2}
    model = GPT(GPTConfig(**sizes, experts=experts))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = build_optimizer(model, RunConfig(optimizer=name, weight_decay=0.1)).param_groups
    decayed = {names[id(p)] for group in groups if group["weight_decay"] for p in group["params"]}
    biases = {name for name in names.values() if name.endswith(".bias")}
    assert "blocks.0.mlp.experts.up.bias" in biases
    assert not decayed & biases
    assert "blocks.0.mlp.experts.up.weight" in decayed


def test_a_matrix_takes_muons_step_scaled_to_the_size_of_adamws():
    model = GPT(GPTConfig(vocabulary=64, context=16, layers=1, width=128, heads=2))
    config = RunConfig(optimizer="muon", lr=0.01, weight_decay=0.0)
    optimizer = build_optimizer(model, config)
    weight = model.get_parameter("blocks.0.mlp.up.weight")
    before = weight.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    moved = weight.detach() - before
    # Orthogonal but for the roughness of Newton and Schulz, times 0.2 lr sqrt(the longer side).
    singular = torch.linalg.svdvals(moved) / (0.01 * 0.2 * max(weight.shape) ** 0.5)
    assert float(singular.min()) > 0.5
    assert float(singular.max()) < 1.5
    rms = float(moved.square().mean().sqrt())
    assert rms == pytest.approx(0.2 * 0.01, rel=0.3)  # what AdamW's steps come to


def test_muon_and_8_bits_have_the_matrices_of_the_blocks_and_adamw_all_else(tmp_path):
    matrices = ("attention.qkv", "attention.output", "mlp.up", "mlp.down")
    codes = {"adamw8bit": torch.uint8, "adamwfp8": torch.float8_e4m3fn}
    for name in CHAINED:
        small = SmallLoop(tmp_path / name, "fp32", optimizer=name)
        small.advance(10)
        rows = metrics(tmp_path / name)
        assert rows[-1]["loss"] < rows[0]["loss"] - 0.1
        first, adamw = optimizers_in(small.run.optimizer)
        assert isinstance(adamw, torch.optim.AdamW)
        assert isinstance(first, torch.optim.Muon) == (name == "muon")
        expected = {
            f"blocks.0.{matrix}.weight" for matrix in matrices if name == "muon" or "mlp" in matrix
        }
        assert names_of(small, 0) == expected
        every = {name for name, _ in small.run.model.named_parameters()}
        assert names_of(small, 1) == every - expected
        assert [group["weight_decay"] for group in adamw.param_groups] == [0.1, 0.0]
        if name in codes:  # of one byte
            state = plain(small.run.optimizer.state[small.run.model.get_parameter(UP)])
            for moment in ("exp_avg.codes", "exp_avg_sq.codes"):
                assert state[moment].dtype == codes[name]
                assert state[moment].float().abs().max() > 0


@pytest.mark.capability("A16")
@pytest.mark.parametrize(
    ("name", "fault", "step"),
    [
        ("muon", "loss", 3), ("adamw8bit", "gradient", 3), ("muon", "gradient", 1),
        ("adamw8bit", "loss", 1), ("sgd", "gradient", 3),
    ],
)  # fmt: skip
def test_a_bad_step_changes_nothing_to_the_bit(name, fault, step, tmp_path):
    small = SmallLoop(tmp_path / "r", "delayed", optimizer=name)
    small.spoil("" if fault == "loss" else "final_norm.weight", {step})
    weights = {n: parameter.detach().clone() for n, parameter in small.run.model.named_parameters()}
    if step > 1:
        small.advance(step - 1)
        before = state_of(small)
        small.advance()
        assert differing(before, state_of(small)) == []
    else:
        small.advance()
        now = dict(small.run.model.named_parameters())
        assert all(torch.equal(now[n], weight) for n, weight in weights.items())
        states = [plain(state).items() for state in small.run.optimizer.state.values()]
        assert len(states) == len(weights)
        moments = [value for state in states for key, value in state if "qmap" not in key]
        assert all(not value.float().any() for value in moments)
    assert [row["event"] for row in metrics(tmp_path / "r") if "event" in row] == ["skip"]
    before = state_of(small)
    small.advance()
    assert len(differing(before, state_of(small))) > len(weights)


@pytest.mark.capability("A9")
@pytest.mark.parametrize("name", CHAINED)
@pytest.mark.parametrize("layer", ["blocks.0.mlp.up", "final_norm"])
def test_an_overflow_in_the_gradients_of_one_optimizer_skips_that_one_alone(name, layer, tmp_path):
    small = SmallLoop(tmp_path / "r", "fp16", optimizer=name, first_loss_scale=1024.0)
    small.spoil(f"{layer}.weight", {3}, INF)
    small.advance(2)
    before = state_of(small)
    small.advance()
    moved = {key.removesuffix(" kept") for key in differing(before, state_of(small))}
    skipped, stepped = (0, 1) if layer.startswith("blocks") else (1, 0)
    assert not any(key.startswith(name) for key in moved for name in names_of(small, skipped))
    assert names_of(small, stepped) <= moved
    rows = metrics(tmp_path / "r")
    assert [row["skipped"] for row in rows] == [False, False, True]
    assert [row["loss_scale"] for row in rows] == [1024, 1024, 512]  # one update
    assert rows[-1]["overflows"] == 1
    assert all(value.float().isfinite().all() for value in state_of(small).values())
    assert small.loop.monitor.poll().overflows == 1


@pytest.mark.capability("A16")
@pytest.mark.parametrize(
    ("keys", "recipe"),
    [
        ({"optimizer": "muon"}, "fp16"),
        ({"optimizer": "sgd"}, "fp16"),
        ({"optimizer": "sgd", "momentum": 0.0}, "delayed"),  # which keeps nothing
        ({"optimizer": "adamw8bit"}, "delayed"),
        ({"optimizer": "adamwfp8"}, "fp32"),
        # Compiled, as torchao does it.
        pytest.param({"optimizer": "adamw8bit"}, "delayed", marks=pytest.mark.slow),
        pytest.param({"optimizer": "adamwfp8"}, "delayed", marks=pytest.mark.slow),
    ],
)
@pytest.mark.full
def test_a_resumed_run_goes_on_to_the_bit(keys, recipe, tmp_path):
    keys = keys | {"save_every": 3, "steps": 6}
    through = SmallLoop(tmp_path / "through", recipe, **keys)
    through.advance(6)
    stopped = SmallLoop(tmp_path / "stopped", recipe, **keys)
    stopped.advance(3)
    saved = state_of(stopped)
    assert bool([name for name in saved if name.endswith(" kept")]) == ("momentum" not in keys)
    resumed = stopped.resumed()
    assert differing(saved, state_of(resumed)) == []
    resumed.advance(3)
    assert differing(state_of(through), state_of(resumed)) == []


def saved_moments(folder: Path, name: str) -> tuple[SmallLoop, dict[str, dict[str, Tensor]]]:
    """A run after two steps, and what a checkpoint of it holds."""
    small = SmallLoop(folder, "fp32", optimizer=name)
    small.advance(2)
    groups = capture(small.run.model, small.run.optimizer)
    save_file(groups["optimizer"], folder / "moments.safetensors")  # it takes plain tensors alone
    return small, groups | {"optimizer": load_file(folder / "moments.safetensors")}


UP = "blocks.0.mlp.up.weight"


def damaged(good: Tensor) -> dict[str, Tensor | None]:
    """A tensor, spoilt in every way that can be told; None is one that is missing."""
    replacements = {"missing": None, "dtype": good.double(), "shape": torch.zeros(5).to(good.dtype)}
    if good.dtype != torch.uint8:  # every uint8 code is a finite value
        replacements["not finite"] = torch.full_like(good.float(), math.nan).to(good.dtype)
    return replacements


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("muon", [f"{UP}.momentum_buffer", "embedding.weight.exp_avg"]),
        ("adamw8bit", [f"{UP}.exp_avg.{suffix}" for suffix in ("codes", "scale", "qmap")]),
        ("adamwfp8", [f"{UP}.exp_avg_sq.codes", f"{UP}.exp_avg_sq.scale", f"{UP}.step"]),
    ],
)
def test_moments_that_are_damaged_are_refused_by_name_and_nothing_is_changed(
    name, tensors, tmp_path
):
    small, groups = saved_moments(tmp_path / "r", name)
    groups["model"] = {n: value.clone() for n, value in groups["model"].items()}
    small.advance(1)
    before = state_of(small)

    def restored(moments: dict[str, Tensor]) -> None:
        restore(small.run.model, small.run.optimizer, groups | {"optimizer": moments})

    for tensor in tensors:
        good = groups["optimizer"][tensor]
        for value in damaged(good).values():
            spoilt = {key: moment for key, moment in groups["optimizer"].items() if key != tensor}
            spoilt |= {} if value is None else {tensor: value}
            assert f"'{tensor}'" in refusal(restored, spoilt)
        more = groups["optimizer"] | {f"{tensor}.more": good}
        assert "a tensor too many" in refusal(restored, more)
    assert differing(before, state_of(small)) == []
    groups["rng"] = {"cpu": groups["rng"]["cpu"].float()}
    assert "RNG state" in refusal(restored, groups["optimizer"])


def test_the_optimizer_is_refused_at_set_up_where_it_cannot_be_had(tmp_path, monkeypatch):
    cpu = Hardware("cpu")
    for name in CHAINED:
        require_optimizer(RunConfig(optimizer=name), cpu, 2)
    for name in ("adamw", "muon", "adamw8bit"):
        require_optimizer(RunConfig(optimizer=name, parallel="fsdp"), cpu, 2)
    for name in ("sgd", "adamwfp8"):
        sharded = RunConfig(optimizer=name, parallel="fsdp")
        require_optimizer(sharded, cpu, 1)
        message = refusal(require_optimizer, sharded, cpu, 2)
        assert f"optimizer {name} is not possible with --parallel fsdp: torch" in message
    for gpu in (Hardware("cuda", (8, 0)), Hardware("cuda", other_gpu="AMD GPU")):
        message = refusal(require_optimizer, RunConfig(optimizer="adamwfp8"), gpu, 1)
        assert "adamwfp8 needs a GPU of NVIDIA that converts to FP8" in message

    def refusal_of_8bit(**keys: Any) -> str:
        return refusal(SmallLoop, tmp_path / "r", "fp32", optimizer="adamw8bit", **keys)

    message = refusal_of_8bit(width=16, model_overrides={"mlp_width": 64})
    assert re.search("no matrix in the blocks .* 4,096 elements", message)

    def none() -> str:
        raise RuntimeError("no compiler")

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", none)
    assert "optimizer adamw8bit needs a C++ compiler" in refusal_of_8bit()
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    assert "need torchao: pip install" in refusal_of_8bit()
    assert not (tmp_path / "r" / "run.toml").exists()
