"""Synthetic run folders for the tests of reports: only the files, in the format of real runs."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

KINDS = ("input", "weight", "grad_output")
LINEARS = ("attention.qkv", "attention.output", "mlp.up", "mlp.down")
TOP = {"e4m3": 448.0, "e5m2": 57344.0}

Change = Callable[[dict[str, Any]], None]


def plan(blocks: int, recipe: str = "delayed", fp8: bool = True) -> dict[str, Any]:
    scaling = {"scaling": recipe} if fp8 else {}
    layers = [
        {"name": f"blocks.{block}.{linear}", "fp8": fp8, "precision": recipe, "reason": ""}
        for block in range(blocks)
        for linear in LINEARS
    ]
    reason = "the recipe says head = false"
    layers.append({"name": "lm_head", "fp8": False, "precision": "fp32", "reason": reason})
    return {
        "asked": recipe,
        "recipe": {"name": recipe} | scaling,
        "backend": "emulate" if fp8 else "reference",
        "device": "cpu",
        "reasons": ["this is a CPU: emulated, same bytes and scales", f"lm_head: fp32, {reason}"],
        "layers": layers,
    }


def operand_rows(
    blocks: int, sampled: Sequence[int], recipe: str = "delayed", seed: int = 0
) -> list[dict[str, Any]]:
    """Rows of an unremarkable run: layers differ, amaxes drift, step 1 has scale 1."""
    random = np.random.default_rng(seed)
    offsets = {
        (layer, kind): random.normal(0, 1.0)
        for layer in [f"{block}.{linear}" for block in range(blocks) for linear in LINEARS]
        for kind in KINDS
    }
    largest: dict[tuple[str, str], float] = {}
    rows = []
    for at, step in enumerate(sampled):
        rows.append({"step": step, "fp8_gemms": 12 * blocks, "fp8_layers": 4 * blocks,
                     "layers": 4 * blocks + 1, "not_fp8": {"lm_head": "fp32"},
                     "scale_changes": None if at == 0 else 3})  # fmt: skip
        for (layer, kind), offset in offsets.items():
            name, format = f"blocks.{layer}", "e5m2" if kind == "grad_output" else "e4m3"
            base = {"input": 2.0, "weight": -1.5, "grad_output": -9.0 - 0.2 * at}[kind]
            amax = 2.0 ** (base + offset + random.normal(0, 0.25))
            held = largest.get((layer, kind))
            largest[layer, kind] = max(amax, held or 0.0)
            scale: float | None = 1.0 if held is None else TOP[format] / largest[layer, kind]
            if recipe in ("block", "mxfp8"):
                scale = None
            elif recipe == "current":
                scale = TOP[format] / amax
            headroom = 0.1 if scale is None else math.log2(TOP[format] / (amax * scale))
            first = held is None and recipe == "delayed"
            usual = {"e4m3": 31.0, "e5m2": 25.2}[format] + {"block": 0.4, "mxfp8": 0.9}.get(
                recipe, 0.0
            )
            rows.append({
                "step": step, "layer": name, "operand": kind, "recipe": recipe, "what_if": False,
                "format": format, "amax": amax, "scale": scale, "headroom_bits": headroom,
                "saturated": 0.0,
                "underflow": 0.6 if first and kind != "input" else abs(random.normal(0, 0.004)),
                "nonfinite": 0.0,
                "sqnr_db": 3.0 if first else usual + random.normal(0, 0.3),
            })  # fmt: skip
    return rows


def metric_rows(steps: int, every_eval: int = 100, start: float = 5.5) -> list[dict[str, Any]]:
    random = np.random.default_rng(1)
    rows = []
    for step in range(1, steps + 1):
        row: dict[str, Any] = {
            "step": step,
            "loss": 1.4 + (start - 1.4) * math.exp(-step / (0.15 * steps)) + random.normal(0, 0.04),
            "lr": 3e-3 * min(1.0, step / 50) * (0.1 + 0.9 * (1 - step / steps)),
            "grad_norm": 0.8 + 2 * math.exp(-step / 40) + abs(random.normal(0, 0.1)),
            "step_ms": 110.0 + random.normal(0, 3),
            "tokens_per_s": 9300.0 + random.normal(0, 200),
            "mfu": 0.17,
            "memory_gib": 0.46,
            "precision": "delayed-emulated",
            "fp8_gemms": 48,
        }
        if step % every_eval == 0 or step == steps:
            row["val_loss"] = row["loss"] + 0.1
        rows.append(row)
    return rows


EVENTS: list[dict[str, Any]] = [
    *(
        {"step": at, "event": "skip", "why": f"the loss is {at / 7:.3f}", "loss": None}
        for at in (42, 43, 44)
    ),
    {"step": 44, "event": "rollback", "why": "three bad steps in a row", "to_step": 30},
    {"step": 44, "event": "demote", "why": "its amax is not finite", "precision": "bf16",
     "layer": "blocks.1.mlp.up", "operand": "grad_output", "until_step": 120},
    {"step": 120, "event": "restore", "layer": "blocks.1.mlp.up", "why": "its time is up"},
    {"step": 130, "event": "phase", "to": "cooldown"},
    {"step": 131, "event": "skip", "why": "the loss is nan", "loss": None},
]  # fmt: skip


def outlier(layer: str, kind: str, since: int, times: float = 64.0) -> Change:
    """A change of rows: from step `since` on, an operand has elements far larger than before."""

    def change(row: dict[str, Any]) -> None:
        if row.get("layer") == layer and row.get("operand") == kind and row["step"] >= since:
            row["amax"] *= times
            row["headroom_bits"] = -math.log2(times) if row["step"] == since else 0.0
            row["saturated"] = 0.004 if row["step"] == since else 0.0
            row["underflow"] = 0.31
            row["sqnr_db"] = 17.5

    return change


def make_run(
    path: Path,
    steps: int = 200,
    blocks: int = 4,
    recipe: str = "delayed",
    metrics: list[dict[str, Any]] | None = None,
    telemetry: list[dict[str, Any]] | None = None,
    every: int = 20,
    change: Change | None = None,
    what_if: Sequence[str] = (),
    config: str = "",
) -> Path:
    """A run folder in `path`; `change` is called with each row of telemetry."""
    path.mkdir(parents=True)
    (path / "run.toml").write_text(
        f'model = "gpt-nano"\nrecipe = "{recipe}"\nsteps = {steps}\n'
        f"telemetry_every = {every}\n{config}",
        encoding="utf-8",
    )
    run_plan = plan(blocks, recipe, fp8=recipe not in ("fp32", "bf16"))
    (path / "plan.json").write_text(json.dumps(run_plan))
    write_lines(path / "metrics.jsonl", metric_rows(steps) if metrics is None else metrics)
    if every:
        sampled = [1, *range(every, steps + 1, every)]
        rows = operand_rows(blocks, sampled, recipe) if telemetry is None else telemetry
        for name in what_if:
            tried = operand_rows(blocks, sampled, name, seed=2)
            rows += [row | {"what_if": True} for row in tried if "operand" in row]
        if change is not None:
            for row in rows:
                change(row)
        write_lines(path / "telemetry.jsonl", [{"event": "plan", "plan": run_plan}, *rows])
    return path


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
