"""The parts of a run one by one: schedule, optimizer, evaluation, throughput, display, plot."""

import io
import re
import signal
import sys

import pytest
import torch
from rich.console import Console

from fp8stack.common.errors import UserError
from fp8stack.layers.compiler import require_compiler
from fp8stack.model.config import GPTConfig
from fp8stack.model.gpt import GPT
from fp8stack.planning.run_config import RunConfig
from fp8stack.precision import Hardware, resolve, toolchain
from fp8stack.training.evaluate import validation_loss
from fp8stack.training.metrics import console, throughput
from fp8stack.training.metrics.console import PlainDisplay, RichDisplay, describe
from fp8stack.training.metrics.loss_plot import loss_plot
from fp8stack.training.metrics.read import Metrics
from fp8stack.training.metrics.throughput import Peak, best_tflops, peak_rate
from fp8stack.training.optim.optimizer import learning_rate
from fp8stack.training.signals import STOPPING, StopRequests
from tests.conftest import metrics
from tests.support.small_loop import SmallLoop

CPU = Hardware("cpu")
SMALL = GPTConfig(vocabulary=61, context=16, layers=1, width=32, heads=2)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        # from 1.0 to 0.1; cosine: 0.1 + 0.9 * (1 + cos(pi * done)) / 2
        ({"schedule": "cosine"}, {1: 0.5, 2: 1.0, 6: 0.55, 10: 0.1}),
        # the last fifth falls linearly: from step 8 to step 10
        ({"schedule": "wsd"}, {1: 0.5, 2: 1.0, 6: 1.0, 8: 1.0, 9: 0.55, 10: 0.1}),
        ({"schedule": "constant"}, {1: 0.5, 2: 1.0, 6: 1.0, 10: 1.0}),
        ({"steps": 3, "warmup_steps": 6}, {3: 0.5}),
        ({"steps": 1, "warmup_steps": 0}, {1: 0.1}),
    ],
)
def test_the_learning_rate_is_the_schedule_computed_by_hand(keys, expected):
    config = RunConfig(**{"steps": 10, "warmup_steps": 2, "lr": 1.0, "min_lr": 0.1} | keys)
    assert {step: learning_rate(step, config) for step in expected} == pytest.approx(expected)


def test_the_validation_loss_is_the_mean_over_all_tokens_whatever_the_batch():
    model = GPT(SMALL).eval()
    windows = torch.randint(61, (7, 17))
    with torch.no_grad():
        expected = model(windows[:, :-1], windows[:, 1:]).item()
    for batch in (1, 3, 7):
        got = validation_loss(model, windows, batch, torch.device("cpu"))
        assert got == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("missing", "hardware", "remedy"),
    [
        ("g++", CPU, "Install g"),
        ("Python.h", CPU, "python3-dev"),
        ("triton", Hardware("cuda", (9, 0)), "pip install triton"),
        ("gcc", Hardware("cuda", (9, 0)), "install gcc"),
    ],
)
def test_without_what_compiling_needs_the_error_names_the_remedy(
    missing, hardware, remedy, monkeypatch, tmp_path
):
    plan = resolve("bf16", hardware)
    monkeypatch.setattr(sys, "platform", "linux")
    compiler = "no-such-compiler" if missing == "g++" else sys.executable
    if missing == "Python.h":
        monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    spec = None if missing == "triton" else object()
    monkeypatch.setattr(toolchain, "find_spec", lambda name: spec)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    from torch._inductor import config as inductor

    with inductor.patch("cpp.cxx", (compiler,)), pytest.raises(UserError, match=remedy):
        require_compiler(plan)


@pytest.mark.parametrize(
    ("name", "recipe", "tflops"),
    [
        ("NVIDIA H200", "bf16", 989),
        ("NVIDIA H900", "bf16", None),
        ("NVIDIA H200", "tf32", 494),
        ("NVIDIA H200", "delayed", 1979),
        ("NVIDIA B200", "nvfp4", 9000),
        ("NVIDIA H200", "nvfp4", 989),
    ],
)
def test_mfu_divides_by_the_data_sheets_peak_or_by_none(name, recipe, tflops):
    hardware = Hardware("cuda", (10 if "B200" in name else 9, 0), has_te=True, name=name)
    peak = peak_rate(hardware, resolve(recipe, hardware))
    assert peak.tflops == tflops
    assert (str(tflops) in peak.name) == (tflops is not None)


def test_on_a_cpu_the_peak_is_measured_and_says_so(monkeypatch):
    rates = {("fp32", False): 0.2, ("bf16", False): 0.5, ("fp32", True): 0.4}

    def measured(dtype: str, by_bf16: bool, threads: int) -> float:
        return rates[dtype, by_bf16]

    monkeypatch.setattr(throughput, "measured_cpu_tflops", measured)
    monkeypatch.setenv("FP8STACK_CPU_BF16", "yes")
    by_bf16 = "400 GFLOP/s measured fp32 matmul by bf16 instructions"
    for recipe, width, cpu_bf16, name in (
        ("fp32", 64, False, "200 GFLOP/s measured fp32 matmul"),
        ("bf16", 64, False, "500 GFLOP/s measured bf16 matmul"),
        ("delayed", 64, False, "200 GFLOP/s measured fp32 matmul"),
        ("delayed", 64, True, by_bf16),
        ("delayed", 256, True, "500 GFLOP/s measured bf16 matmul"),
    ):
        machine = Hardware("cpu", cpu_bf16=cpu_bf16)
        plan = resolve(recipe, machine).for_layers({"up": (width, width)})
        assert peak_rate(machine, plan).name == name


def test_of_a_busy_machines_peak_the_best_of_many_short_bursts_counts(monkeypatch):
    monkeypatch.setattr(throughput, "BURSTS_S", 0.3)
    now = 0.0
    sizes: list[int] = []

    def burst(size: int) -> float:
        nonlocal now
        sizes.append(size)
        seconds = 2 * size**3 / 1e11  # 100 GFLOP/s, but for what others take of it
        seconds *= 1.0 if len(sizes) in (2, 9) else 7.0
        now += seconds
        return seconds

    assert best_tflops(burst, lambda: now) == pytest.approx(0.1)
    assert set(sizes[3:]) == {512}  # whose 2.7 ms are enough
    assert throughput.BURSTS_S <= now < throughput.BURSTS_S + 0.06


def test_a_step_that_is_faster_than_the_measured_peak_raises_it():
    measured = Peak(tflops=0.1, name="100 GFLOP/s measured fp32 matmul", measured=True)
    assert measured.at_least(0.1) is measured
    raised = measured.at_least(0.119)
    assert raised.mfu(0.119) == 1.0
    assert str(raised) == "peak for MFU: 100 GFLOP/s measured fp32 matmul, or the fastest step"
    assert raised.at_least(0.2).mfu(0.1) == 0.5
    assert measured.mfu(0.119) == 1.0
    sheet = Peak(tflops=989.0, name="989 TFLOP/s half")
    assert sheet.at_least(1000.0) is sheet
    assert Peak(tflops=None, name="none").at_least(1.0).mfu(1.0) is None


ROW = {
    "step": 3, "loss": 1.23456, "lr": 0.001, "grad_norm": 0.5, "step_ms": 12.3,
    "tokens_per_s": 45600.0, "mfu": 0.37, "memory_gib": 0.5, "precision": "delayed-emulated",
    "fp8_gemms": 48,
}  # fmt: skip


def test_the_log_line_says_it_all():
    assert describe(ROW, 10) == (
        "step 3/10 | loss 1.2346 | lr 1.00e-03 | grad norm 0.50 | 12 ms | 45.6k tok/s | "
        "MFU 37% | 0.50 GiB | delayed-emulated"
    )
    broken = ROW | {"loss": None, "grad_norm": None, "mfu": None}
    assert "loss non-finite" in describe(broken, 10)
    assert "MFU" not in describe(broken, 10)
    scaled = ROW | {"loss_scale": 32768.0, "skipped": True}
    assert "loss scale 32768, skipped" in describe(scaled, 10)


def test_plain_lines_are_complete_and_carry_the_time_left(capsys):
    display = console.open_display(10, 2, None)
    for seconds_left in (None, 61.0):
        display.step(ROW, seconds_left)
    display.note("[a note]")
    display.close()
    line = describe(ROW, 10)
    printed = capsys.readouterr().out.splitlines()
    assert printed == [f"{line} | ETA n/a", f"{line} | ETA 0:01:01", "[a note]"]


@pytest.mark.parametrize(
    ("steps", "start", "log_every", "expected"),
    [
        (1200, 0, None, [1, *range(60, 1201, 60)]),
        (1205, 601, None, [602, *range(660, 1201, 60), 1205]),
        (25, 0, None, [1, 10, 20, 25]),
        (9, 0, None, range(1, 10)),
        (1200, 0, 1, range(1, 1201)),
    ],
)
def test_the_first_the_last_and_every_20th_part_of_the_steps_get_a_row(
    steps, start, log_every, expected
):
    display = PlainDisplay(steps, start, log_every)
    rows = [step for step in range(start + 1, steps + 1) if display.has_row(step)]
    assert rows == list(expected)


def on_screen(written: str) -> list[str]:
    """The rows of a terminal after `written`: of what moves its cursor, what rich writes."""
    rows, at = [""], 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", written):
        if token == "\n":
            at += 1
            rows += [""] * (at + 1 - len(rows))
        elif token.endswith("A") and token.startswith("\x1b"):
            at -= int(token[2:-1])
        elif token == "\x1b[2K":
            rows[at] = ""
        elif token[0] not in "\x1b\r":
            rows[at] += token
    return [row for row in rows if row]


def test_a_terminal_shows_a_live_line_and_in_the_end_rows_and_notes_alone():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80)
    display = RichDisplay(1200, 1190, None, console)
    display.step(ROW | {"step": 1199}, 61.0)
    display.progress.refresh()
    (live,) = on_screen(screen.getvalue())
    assert live.startswith("step 1199/1200 ")
    assert live.rstrip().endswith(" loss 1.2346 | 45.6k tok/s")
    assert len(live) <= 80
    requests = StopRequests()
    requests.tell = display.tell
    requests._handle(signal.SIGINT, None)
    display.progress.refresh()
    assert on_screen(screen.getvalue())[-1] == STOPPING
    last = ROW | {"step": 1200}
    display.step(last, 0.0)
    display.note("[bold] stays")
    display.close()
    assert on_screen(screen.getvalue()) == [STOPPING, describe(last, 1200), "[bold] stays"]


def test_the_plot_is_a_picture_even_of_little():
    rows = [{"step": i, "loss": 5 / i} for i in range(1, 50)]
    rows[-1]["val_loss"] = 0.2
    for metrics_rows in (rows, rows[:1], [{"step": 1, "loss": None}], []):
        assert loss_plot(Metrics(rows=metrics_rows), "a$_{$, title").startswith(b"\x89PNG")


def test_a_step_that_was_taken_again_is_evaluated_though_it_was_before_the_roll_back(tmp_path):
    small = SmallLoop(tmp_path / "r", "fp32", eval_every=4)
    small.advance(4)
    before = metrics(tmp_path / "r")[-1]
    rows = [
        {"step": 4, "event": "rollback", "why": "", "to_step": 3},
        {"step": 4, "loss": before["loss"]},  # the run was killed before it evaluated
    ]
    for row in rows:
        small.run.folder.append_metrics(row)
    small.loop.evaluate_if_interrupted()
    rows[1]["val_loss"] = before["val_loss"]
    assert metrics(tmp_path / "r")[-3:] == [before, *rows]
