"""`fp8stack estimate --tokens`: time, dollars, disk and loss of a run on GPUs that are not here."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from fp8stack.model.config import load_config, plan_for, workload
from fp8stack.planning.duration import Duration, as_json, predict_durations, sentences
from fp8stack.planning.run_config import parse_config
from fp8stack.precision.hardware import machine_for
from tests.conftest import refusal

MODEL = load_config("gpt2-124m", {"layers": 2, "context": 256})
WORK = workload(MODEL, 8 * 256, accumulate=2)


def plan(recipe: str) -> Any:
    return plan_for(MODEL, recipe, machine_for(None, False, gpu="H100"), work=WORK)


def duration(*phases: tuple[str, float], price: float | None = None, **flags: Any) -> Duration:
    config = parse_config(None, {"batch": 64, "accumulate": 2} | flags)
    planned = [(plan(recipe), share) for recipe, share in phases]
    settings: dict[str, Any] = {"gpus": 4, "tokens": 10**9, "steps": 61_036, "price": price}
    (predicted,) = predict_durations(config, MODEL, planned, **settings)
    return predicted


def test_a_run_takes_the_time_of_its_steps():
    predicted, (time,) = duration(("delayed", 1.0), price=2.5), plan("delayed").times
    for end in ("low", "high"):
        seconds = 61_036 * getattr(time.step_ms, end) / 1000
        assert getattr(predicted.seconds, end) == pytest.approx(seconds)
        assert getattr(predicted.cost, end) == pytest.approx(seconds / 3600 * 4 * 2.5)
    assert predicted.tokens_per_s.low == pytest.approx(10**9 / predicted.seconds.high)
    assert predicted.data_bytes == 2 * 10**9  # 50,257 tokens fit uint16
    values = as_json(duration(("delayed", 1.0)))
    assert (values["cost_low"], values["cost_high"]) == (None, None)
    assert (values["seconds_low"], values["gpu"]) == (predicted.seconds.low, "H100")


def test_checkpoints_hold_the_weights_and_the_state_of_the_optimizer():
    def bytes_of(**flags: Any) -> float:
        return float(duration(("delayed", 1.0), **flags).checkpoint_bytes) / 3  # two, and one more

    count, shapes = MODEL.parameters(), MODEL.parameter_shapes()
    assert bytes_of() == bytes_of(optimizer="adamw") == 12 * count + 4 * len(shapes)
    assert bytes_of(optimizer="sgd") == 8 * count
    assert bytes_of(optimizer="sgd", momentum=0.0) == 4 * count
    matrices = [s for name, s in shapes.items() if name.startswith("blocks.") and len(s) == 2]
    in_8_bit = sum(map(math.prod, matrices))  # two moments of a byte, and scales
    assert bytes_of(optimizer="adamw8bit") == pytest.approx(12 * count - 6 * in_8_bit, rel=0.01)
    assert bytes_of(keep_checkpoints=5) == 2 * bytes_of()


def test_phases_count_by_their_share_of_the_steps():
    alone = [duration((name, 1.0)).seconds.low for name in ("bf16", "delayed")]
    phased = duration(("bf16", 0.25), ("delayed", 0.75)).seconds.low
    assert phased == pytest.approx(0.25 * alone[0] + 0.75 * alone[1])


def test_the_sentences_name_the_prediction_and_what_it_leaves_out():
    first, host, disk = sentences([duration(("delayed", 1.0), price=2.5)])
    for piece in (
        "Predicted, not measured: 1,000,000,000 tokens in 61,036 steps on 4 H100",
        "at $2.5 per GPU hour", "evaluations and the writing of checkpoints are not counted",
    ):  # fmt: skip
        assert piece in first
    assert host.startswith("Without CUDA graphs, launching the kernels may take the host longer")
    assert disk.startswith("Disk: tokens 2.0 GB, checkpoints ")


@pytest.mark.full
def test_the_command_predicts_a_run_with_its_loss(command, capsys):
    words = ["--model", "gpt2-124m", "--set", "model.layers=2", "--recipe", "delayed"]
    words += ["--tokens", "10B", "--gpus", "8", "--gpu", "H100", "--price", "2.5", "--json"]
    assert command("estimate", *words) == 0
    predicted = json.loads(capsys.readouterr().out)["predicted"]
    assert (predicted["gpus"], predicted["gpu"]) == (8, "H100")
    assert predicted["cost_low"] == pytest.approx(predicted["seconds_low"] / 3600 * 8 * 2.5)
    parameters = load_config("gpt2-124m", {"layers": 2}).parameters()
    # Besiroglu et al. (arXiv 2404.10102)
    law = 1.8172 + 482.01 / parameters**0.3478 + 2085.43 / 1e10**0.3658
    assert predicted["loss"] == pytest.approx(law)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tokens many --gpu H100", "--tokens many is no number"),
        ("--tokens 1B", "time is predicted of known GPUs, not of"),
        ("--price 2", "--price 2: give dollars per GPU hour, and --tokens beside"),
        ("--tokens 1B --gpu H100 --price -1", "--price -1"),
        ("--tokens 1B --gpu H100 --recipe mxfp8", "mxfp8 is emulated on H100"),
        ("--gpu H100 --capability 8.0", "H100 has compute capability 9.0"),
    ],
)
@pytest.mark.full
def test_bad_input_is_named(refused, words, message):
    model = ["--model", "gpt2-124m", "--set", "model.layers=1"]
    refused("estimate", *model, *words.split(), message=message)


def test_an_emulated_recipe_has_no_prediction():
    assert "is emulated on H100" in refusal(duration, ("nvfp4", 1.0))


@pytest.mark.full
def test_both_cards_of_a_capability_are_predicted(command, capsys):
    words = ["--model", "gpt2-124m", "--set", "model.layers=1", "--recipe", "bf16"]
    words += ["--tokens", "1B", "--capability", "9.0"]
    assert command("estimate", *words, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert [values["gpu"] for values in answer["predictions"]] == ["H200", "H100"]
    assert answer["predicted"] == answer["predictions"][0]
    assert command("estimate", *words) == 0
    printed = capsys.readouterr().out
    assert printed.count("Predicted, not measured: ") == 2
    assert printed.count("Disk: tokens ") == 1


@pytest.mark.full
def test_phases_are_those_of_a_run_of_so_many_tokens(command, capsys):
    words = ["--model", "gpt2-124m", "--recipe", "delayed", "--gpu", "H100", "--phases", "default"]
    assert command("estimate", *words, "--tokens", "10B", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    steps = [phase["steps"] for phase in answer["phases"]]
    assert sum(steps) == answer["predicted"]["steps"] == math.ceil(10**10 / (512 * 1024))
    assert steps[0] == 715  # of the preset's warm-up
