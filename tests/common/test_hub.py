"""Models of the Hugging Face Hub as weights to begin with: `--init-from hf:owner/name`, against a
Hub on this machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch

from fp8stack import GPTConfig
from fp8stack.common.hub import Repository, fetch, repository_in
from fp8stack.planning.run_config import parse_config
from fp8stack.training.load import find_source
from tests.conftest import refusal
from tests.support.hf_models import SHAPES, export_to, random_model, weights_of
from tests.support.hub_stand_in import Hub

pytestmark = pytest.mark.usefixtures("one_thread")

TRAIN = ["--steps", "2", "--batch", "2", "--set", "eval_windows=2", "--set", "sample_tokens=0"]


def model_of(vocabulary: int = 256):
    return random_model(GPTConfig(**(SHAPES["llama"] | {"vocabulary": vocabulary})))


@pytest.fixture
def files(tmp_path) -> dict[str, bytes]:
    folder = export_to(tmp_path / "exported", model_of())
    exported = {path.name: path.read_bytes() for path in folder.iterdir()}
    return exported | {"model-card.md": b"x", "original/consolidated.00.safetensors": b"x" * 99}


@pytest.mark.parametrize(
    ("name", "repository"),
    [
        ("hf:a/b", Repository(name="a/b")),
        ("hf:Qwen/Qwen3-0.6B@v1.0", Repository(name="Qwen/Qwen3-0.6B", revision="v1.0")),
        ("hf:a/b@refs/pr/1", Repository(name="a/b", revision="refs/pr/1")),
        *((name, None) for name in ("a/b", "hf:a", "hf:/a/b", "hf:a/b/c", "hf:a/b@")),
    ],
)
def test_what_reads_as_a_repository(name, repository):
    assert repository_in(name) == repository


def test_weights_come_from_the_hub_to_the_bit_and_once(
    hub: Hub, files, capsys, tmp_path, monkeypatch
):
    sha = hub.add("a/b", files)
    source = find_source("hf:a/b")
    weights = weights_of(model_of())
    assert source.weights.keys() == weights.keys()
    assert all(torch.equal(source.weights[name], weights[name]) for name in weights)
    assert source.name == f"hf:a/b@{sha}"
    assert capsys.readouterr().err == ""
    fetched = {path.rsplit("/", 1)[1] for path in hub.requested("GET", "/resolve/")}
    assert fetched == {"config.json", "generation_config.json", "model.safetensors"}
    hub.requests.clear()
    second = hub.repositories["a/b"].commit(files | {"config.json": b"{}"}, "broken")
    assert find_source(f"hf:a/b@{sha}").name == source.name
    assert not hub.requested("GET", "/resolve/")
    assert fetch(Repository(name="a/b"))[1].revision == second
    assert second in refusal(find_source, "hf:a/b")
    monkeypatch.chdir(tmp_path)  # a folder of that name comes before the Hub
    export_to(tmp_path / "a" / "b", model_of())
    assert repository_in("hf:a/b") is None
    assert find_source("hf:a/b").name == f"hf:{tmp_path.resolve() / 'a' / 'b'}"


def test_without_a_network_what_was_fetched_before_is_taken(hub: Hub, files, monkeypatch):
    sha = hub.add("a/b", files)
    find_source("hf:a/b")
    dead = "http://127.0.0.1:9"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", dead)
    assert find_source("hf:a/b").name == f"hf:a/b@{sha}"
    error = refusal(find_source, "hf:a/c")
    assert "hf:a/c cannot be fetched" in error
    assert "Check the network" in error


def test_what_the_hub_refuses_is_one_line_with_a_remedy(hub: Hub, files, refused, tmp_path):
    hub.add("a/gated", files, gated=True)
    hub.add("a/pickled", {"config.json": b"{}", "pytorch_model.bin": b""})
    hub.add("a/empty", {"README.md": b""})
    hub.add("a/bare", {"model.safetensors": files["model.safetensors"]})
    hub.add("a/fine", files)
    for name, message in (
        ("a/none", "No folder 'a/none' here, and no model 'a/none' on the Hugging Face Hub."),
        ("a/fine@v7", "hf:a/fine has no revision 'v7'. Give a branch, a tag or a commit"),
    ):
        refused("pretrain", "--init-from", f"hf:{name}", "--out", "new", message=message)
        refused("eval", f"hf:{name}", "--data", "x.txt", message=message)
    for name, message in (
        ("a/pickled", "has no safetensors file; pickled weights are not read. Give"),
        ("a/empty", "hf:a/empty has no safetensors file"),
        ("a/bare", "has no config.json"),
    ):
        assert message in refusal(find_source, f"hf:{name}")
    error = refusal(find_source, "hf:a/gated")
    assert error.startswith("hf:a/gated is gated. Accept its terms at http")
    assert "HF_TOKEN" in error


def test_without_huggingface_hub_a_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    message = "hf:a/b needs huggingface_hub: pip install huggingface_hub"
    assert refusal(find_source, "hf:a/b") == message


@pytest.mark.full
def test_a_process_that_has_not_used_huggingface_hub_before_may_push():
    code = "from fp8stack.common import hub; hub.require_pushable('a/b')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_run_records_the_commit_and_is_resumed_from_there(hub: Hub, files, command, capsys):
    sha = hub.add("a/b", files)
    train = ["--recipe", "fp32", *TRAIN, "--tokenizer", "bytes"]
    assert command("pretrain", "--init-from", "hf:a/b", "--out", "run", *train) == 0
    printed = capsys.readouterr()
    assert f"weights of hf:a/b@{sha}" in printed.out
    saved = parse_config(str(Path("run/run.toml")), {}).init_from
    assert saved == f"hf:a/b@{sha}"
    hub.requests.clear()
    again = ["pretrain", "--resume", "run", "--steps", "4", "--init-from"]
    assert command(*again, "hf:a/b") == 0
    assert not hub.requests


def test_a_resumed_run_fetches_only_weights_that_the_command_names(
    hub: Hub, files, command, refused
):
    hub.add("a/b", files)
    assert command("pretrain", "--init-from", "hf:a/b", "--out", "run", *TRAIN) == 0
    shutil.rmtree("run/checkpoints")
    hub.requests.clear()
    error = refused("pretrain", "--resume", "run")
    assert "run has no checkpoint yet and begins with hf:a/b@" in error
    assert "add --init-from hf:a/b@" in error
    assert not hub.requests
