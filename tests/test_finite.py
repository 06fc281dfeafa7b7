"""Steps that are not finite change nothing, and no step waits for the device to find that out."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import metrics
from small_loop import SmallLoop, host_reads
from torch import Tensor, nn

from fp8stack.errors import NumericFailure
from fp8stack.training import loop as loop_module
from fp8stack.training.finite import Failure, FiniteWatch

CPU = torch.device("cpu")
NAN, INF = math.nan, math.inf


class Watched:
    """Two parameters, fused AdamW and a watch."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = (5, 3), (7,)
        self.parameters = [nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.1, fused=True)
        self.watch = FiniteWatch(self.optimizer, CPU)

    def step(self, number: int, loss: float, norm: float, excused: bool | None = None) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.full_like(parameter, norm)
        flag = None if excused is None else torch.tensor(excused)
        self.watch.see(number, torch.tensor(loss), torch.tensor(norm), flag)
        self.optimizer.step()

    def state(self) -> list[Tensor]:
        kept = [p.detach().clone() for p in self.parameters]
        for parameter in self.parameters:
            kept += [value.clone() for value in self.optimizer.state[parameter].values()]
        return kept


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("loss", "norm"), [(NAN, 1.0), (1.0, NAN), (INF, 1.0), (1.0, INF)])
def test_a_step_that_is_not_finite_changes_no_weight_moment_or_count_and_none_after_it_does(
    loss: float, norm: float
) -> None:
    watched = Watched()
    watched.step(1, 3.0, 1.0)
    watched.step(2, 2.0, 1.0)
    before = watched.state()
    assert watched.watch.failure() is None
    watched.step(3, loss, norm)
    assert same(watched.state(), before)
    watched.step(4, 1.0, 1.0)
    watched.step(5, NAN, INF)
    assert same(watched.state(), before)
    found = watched.watch.failure()
    assert found is not None
    assert found.step == 3
    assert repr([found.loss, found.norm]) == repr([loss, norm])


def test_finite_steps_are_those_of_an_optimizer_without_a_watch() -> None:
    watched, alone = Watched(), Watched()
    del alone.optimizer.found_inf  # type: ignore[attr-defined]
    for step in range(1, 4):
        watched.step(step, 1.0, 0.5 * step)
        alone.step(step, 1.0, 0.5 * step)
    assert same(watched.state(), alone.state())


def test_an_excused_step_is_skipped_alone() -> None:
    watched = Watched()
    watched.step(1, 3.0, 1.0, excused=True)
    before = watched.state()
    watched.step(2, 3.0, INF, excused=True)
    assert same(watched.state(), before)
    assert watched.watch.failure() is None
    watched.step(3, 3.0, 1.0, excused=False)
    assert not same(watched.state(), before)
    watched.step(4, 3.0, INF, excused=False)
    assert watched.watch.failure() == Failure(step=4, loss=3.0, norm=INF)


def test_the_number_of_a_late_step_is_exact() -> None:
    watched = Watched()
    watched.step(2**31 - 1, NAN, 1.0)
    found = watched.watch.failure()
    assert found is not None
    assert found.step == 2**31 - 1


def test_an_optimizer_that_cannot_skip_refuses_the_watch() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter], fused=False)
    FiniteWatch(optimizer, CPU)
    parameter.grad = torch.ones(2)
    with pytest.raises(AssertionError, match="found_inf"):
        optimizer.step()


def spoil(small: SmallLoop, what: str, steps: set[int]) -> None:
    """Have the loss, or a gradient alone, be NaN in some steps."""

    def factor() -> float:
        return NAN if small.run.step + 1 in steps else 1.0

    if what == "loss":
        small.run.model.register_forward_hook(lambda model, args, loss: loss * factor())
    else:
        weight = small.run.model.final_norm.weight
        weight.register_hook(lambda gradient: gradient * factor())


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_failure_between_two_looks_is_named_and_nothing_after_it_happened(
    what: str, tmp_path: Path
) -> None:
    small = SmallLoop(tmp_path / "r", "fp32", log_every=10)
    spoil(small, what, {3, 7})
    small.advance(2)
    before = small.state()
    small.advance(7)
    with pytest.raises(NumericFailure, match=r"^Step 3: the loss is .*The step was not taken"):
        small.advance()
    after = small.state()
    assert after.keys() == before.keys()
    assert [name for name in before if not torch.equal(after[name], before[name])] == []
    row = metrics(tmp_path / "r")[-1]
    assert (row["step"], row["event"], row["grad_norm"]) == (3, "non-finite", None)
    assert (row["loss"] is None) == (what == "loss")
    assert row["lr"] == pytest.approx(loop_module.learning_rate(3, small.run.config))


def test_a_failure_is_noticed_before_a_checkpoint_is_written(tmp_path: Path) -> None:
    small = SmallLoop(tmp_path / "r", "fp32", log_every=100, save_every=2)
    spoil(small, "gradient", {3})
    small.advance(3)
    with pytest.raises(NumericFailure, match=r"Step 3: .*The last checkpoint is of step 2\."):
        small.loop.save()
    with pytest.raises(NumericFailure, match="Step 3: "):
        small.advance()
    assert [path.name for path in (tmp_path / "r" / "checkpoints").iterdir()] == ["step-000002"]


def test_a_failure_is_noticed_before_an_evaluation(tmp_path: Path) -> None:
    small = SmallLoop(tmp_path / "r", "fp32", log_every=100, eval_every=4)
    spoil(small, "loss", {2})
    small.advance(3)
    with pytest.raises(NumericFailure, match="Step 2: "):
        small.advance()
    assert all("val_loss" not in row for row in metrics(tmp_path / "r"))


def scale_of(small: SmallLoop, scale: float, **options: int) -> None:
    """Have fp16 go on with a loss scale."""
    scaler = small.run.scaler
    assert scaler is not None
    state = scaler.state_dict() | {"scale": scale} | options
    scaler.load_state_dict(state)


def test_fp16_skips_a_step_that_overflows_lowers_the_scale_and_goes_on(tmp_path: Path) -> None:
    small = SmallLoop(tmp_path / "r", "fp16")
    scale_of(small, 1024.0)
    spoil(small, "gradient", {3})
    small.advance(2)
    before = small.state()
    small.advance()
    after = small.state()
    assert [name for name in before if not torch.equal(after[name], before[name])] == []
    small.advance()
    assert not torch.equal(small.state()["lm_head.weight"], before["lm_head.weight"])
    rows = metrics(tmp_path / "r")
    assert [row["skipped"] for row in rows] == [False, False, True, False]
    assert [row["loss_scale"] for row in rows] == [1024, 1024, 512, 512]


def test_fp16_that_overflows_with_the_smallest_scale_takes_no_later_step(tmp_path: Path) -> None:
    small = SmallLoop(tmp_path / "r", "fp16", log_every=10)
    scale_of(small, 1.0)
    spoil(small, "gradient", {3})
    small.advance(2)
    before = small.state()
    small.advance(7)
    with pytest.raises(NumericFailure, match="Step 3: the gradient overflows in fp16 even with"):
        small.advance()
    after = small.state()
    assert [name for name in before if not torch.equal(after[name], before[name])] == []


def test_the_loss_scale_stays_between_its_bounds(tmp_path: Path) -> None:
    small = SmallLoop(tmp_path / "r", "fp16")
    spoil(small, "gradient", {3})
    small.run.model.register_forward_hook(lambda model, args, loss: loss / 1000)  # so none overflow
    scale_of(small, 200000.0, growth_interval=1)
    small.advance(2)
    scale_of(small, 1.5, growth_interval=100)
    small.advance()
    assert [row["loss_scale"] for row in metrics(tmp_path / "r")] == [262144, 262144, 1]


# Recipe and other keys of the run. The FP8 backends read scales on the host where the host is the
# device, in eager mode.
READS_NOTHING = [("fp32", {}), ("bf16", {}), ("fp16", {}), ("bf16", {"accumulate": 2})]


@pytest.mark.parametrize(("recipe", "keys"), READS_NOTHING)
def test_a_training_step_reads_nothing_on_the_host(
    recipe: str, keys: dict[str, object], tmp_path: Path
) -> None:
    small = SmallLoop(tmp_path / "r", recipe, width=128, **keys)
    small.advance(3)
    assert host_reads(small.next_step()) == {}


@pytest.mark.parametrize(
    "read",
    [
        lambda loss, norm: float(norm),
        lambda loss, norm: bool(loss.isfinite()),
        lambda loss, norm: torch.equal(loss, norm),
        lambda loss, norm: loss.reshape(1)[loss.reshape(1) > 0],
    ],
)
def test_what_reads_on_the_host_is_counted(
    read: Callable[[Tensor, Tensor], object], tmp_path: Path
) -> None:
    small = SmallLoop(tmp_path / "r", "fp32")
    step = small.next_step()
    assert sum(host_reads(lambda: read(*step())).values()) > 0


def test_the_time_of_a_step_is_the_mean_since_the_last_row_without_what_lies_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(loop_module.time, "perf_counter", lambda: now[0])
    keys = {"steps": 11, "log_every": 4, "save_every": 6, "eval_every": 5}
    small = SmallLoop(tmp_path / "r", "fp32", **keys)
    loop = small.loop
    train_step, evaluate, save = loop.train_step, loop.evaluate, loop.save

    def taking(seconds: float, work: Callable) -> Callable:
        def timed(*given: object) -> object:
            now[0] += seconds
            return work(*given)

        return timed

    loop.train_step = lambda step, tokens: taking(step, train_step)(step, tokens)
    loop.evaluate, loop.save = taking(1000, evaluate), taking(5000, save)
    small.advance(11)
    # Rows at 4 and 8, at 5 and 10 with an evaluation, at the last; saved after 6 and the last.
    assert [(row["step"], row["step_ms"]) for row in metrics(tmp_path / "r")] == [
        (4, 2500), (5, 5000), (8, 7500), (10, 9500), (11, 11000),
    ]  # fmt: skip


def test_the_time_left_leaves_the_first_step_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(loop_module.time, "perf_counter", lambda: now[0])
    small = SmallLoop(tmp_path / "r", "fp32", steps=20)
    shown: list[float | None] = []
    small.loop.display.step = lambda row, left: shown.append(left)  # type: ignore[method-assign]
    train_step = small.loop.train_step

    def slow_at_first(step: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        now[0] += 60 if step == 1 else 2
        return train_step(step, tokens)

    small.loop.train_step = slow_at_first  # type: ignore[method-assign]
    small.advance(4)
    assert shown == [None, 36, 34, 32]
