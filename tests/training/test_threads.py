"""The number of CPU threads, and the way they wait for each other on a busy machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8stack.training import threads
from tests.conftest import TINY, losses

ROOT = Path(__file__).parents[1]
LIBGOMP = sys.platform == "linux" and "libgomp" in Path("/proc/self/maps").read_text()


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def four_cores(monkeypatch) -> None:
    monkeypatch.setattr(threads, "cores", lambda: 4)


@pytest.mark.usefixtures("four_cores")
def test_a_run_keeps_the_threads_that_were_asked_for_and_repeats_its_losses_when_resumed(
    command, tmp_path, capsys
):
    pretrain = ["pretrain", "--out", "run", "--recipe", "fp32", "--threads", "3", *TINY]
    assert command(*pretrain) == 0
    assert torch.get_num_threads() == 3
    assert tomllib.loads((tmp_path / "run" / "run.toml").read_text())["threads"] == 3
    shutil.copytree("run", "cut")
    torch.set_num_threads(1)
    assert command("pretrain", "--resume", "cut/checkpoints/step-000008") == 0
    assert torch.get_num_threads() == 3
    assert losses(Path("cut")) == losses(Path("run"))
    assert "threads 3 ->" not in capsys.readouterr().out
    longer = ["--steps", "13", "--out", "run", "--resume", "auto", "--threads", "2"]
    assert command("pretrain", *longer) == 0
    assert torch.get_num_threads() == 2
    assert "threads 3 -> 2: sums may round differently" in capsys.readouterr().out
    for words in (["generate", "run", "--tokens", "2"], ["eval", "run", "--windows", "1"]):
        assert command(*words, "--threads", "1") == 0
        assert torch.get_num_threads() == 1


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(
    "words",
    [
        *(f"pretrain --threads {count}" for count in ("0", "-1", "two")),
        *("pretrain --threads 5", "compare --threads 5", "generate run --threads 5"),
        *("eval run --threads 5", "bench step --threads 5"),
    ],
)
def test_a_number_of_threads_that_no_machine_like_this_has_is_refused(words, refused):
    error = refused(*words.split())
    count = words.split()[-1]
    assert "threads" in error
    assert count in error or count == "two"  # an option's own words are typer's
    assert count != "5" or "this machine has 4 cores. Give --threads 1 to 4" in error


# Waiting threads


def steps(shares: list[float], seconds: float = 1.0) -> list[str | None]:
    """The note after each step of `seconds` that waits for the given share of its time."""
    now = {"clock": 0.0, "waited": 100.0}
    busy = threads.BusySteps(clock=lambda: now["clock"], waited=lambda: now["waited"])
    notes = []
    for share in shares:
        now["clock"] += 50.0  # an evaluation, or data: however long, and whatever it waits
        now["waited"] += 40.0
        with busy.step():
            now["clock"] += seconds
            now["waited"] += share * seconds
        notes.append(busy.note(2))
    return notes


def test_a_run_whose_steps_wait_for_a_busy_machine_says_so_once_with_the_remedy():
    notes = steps([0.5] * 40)
    assert [index for index, line in enumerate(notes) if line] == [9]
    assert notes[9] == (
        "this machine is busy: steps wait 50% of their time for a core that another process has. "
        "Close other work, or try --threads 1"
    )
    late = steps([0.0] * 25 + [0.4] * 25)
    assert [index for index, line in enumerate(late) if line] == [29]


@pytest.mark.parametrize("shares", [[0.0] * 100, [0.15] * 100, [0.9] * 9], ids=len)
def test_a_run_on_a_quiet_machine_or_with_a_few_slow_steps_says_nothing(shares):
    assert steps(shares) == [None] * len(shares)


def test_a_system_that_does_not_count_waiting_is_never_called_busy():
    ticks = iter(range(0, 10_000, 20))
    busy = threads.BusySteps(clock=lambda: float(next(ticks)), waited=lambda: None)
    for _ in range(20):
        with busy.step():
            pass
        assert busy.note(2) is None
    assert threads.waited_s("no-such-thread") is None


def test_the_loop_shows_what_its_steps_wait(command, monkeypatch, capsys):
    monkeypatch.setattr(threads.BusySteps, "LONG_S", 0.0)
    monkeypatch.setattr(threads, "BUSY", -1.0)  # nothing is as quiet
    assert command("pretrain", "--recipe", "fp32", *TINY) == 0
    assert capsys.readouterr().out.count("this machine is busy: steps wait") == 1


def test_threads_sleep_while_the_machine_is_busy_and_try_less_and_less_often_to_spin():
    judge = threads.Judge()
    assert all(judge.look(share) for share in (0.0, 0.2, 0.1))
    spun = [judge.look(0.9) for _ in range(600)]
    tries = [index for index, spins in enumerate(spun) if spins]
    assert tries == [40, 121, 282, 523]  # 40 looks after the first, then 80, 160; 240 at most


def test_threads_spin_again_once_the_machine_is_quiet():
    judge = threads.Judge()
    busy = [judge.look(0.9) for _ in range(100)]
    assert sum(busy) == 1
    quiet = [judge.look(0.0) for _ in range(200)]
    assert quiet.index(True) <= 42
    assert all(quiet[quiet.index(True) :])
    again = [judge.look(0.9) for _ in range(60)]
    assert again.index(True) == 40  # what was learnt before is forgotten


def test_of_several_threads_the_one_counts_that_waited_longest(monkeypatch):
    waited = {"1": 5.0, "2": 7.0}
    monkeypatch.setattr(os, "listdir", lambda path: list(waited))
    monkeypatch.setattr(threads, "waited_s", lambda name: waited[name.rpartition("/")[2]])
    waits = threads.Waits()
    waited |= {"1": 5.1, "2": 7.5, "3": 9.0}  # a new one waited before it was known
    assert waits.longest_s() == pytest.approx(0.5)
    assert waits.longest_s() == 0
    del waited["2"]
    waited["3"] = 9.25
    assert waits.longest_s() == pytest.approx(0.25)


PROGRAM = """
import json, os, time
import torch
from fp8stack.training import threads

x = torch.ones(1 << 20)
torch.set_num_threads(2)

def burnt():
    start = time.process_time()
    for _ in range(20):
        x.add_(1)
        time.sleep(0.01)  # what the other thread does meanwhile, its CPU time shows
    return time.process_time() - start

def figures():
    return {"burnt_s": burnt(), "sum": (torch.arange(2.0**20) / 3).sum().item()}

class Shares:
    def __init__(self): pass
    def longest_s(self): return busy * threads.LOOK_S

def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()

count = lambda: len(os.listdir("/proc/self/task"))
threads.Waits, threads.LOOK_S, threads._FIRST_TRY = Shares, 0.02, 1
busy, found = 0.0, {}
found["alone"] = figures()
before = count()
with threads.adapting():
    found["quiet"] = figures()
    busy = 0.9
    wait_for(lambda: count() > before + os.cpu_count())
    threads.Judge.look = lambda *_: False
    found["busy"] = figures()
    threads.Judge.look = lambda *_: True
    wait_for(lambda: count() <= before + 1)
    found["quiet again"] = figures()
wait_for(lambda: count() <= before)
print(json.dumps(found))
"""


def run_program(code: str, **environment: str) -> str:
    inherited = {
        key: value for key, value in os.environ.items() if key not in threads.USER_SETTINGS
    }
    options: dict[str, Any] = {"env": inherited | environment, "cwd": ROOT, "timeout": 300}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(threads.cores() < 2, reason="one core: libgomp never spins")
@pytest.mark.skipif(not LIBGOMP, reason="torch computes by another OpenMP here")
def test_threads_that_wait_burn_no_time_of_a_busy_machine_and_give_the_same_sums():
    results = json.loads(run_program(PROGRAM))
    assert len({figures["sum"] for figures in results.values()}) == 1
    burnt = {name: figures["burnt_s"] for name, figures in results.items()}
    assert all(burnt["busy"] < burnt[name] / 2 for name in ("alone", "quiet", "quiet again"))


NOTHING = """
import threading
from fp8stack.training import threads
from fp8stack.cli import app as cli
seen = []
cli.app = lambda *_, **__: seen.append(threading.active_count())
try:
    cli.main([])
except SystemExit:
    print(seen[0], threading.active_count())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="nothing to adapt")
def test_every_command_adapts_unless_the_user_says_how_threads_wait():
    assert run_program(NOTHING).split() == ["2", "1"]
    assert run_program(NOTHING, OMP_WAIT_POLICY="passive").split() == ["1", "1"]
    assert run_program(NOTHING, GOMP_SPINCOUNT="1000").split() == ["1", "1"]
