"""A bad step changes nothing; robust statistics find what is bad; nobody waits for the verdict."""

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing
from torch import Tensor, nn

from fp8stack.common.errors import NumericFailure
from fp8stack.planning.run_config import GuardConfig
from fp8stack.training.distributed.process_group import join
from fp8stack.training.guard.diagnosis import place_of
from fp8stack.training.guard.monitor import LOG_ROWS, Cause, Monitor
from fp8stack.training.step import Step
from tests.conftest import metrics
from tests.faults.processes import in_ranks
from tests.support.small_loop import SmallLoop, changed, host_reads
from tests.training.conftest import saved

NAN, INF = math.nan, math.inf
OFF: dict[str, Any] = {"guard": {"enabled": False}}


class Watched:
    """Two parameters, fused AdamW and a watch."""

    def __init__(self, log_rows: int = LOG_ROWS, **guard: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = (5, 3), (7,)
        self.parameters = [nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.1, fused=True)
        self.watch = Monitor(self.optimizer, GuardConfig(**guard), log_rows=log_rows)

    def step(self, number: int, loss: float, norm: float, excused: bool | None = None) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.full_like(parameter, norm)
        flag = None if excused is None else torch.tensor(excused)
        self.watch.begin()
        self.watch.judge(number, torch.tensor(loss), torch.tensor(norm), flag)
        self.optimizer.step()

    def poll(self) -> Any:
        return self.watch.poll()

    def skipped(self) -> bool:
        return self.poll().skipped

    def state(self) -> list[Tensor]:
        tensors = [p.detach().clone() for p in self.parameters]
        for parameter in self.parameters:
            tensors += [value.clone() for value in self.optimizer.state[parameter].values()]
        return tensors


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("loss", "norm"), [(NAN, 1.0), (1.0, NAN), (INF, 1.0), (1.0, -INF)])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_step_that_is_not_finite_changes_no_weight_moment_or_count(loss, norm, enabled):
    watched = Watched(enabled=enabled)
    watched.step(1, 3.0, 1.0)
    watched.step(2, 2.0, 1.0)
    before = watched.state()
    assert watched.poll().bad == ()
    watched.step(3, loss, norm)
    assert same(watched.state(), before)
    look = watched.poll()
    (bad,) = look.bad
    assert (bad.step, look.streak, look.skipped) == (3, 1, True)
    assert repr([bad.loss, bad.norm]) == repr([loss, norm])
    assert bad.causes == (Cause.GRADIENT if math.isfinite(loss) else Cause.LOSS)
    watched.step(4, 1.0, 1.0)
    assert same(watched.state(), before) != enabled  # nobody is there to act: nothing moves on


def test_of_more_bad_steps_than_are_kept_the_newest_are_told_and_late_numbers_are_exact():
    rows, last = LOG_ROWS + 6, 2**31 - 1
    watched = Watched(log_rows=rows)
    for step in range(last - rows - 10, last + 1):
        watched.step(step, NAN, 1.0)
    assert [bad.step for bad in watched.poll().bad] == list(range(last - rows + 1, last + 1))
    assert watched.skipped()
    watched.watch.forgive()
    look = watched.poll()
    assert (look.streak, look.skipped) == (0, False)


def test_an_overflow_of_fp16_is_skipped_alone_and_counted():
    watched = Watched()
    watched.step(1, 3.0, 1.0, excused=True)
    before = watched.state()
    watched.step(2, 3.0, INF, excused=True)
    watched.step(3, 3.0, NAN, excused=True)
    assert same(watched.state(), before)
    look = watched.poll()
    assert (look.bad, look.overflows, look.streak, look.skipped) == ((), 2, 0, True)
    watched.step(4, 3.0, 1.0, excused=False)
    assert not same(watched.state(), before)
    assert watched.poll().overflows == 0
    watched.step(5, 3.0, INF, excused=False)
    assert [bad.step for bad in watched.poll().bad] == [5]
    watched.step(6, INF, NAN, excused=True)  # a smaller loss scale cures no loss
    assert [bad.step for bad in watched.poll().bad] == [6]


def limit_by_numpy(values: list[float], config: GuardConfig, factor: float) -> float:
    """The rule of `GuardConfig`, from its description."""
    ordered = np.sort(values)
    median = ordered[(len(ordered) - 1) // 2]
    deviations = np.sort(np.abs(ordered - median))
    sigma = 1.4826 * deviations[(len(ordered) - 1) // 2]
    return max(median + config.deviations * sigma, factor * median)


@pytest.mark.parametrize("count", [32, 33, 200])
def test_a_spike_is_what_exceeds_the_limit_computed_by_numpy(count):
    config = GuardConfig(deviations=5.0)
    random = np.random.default_rng(count)
    losses = (3 + 0.2 * random.standard_normal(count)).astype(np.float32)
    norms = np.exp(0.5 * random.standard_normal(count)).astype(np.float32)
    watched = Watched(deviations=5.0)
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        watched.step(step + 1, float(loss), float(norm))
    assert watched.poll().bad == ()
    last = slice(-128, None)
    loss_limit = limit_by_numpy(losses[last].astype(np.float64), config, config.loss_factor)
    norm_limit = limit_by_numpy(norms[last].astype(np.float64), config, config.gradient_factor)
    nearly, above = 1 - 1e-5, 1 + 1e-5
    # Bad steps do not enter the window, so the limit stays.
    watched.step(301, float(losses[-1]), float(norm_limit * above))
    watched.step(302, float(loss_limit * above), float(norms[-1]))
    bad = watched.poll().bad
    assert [bad_step.causes for bad_step in bad] == [Cause.GRADIENT_SPIKE, Cause.LOSS_SPIKE]
    assert bad[1].loss_limit == pytest.approx(loss_limit, rel=1e-12)
    assert "is above its limit" in bad[1].reason
    watched.step(303, float(loss_limit * nearly), float(norms[-1]))
    assert watched.poll().bad == ()


def test_a_window_saved_and_put_back_judges_alike_and_a_shorter_one_takes_the_newest():
    watched = Watched()
    for step in range(1, 60):
        watched.step(step, 3.0 + 0.01 * step, 1.0)
    state = watched.watch.state()
    restored, shorter = Watched(), Watched(window=40)
    restored.watch.load_state(state)
    shorter.watch.load_state(state)
    assert restored.watch.state() == state
    assert shorter.watch.state()["window"] == state["window"][-40:]
    for watched_run in (watched, restored, shorter):
        watched_run.step(60, 30.0, 1.0)
        assert watched_run.skipped()


def _taken(rank: int) -> tuple[list[bool], float]:
    """The steps that a rank of two took, and the sum of its weights."""
    join("cpu", 60)
    watched = Watched(warmup=8)
    steps_taken = []
    for step in range(1, 13):
        loss = 3.0 + rank
        if (step, rank) == (5, 1):
            loss = NAN  # on one rank only
        if (step, rank) == (11, 0):
            loss = 500.0  # the mean is a spike
        watched.step(step, loss, 1.0)
        steps_taken.append(not watched.skipped())
    return steps_taken, float(watched.parameters[0].sum())


def test_all_ranks_skip_alike_where_only_one_has_a_bad_loss():
    first, second = in_ranks(_taken, 2)
    assert first == second
    assert [step for step, was_taken in enumerate(first[0], 1) if not was_taken] == [5, 11]


# The monitor in a run. More faults in numbers are in tests/faults/numeric.

PLACES = {"loss": "", "gradient": "final_norm.weight"}


@pytest.mark.parametrize("place", PLACES)
def test_without_a_guard_a_failure_between_two_looks_is_named_and_nothing_after_it_happened(
    place, tmp_path
):
    small = SmallLoop(tmp_path / "r", "fp32", log_every=10, **OFF)
    small.spoil(PLACES[place], {3, 7})
    small.advance(2)
    before = small.everything()
    small.advance(7)
    with pytest.raises(
        NumericFailure, match=r"^Step 3: the (loss|gradient norm) is nan.*The step was not taken"
    ):
        small.advance()
    assert changed(before, small.everything()) == []
    skip, stop = metrics(tmp_path / "r")
    assert (skip["step"], skip["event"], skip["grad_norm"]) == (3, "skip", None)
    assert (skip["loss"] is None) == (place == "loss")
    assert (stop["step"], stop["event"]) == (3, "stop")


def test_no_checkpoint_is_written_while_steps_are_bad(tmp_path):
    small = SmallLoop(tmp_path / "r", "fp32", log_every=100, save_every=4)
    small.spoil(PLACES["gradient"], {3, 4})
    small.advance(4)
    assert saved(tmp_path / "r") == []
    small.advance()
    assert saved(tmp_path / "r") == ["step-000005"]


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    small = SmallLoop(tmp_path / "r", "fp32")
    small.advance(2)
    next(iter(small.run.optimizer.state.values()))["exp_avg"].view(-1)[0] = NAN
    with pytest.raises(NumericFailure, match="Step 2: a weight or a moment is not finite"):
        small.loop.save()
    assert saved(tmp_path / "r") == []


def test_an_amax_that_spikes_is_skipped_once_the_window_knows_better(tmp_path):
    small = SmallLoop(tmp_path / "r", "delayed", steps=30, guard={"warmup": 8})
    output = small.run.model.get_submodule("blocks.0.attention.output")
    weight = output.get_parameter("weight")
    output.register_forward_pre_hook(
        lambda _, args: (args[0] * 1e4,) if small.run.step + 1 in (5, 20) else None
    )
    small.advance(19)
    assert small.events() == []
    before = weight.clone()
    small.advance()
    assert torch.equal(weight, before)
    (event,) = small.events()
    assert event["event"] == "skip"
    assert "the amax of blocks.0.attention.output." in event["why"]


def test_a_scale_that_does_not_follow_from_its_amaxes_is_made_anew_and_told(tmp_path):
    keys = {"amax_algorithm": "most_recent", "history_length": 4}
    small = SmallLoop(tmp_path / "r", "delayed", recipe_overrides=keys)
    history = small.run.backend.delayed.history
    small.advance(3)
    right = history.scales.clone()
    history.scales[history.column("blocks.0.mlp.up.input")] *= 1.01
    small.loop.monitor.begin()
    assert torch.equal(history.scales, right)
    small.advance()
    (event,) = small.events()
    named = event["event"], event["layer"], event["operand"]
    assert named == ("clear_amax", "blocks.0.mlp.up", "input")


# The FP8 backends read scales on the host where the host is the device, in eager mode.
@pytest.mark.parametrize(
    ("recipe", "keys"),
    [
        *(("fp16", {}), ("bf16", {"accumulate": 2})),
        *(("fp32", {"clip_mode": mode}) for mode in ("norm", "value", "adaptive")),
    ],
)
def test_a_training_step_reads_nothing_on_the_host(recipe, keys, tmp_path):
    small = SmallLoop(tmp_path / "r", recipe, width=128, **keys)
    small.advance(12)
    assert host_reads(small.next_step()) == {}


def test_the_time_of_a_step_is_the_mean_since_the_last_row_without_what_lies_between(
    tmp_path, monkeypatch
):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    small = SmallLoop(
        tmp_path / "r", "fp32", steps=11, log_every=4, save_every=6, eval_every=5
    )  # fmt: skip
    loop = small.loop
    train_step, evaluate, save = Step.__call__, loop.evaluate, loop.save

    def taking(seconds: float, work: Callable) -> Callable:
        def timed(*args: object) -> object:
            now[0] += seconds
            return work(*args)

        return timed

    slow = lambda self, step, tokens: taking(step, train_step)(self, step, tokens)  # noqa: E731
    monkeypatch.setattr(Step, "__call__", slow)
    monkeypatch.setattr(loop, "evaluate", taking(1000, evaluate))
    monkeypatch.setattr(loop, "save", taking(5000, save))
    etas: list[float | None] = []
    monkeypatch.setattr(loop.display, "step", lambda row, eta: etas.append(eta))
    small.advance(11)
    # At the first row, that of step 4, without the first step, which compiles.
    assert etas[0] == (2 + 3 + 4) / 3 * 7
    # Rows at 4 and 8, at 5 and 10 with an evaluation, at the last; saved after 6 and the last.
    assert [(row["step"], row["step_ms"]) for row in metrics(tmp_path / "r")] == [
        (4, 2500), (5, 5000), (8, 7500), (10, 9500), (11, 11000),
    ]  # fmt: skip


def test_a_slot_of_a_copy_for_one_gemm_is_its_operands():
    assert place_of("blocks.0.mlp.up.input.wgrad") == ("blocks.0.mlp.up", "input", None)
    assert place_of("blocks.0.mlp.up.weight.dgrad") == ("blocks.0.mlp.up", "weight", None)
    assert place_of("blocks.0.mlp.experts.up.3.input") == ("blocks.0.mlp.experts.up", "input", 3)
