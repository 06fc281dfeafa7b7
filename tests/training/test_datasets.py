"""Runs on prepared data: their tokenizer, documents, order and mixtures, also when resumed."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

import fp8stack
from fp8stack.common.errors import UserError
from fp8stack.data import load_corpora, texts
from fp8stack.training.load import tokenizer_of_run
from tests.conftest import TINY, exit_code, losses

WORDS = ["quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "wizards", "box"]
VOCABULARY = ["--set", "model_overrides.vocabulary=300"]
SHORT = [*TINY, "--steps", "2"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder: 300 short documents in 300 tokens, some of them held out."""
    folder = tmp_path_factory.mktemp("prepared")
    rows = ({"text": " ".join(WORDS[i % 7 : 4 + i % 9] * 6)} for i in range(300))
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--train-bpe", "300", "--held-out", "0.2"]
    tokens = str(folder / "tokens")
    assert exit_code("prepare", str(folder / "texts.jsonl"), "--out", tokens, *flags) == 0
    return folder / "tokens"


@pytest.fixture
def tokens(prepared: Path, tmp_path: Path) -> str:
    """A copy of it, in the folder where the command runs."""
    shutil.copytree(prepared, tmp_path / "tokens")
    return "tokens"


def test_a_run_keeps_the_tokenizer_of_its_data_and_writes_its_sample_with_it(
    command, tokens, tmp_path
):
    assert command("pretrain", "--data", tokens, "--out", "run", *SHORT, *VOCABULARY) == 0
    saved_json = (tmp_path / "run/tokenizer.json").read_text()
    assert saved_json == (tmp_path / "tokens/tokenizer.json").read_text()
    sample = (tmp_path / "run/sample.txt").read_text()
    assert sample.startswith("\n")
    assert len(sample) > len("\n")
    flags = ["--overwrite", "--out", "run"]
    assert command("pretrain", *flags, *SHORT) == 0  # of bytes now
    run_tokenizer = fp8stack.load_tokenizer(str(tmp_path / "run"))
    assert run_tokenizer.name == "bytes"


def test_a_tokenizer_that_is_not_the_datas_is_refused(refused, tokens):
    words = ["pretrain", "--data", tokens, *TINY]
    refused(*words, "--tokenizer", "bytes", *VOCABULARY, message="is not that of the data")
    small = ("--set", "model_overrides.vocabulary=299")
    refused(*words, *small, message="--set model.vocabulary=300")


def test_nanogpts_characters_are_the_vocabulary_and_the_text_of_a_run(command, tmp_path, capsys):
    characters = "\n abcdeé"
    ids = {character: number for number, character in enumerate(characters)}
    meta = {"vocab_size": len(ids), "stoi": ids, "itos": dict(enumerate(characters))}
    (tmp_path / "text").mkdir()
    (tmp_path / "text/meta.pkl").write_bytes(pickle.dumps(meta))
    for name in ("train", "val"):
        tokens = np.array([ids[c] for c in "abc de é\n" * 200], dtype="<u2")
        tokens.tofile(tmp_path / f"text/{name}.bin")
    assert command("pretrain", "--data", "text", "--out", "run", *SHORT) == 0
    assert fp8stack.load(tmp_path / "run").config.vocabulary == len(characters)
    capsys.readouterr()
    assert command("generate", "run", "--prompt", "abc", "--tokens", "20", "--seed", "0") == 0
    assert set(capsys.readouterr().out.rstrip("\n")) <= set(characters)


def cut_short(run: Path) -> Path:
    """A copy of a run, resumed from step 8."""
    copy = Path(shutil.copytree(run, run.with_name("cut")))
    (copy / "checkpoints/step-000012/checkpoint.json").unlink()
    return copy


@pytest.mark.full
def test_document_masks_reach_every_pass_and_a_resumed_run_is_the_same(
    command, tokens, tmp_path, monkeypatch
):
    flags = ["--data", tokens, "--data-order", "epochs", *TINY, *VOCABULARY]
    flags += ["--phases", "default", "--recipe", "delayed"]
    assert command("pretrain", *flags, "--out", "plain") == 0
    passes: list[Tensor] = []
    forward = fp8stack.GPT.forward

    def see(self, tokens_BT, targets_BT=None, documents_BT=None, **cache):
        if targets_BT is not None:
            passes.append(documents_BT)
        return forward(self, tokens_BT, targets_BT, documents_BT, **cache)

    with monkeypatch.context() as seeing:
        seeing.setattr(fp8stack.GPT, "forward", see)
        assert command("pretrain", *flags, "--document-mask", "--out", "whole") == 0
    assert len(passes) > 12
    assert all(documents is not None for documents in passes)
    assert max(int(documents.max()) for documents in passes) >= 1
    assert losses(tmp_path / "whole") != losses(tmp_path / "plain")
    cut = cut_short(tmp_path / "whole")
    assert command("pretrain", "--resume", "cut") == 0
    assert losses(cut) == losses(tmp_path / "whole")


def test_epochs_and_mixtures_are_told_and_resumed(command, refused, tmp_path, capsys):
    for name, text in (("a.txt", "abc " * 900), ("b.txt", "xyz " * 700)):
        (tmp_path / name).write_text(text)
    mixture = "0.75:a.txt,0.25:b.txt"
    flags = ["--data", mixture, "--data-order", "epochs", *TINY]
    assert command("pretrain", *flags, "--out", "whole") == 0
    assert "75.00% of the rows, 101 windows of 32 an epoch" in capsys.readouterr().out
    cut = cut_short(tmp_path / "whole")
    assert command("pretrain", "--resume", "cut", "--data", mixture) == 0
    assert losses(cut) == losses(tmp_path / "whole")
    saved = (cut / "run.toml").read_text()
    assert f'data = "0.75:{tmp_path}/a.txt,0.25:{tmp_path}/b.txt"' in saved
    again = ["pretrain", "--resume", "cut"]
    refused(*again, "--data", "0.7:a.txt,0.3:b.txt", message="the data are not those")
    refused(*again, "--set", "data_order=random", message="data_order")


def test_a_tokenizer_that_lies_beside_runs_is_none_of_a_runs(command, tokens, tmp_path):
    (tmp_path / "n.bin").write_bytes((tmp_path / "tokens/train-00000.bin").read_bytes())
    (tmp_path / "tokenizer.json").write_text((tmp_path / "tokens/tokenizer.json").read_text())
    flags = ["--data", "n.bin", "--out", "runs/mine", *SHORT, *VOCABULARY]
    assert command("pretrain", *flags) == 0
    assert tokenizer_of_run("runs/mine", None, None) is None
    assert command("pretrain", *flags, "--tokenizer", "tokens", "--overwrite") == 0
    for path in ("runs/mine", "runs/mine/checkpoints/step-000002"):
        tokenizer = tokenizer_of_run(path, None, None)
        assert tokenizer is not None
        assert tokenizer.vocabulary == 300
    with pytest.raises(UserError, match="was trained on tokens of"):
        tokenizer_of_run("runs/mine", "bytes", None)


def another(file: Path) -> None:
    """Two tokens of a tokenizer.json change places."""
    content = json.loads(file.read_text())
    ids = content["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    file.write_text(json.dumps(content))


REPLACED: dict[str, Callable[[Path], object]] = {
    "another vocabulary": another,
    "nothing": Path.unlink,
    "no tokenizer": lambda file: file.write_text("{}"),
}
USES = {
    "resume": ["pretrain", "--steps", "13", "--resume", "cut"],
    "begin": ["pretrain", "--init-from", "cut", "--data", "text.txt", "--out", "new"],
    "generate": ["generate", "cut", "--tokens", "2"],
    "generate of a checkpoint": ["generate", "cut/checkpoints/step-000008", "--tokens", "2"],
    "eval": ["eval", "cut", "--windows", "2", "--recipes", "fp32"],
    "export": ["export", "cut", "--format", "hf", "--out", "exported"],
}


@pytest.fixture(scope="module")
def runs(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs in 300 tokens: on `.bin` and a named tokenizer, and on prepared data."""
    home = tmp_path_factory.mktemp("runs")
    shutil.copytree(prepared, home / "tokens")
    (home / "train.bin").write_bytes((home / "tokens/train-00000.bin").read_bytes())
    named = ["--tokenizer", str(home / "tokens")]
    for name, data, more in (("bin", "train.bin", named), ("prepared", "tokens", [])):
        flags = ["--data", str(home / data), *more, "--out", str(home / name)]
        assert exit_code("pretrain", *flags, *TINY, "--recipe", "fp32", *VOCABULARY) == 0
        (home / name / "checkpoints/step-000012/checkpoint.json").unlink()
    return home


@pytest.mark.parametrize(
    ("name", "use", "replaced"),
    [
        *(("bin", use, "another vocabulary") for use in USES),
        *(("bin", "resume", replaced) for replaced in ("nothing", "no tokenizer")),
        *(("prepared", "resume", replaced) for replaced in ("another vocabulary", "nothing")),
        ("bin", "begin", "nothing"),
    ],
)
@pytest.mark.full
def test_a_run_whose_tokenizer_was_replaced_says_so_and_goes_on_with_it_by_name(
    name, use, replaced, runs, command, tmp_path, capsys
):
    shutil.copytree(runs / name, tmp_path / "cut")
    (tmp_path / "text.txt").write_text(TEXT)
    file = tmp_path / "cut/tokenizer.json"
    before = file.read_text()
    REPLACED[replaced](file)
    code = command(*USES[use])
    printed = capsys.readouterr()
    if replaced == "nothing" and (use, name) == ("resume", "prepared"):  # the data have another
        assert code == 0
        assert "tokenizer.json was missing: it is written again" in printed.out
        assert file.read_text() == before
        return
    assert code == 2, printed
    assert printed.err.count("\n") == 1 + printed.err.count("passed over"), printed
    assert "tokenizer.json" in printed.err
    if replaced == "another vocabulary" and use != "begin":
        (tmp_path / "other.json").write_bytes(file.read_bytes())
        assert command(*USES[use], "--tokenizer", "other.json") == 2
        assert command(*USES[use], "--tokenizer", str(runs / "tokens")) == 0
        assert use != "resume" or file.read_text() == before


TEXT = "".join(" ".join(WORDS[i % 7 : 4 + i % 9] * 6) + "\n" for i in range(200))


def test_a_run_that_begins_with_other_weights_reads_text_as_their_tokens(command, tokens, tmp_path):
    assert command("pretrain", "--data", tokens, "--out", "bpe", *SHORT, *VOCABULARY) == 0
    (tmp_path / "text.txt").write_text(TEXT)
    begin = ["--init-from", "bpe", "--data", "text.txt", "--steps", "2", "--context", "32"]
    begin += ["--set", "sample_tokens=0", "--set", "eval_windows=2"]
    assert command("pretrain", *begin, "--batch", "4", "--out", "on") == 0
    of_new_run, of_source = (
        fp8stack.load_tokenizer(str(tmp_path / name)) for name in ("on", "bpe")
    )
    assert of_new_run.to_json() == of_source.to_json()
    train, val = load_corpora(str(tmp_path / "text.txt"), 300, texts=of_source)
    read = train.window(0, len(train)).tolist() + val.window(0, len(val)).tolist()
    assert read == [*of_source.encode(TEXT), of_source.end_of_text]
    # It resumes without them, and can be evaluated on text as well as on its own data.
    (tmp_path / "bpe").rename(tmp_path / "gone")
    assert command("pretrain", "--resume", "on", "--steps", "3") == 0
    assert command("eval", "on", "--data", "text.txt", "--recipes", "fp32") == 0


def test_text_is_no_bytes_to_a_model_with_many_tokens(command, refused, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    flags = ["pretrain", "--data", "text.txt", "--out", "r", *TINY, "--steps", "1"]
    many = [*flags, "--set", "model.vocabulary=5000"]
    assert "--tokenizer bytes" in refused(*many, message="fp8stack prepare")
    assert command(*many, "--tokenizer", "bytes") == 0


def test_more_text_than_a_start_can_read_is_to_be_prepared(prepared, tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text(TEXT)
    bpe = fp8stack.load_tokenizer(str(prepared))
    monkeypatch.setattr(texts, "MOST_BYTES", len(TEXT) - 1)
    with pytest.raises(UserError, match="fp8stack prepare"):
        load_corpora(str(tmp_path / "text.txt"), 300, texts=bpe)


@pytest.mark.full
def test_a_runs_files_may_move_and_so_may_the_run(command, tmp_path):
    shape = "vocabulary = 256\ncontext = 32\nlayers = 1\nwidth = 32\nheads = 2\n"
    (tmp_path / "mine.toml").write_text(shape)
    for name, scaling in (("one", "current"), ("two", "block")):
        (tmp_path / f"{name}.toml").write_text(f'like = "{scaling}"\n')
    (tmp_path / "other").mkdir()
    (tmp_path / "other/one.toml").write_text('compute_dtype = "fp32"\n')
    (tmp_path / "run.toml").write_text(
        'phases = [{name = "first", recipe = "other/one.toml", until = 1}, {name = "rest"}]\n'
    )
    files = ["--model", "mine.toml", "--recipe", "one.toml", "--what-if", "two.toml"]
    small_flags = ["--batch", "2", "--set", "eval_windows=2", "--set", "sample_tokens=0"]
    first = ["--config", "run.toml", "--steps", "3", "--save-every", "1"]
    assert command("pretrain", *files, *small_flags, *first, "--out", "r") == 0
    assert command("pretrain", *files, *small_flags, *first, "--resume", "auto", "--out", "r") == 0
    for name in ("mine.toml", "one.toml", "two.toml", "other/one.toml"):
        (tmp_path / name).unlink()
    (tmp_path / "r").rename(tmp_path / "moved")
    assert command("pretrain", "--resume", "moved", "--steps", "4") == 0
    assert command("pretrain", "--config", "moved/run.toml", "--steps", "3", "--out", "s") == 0
    assert losses(tmp_path / "s") == losses(tmp_path / "moved")[:3]
    assert (
        command("pretrain", "--init-from", "moved", *small_flags, "--steps", "1", "--out", "t") == 0
    )
    for run in ("moved", "s"):
        assert str(tmp_path) not in (tmp_path / run / "run.toml").read_text().replace("out = ", "")
