"""Training in several ranks comes to the numbers of one, and how ranks agree with each other."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from fp8stack.common.errors import RankLost, UserError
from fp8stack.model.config import plan_for
from fp8stack.planning.run_config import RunConfig
from fp8stack.precision import Hardware, Plan, load_recipe
from fp8stack.training import run_plans
from fp8stack.training.checkpoint import reader
from fp8stack.training.checkpoint.state import random_states
from fp8stack.training.distributed.parallelize import part_of
from fp8stack.training.distributed.process_group import ALONE, ElsewhereError, Ranks, join
from fp8stack.training.guard.policy import Guard, Outcome
from fp8stack.training.run_plans import plan_run
from tests.conftest import metrics
from tests.faults.processes import Change, in_ranks, run_ranks, states, telling_states, unchanged
from tests.faults.twins import TEXT
from tests.support.cases import case
from tests.support.quantizers import has_amax_of_tensors, has_draws
from tests.support.small_loop import changed

WORDS = [
    "pretrain", "--data", "text.txt", "--device", "cpu", "--context", "16", "--batch", "8",
    "--steps", "6", "--eval-every", "6", "--save-every", "6", "--set", "warmup_steps=2",
    "--set", "eval_windows=5", "--set", "sample_tokens=4", "--set", "model_overrides.layers=2",
    "--set", "model_overrides.width=128", "--set", "model_overrides.heads=2",
    "--set", "rank_timeout=60", "--set", "log_every=1",
]  # fmt: skip
RECKONED = {  # which backend computes which recipes here
    "reference": ("fp32", "bf16", "fp16"),
    "emulate": ("delayed", "current", "block", "mxfp8", "nvfp4", "mxfp4"),
    "torch": ("delayed", "current"),
}


def _agree(rank: int) -> dict[str, Any]:
    """Exchanges of two ranks, and what became of each on this one."""
    ranks = join("cpu", 60)
    answers: dict[str, Any] = {"any": [ranks.any(False), ranks.any(rank == 1)]}
    answers["texts"] = ranks.texts("" if rank == 0 else "zwei \N{GREEK SMALL LETTER PI}")
    answers["main"] = ranks.from_main(lambda: {"asked": rank, "list": [1, None]})
    answers["gather"] = [int(value) for value in ranks.gather(torch.tensor(rank + 5))]
    answers["apart"] = ranks.apart().any(rank == 0)
    answers["random"] = {key: of[:16].tolist() for key, of in _random(ranks, rank).items()}

    def fails(victim: int, message: str) -> None:
        if rank == victim:
            error = UserError(message)
            error.exit_code = 4
            raise error

    def fails_before_waiting() -> None:
        fails(1, "at once")
        ranks.wait()

    answers["from main"] = _raised(lambda: ranks.from_main(lambda: fails(0, "no such file")))
    answers["together"] = _raised(lambda: _within(ranks, lambda: fails(1, "no room")))
    answers["within"] = _raised(lambda: _within(ranks, fails_before_waiting))
    answers["unequal"] = _raised(lambda: ranks.require_equal("plan", f"plan {rank}"))
    answers["equal"] = _raised(lambda: ranks.require_equal("plan", "plan"))
    if rank == 1:
        return answers
    answers["lost"] = _raised(ranks.wait)  # the other one has left
    return answers


def _random(ranks: Ranks, rank: int) -> dict[str, Tensor]:
    torch.manual_seed(rank)
    return dict(random_states(ranks))


def _within(ranks: Ranks, work: Callable[[], object]) -> None:
    with ranks.together():
        work()


def _raised(work: Callable[[], object]) -> tuple[str, str, int] | None:
    try:
        work()
    except UserError as error:
        return type(error).__name__, str(error), error.exit_code
    return None


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    return in_ranks(_agree, 2)


def test_what_ranks_exchange_is_the_same_on_all(answers):
    for key in ("any", "texts", "main", "gather", "apart", "random"):
        assert answers[0][key] == answers[1][key], key
    assert answers[0]["any"] == [False, True]
    assert answers[0]["texts"] == ["", "zwei \N{GREEK SMALL LETTER PI}"]
    assert answers[1]["main"] == {"asked": 0, "list": [1, None]}
    assert answers[1]["gather"] == [5, 6]
    assert answers[1]["apart"] is True
    states = answers[1]["random"]
    torch.manual_seed(1)
    assert states["cpu.1"] == torch.get_rng_state()[:16].tolist()
    assert states["cpu"] != states["cpu.1"]


def test_an_error_on_one_rank_ends_all_with_its_message_and_exit_code(answers):
    assert answers[0]["from main"] == ("UserError", "no such file", 4)
    assert answers[1]["from main"] == ("ElsewhereError", "rank 0: no such file", 4)
    for key, message in (("together", "no room"), ("within", "at once")):
        assert answers[1][key] == ("UserError", message, 4)
        assert answers[0][key] == ("ElsewhereError", f"rank 1: {message}", 4)
    for of_rank in answers:
        kind, message, code = of_rank["unequal"]
        assert (kind, code) == ("UserError", 2)
        assert message.startswith("Rank 1 has another plan than rank 0")
        assert of_rank["equal"] is None
    kind, message, code = answers[0]["lost"]
    assert (kind, code) == (RankLost.__name__, 4)
    assert message.startswith("rank 0 of 2 lost another rank")


def test_one_process_exchanges_nothing():
    assert not torch.distributed.is_initialized()
    assert join("cpu", 60) is ALONE
    assert ALONE.is_main
    assert ALONE.any(True) is True
    assert ALONE.apart() is ALONE
    assert ALONE.from_main(lambda: (1, 2)) == (1, 2)
    with pytest.raises(UserError) as error, ALONE.together():
        raise UserError("x")
    assert not isinstance(error.value, ElsewhereError)


LAUNCHED = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', not a number"),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        (LAUNCHED | {"MASTER_PORT": "abc"}, "The environment's MASTER_PORT is 'abc', not a number"),
    ],
)
def test_a_launchers_environment_that_is_incomplete_is_refused(variables, words, monkeypatch):
    for key in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(key, raising=False)
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(UserError, match=re.escape(words)):
        join("cpu", 60)


@pytest.mark.parametrize(("ranks", "accumulate"), [(1, 2), (2, 1), (2, 2), (4, 2)])
def test_ranks_share_out_each_micro_batch_and_nothing_is_left_over(ranks, accumulate):
    tokens = torch.arange(8 * 3).view(8, 3)
    shares = [part_of(tokens, rank, ranks, accumulate) for rank in range(ranks)]
    for number, micro_batch in enumerate(tokens.chunk(accumulate)):
        micro = [share.chunk(accumulate)[number] for share in shares]
        assert torch.equal(torch.cat(micro), micro_batch)


def test_a_batch_that_cannot_be_shared_equally_is_refused():
    config = RunConfig(batch=8, accumulate=2)
    plan_run(config, Hardware("cpu"), 4)
    with pytest.raises(UserError, match=r"in 2 micro-batches cannot be shared.* multiple of 6"):
        plan_run(config, Hardware("cpu"), 3)


class Trained:
    """Runs of one rank and of several in a folder; those of one rank are trained once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.alone: dict[tuple[str, ...], Path] = {}
        (folder / "text.txt").write_text(TEXT)

    def single_rank(self, flags: tuple[str, ...], change: Change) -> Path:
        """A run of one rank."""
        if flags not in self.alone:
            self.alone[flags] = self.several(flags, 1, change)
        return self.alone[flags]

    def several(self, flags: tuple[str, ...], count: int, change: Change) -> Path:
        run = self.folder / f"run-{len(list(self.folder.iterdir()))}"
        words = [*WORDS, *flags, "--out", run.name]
        ended = run_ranks(words, self.folder, count, change=change, timeout_s=400)
        assert [ended_rank.code for ended_rank in ended] == [0] * count, ended
        assert [ended_rank.stderr for ended_rank in ended] == [""] * count
        assert [bool(ended_rank.stdout) for ended_rank in ended] == [True] + [False] * (count - 1)
        return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained"))


def compare(
    trained: Trained,
    recipe: str,
    backend: str,
    parallel: str,
    flags: tuple[str, ...] = (),
    change: Change = unchanged,
    ranks: int = 2,
) -> None:
    """Train with several ranks and with one, and compare.

    In current scaling, a rank takes the amax of a tensor from its own rows of a micro-batch; one
    rank has the same rows if it accumulates that many times more. Random bits depend on the
    micro-batch, so one rank with more of them draws others: the weights must move little.
    """
    # A block of a gradient has 128 tokens, as many as a rank's rows of a micro-batch.
    context = ("--context", "64") if recipe == "block" else ()
    accumulate = 2 * ranks if has_amax_of_tensors(recipe) else 2
    little = ("--lr", "3e-4") if accumulate > 2 and has_draws(recipe) else ()
    shared = ("--recipe", recipe, "--backend", backend, *context, *little, *flags)
    single = trained.single_rank((*shared, "--accumulate", str(accumulate)), change)
    states_folder = trained.folder / f"fp8-{len(list(trained.folder.iterdir()))}"
    states_folder.mkdir()
    recompute = ("--activation-checkpointing", "block") if parallel == "fsdp" else ()
    several = trained.several(
        (*shared, "--accumulate", "2", "--parallel", parallel, *recompute),
        ranks,
        partial(_both, change, partial(telling_states, str(states_folder))),
    )
    rank_states = states(states_folder, ranks)
    assert bool(rank_states[0]) == (load_recipe(recipe).delayed or has_draws(recipe))
    assert all(changed(rank_states[0], states_of_rank) == [] for states_of_rank in rank_states[1:])
    require_near(metrics(several), metrics(single), recipe)
    assert (several / "sample.txt").exists()


def require_near(rows: list[dict[str, Any]], expected: list[dict[str, Any]], recipe: str) -> None:
    assert [row["step"] for row in rows] == [row["step"] for row in expected] == [*range(1, 7)]
    fp8 = load_recipe(recipe).is_fp8
    for row, expected_row in zip(rows, expected, strict=True):
        near = 1e-5 if recipe == "fp32" or row["step"] == 1 else 5e-3
        assert row["loss"] == pytest.approx(expected_row["loss"], rel=near, abs=0), row["step"]
        far = 2e-4 if recipe == "fp32" else 0.05
        assert row["grad_norm"] == pytest.approx(expected_row["grad_norm"], rel=far), row["step"]
        assert row["lr"] == expected_row["lr"]
        if row["fp8_gemms"] is not None:  # compiled code does not count
            assert (row["fp8_gemms"] > 0) == (expected_row["fp8_gemms"] > 0) == fp8
    assert rows[-1]["val_loss"] == pytest.approx(expected[-1]["val_loss"], rel=near)


@contextmanager
def _both(first: Change, second: Change, rank: int) -> Iterator[None]:
    with first(rank), second(rank):
        yield


@contextmanager
def demoting(rank: int) -> Iterator[None]:
    """A change: a layer is out of FP8 in steps 3 and 4, as the guard can decide."""
    check = Guard.check

    def checked(guard: Guard, step: int, **options: bool) -> Outcome:
        if step == 2:
            guard.demoted["blocks.0.mlp.up"] = 4
        return check(guard, step, **options)

    with patch.object(Guard, "check", checked):
        yield


def test_ranks_that_take_a_layer_out_of_fp8_and_back_train_as_one(trained):
    flags = ("--recipe", "delayed", "--backend", "torch")
    single = trained.single_rank(flags, demoting)
    several = trained.several((*flags, "--parallel", "fsdp"), 2, demoting)
    rows, expected_rows = (
        [row for row in metrics(run) if "loss" in row] for run in (several, single)
    )
    for row, expected in zip(rows, expected_rows, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=5e-3, abs=0)
        assert (row["fp8_gemms"] < rows[0]["fp8_gemms"]) == (row["step"] in (3, 4))


GRID = [
    (recipe, backend, parallel)
    for backend, recipes in RECKONED.items()
    for recipe in recipes
    for parallel in ("ddp", "fsdp")
]
QUICK = {("delayed", "torch", "ddp")}  # test_rows.py (R12, R13) has fp32, emulate and FSDP
assert set(GRID) > QUICK


@pytest.mark.capability("E3")
@pytest.mark.parametrize(
    ("recipe", "backend", "parallel"),
    [case(*row, quick=row in QUICK) for row in GRID],
)
@pytest.mark.full
def test_two_ranks_train_as_one(trained, recipe, backend, parallel):
    compare(trained, recipe, backend, parallel)


@pytest.mark.capability("C1")
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.full
def test_two_ranks_go_through_the_phases_of_one(trained, parallel):
    flags = ("--recipe", "delayed", "--phases", "default", "--accumulate", "2")
    runs = [trained.several((*flags, "--parallel", parallel), count, unchanged) for count in (1, 2)]
    single, two = ([row for row in metrics(run) if "loss" in row] for run in runs)
    assert [row["precision"] for row in two] == ["bf16"] * 2 + ["delayed-emulated"] * 3 + ["bf16"]
    for row, single_row in zip(two, single, strict=True):
        assert row["loss"] == pytest.approx(single_row["loss"], rel=5e-3, abs=0), row["step"]
        assert (row["fp8_gemms"] > 0) == (single_row["fp8_gemms"] > 0) == (3 <= row["step"] <= 5)
    histories = [reader.load(run / "checkpoints/step-000006").tensors["fp8"] for run in runs]
    assert histories[0].keys() == histories[1].keys()
    for name, tensor in histories[0].items():
        if not name.endswith(".amax_history"):
            continue
        places = {"weight": 1}.get(name.split(".")[-2], 2)  # of a step, in delayed scaling
        calibrated = 1024 - 3 * places - 1  # as step 3 begins
        assert [int((history[name] > 0).sum()) for history in histories] == [3 * places + 1] * 2
        expected = histories[1][name][calibrated]  # the maxima over both ranks
        torch.testing.assert_close(tensor[calibrated], expected, rtol=0.02, atol=1e-6)


COMPILED = [  # minutes each
    ("bf16", "reference", "fsdp"), ("delayed", "emulate", "ddp"), ("delayed", "torch", "fsdp"),
    ("current", "torch", "ddp"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "backend", "parallel"), COMPILED)
def test_two_ranks_train_as_one_compiled(trained, recipe, backend, parallel):
    compare(trained, recipe, backend, parallel, ("--compile", "--set", "rank_timeout=600"))


@contextmanager
def _on_te(recipe: str, rank: int) -> Iterator[None]:
    """Plan for a GPU with Transformer Engine, which a stand-in on the CPU is."""
    from tests.support.te.te_stand_in import installed

    gpu = Hardware("cuda", (10 if recipe == "mxfp8" else 9, 0), has_te=True)

    def planned(config: Any, recipe: Any, hardware: Any, **options: Any) -> Plan:
        # If it knew the tokens, the plan would keep layers as small as these out of FP8.
        return replace(plan_for(config, recipe, gpu, **options | {"work": None}), device="cpu")

    with installed(), patch.object(run_plans, "plan_for", planned):
        yield


@pytest.mark.parametrize(
    "recipe",
    ["delayed", *(pytest.param(r, marks=pytest.mark.slow) for r in ("current", "block", "mxfp8"))],
)
@pytest.mark.full
def test_two_ranks_train_as_one_by_transformer_engine(trained, recipe):
    compare(trained, recipe, "te", "ddp", change=partial(_on_te, recipe))
