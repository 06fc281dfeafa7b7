"""A user's whole way, command by command: from JSONL, through FP8, to transformers."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import fp8stack
from tests.conftest import exit_code, metrics

pytestmark = pytest.mark.full

PROMPT = "Once there was a number"
RUN = """
    pretrain --recipe delayed --data tokens --steps 60 --batch 8 --context 64 --lr 3e-3
    --set model_overrides.vocabulary=512 --set model_overrides.layers=2
    --set model_overrides.width=64 --set model_overrides.heads=2 --set warmup_steps=10
    --set eval_windows=8 --set sample_tokens=16 --eval-every 30 --telemetry-every 20
    --device cpu --out run
"""


def story(number: int) -> str:
    color = ("red", "green", "blue")[number % 3]
    size = ("small", "large", "round", "old", "new")[number % 5]
    return f"{PROMPT} {number}, {color} and {size}. Squared, it was {number * number}: the end."


def printed(*words: str) -> str:
    """Run `fp8stack` with `words`. Returns its output to a pipe."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        assert exit_code(*words) == 0
    return text.getvalue()


def test_a_users_whole_way(tmp_path, monkeypatch, one_thread):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    rows = [json.dumps({"text": " ".join(story(n + k) for k in range(8))}) for n in range(400)]
    (corpus / "a.jsonl").write_text("\n".join(rows[:200]) + "\n", encoding="utf-8")
    with gzip.open(corpus / "b.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("\n".join(rows[200:]) + "\n")

    # The documents are tokens, with a tokenizer of their own.
    prepare = "prepare corpus --train-bpe 512 --held-out 0.1 --out tokens"
    printed(*prepare.split())
    manifest = json.loads((tmp_path / "tokens" / "manifest.json").read_text())
    assert manifest["tokenizer"]["vocabulary"] <= 512
    documents = [manifest["splits"][split]["documents"] for split in ("train", "val")]
    assert sum(documents) == 400
    assert documents[1] > 0
    tokenizer = fp8stack.load_tokenizer("tokens")
    document = story(17)
    assert tokenizer.decode(tokenizer.encode(document)) == document
    assert len(tokenizer.encode(document)) < len(document) / 3, "it merged nothing"

    # The run learns in FP8, and what is piped is plain text with a fact a line.
    lines = printed(*RUN.split()).splitlines()
    assert all(line.isprintable() for line in lines)
    assert len([line for line in lines if line.startswith("step ") and " | loss " in line]) == 7
    assert sum(": validation loss " in line for line in lines) == 3  # and at the end
    logged = metrics(Path("run"))
    steps = [row for row in logged if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 61))
    assert {row["precision"] for row in steps} == {"delayed-emulated"}
    assert all(row["fp8_gemms"] == 2 * 4 * 3 for row in steps)
    assert steps[-1]["loss"] < 0.5 * steps[0]["loss"]

    # The report is a page, and text on the terminal.
    printed("report", "run")
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert page.lstrip().lower().startswith("<!doctype html>")
    report = printed("show", "run")
    assert "60" in report
    assert "delayed" in report

    # The evaluation has both recipes close together.
    scores = json.loads(printed("eval", "run", "--recipes", "fp32,delayed", "--json"))["scores"]
    assert [score["recipe"] for score in scores] == ["fp32", "delayed"]
    assert [score["fp8_layers"] for score in scores] == [0, 8]
    assert all(0 < score["bits_per_byte"] < score["loss"] for score in scores)
    losses = [score["loss"] for score in scores]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    last = next(row["val_loss"] for row in reversed(logged) if "val_loss" in row)
    assert losses[1] == pytest.approx(last, rel=0.01)

    # transformers has the same logits, and generates the same text.
    printed("export", "run", "--format", "hf", "--out", "exported")
    hf_model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        "exported", dtype=torch.float32
    )
    tokens = transformers.AutoTokenizer.from_pretrained("exported")
    ids = tokens(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        expected = hf_model(ids).logits
        logits = fp8stack.load("run", recipe="fp32")(ids)
    assert expected.shape[:2] == logits.shape[:2]
    shared = min(logits.shape[-1], expected.shape[-1])
    assert shared == 512
    assert (logits[..., :shared] - expected[..., :shared]).abs().max() < 1e-5
    written = hf_model.generate(ids, max_new_tokens=8, do_sample=False)[0]
    text = tokens.decode(written, skip_special_tokens=True)
    options = ("--tokens", "8", "--temperature", "0", "--recipe", "fp32")
    generated = printed("generate", "run", "--prompt", PROMPT, *options).removesuffix("\n")
    assert text.startswith(PROMPT)
    assert len(text) > len(PROMPT)
    assert generated in (text, text.removeprefix(PROMPT))
