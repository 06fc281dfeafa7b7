"""Models of transformers are generated from and evaluated as they compute there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fp8stack
from fp8stack.model.config import load_config
from fp8stack.planning.run_config import RunConfig
from fp8stack.trained.evaluate.windows import windows_for
from fp8stack.trained.export.format_files import hf_files
from fp8stack.trained.export.writing import replace_folder

SMALL = {"layers": 2, "width": 32, "heads": 2, "mlp_width": 64, "context": 32}


@pytest.fixture
def transformers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of transformers with a tokenizer of bytes, and `text.txt` next to it."""
    from tests.support.hf_models import random_model, source_of

    monkeypatch.chdir(tmp_path)
    model = random_model(load_config("gpt-nano", SMALL))
    replace_folder(tmp_path / "theirs", hf_files(source_of(model), "bytes"))
    (tmp_path / "text.txt").write_text("some text that is not much, again and again\n" * 50)
    return tmp_path / "theirs"


def test_the_loss_of_a_folder_of_transformers_is_transformers_own(transformers_folder):
    from tests.support.hf_models import loaded

    scores = fp8stack.evaluate("hf:theirs", data="text.txt", windows=4)
    assert [score.recipe for score in scores] == ["fp32"]
    model = load_config("gpt-nano", SMALL)
    tokenizer = fp8stack.load_tokenizer("bytes")
    windows = windows_for("x", RunConfig(), model, tokenizer, "text.txt", 4, None).tokens
    assert len(scores[0].losses_N) == len(windows) == 4
    with torch.no_grad():
        logits = loaded(transformers_folder)(windows[:, :-1]).logits
    expected = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    assert scores[0].loss == pytest.approx(expected.item(), abs=1e-5)
    bits = expected.item() / torch.log(torch.tensor(2.0)).item()  # a byte is a token
    assert scores[0].bits_per_byte == pytest.approx(bits, abs=1e-4)


def test_a_folder_of_transformers_comes_without_text(transformers_folder, refused):
    assert "hf:theirs comes without text." in refused("eval", "hf:theirs")
    assert "No folder" in refused("generate", "hf:nothing")
