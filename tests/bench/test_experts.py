"""The scenario of mixtures of experts: its table, its figure and the command that it runs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from matplotlib.patches import Rectangle

from bench import runner
from bench.quality import experts


def test_the_table_has_the_gap_of_each_recipe_and_its_limit(monkeypatch, tmp_path):
    commands: list[list[str]] = []
    rows = [
        {"recipe": "fp32", "val_loss": 2.0, "gap_percent": None},
        {"recipe": "delayed", "val_loss": 2.01, "gap_percent": {"mean": 0.5}},
        {"recipe": "nvfp4", "val_loss": 2.06, "gap_percent": {"mean": 3.0}},
    ]

    def fake(words: list[str], folder: Path, count: int, timeout_s: float) -> list[SimpleNamespace]:
        commands.append(words)
        (folder / "comparison").mkdir()
        (folder / "comparison" / "compare.json").write_text(json.dumps({"recipes": rows}))
        return [SimpleNamespace(code=0)]

    monkeypatch.setattr(experts, "run_ranks", fake)
    options = ["--steps", "5", "--seeds", "2", "--recipes", "delayed,nvfp4"]
    options += ["--runs", str(tmp_path)]
    data = runner.measured(experts, "experts", options)
    (words,) = commands
    assert words[words.index("--recipes") + 1] == "fp32,delayed,nvfp4"
    assert words[words.index("--steps") + 1] == "5"
    text = experts.table(data)
    assert "| delayed | 2.0100 | +0.50 % | 2 % |" in text
    assert "| nvfp4 | 2.0600 | +3.00 % | 5 % |" in text
    bar = experts.figure(data).axes[0].patches[1]
    assert isinstance(bar, Rectangle)
    assert bar.get_height() == 3.0


def test_a_comparison_that_fails_ends_the_scenario(monkeypatch, tmp_path):
    ended = [SimpleNamespace(code=2, stderr="no such model")]
    monkeypatch.setattr(experts, "run_ranks", lambda *words, **options: ended)
    with pytest.raises(RuntimeError, match="no such model"):
        runner.measured(experts, "experts", ["--recipes", "delayed", "--runs", str(tmp_path)])
