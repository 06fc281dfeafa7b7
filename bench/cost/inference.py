"""Text that a trained model writes token by token, in each recipe, compared with transformers on
the same weights; and `eval --agree` of two recipes, compared with evaluations of both."""

from __future__ import annotations

import argparse
import io
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

import fp8stack
from bench import report, runner
from bench.report import Report, Row
from fp8stack.analysis.benchmark.timing import Timing
from fp8stack.model.config import load_config
from fp8stack.model.sampling import Sampling, generate
from fp8stack.precision import probe
from fp8stack.trained.evaluate import agreements

RECIPES = ("fp32", "bf16", "delayed", "mxfp8", "nvfp4")
PROMPT = list(b"def main(arguments):\n    ")
TOKENS, WINDOWS = 64, 32
NANO = load_config("gpt-nano")
MODELS: dict[str, dict[str, Any]] = {
    "gpt-nano": {},
    "6 layers of 384": {"layers": 6, "width": 384, "heads": 6, "mlp_width": 1152},
}
"""Shapes by name, over gpt-nano's. transformers has them as Qwen3, whose linears torchao takes."""
EVALUATES = ("gpt-nano", "tiny")
"""Models that are evaluated as well: `--agree` runs larger ones for minutes."""
TINY = {"layers": 1, "width": 32, "heads": 2, "mlp_width": 64}
SHORT = ["--rounds", "8", "--budget", "15"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runner.add_options(parser, rounds=20, budget_s=30.0, device=False)


def measure(arguments: argparse.Namespace) -> Report:
    """Measure the models of runs of one step: speed does not depend on the weights."""
    rows: list[Row] = []
    options, timed = runner.timing_options(arguments), arguments.cells.timed
    for model, shape in ({"tiny": TINY} if arguments.tiny else MODELS).items():
        with tempfile.TemporaryDirectory() as folder:
            run = trained(Path(folder), shape)
            case = f"generate: {model}, {TOKENS} tokens"
            rows += timed(case, writers(run), partial(_rows, RECIPES[0], TOKENS), **options)
            if model in EVALUATES:
                windows = 2 if arguments.tiny else WINDOWS
                arms, tokens = evaluations(run, windows), windows * NANO.context
                case = f"eval: {model}, {windows} windows"
                rows += timed(case, arms, partial(_rows, EVALUATED, tokens), **options)
    settings = runner.timing_settings(arguments) | {"ratio": "fastest"}
    return report.report_of("cpu", settings, rows, packages=("transformers", "torchao"))


def trained(folder: Path, shape: dict[str, Any]) -> Path:
    """Train a model of `shape` for a step in `folder/run`, so that there are scales of delayed
    scaling, and export it for transformers to `folder/export`. Returns the run."""
    keys: dict[str, Any] = {"eval_windows": 1, "sample_tokens": 0, "telemetry_every": 0}
    with redirect_stdout(io.StringIO()):
        run = fp8stack.pretrain(
            recipe="delayed", steps=1, out=str(folder / "run"), model_overrides=shape, **keys
        )
        fp8stack.export(run, format="hf", out=_export_of(run))
    return run


def _export_of(run: Path) -> Path:
    return run.with_name("export")


# Text


Builder = Callable[[], Callable[[], object]]


def writers(run: Path) -> dict[str, Builder]:
    """Builders of arms that write `TOKENS` tokens, always the likeliest one: ours by recipe, and
    transformers', in float32 and with weights that torchao stores in FP8."""
    slow = () if probe("cpu").cpu_bf16 else ("bf16",)
    builders: dict[str, Builder]
    builders = {recipe: partial(writer, run, recipe) for recipe in RECIPES if recipe not in slow}
    return builders | {
        "transformers in fp32": partial(peer_writer, run, fp8_weights=False),
        "torchao FP8 weights, by transformers": partial(peer_writer, run, fp8_weights=True),
    }


def writer(run: Path, recipe: str) -> Callable[[], list[int]]:
    """A function that writes the text of a run in a recipe, and returns the tokens."""
    model, sampling = fp8stack.load(run, recipe), Sampling(temperature=0)
    return lambda: list(generate(model, PROMPT, TOKENS, sampling, seed=0))


def peer_writer(run: Path, *, fp8_weights: bool) -> Callable[[], list[int]]:
    """`writer` by transformers, of the run's export."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(_export_of(run), dtype=torch.float32)
    if fp8_weights:
        from torchao.quantization import Float8WeightOnlyConfig, quantize_

        quantize_(model, Float8WeightOnlyConfig())
    prompt = torch.tensor([PROMPT])
    options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}

    def write() -> list[int]:
        with torch.no_grad():
            tokens = model.generate(prompt, **options, pad_token_id=0)
        return cast(list[int], tokens[0, len(PROMPT) :].tolist())

    return write


# Evaluations

EVALUATED = "eval --recipes fp32,delayed"


def evaluations(run: Path, windows: int) -> dict[str, Builder]:
    """Builders of evaluations of a run, loading included: `--agree` also runs each layer that the
    recipes multiply differently by itself."""

    def quiet(call: Callable[..., object]) -> Callable[[], object]:
        def once() -> object:
            with redirect_stderr(io.StringIO()):
                return call(run, "fp32", "delayed", windows=windows)

        return once

    return {
        EVALUATED: partial(quiet, fp8stack.evaluate),
        f"{EVALUATED} --agree": partial(quiet, agreements),
    }


def _rows(base: str, tokens: int, case: str, timings: dict[str, Timing]) -> list[Row]:
    rows = report.rows_of(case, timings, base)
    for row in rows:
        row["tokens_per_s"] = round(1000 * tokens / row["fastest_ms"], 1)
    return rows


def table(data: Report) -> str:
    text = (
        "Text is written token by token, with a cache of keys and values; transformers writes it "
        "with the same weights. `eval --agree` "
        "compares the predictions of two recipes, then runs the model once more for each layer "
        "that differs. tokens/s and ratios are of the fastest rounds."
    )
    extra = {"tokens/s": report.number("tokens_per_s", 0), "relative time": report.number("ratio")}
    return report.page(data, "Trained models", text, extra)


figure = report.ratios("Trained models", "ratio", "time, relative to {ratio_to}")
