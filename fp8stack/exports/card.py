"""The model card of an exported folder, a `README.md` for the Hugging Face Hub."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import fp8stack
from fp8stack import presets
from fp8stack.config import RunConfig
from fp8stack.exports.files import Source
from fp8stack.forecast.result import NAME as FORECAST
from fp8stack.forecast.result import ForecastResult, shares
from fp8stack.io import read_json
from fp8stack.training.run_folder import RunFolder
from fp8stack.training.setup.build import context_of

CARD = "README.md"
MARK = "<!-- Written by fp8stack export. -->"
"""In every card: a README.md without it is somebody's own."""


def model_card(source: Source, format: str, title: str, repository: str | None) -> str:
    """The card of a folder.

    Args:
        source: the model. Facts that its run's folder lacks are left out.
        format: "hf" or "fp8".
        title: what the folder holds, in a few words.
        repository: `owner/name` on the Hub; None if the folder is not pushed.
    """
    recipe = str(source.plan["recipe"]["name"])
    name = repository or "FOLDER"
    tags = ["fp8stack", recipe, *(["compressed-tensors"] if format == "fp8" else [])]
    lines = ["---", "library_name: transformers", "tags:"]
    lines += [f"- {json.dumps(tag)}" for tag in dict.fromkeys(tags)]  # a JSON string is YAML
    lines += ["---", MARK, "", f"# {repository.split('/')[1] if repository else 'Model card'}", ""]
    lines += ["Pretrained with fp8stack, in low precision where its recipe says so.", ""]
    lines += [
        "| | |",
        "|---|---|",
        *(f"| {key} | {value} |" for key, value in _facts(source, title)),
    ]
    lines += ["", *(f"{gap}\n" for gap in _gaps(source, recipe))]
    lines += ["## Use", "", "```python"]
    lines += ["from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
    lines += [f'model = AutoModelForCausalLM.from_pretrained("{name}")']
    lines += [f'tokenizer = AutoTokenizer.from_pretrained("{name}")', "```", ""]
    if format == "hf":
        lines += ["To train it further:", "", "```"]
        lines += [f"fp8stack pretrain --init-from hf:{name} --data DATA", "```", ""]
    else:
        lines += ["transformers needs `compressed-tensors` for it; vLLM:", "", "```"]
        lines += [f"vllm serve {name}", "```", ""]
    return "\n".join(lines)


def _facts(source: Source, title: str) -> Iterator[tuple[str, str]]:
    """The rows of the card's table."""
    shape, plan = source.config, source.plan
    yield "weights", title
    yield "parameters", f"{shape.parameters():,}"
    yield "layers, width, heads", f"{shape.layers}, {shape.width}, {shape.heads}"
    yield "vocabulary, context", f"{shape.vocabulary:,}, {shape.context:,}"
    how = f"{shape.positions} positions, {shape.norm}, {shape.activation}"
    yield "architecture", how + (", tied embeddings" if shape.tied else "")
    backend = f", computed by the backend {plan['backend']}" if "backend" in plan else ""
    yield "recipe", _code(str(plan["recipe"]["name"])) + backend
    yield "steps", f"{source.step:,}"
    config = source.info.get("config")
    if config is not None:
        run: RunConfig = presets.parse(RunConfig, config, f"config of {source.path}")
        more = ", after those of the weights that it began with" if run.init_from else ""
        tokens = source.step * run.batch * context_of(run, shape)
        yield "tokens", f"{tokens:,}{more}"
    if (loss := _last_val_loss(source)) is not None:
        yield "validation loss", f"{loss[1]:.4f} nats per token, after step {loss[0]:,}"
    torch_of_run = source.info.get("versions", {}).get("torch", torch.__version__)
    yield "made with", f"fp8stack {fp8stack.__version__}, torch {torch_of_run}"


def _last_val_loss(source: Source) -> tuple[int, float] | None:
    """The last validation loss up to the checkpoint, and its step."""
    found = None
    for row in [] if source.run is None else RunFolder(source.run).read_metrics():
        loss = row.get("val_loss")
        if row["step"] <= source.step and isinstance(loss, int | float):
            found = row["step"], float(loss)
    return found


def _gaps(source: Source, recipe: str) -> Iterator[str]:
    """Sentences on the measured and the forecast loss gap of the recipe, if the run's folder has
    them."""
    if source.run is None:
        return
    with suppress(OSError, ValueError, KeyError, TypeError, IndexError, StopIteration):
        yield _measured_gap(source.run, source.step)
    with suppress(OSError, ValueError):
        forecast = ForecastResult.model_validate_json((source.run / FORECAST).read_text("utf-8"))
        for one in forecast.recipes:
            if (
                one.recipe == recipe
                and one.gap is not None
                and forecast.checkpoint == source.path.name
            ):
                gap, interval = shares(one.gap, forecast.loss)
                yield (
                    f"Forecast, not measured: training a model like this in {_code(recipe)} changes"
                    f" its loss by {gap} (90 % interval {interval})."
                )


def _measured_gap(run: Path, step: int) -> str:
    """The gap to the baseline of the comparison that the run belongs to. Raises a KeyError, or
    errors of reading, if there is none."""
    run = run.absolute()  # a relative path may have no parents
    report: dict[str, Any] = read_json(run.parents[1] / "compare.json")
    recipe, _, _ = run.name.rpartition("-seed")
    row = next(row for row in report["recipes"] if row["recipe"] == recipe)
    baseline, gap = report["asked"]["baseline"], row["gap_percent"]
    if recipe == baseline or run.parent.name != "runs" or report["config"]["steps"] != step:
        raise KeyError(recipe)
    width = gap["half_width"]
    about = "" if width is None else f" ± {width:.2f}, at a confidence of 95 %"
    seeds = "1 seed" if gap["samples"] == 1 else f"{gap['samples']} seeds"
    return (
        f"Measured: the validation loss in {_code(recipe)} is {gap['mean']:+.2f} %{about}, from "
        f"that of runs in {_code(baseline)} with the same data and steps ({seeds})."
    )


def _code(name: str) -> str:
    """A name as code within a table."""
    return f"`{name.replace('`', ' ').replace('|', ' ')}`"
