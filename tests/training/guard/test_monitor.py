"""A bad step changes nothing; robust statistics find what is bad; nobody waits for the verdict."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn

from fp8stack.backends import fp8_state
from fp8stack.config import GuardConfig
from fp8stack.errors import NumericFailure
from fp8stack.training import loop as loop_module
from fp8stack.training.guard.monitor import KEPT, Cause, Monitor
from fp8stack.training.step import Step
from tests.conftest import metrics
from tests.support.small_loop import SmallLoop, host_reads

NAN, INF = math.nan, math.inf
OFF = {"guard": {"enabled": False}}


class Watched:
    """Two parameters, fused AdamW and a watch."""

    def __init__(self, **guard: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = (5, 3), (7,)
        self.parameters = [nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.1, fused=True)
        self.watch = Monitor(self.optimizer, GuardConfig(**guard))

    def step(self, number: int, loss: float, norm: float, excused: bool | None = None) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.full_like(parameter, norm)
        flag = None if excused is None else torch.tensor(excused)
        self.watch.begin()
        self.watch.see(number, torch.tensor(loss), torch.tensor(norm), flag)
        self.optimizer.step()

    def skipped(self) -> bool:
        return self.watch.poll().skipped

    def state(self) -> list[Tensor]:
        kept = [p.detach().clone() for p in self.parameters]
        for parameter in self.parameters:
            kept += [value.clone() for value in self.optimizer.state[parameter].values()]
        return kept


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("loss", "norm"), [(NAN, 1.0), (1.0, NAN), (INF, 1.0), (1.0, -INF)])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_step_that_is_not_finite_changes_no_weight_moment_or_count(
    loss: float, norm: float, enabled: bool
) -> None:
    watched = Watched(enabled=enabled)
    watched.step(1, 3.0, 1.0)
    watched.step(2, 2.0, 1.0)
    before = watched.state()
    assert watched.watch.poll().bad == ()
    watched.step(3, loss, norm)
    assert same(watched.state(), before)
    look = watched.watch.poll()
    (bad,) = look.bad
    assert (bad.step, look.streak, look.skipped) == (3, 1, True)
    assert repr([bad.loss, bad.norm]) == repr([loss, norm])
    assert bad.causes == (Cause.GRADIENT if math.isfinite(loss) else Cause.LOSS)
    watched.step(4, 1.0, 1.0)
    assert same(watched.state(), before) != enabled  # nobody is there to act: nothing moves on


def test_two_steps_that_are_not_finite_are_both_told_and_the_streak_ends_with_a_good_one() -> None:
    watched = Watched()
    watched.step(1, NAN, 1.0)
    watched.step(2, 2.0, INF)
    look = watched.watch.poll()
    assert [bad.step for bad in look.bad] == [1, 2]
    assert [bad.why for bad in look.bad] == ["the loss is nan", "the gradient norm is inf"]
    assert look.streak == 2
    watched.step(3, 2.0, 1.0)
    assert watched.watch.poll() == look.__class__(
        bad=(), streak=0, overflows=0, skipped=False, cleared=()
    )


def test_of_more_bad_steps_than_are_kept_the_newest_are_told() -> None:
    watched = Watched()
    for step in range(1, KEPT + 11):
        watched.step(step, NAN, 1.0)
    assert [bad.step for bad in watched.watch.poll().bad] == list(range(11, KEPT + 11))


def test_finite_steps_are_those_of_an_optimizer_without_a_watch() -> None:
    watched, alone = Watched(), Watched()
    del alone.optimizer.found_inf  # type: ignore[attr-defined]
    for step in range(1, 4):
        watched.step(step, 1.0, 0.5 * step)
        alone.step(step, 1.0, 0.5 * step)
    assert same(watched.state(), alone.state())


def test_an_overflow_of_fp16_is_skipped_alone_and_counted() -> None:
    watched = Watched()
    watched.step(1, 3.0, 1.0, excused=True)
    before = watched.state()
    watched.step(2, 3.0, INF, excused=True)
    watched.step(3, 3.0, NAN, excused=True)
    assert same(watched.state(), before)
    look = watched.watch.poll()
    assert (look.bad, look.overflows, look.streak, look.skipped) == ((), 2, 0, True)
    watched.step(4, 3.0, 1.0, excused=False)
    assert not same(watched.state(), before)
    assert watched.watch.poll().overflows == 0
    watched.step(5, 3.0, INF, excused=False)
    assert [bad.step for bad in watched.watch.poll().bad] == [5]


def test_a_loss_that_is_not_finite_is_no_overflow_which_a_smaller_loss_scale_would_cure() -> None:
    watched = Watched()
    watched.step(1, INF, NAN, excused=True)
    assert [bad.step for bad in watched.watch.poll().bad] == [1]


def test_the_number_of_a_late_step_is_exact() -> None:
    watched = Watched()
    watched.step(2**31 - 1, NAN, 1.0)
    assert [bad.step for bad in watched.watch.poll().bad] == [2**31 - 1]


def test_an_optimizer_that_cannot_skip_refuses_the_watch() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter], fused=False)
    Monitor(optimizer, GuardConfig())
    parameter.grad = torch.ones(2)
    with pytest.raises(AssertionError, match="found_inf"):
        optimizer.step()


def limit_by_numpy(values: list[float], config: GuardConfig, factor: float) -> float:
    """The rule of `GuardConfig`, from its description."""
    ordered = np.sort(values)
    median = ordered[(len(ordered) - 1) // 2]
    deviations = np.sort(np.abs(ordered - median))
    sigma = 1.4826 * deviations[(len(ordered) - 1) // 2]
    return max(median + config.deviations * sigma, factor * median)


@pytest.mark.parametrize("count", [32, 33, 127, 128, 200])
def test_a_spike_is_what_exceeds_the_limit_computed_by_numpy(count: int) -> None:
    config = GuardConfig(deviations=5.0)
    random = np.random.default_rng(count)
    losses = (3 + 0.2 * random.standard_normal(count)).astype(np.float32)
    norms = np.exp(0.5 * random.standard_normal(count)).astype(np.float32)
    watched = Watched(deviations=5.0)
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        watched.step(step + 1, float(loss), float(norm))
    assert watched.watch.poll().bad == ()
    last = slice(-128, None)
    loss_limit = limit_by_numpy(losses[last].astype(np.float64), config, config.loss_factor)
    norm_limit = limit_by_numpy(norms[last].astype(np.float64), config, config.gradient_factor)
    nearly, above = 1 - 1e-5, 1 + 1e-5
    # Bad steps do not enter the window, so the limit stays.
    watched.step(301, float(losses[-1]), float(norm_limit * above))
    watched.step(302, float(loss_limit * above), float(norms[-1]))
    bad = watched.watch.poll().bad
    assert [one.causes for one in bad] == [Cause.GRADIENT_SPIKE, Cause.LOSS_SPIKE]
    assert bad[1].loss_limit == pytest.approx(loss_limit, rel=1e-12)
    assert "is above its limit" in bad[1].why
    watched.step(303, float(loss_limit * nearly), float(norms[-1]))
    assert watched.watch.poll().bad == ()


def test_no_step_is_a_spike_before_the_warm_up_is_over() -> None:
    watched = Watched(warmup=20)
    for step in range(1, 20):
        watched.step(step, 3.0, 1.0)
    watched.step(20, 300.0, 1.0)
    assert not watched.skipped()
    watched.step(21, 300.0, 1.0)
    assert watched.skipped()


def test_bad_steps_do_not_poison_the_window() -> None:
    watched = Watched(patience=1000)
    for step in range(1, 40):
        watched.step(step, 3.0 + 0.01 * (step % 7), 1.0)
    for step in range(40, 240):
        watched.step(step, NAN if step % 2 else 1e30, INF)
    watched.watch.poll()
    watched.step(240, 3.05, 1.0)
    assert not watched.skipped()
    watched.step(241, 30.0, 1.0)
    assert watched.skipped()


def test_a_window_saved_and_put_back_judges_alike_and_a_shorter_one_takes_the_newest() -> None:
    watched = Watched()
    for step in range(1, 60):
        watched.step(step, 3.0 + 0.01 * step, 1.0)
    state = watched.watch.state()
    other, shorter = Watched(), Watched(window=40)
    other.watch.load_state(state)
    shorter.watch.load_state(state)
    assert other.watch.state() == state
    assert shorter.watch.state()["window"] == state["window"][-40:]
    for one in (watched, other, shorter):
        one.step(60, 30.0, 1.0)
        assert one.skipped()


def _rank(rank: int, port: int, answers: Any) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    watched = Watched(warmup=8)
    taken = []
    for step in range(1, 13):
        loss = 3.0 + rank
        if (step, rank) == (5, 1):
            loss = NAN  # on one rank only
        if (step, rank) == (11, 0):
            loss = 500.0  # the mean is a spike
        watched.step(step, loss, 1.0)
        taken.append(not watched.skipped())
    answers.put((rank, taken, float(watched.parameters[0].sum())))
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
def test_all_ranks_skip_alike_where_only_one_has_a_bad_loss() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    ranks = [context.Process(target=_rank, args=(rank, port, answers)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=120)
        assert process.exitcode == 0
    found = sorted([answers.get(), answers.get()])
    assert found[0][1:] == found[1][1:]
    assert [step for step, taken in enumerate(found[0][1], 1) if not taken] == [5, 11]


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
def test_without_a_guard_a_failure_between_two_looks_is_named_and_nothing_after_it_happened(
    what: str, tmp_path: Path
) -> None:
    small = SmallLoop(tmp_path / "r", "fp32", log_every=10, **OFF)
    spoil(small, what, {3, 7})
    small.advance(2)
    before = small.state()
    small.advance(7)
    with pytest.raises(
        NumericFailure, match=r"^Step 3: the (loss|gradient norm) is nan.*The step was not taken"
    ):
        small.advance()
    after = small.state()
    assert after.keys() == before.keys()
    assert [name for name in before if not torch.equal(after[name], before[name])] == []
    skip, stop = metrics(tmp_path / "r")
    assert (skip["step"], skip["event"], skip["grad_norm"]) == (3, "skip", None)
    assert (skip["loss"] is None) == (what == "loss")
    assert (stop["step"], stop["event"]) == (3, "stop")


def test_no_checkpoint_is_written_while_steps_are_bad(tmp_path: Path) -> None:
    small = SmallLoop(tmp_path / "r", "fp32", log_every=100, save_every=2)
    spoil(small, "gradient", {3, 4})
    small.advance(4)
    assert saved(tmp_path / "r") == ["step-000002"]
    small.advance()
    assert saved(tmp_path / "r") == ["step-000002", "step-000005"]


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    small = SmallLoop(tmp_path / "r", "fp32")
    small.advance(2)
    next(iter(small.run.optimizer.state.values()))["exp_avg"].view(-1)[0] = NAN
    with pytest.raises(NumericFailure, match="Step 2: a weight or a moment is not finite"):
        small.loop.save()
    assert saved(tmp_path / "r") == []


def saved(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "mxfp8", "fp32"])
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_skipped_step_leaves_weights_moments_and_fp8_state_as_if_it_had_not_been(
    recipe: str, what: str, tmp_path: Path
) -> None:
    small = SmallLoop(tmp_path / "r", recipe, accumulate=2)
    spoil(small, what, {4})
    small.advance(3)
    before = small.state() | fp8_state(small.run.model)
    small.advance()
    after = small.state() | fp8_state(small.run.model)
    assert after.keys() == before.keys()
    assert [name for name in before if not torch.equal(after[name], before[name])] == []
    small.advance()
    assert not torch.equal(small.state()["lm_head.weight"], before["lm_head.weight"])
    assert [row["event"] for row in metrics(tmp_path / "r") if "event" in row] == ["skip"]


def test_a_run_that_skips_a_step_goes_on_as_one_whose_data_never_had_it(tmp_path: Path) -> None:
    runs = []
    for name in ("spoilt", "left out"):
        small = SmallLoop(tmp_path / name, "delayed")
        small.run.model.dropout.p = 0.1  # draws
        small.loop.train_step.draws = True
        if name == "spoilt":
            spoil(small, "loss", {3})
        else:
            small.loop.guard.left_out = {3}
        small.advance(6)
        runs.append(small.state() | fp8_state(small.run.model) | {"rng": torch.get_rng_state()})
    assert [name for name in runs[0] if not torch.equal(runs[0][name], runs[1][name])] == []


@pytest.mark.parametrize("backend", ["emulate", "torch"])
def test_an_inf_that_fp8_hides_is_seen_in_the_amax_and_named(backend: str, tmp_path: Path) -> None:
    small = SmallLoop(tmp_path / "r", "delayed", backend=backend)
    up = small.run.model.blocks[0].mlp.up

    def spike(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor] | None:
        if small.run.step + 1 != 3 or not module.training:
            return None
        x = args[0].clone()
        x[0, 0, 0] = INF
        return (x,)

    up.register_forward_pre_hook(spike)
    small.advance(2)
    before = small.state() | fp8_state(small.run.model)
    small.advance()
    after = small.state() | fp8_state(small.run.model)
    assert [name for name in before if not torch.equal(after[name], before[name])] == []
    (event,) = [row for row in metrics(tmp_path / "r") if row.get("event") == "skip"]
    assert event["why"] == "the amax of blocks.0.mlp.up.input is infinite"
    assert event["loss"] is not None


def test_an_amax_that_spikes_is_skipped_once_the_window_knows_better(tmp_path: Path) -> None:
    small = SmallLoop(tmp_path / "r", "delayed", steps=30, guard={"warmup": 8})
    weight = small.run.model.blocks[0].attention.output.weight

    def spike(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor] | None:
        return (args[0] * 1e4,) if small.run.step + 1 in (5, 20) else None

    small.run.model.blocks[0].attention.output.register_forward_pre_hook(spike)
    small.advance(19)
    assert [row for row in metrics(tmp_path / "r") if "event" in row] == []
    before = weight.clone()
    small.advance()
    assert torch.equal(weight, before)
    (event,) = [row for row in metrics(tmp_path / "r") if row.get("event") == "skip"]
    assert "the amax of blocks.0.attention.output." in event["why"]


@pytest.mark.parametrize("value", [INF, NAN])
def test_what_is_not_finite_in_an_amax_history_is_cleared_and_told(
    value: float, tmp_path: Path
) -> None:
    small = SmallLoop(tmp_path / "r", "delayed")
    delayed = small.run.backend.delayed
    assert delayed is not None
    small.advance(2)
    slot = "blocks.0.mlp.up.input"
    delayed.history.history[5, delayed.history.column(slot)] = value
    small.advance()
    assert delayed.history.history.isfinite().all()
    (event,) = [row for row in metrics(tmp_path / "r") if "event" in row]
    assert (event["event"], event["layer"], event["operand"]) == (
        "clear_amax", "blocks.0.mlp.up", "input",
    )  # fmt: skip


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_a_scale_that_does_not_follow_from_its_amaxes_is_made_anew_and_told(
    algorithm: str, tmp_path: Path
) -> None:
    keys = {"amax_algorithm": algorithm, "history_length": 4}
    small = SmallLoop(tmp_path / "r", "delayed", recipe_overrides=keys)
    delayed = small.run.backend.delayed
    assert delayed is not None
    small.advance(3)
    history, column = delayed.history, delayed.history.column("blocks.0.mlp.up.input")
    right = history.scales.clone()
    history.scales[column] *= 1.01
    small.loop.monitor.begin()
    assert torch.equal(history.scales, right)
    small.advance()
    (event,) = [row for row in metrics(tmp_path / "r") if "event" in row]
    assert (event["event"], event["layer"], event["operand"]) == (
        "clear_amax", "blocks.0.mlp.up", "input",
    )  # fmt: skip


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


def test_without_a_guard_fp16_that_overflows_with_the_smallest_scale_takes_no_later_step(
    tmp_path: Path,
) -> None:
    small = SmallLoop(tmp_path / "r", "fp16", log_every=10, **OFF)
    scale_of(small, 1.0)
    spoil(small, "gradient", {3})
    small.advance(2)
    before = small.state()
    small.advance(7)
    with pytest.raises(NumericFailure, match=r"Step 3: the gradient norm is nan.*more range"):
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
    rows = [row for row in metrics(tmp_path / "r") if "event" not in row]
    assert [row["loss_scale"] for row in rows] == [262144, 262144, 1]


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
    train_step, evaluate, save = Step.__call__, loop.evaluate, loop.save

    def taking(seconds: float, work: Callable) -> Callable:
        def timed(*given: object) -> object:
            now[0] += seconds
            return work(*given)

        return timed

    slow = lambda self, step, tokens: taking(step, train_step)(self, step, tokens)  # noqa: E731
    monkeypatch.setattr(Step, "__call__", slow)
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
    train_step = Step.__call__

    def slow_at_first(self: Step, step: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        now[0] += 60 if step == 1 else 2
        return train_step(self, step, tokens)

    monkeypatch.setattr(Step, "__call__", slow_at_first)
    small.advance(4)
    assert shown == [None, 36, 34, 32]
