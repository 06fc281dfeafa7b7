"""`fp8stack list`: tables of models, recipes and runs with their main facts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from fp8stack.common import presets
from fp8stack.common.errors import UserError, quoted
from fp8stack.common.formats import FORMATS
from fp8stack.model.config import GPTConfig, load_config
from fp8stack.planning.run_config import training_preset
from fp8stack.precision import Hardware, Recipe, load_recipe, resolve
from fp8stack.precision.rules import shipped

Row = dict[str, str | int | float | None]


def models() -> list[Row]:
    """Rows of the shipped models, the smallest first."""
    configs = [(name, load_config(name)) for name in presets.names("models")]
    return [
        {
            "model": name,
            "parameters": config.parameters(),
            "layers": config.layers,
            "width": config.width,
            "heads": config.heads,
            "context": config.context,
            "vocabulary": config.vocabulary,
            "lr": training_preset(name).get("lr"),
            "shape of": _family(config),
        }
        for name, config in sorted(configs, key=lambda pair: pair[1].parameters())
    ]


def _family(config: GPTConfig) -> str:
    """The kind of model, with the number of its experts."""
    family = "Llama" if config.positions == "rope" else "GPT-2"
    return family if config.experts is None else f"{family}, {config.experts.count} experts"


def recipes(hardware: Hardware) -> list[Row]:
    """Rows of the shipped recipes, with the plan that `hardware` runs them by."""
    rows: list[Row] = []
    for name in shipped():
        recipe, plan = load_recipe(name), resolve(name, hardware)
        execution = "native" if plan.native else "emulated"
        if plan.recipe.name != name:
            execution = f"as {plan.recipe.name}"
        elif not plan.is_fp8:
            execution = plan.compute_dtype
        rows.append(
            {
                "recipe": name,
                "bits": _bits(recipe),
                "runs here": execution,
                "backend": plan.backend,
                "what it is": recipe.description,
            }
        )
    return rows


def _bits(recipe: Recipe) -> int:
    """The bits of the narrowest GEMM operand."""
    if recipe.quantizers is None:
        return FORMATS[str(recipe.compute_dtype)].bits
    return min(quantizer.element.bits for quantizer in recipe.quantizers.each.values())


def runs(folder: Path) -> list[Row]:
    """Rows of the runs in a folder and its subfolders, the most recent first.

    Raises:
        UserError: the folder does not exist.
    """
    # The other tables need no torch.
    from fp8stack.analysis.report.run_record import read_run
    from fp8stack.analysis.report.summary import headline

    if not folder.is_dir():
        raise UserError(f"No folder {quoted(str(folder))}. Give the one that your runs are in.")
    runs = [read_run(path, telemetry=False) for path in _run_folders(folder)]
    runs.sort(key=lambda run: run.written.timestamp() if run.written else 0.0, reverse=True)
    labels = ("state", "model", "recipe", "steps", "validation loss", "took")
    return [
        {"run": str(run.path), **{label: headline(run)[label] for label in labels}} for run in runs
    ]


def _run_folders(folder: Path) -> Iterator[Path]:
    for path, subfolders, files in os.walk(folder):
        if "run.toml" in files:
            subfolders.clear()  # skip the run's checkpoints
            yield Path(path)
        subfolders.sort()
