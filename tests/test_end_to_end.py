"""A user's whole way, by tests/end_to_end.sh: from JSONL, through FP8, to transformers."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fp8stack
from tests.conftest import metrics

SCRIPT = Path(__file__).with_name("end_to_end.sh")
PROMPT = "Once there was a number"


def story(number: int) -> str:
    color = ("red", "green", "blue")[number % 3]
    size = ("small", "large", "round", "old", "new")[number % 5]
    return f"{PROMPT} {number}, {color} and {size}. Squared, it was {number * number}: the end."


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the script did its work."""
    folder = tmp_path_factory.mktemp("way")
    corpus = folder / "corpus"
    corpus.mkdir()
    rows = [json.dumps({"text": " ".join(story(n + k) for k in range(8))}) for n in range(400)]
    (corpus / "a.jsonl").write_text("\n".join(rows[:200]) + "\n", encoding="utf-8")
    with gzip.open(corpus / "b.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("\n".join(rows[200:]) + "\n")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", str(SCRIPT), str(corpus), str(folder / "made")],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return folder / "made"


def _the_documents_are_tokens_with_a_tokenizer_of_their_own(made: Path) -> None:
    manifest = json.loads((made / "tokens" / "manifest.json").read_text())
    assert manifest["tokenizer"]["vocabulary"] <= 512
    documents = [manifest["splits"][split]["documents"] for split in ("train", "val")]
    assert sum(documents) == 400
    assert documents[1] > 0
    tokenizer = fp8stack.load_tokenizer(str(made / "tokens"))
    told = story(17)
    assert tokenizer.decode(tokenizer.encode(told)) == told
    assert len(tokenizer.encode(told)) < len(told) / 3, "it merged nothing"


def _the_run_learned_in_fp8(made: Path) -> None:
    rows = [row for row in metrics(made / "run") if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 61))
    assert {row["precision"] for row in rows} == {"delayed-emulated"}
    assert all(row["fp8_gemms"] == 2 * 4 * 3 for row in rows)
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"]


def _the_report_is_a_page_and_a_text(made: Path) -> None:
    page = (made / "run" / "report.html").read_text(encoding="utf-8")
    assert page.lstrip().lower().startswith("<!doctype html>")
    text = (made / "report.txt").read_text()
    assert "60" in text
    assert "delayed" in text


def _the_evaluation_has_both_recipes_close_together(made: Path) -> None:
    scores = json.loads((made / "eval.json").read_text())["scores"]
    assert [score["recipe"] for score in scores] == ["fp32", "delayed"]
    assert [score["fp8_layers"] for score in scores] == [0, 8]
    assert all(0 < score["bits_per_byte"] < score["loss"] for score in scores)
    losses = [score["loss"] for score in scores]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    last = next(r["val_loss"] for r in reversed(metrics(made / "run")) if "val_loss" in r)
    assert losses[1] == pytest.approx(last, rel=0.01)


def _transformers_has_the_same_logits(made: Path) -> None:
    theirs = load_file(made / "transformers.safetensors")
    with torch.no_grad():
        logits = fp8stack.load(made / "run", recipe="fp32")(theirs["tokens"])
    assert theirs["logits"].shape[:2] == logits.shape[:2]
    shared = min(logits.shape[-1], theirs["logits"].shape[-1])
    assert shared == 512
    assert (logits[..., :shared] - theirs["logits"][..., :shared]).abs().max() < 1e-5


def _both_generate_the_same_text(made: Path) -> None:
    theirs = (made / "transformers.txt").read_text(encoding="utf-8")
    ours = (made / "generated.txt").read_text(encoding="utf-8").removesuffix("\n")
    assert theirs.startswith(PROMPT)
    assert len(theirs) > len(PROMPT)
    assert ours in (theirs, theirs.removeprefix(PROMPT))


def _what_was_piped_is_plain_text_with_a_fact_a_line(made: Path) -> None:
    lines = (made / "pretrain.txt").read_text(encoding="utf-8").splitlines()
    assert all(line.isprintable() for line in lines)
    steps = [line for line in lines if line.startswith("step ") and " | loss " in line]
    assert len(steps) == 60
    assert sum(": validation loss " in line for line in lines) == 3  # and at the end


def test_a_users_whole_way(made: Path) -> None:
    # One test: pytest-xdist would have each of its processes go all the way.
    _the_documents_are_tokens_with_a_tokenizer_of_their_own(made)
    _the_run_learned_in_fp8(made)
    _the_report_is_a_page_and_a_text(made)
    _the_evaluation_has_both_recipes_close_together(made)
    _transformers_has_the_same_logits(made)
    _both_generate_the_same_text(made)
    _what_was_piped_is_plain_text_with_a_fact_a_line(made)
