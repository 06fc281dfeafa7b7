"""`fp8stack estimate --tokens`: time, dollars, disk and loss of a run on GPUs that are not here."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from fp8stack.model.config import load_config, plan_for
from fp8stack.planning.duration import predict_duration, sentences
from fp8stack.planning.roofline import predict
from fp8stack.planning.run_config import parse_config
from fp8stack.precision.gpus import gpu_named
from fp8stack.precision.hardware import machine_for
from tests.conftest import refusal

MODEL = load_config("gpt2-124m", {"layers": 2, "context": 256})
FLAGS = {"batch": 64, "accumulate": 2}
GPU = gpu_named("H100")


def plan(recipe: str, capability: str = "9.0") -> Any:
    return plan_for(MODEL, recipe, machine_for(capability, False))


def duration(
    *phases: tuple[str, float], gpus: int = 4, price: float | None = None, **flags: Any
) -> Any:
    config = parse_config(None, FLAGS | flags)
    planned = [(plan(recipe), share) for recipe, share in phases]
    return predict_duration(config, MODEL, 256, planned, GPU, gpus=gpus, tokens=10**9, price=price)


def test_a_step_is_its_micro_batches_and_one_optimizer_step():
    predicted = duration(("delayed", 1.0), price=2.5)
    micro_batch = predict(MODEL, plan("delayed"), GPU, batch=64 // (2 * 4), context=256)
    passes = micro_batch.step_ms - micro_batch.parts_ms["optimizer"]
    step_s = (2 * passes + micro_batch.parts_ms["optimizer"]) / 1000
    assert predicted.steps == math.ceil(10**9 / (64 * 256))
    assert predicted.seconds == pytest.approx(predicted.steps * step_s)
    assert predicted.tokens_per_s == pytest.approx(64 * 256 / step_s)
    assert predicted.cost == pytest.approx(predicted.seconds / 3600 * 4 * 2.5)
    assert predicted.data_bytes == 2 * 10**9  # 50,257 tokens fit uint16
    assert duration(("delayed", 1.0)).cost is None


def test_fsdp_shares_out_the_optimizer_and_checkpointing_takes_time():
    optimizer_ms = predict(MODEL, plan("delayed"), GPU, batch=8, context=256).parts_ms["optimizer"]
    ddp, fsdp = (duration(("delayed", 1.0), parallel=parallel) for parallel in ("ddp", "fsdp"))
    saved_s = ddp.steps * 3 / 4 * optimizer_ms / 1000  # of four GPUs
    assert ddp.seconds - fsdp.seconds == pytest.approx(saved_s)
    block = duration(("delayed", 1.0), activation_checkpointing="block")
    assert ddp.seconds < block.seconds < 1.4 * ddp.seconds


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
    alone = [duration((name, 1.0)).seconds for name in ("bf16", "delayed")]
    phased = duration(("bf16", 0.25), ("delayed", 0.75)).seconds
    assert phased == pytest.approx(0.25 * alone[0] + 0.75 * alone[1])


def test_the_sentences_name_the_prediction_and_what_it_leaves_out():
    first, disk = sentences(duration(("delayed", 1.0), price=2.5))
    assert first.startswith(
        "Predicted, not measured: 1,000,000,000 tokens in 61,036 steps on 4 H100"
    )
    assert "at $2.5 per GPU hour" in first
    not_counted = "communication, evaluations and the writing of checkpoints are not counted"
    assert not_counted in first
    assert disk.startswith("Disk: tokens 2.0 GB, checkpoints ")


def test_the_command_predicts_a_run_with_its_loss(command, capsys):
    words = ["--model", "gpt2-124m", "--set", "model.layers=2", "--recipe", "delayed"]
    words += ["--tokens", "10B", "--gpus", "8", "--gpu", "H100", "--price", "2.5", "--json"]
    assert command("estimate", *words) == 0
    predicted = json.loads(capsys.readouterr().out)["predicted"]
    assert (predicted["gpus"], predicted["gpu"]) == (8, "H100")
    assert predicted["cost"] == pytest.approx(predicted["seconds"] / 3600 * 8 * 2.5)
    parameters = load_config("gpt2-124m", {"layers": 2}).parameters()
    # Besiroglu et al. (arXiv 2404.10102)
    law = 1.8172 + 482.01 / parameters**0.3478 + 2085.43 / 1e10**0.3658
    assert predicted["loss"] == pytest.approx(law)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokens", "many", "--gpu", "H100"], "--tokens many is no number"),
        (["--tokens", "1B", "--gpu", "H1000"], "No GPU 'H1000'"),
        (["--tokens", "1B"], "time is predicted of known GPUs, not of"),
        (["--price", "2"], "--price 2: give dollars per GPU hour, and --tokens beside"),
        (["--tokens", "1B", "--gpu", "H100", "--price", "-1"], "--price -1"),
        (["--tokens", "1B", "--gpu", "H100", "--recipe", "mxfp8"], "mxfp8 is emulated on H100"),
        (["--gpu", "H100", "--capability", "8.0"], "H100 has compute capability 9.0"),
    ],
)
def test_bad_input_is_named(refused, words, message):
    refused("estimate", "--model", "gpt2-124m", "--set", "model.layers=1", *words, message=message)


def test_an_emulated_recipe_has_no_prediction():
    assert "is emulated on H100" in refusal(duration, ("nvfp4", 1.0))


@pytest.mark.parametrize(("recipe", "peak"), [("fp32", 67), ("tf32", 494.5)])
def test_gemms_in_float32_take_the_time_of_their_own_units(recipe, peak):
    """GEMMs reach the share of the peak rate that an H200 reaches in bf16, 700 of 989."""
    model = load_config("llama-8b", {"layers": 2})
    planned = plan_for(model, recipe, machine_for("9.0", False))
    predicted = predict(model, planned, GPU, batch=4, context=2048)
    blocks = sum(layer.work for layer in planned.layers if layer.name != "lm_head")
    expected_ms = 1000 * 6 * blocks * 4 * 2048 / (peak * 1e12 * 700 / 989)
    assert predicted.parts_ms["GEMMs"] == pytest.approx(expected_ms, rel=0.05)
    assert predicted.peak_of == recipe
    assert 0 < predicted.mfu < 700 / 989


def test_phases_are_those_of_a_run_of_so_many_tokens(command, capsys):
    words = ["--model", "gpt2-124m", "--recipe", "delayed", "--gpu", "H100", "--phases", "default"]
    assert command("estimate", *words, "--tokens", "10B", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    steps = [phase["steps"] for phase in answer["phases"]]
    assert sum(steps) == answer["predicted"]["steps"] == math.ceil(10**10 / (512 * 1024))
    assert steps[0] == 715  # of the preset's warm-up
