"""Model cards, `export --json`, and `export --push` to a Hub on this machine."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import torch
import yaml

import fp8stack
from fp8stack.trained.export.card import CARD, MARK, model_card
from fp8stack.trained.export.format_files import hf_files, load_source
from fp8stack.training.load import find_source
from tests.conftest import metrics
from tests.support.hf_models import loaded, require_same_logits, weights_of
from tests.support.hub_stand_in import TOKEN, Hub


@pytest.fixture(autouse=True)
def copied(run, tmp_path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


def front_matter(card: str) -> dict:
    _, front, _ = card.split("---\n", 2)
    return yaml.safe_load(front)


def test_a_card_says_what_is_known(run, command):
    assert command("export", "run", "--out", "x") == 0
    card = Path("x", CARD).read_text()
    assert front_matter(card) == {"library_name": "transformers", "tags": ["fp8stack", "delayed"]}
    loss = next(row["val_loss"] for row in reversed(metrics(run)) if "val_loss" in row)
    parameters = fp8stack.load(run).config.parameters()
    for line in (
        f"| parameters | {parameters:,} |",
        "| layers, width, heads | 1, 32, 2 |",
        "| recipe | `delayed`, computed by the backend emulate |",
        "| steps | 6 |",
        "| tokens | 768 |",  # 6 steps of 4 windows of 32
        f"| validation loss | {loss:.4f} nats per token, after step 6 |",
        f"| made with | fp8stack {fp8stack.__version__}, torch {torch.__version__} |",
        'AutoModelForCausalLM.from_pretrained("FOLDER")',
    ):
        assert line in card, card
    assert str(run.parent) not in card  # no path of this machine


def test_a_readme_of_ones_own_is_not_overwritten(run, command, refused):
    assert command("export", "run", "--out", "x") == 0
    assert MARK in Path("x", CARD).read_text()
    Path("x", CARD).write_text("# Mine")
    again = ["export", "run", "--out", "x", "--overwrite"]
    refused(*again, message="x holds 'README.md', which no export wrote")


def test_what_was_written_is_json_on_request(run, command, capsys):
    assert command("export", "run", "--out", "x", "--format", "fp8", "--json") == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert result.keys() == {"out", "format", "title", "parameters", "dtype", "source", "notes"}
    assert (result["out"], result["format"], result["dtype"]) == ("x", "fp8", "fp32")
    assert result["parameters"] == fp8stack.load(run).config.parameters()
    assert result["source"] == "run/checkpoints/step-000006"
    assert printed.err.splitlines() == [f"note: {note}" for note in result["notes"]]
    card = Path("x", CARD).read_text()
    assert "compressed-tensors" in front_matter(card)["tags"]
    assert "\ntransformers needs `compressed-tensors` for it; vLLM:\n" in card
    assert "vllm serve" in card
    assert command("export", "run", "--out", "y", "--format", "safetensors") == 0
    assert not Path("y", CARD).exists()


def test_what_is_pushed_is_loaded_again_to_the_bit(hub: Hub, run, command, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert command("export", "run", "--out", "x", "--push", "me/mine", "--private") == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"pushed: {hub.endpoint}/me/mine"
    stored = hub.repositories["me/mine"]
    assert stored.private
    assert len(hub.requested("POST", "/commit/")) == 1
    files = {path.name: path.read_bytes() for path in Path("x").iterdir()}
    assert stored.commits[stored.main] == files | {".gitattributes": b""}
    assert 'from_pretrained("me/mine")' in files[CARD].decode()
    source, weights = find_source("hf:me/mine"), weights_of(fp8stack.load(run))
    assert source.name == f"hf:me/mine@{stored.main}"
    assert source.weights.keys() == weights.keys()
    assert all(torch.equal(source.weights[name], weights[name]) for name in weights)
    assert source.tokenizer is not None
    assert source.tokenizer.read_bytes() == files["tokenizer.json"]
    require_same_logits(fp8stack.load(run), loaded(source.tokenizer.parent))


def test_a_second_push_leaves_no_weights_of_the_first(hub: Hub, run, command, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    old = {"model-00001-of-00001.safetensors": b"x", "model.safetensors.index.json": b"{}"}
    hub.add("me/mine", {**old, "samples/one.safetensors": b"y", "notes.txt": b"z"})
    capsys.readouterr()
    assert command("export", "run", "--out", "x", "--push", "me/mine", "--json") == 0
    assert json.loads(capsys.readouterr().out)["url"] == f"{hub.endpoint}/me/mine"
    stored = hub.repositories["me/mine"]
    mine = {path.name for path in Path("x").iterdir()}
    assert stored.commits[stored.main].keys() == mine | {"samples/one.safetensors", "notes.txt"}
    assert len(stored.commits) == 2


@pytest.fixture
def unpushed(hub: Hub, run, command, capsys) -> Callable[..., str]:
    """The line with which a push ends; the folder stays."""

    def ask(*more: str) -> str:
        capsys.readouterr()
        assert command("export", "run", "--out", "x", "--overwrite", "--push", *more) == 2
        errors = capsys.readouterr().err.splitlines()
        assert errors[-1].startswith(f"fp8stack: x is written, but not pushed to {more[0]}: "), (
            errors
        )
        assert "then give the same command with --overwrite." in errors[-1]
        loaded(Path("x"))
        return errors[-1]

    return ask


def test_a_push_that_is_refused_loses_nothing(hub: Hub, unpushed, monkeypatch):
    error = unpushed("me/mine")
    for remedy in ("there is no token", "hf auth login", "huggingface-cli login", "HF_TOKEN"):
        assert remedy in error
    assert not hub.requests
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.forbidden.add("them")
    assert "the token may not write there" in unpushed("them/theirs")
    hub.add("me/public", {})
    assert "it is public already" in unpushed("me/public", "--private")
    assert len(hub.repositories["me/public"].commits) == 1
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "Check the name and the network" in unpushed("me/mine")


def test_a_push_that_cannot_be_is_refused_before_anything_is_written(run, refused, monkeypatch):
    export = ["export", "run", "--out", "x"]
    refused(*export, "--push", "mine", message="--push 'mine' is no repository. Give owner/name.")
    refused(*export, "--private", message="--private needs --push.")
    words = ["--push", "me/mine", "--format", "safetensors"]
    refused(*export, *words, message="--push needs --format hf or fp8.")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refused(*export, "--push", "me/mine", message="--push needs huggingface_hub: pip install")


EVIL = "a<img src=x>`<script>`|[x](http://y)*b*\n# c\x1b[2J\u202e&amp;~~\\$"


def test_no_name_of_a_run_is_markup_in_its_card(run):
    source = load_source(str(run), torch.float32)
    cards = []
    for name in ("plain", EVIL):
        recipe = source.plan["recipe"] | {"name": name}
        plan, info = (
            {"recipe": recipe, "backend": name},
            {**source.info, "versions": {"torch": name}},
        )
        named = dataclasses.replace(source, plan=plan, info=info)
        cards.append(model_card(named, hf_files(source, None), None))
    plain, card = cards
    for active in "<>`|[]*#&~$\n\x1b\u202e":
        assert card.count(active) == plain.count(active), active
    assert front_matter(card)["tags"][1].startswith("a\\x3cimg src=x\\x3e")
