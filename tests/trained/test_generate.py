"""Text that a model writes: the cache, the draw, and the command."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fp8stack
from fp8stack.common.errors import NumericFailure
from fp8stack.data.tokenizer import load_tokenizer
from fp8stack.layers import build_backend, fp8_state
from fp8stack.model.config import GPTConfig, plan_for
from fp8stack.model.gpt import GPT
from fp8stack.model.sampling import Sampling, draw, filtered, generate
from fp8stack.precision import Hardware
from fp8stack.trained import generate as writing
from tests.conftest import TINY
from tests.faults.inputs.input_corruptions import rewrite
from tests.model.test_gpt import (
    MODERN,
    assert_close,
    build,
    tokens,
)
from tests.support.data_writers import write_llmc
from tests.trained.conftest import TEXT

SHAPES = {"gpt2": {}, "llama": MODERN | {"kv_heads": 2}, "qwen3": MODERN | {"qk_norm": True}}
GREEDY = Sampling(temperature=0)


def small(recipe: str, backend: str = "auto", **shape: Any) -> GPT:
    """A model whose GEMMs every backend takes."""
    config = GPTConfig(vocabulary=64, context=16, layers=2, width=32, heads=2)
    plan = plan_for(config.model_copy(update=shape), recipe, Hardware("cpu"), backend)
    return GPT(config.model_copy(update=shape), build_backend(plan)).eval()


def without_cache(model: GPT, prompt: list[int], count: int) -> list[int]:
    """Greedy generation that computes the complete window again for each token."""
    context = model.config.context
    window, generated = prompt[-context:], list[int]()
    for _ in range(count):
        if len(window) > context:
            window = window[-(context // 2) :]
        with torch.no_grad():
            token = int(model(torch.tensor([window]))[0, -1].argmax())
        window, generated = [*window, token], [*generated, token]
    return generated


# The cache


@pytest.mark.parametrize("lengths", [[16], [5] + [1] * 11, [1] * 16, [5, 4, 1, 6]], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_cache_gives_the_logits_of_the_full_pass(shape, lengths):
    model = build(init_std=0.2, **shape).eval()
    cache = model.new_cache(batch=3)
    with torch.no_grad():
        expected = model(tokens())
        logits = [model(chunk, cache=cache) for chunk in tokens().split(lengths, dim=1)]
    assert cache.length == 16
    assert_close(torch.cat(logits, dim=1), expected, 1e-5)


@pytest.mark.parametrize("recipe", ["fp16", "delayed"])
def test_a_cache_is_in_attentions_dtype_and_serves_every_recipe(recipe):
    model = build(recipe, init_std=0.2, **MODERN | {"kv_heads": 2}).eval()
    cache = model.new_cache(batch=3)
    assert [keys.shape for keys in cache.keys_BGTE] == [(3, 2, 16, 8)] * len(model.blocks)
    assert cache.keys_BGTE[0].dtype == model.backend.attention_dtype
    with torch.no_grad():
        expected = model(tokens())
        logits = [model(chunk, cache=cache) for chunk in tokens().split([6] + [1] * 10, dim=1)]
    assert_close(torch.cat(logits, dim=1), expected, 0.05)


def test_an_emptied_cache_forgets_and_more_tokens_than_fit_are_refused():
    model = build(init_std=0.2).eval()
    full, short = model.new_cache(batch=3), model.new_cache(batch=3, tokens=8)
    with torch.no_grad():
        model(tokens(seed=9), cache=full)
        full.length = 0
        assert torch.equal(model(tokens(), cache=full), model(tokens()))
        full.length = 8
        with pytest.raises(ValueError, match="17 tokens are more than the model's context, 16"):
            model(tokens(length=9), cache=full)
        model(tokens(length=4), cache=short)
        with pytest.raises(ValueError, match="9 tokens are more than the c"):
            model(tokens(length=5), cache=short)
        assert (full.length, short.length) == (8, 4)
        # A cache does not support training or documents.
        for in_training, arguments in ((True, ()), (False, (None, torch.zeros(3, 16)))):
            model.train(in_training)
            with (
                torch.set_grad_enabled(in_training),
                pytest.raises(ValueError, match="generation alone"),
            ):
                model(tokens(length=8), *arguments, cache=full)


# The draw


def warped(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """The logits after the filters of transformers."""
    import transformers

    warpers: list[Any] = [transformers.TemperatureLogitsWarper(sampling.temperature)]
    warpers += [transformers.TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    warpers += [transformers.TopPLogitsWarper(sampling.top_p)] if sampling.top_p else []
    scores = logits_V[None]
    for warper in warpers:
        scores = warper(None, scores)
    return scores[0]


def test_the_filters_are_those_of_transformers():
    top_ks, top_ps = (None, 1, 2, 10, 61, 100), (None, 1e-9, 0.1, 0.5, 0.9, 0.999, 1.0)
    settings = itertools.product((0.3, 1.7), top_ks, top_ps, range(3))
    for temperature, top_k, top_p, seed in settings:
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        logits = 3 * torch.randn(61, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(
            filtered(logits, sampling).softmax(-1), warped(logits, sampling).softmax(-1)
        )


def test_tokens_come_as_often_as_they_are_likely():
    logits = torch.tensor([0.0, 1.0, 2.0, -torch.inf]).clamp(min=-50)
    generator = torch.Generator().manual_seed(0)
    sampling = Sampling(temperature=2.0)
    drawn = torch.tensor([draw(logits, sampling, generator) for _ in range(4000)])
    shares = drawn.bincount(minlength=4) / 4000
    torch.testing.assert_close(shares, (logits / 2).softmax(-1), atol=0.03, rtol=0)


def test_the_text_depends_on_the_seed_alone():
    model = build(init_std=0.2)
    before, sampling = torch.get_rng_state(), Sampling(temperature=1.0)
    first = list(generate(model, [1, 2], 12, sampling, seed=3))
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training  # as it was
    torch.manual_seed(99)
    assert list(generate(model, [1, 2], 12, sampling, seed=3)) == first
    assert list(generate(model, [1, 2], 12, sampling, seed=4)) != first


def test_a_model_in_training_writes_without_dropout_and_no_token_of_what_is_not_finite():
    model = build(init_std=0.2, dropout=0.5)
    generated = list(generate(model, [1, 2], 10, GREEDY, seed=0))
    assert generated == without_cache(model.eval(), [1, 2], 10)
    with torch.no_grad():
        model.get_parameter("final_norm.weight").fill_(torch.nan)
    with pytest.raises(NumericFailure, match="not finite"):
        next(generate(model, [1], 1, GREEDY, seed=0))


# The text


@pytest.mark.parametrize("prompt", [[7], list(range(16)), list(range(40))])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_greedy_text_is_that_of_a_plain_loop_beyond_the_context_too(shape, prompt):
    model = build(init_std=0.2, **shape).eval()
    full = []
    generated = list(generate(model, prompt, 30, GREEDY, seed=0, when_full=lambda: full.append(1)))
    assert generated == without_cache(model, prompt, 30)
    assert len(full) == {1: 2, 16: 4, 40: 4}[len(prompt)]


def test_it_stops_before_a_token_that_ends_the_text_and_draws_none_that_is_not_known():
    model = build(init_std=0.2)
    unstopped = list(generate(model, [1], 10, GREEDY, seed=0))
    end = unstopped[5]
    generated = list(generate(model, [1], 10, GREEDY, seed=0, stop=(end,)))
    assert generated == unstopped[: unstopped.index(end)]
    hot = Sampling(temperature=9.0)
    generated = list(generate(build(init_std=0.01), [1], 14, hot, seed=0, vocabulary=3))
    assert set(generated) == {0, 1, 2}


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_batch_1_in_fp8_runs_on_padded_rows_and_counts_its_gemms(recipe):
    native, emulated = small(recipe, "torch"), small(recipe, "emulate")
    before = {name: value.clone() for name, value in fp8_state(native).items()}
    generated = list(generate(native, [3, 1, 4], 8, GREEDY, seed=0))
    assert native.backend.fp8_gemms() == 8 * 8  # 2 layers of 4 linears, 8 passes
    assert generated == list(generate(emulated, [3, 1, 4], 8, GREEDY, seed=0))
    after = fp8_state(native)
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.full
def test_a_compiled_model_is_not_compiled_for_each_length():
    from torch._dynamo.testing import CompileCounterWithBackend

    model, compiler = build(init_std=0.2), CompileCounterWithBackend("eager")
    expected = list(generate(model, [1, 2], 8, GREEDY, seed=0))
    model.compile_blocks(compiler)
    assert list(generate(model, [1, 2], 8, GREEDY, seed=0)) == expected
    assert not compiler.graphs
    model(tokens(), tokens(seed=2))
    assert compiler.graphs  # compilation is on again


# The command


@pytest.fixture
def write(command, run, capfd) -> Callable[..., tuple[str, str]]:
    """`fp8stack generate` on the run: its stdout and stderr."""

    def ask(*flags: str, of: str = str(run)) -> tuple[str, str]:
        assert command("generate", of, *flags) == 0
        return tuple(capfd.readouterr())

    return ask


def test_the_text_alone_is_on_stdout_and_repeats(write, run):
    texts = []
    for seed in ("5", "5", "6"):
        out, err = write("--prompt", "The ", "--tokens", "40", "--seed", seed)
        assert out.startswith("The ")
        assert out.endswith("\n")
        assert "tokens/s" not in out
        pieces = (str(run / "checkpoints" / "step-000006"), "read 4 tokens at ", "wrote 40 at ")
        assert all(piece in err for piece in pieces)
        texts.append(out)
    assert texts[0] == texts[1] != texts[2]


def printable(text: str) -> str:
    """`text` as the command prints it."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def test_temperature_0_takes_no_draw_and_is_what_the_model_gives(write, run):
    flags = ["--prompt", "quick", "--tokens", "12", "--recipe", "fp32"]
    likeliest = (["--top-k", "1"], ["--top-p", "1e-9"], ["--temperature", "1e-40"])
    ways = [["--temperature", "0", "--seed", seed] for seed in ("1", "2")]
    texts = {write(*flags, *more)[0] for more in (*ways, *likeliest)}
    expected = without_cache(fp8stack.load(run), list(b"quick"), 12)
    assert texts == {printable("quick" + bytes(expected).decode(errors="replace") + "\n")}
    # An empty prompt begins as a document does.
    text = write("--tokens", "10", "--temperature", "0", "--recipe", "fp32")[0]
    expected = without_cache(fp8stack.load(run), [255], 10)
    assert text == printable(bytes(expected).decode(errors="replace") + "\n")


def test_any_recipe_and_backend_write(write):
    err = write("--recipe", "delayed", "--backend", "torch", "--tokens", "5", "--prompt", "ab")[1]
    assert "% of GEMM FLOPs (4 of 5 linears)" in err
    assert f"{4 * 5} FP8 GEMMs" in err


def test_without_a_recipe_it_takes_what_the_machine_multiplies_and_says_so(write):
    err = write("--tokens", "1", "--prompt", "T")[1]
    assert "read 1 token at " in err
    assert ("plan: bf16" in err) or "plan: fp32, plain torch, on cpu (this CPU has no bf16" in err
    machines = (Hardware("cpu"), Hardware("cpu", cpu_bf16=True), Hardware("cuda", (9, 0)))
    recipes = [writing.default_recipe(hardware)[0] for hardware in machines]
    assert recipes == ["fp32", "bf16", "bf16"]


def test_a_prompt_file_longer_than_the_context_is_read_from_its_end(write, tmp_path):
    long = "x" * 300 + TEXT[:100]
    end = long.encode()[-128:].decode()
    assert end.startswith("x")
    continuations = []
    for name, text in (("long.txt", long), ("end.txt", end)):
        (tmp_path / name).write_text(text, encoding="utf-8")
        out, err = write("--prompt-file", name, "--tokens", "140", "--temperature", "0")
        assert out.startswith(text)
        cut = f"the prompt has {len(long.encode())} tokens: the model reads the last 128"
        assert (cut in err) is (text == long)
        assert err.count("the context of 128 tokens is full") == 1  # of three times
        continuations.append(out.removeprefix(text))
    assert continuations[0] == continuations[1]


def test_the_runs_own_tokenizer_is_used_and_another_only_where_there_is_none(
    write, run, command, capfd, tmp_path
):
    assert (run / "tokenizer.json").exists()
    swapped = json.loads((run / "tokenizer.json").read_text(encoding="utf-8"))
    ids = swapped["model"]["vocab"]
    ids["y"], ids["z"] = ids["z"], ids["y"]  # not in an escape such as \x0b
    (tmp_path / "swapped.json").write_text(json.dumps(swapped), encoding="utf-8")
    flags = ["--tokens", "6", "--temperature", "0"]
    expected = write("--prompt", "xz", *flags)[0].translate(str.maketrans("yz", "zy"))
    swapping = [*flags, "--tokenizer", "swapped.json", "--prompt", "xy"]
    shutil.copytree(run, tmp_path / "without")
    (tmp_path / "without/tokenizer.json").unlink()
    for of in (run / "checkpoints/step-000006", "without"):
        assert command("generate", str(of), *swapping) == 2
        assert "was trained on tokens of bytes" in capfd.readouterr().err
    # Bytes need no file.
    assert write("--prompt", "xz", *flags, of="without")[0] == write("--prompt", "xz", *flags)[0]
    # Older checkpoints record no tokenizer.
    older = tmp_path / "without/checkpoints/step-000006"
    rewrite(older, lambda body: body["info"].pop("tokenizer"))
    assert write(*swapping, of=str(older))[0] == expected
    assert command("generate", "without") == 2
    assert "The tokenizer of without is unknown" in capfd.readouterr().err


@pytest.mark.full
def test_ids_that_nobody_explains_are_not_taken_for_bytes(refused, command, tmp_path, capsys):
    ids = np.random.default_rng(0).integers(0, 256, 5000)
    write_llmc(tmp_path / "llmc.bin", ids.tolist())
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    short = [*TINY, "--steps", "1", "--recipe", "fp32"]
    assert command("pretrain", "--data", "llmc.bin", "--out", "run", *short) == 0
    for words in (["generate", "run"], ["eval", "run", "--data", "text.txt"]):
        error = refused(*words)
        assert "tokenizer of run is unknown" in error
        assert "Give --tokenizer: bytes, gpt2, or the path of a tokenizer.json" in error
        assert command(*words, "--tokenizer", "bytes") == 0
    assert command("eval", "run", "--recipes", "fp32") == 0  # its own ids need none
    capsys.readouterr()
    begin = ["--init-from", "run", "--data", "text.txt", "--out", "on", "--steps", "1"]
    begin += ["--tokenizer", "bytes"]  # the header names GPT-2's vocabulary
    assert command("pretrain", *begin, "--batch", "2", "--context", "32") == 0
    assert "the tokenizer of the weights is unknown: the data are" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tokens", "0"], "--tokens 0"),
        (["--temperature", "-1"], "--temperature -1.0"),
        (["--top-k", "0"], "--top-k 0"),
        (["--top-p", "0"], "--top-p 0.0"),
        (["--seed", "-1"], "--seed -1"),
        (["--prompt", "a", "--prompt-file", "b"], "not both"),
        (["--prompt-file", "missing.txt"], "missing.txt"),
        (["--prompt-file", "."], "Cannot read --prompt-file ."),
        (["--prompt-file", "bad.txt"], "Give a file in UTF-8."),
        (["--prompt", "\udcff"], "not valid UTF-8"),
        (["--tokenizer", "nowhere"], "nowhere"),
        (["--prompt", "a b", "--tokenizer", "large.json"], "was trained on tokens of bytes"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(refused, run, tmp_path, flags, words):
    (tmp_path / "bad.txt").write_bytes(b"ab\xff")
    large = json.loads(load_tokenizer("bytes").to_json())
    large["model"]["vocab"] = {name: i + 200 for name, i in large["model"]["vocab"].items()}
    large["added_tokens"][0]["id"] = 455
    (tmp_path / "large.json").write_text(json.dumps(large))
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run/tokenizer.json").unlink()
    assert words in refused("generate", "run", *flags)


def test_no_run_and_no_checkpoint_are_one_line(refused, command, tmp_path, capsys):
    assert "No run and no checkpoint at 'nothing'" in refused("generate", "nothing")
    (tmp_path / "new" / "checkpoints").mkdir(parents=True)
    assert command("generate", "new") == 3
    assert "No checkpoint in" in capsys.readouterr().err


def test_characters_are_printed_whole(monkeypatch):
    pieces: list[str] = []
    monkeypatch.setattr(writing, "write_text", pieces.append)
    text = "é☃😀"
    cut = "😀".encode()[:2]  # by --tokens
    after: Any = SimpleNamespace(prompt=[255], tokenizer=load_tokenizer("bytes"))
    writing._print("", writing._Text.pieces(after, iter([*text.encode(), *cut])))
    assert [piece for piece in pieces if piece] == ["é", "☃", "😀", "\ufffd", "\n"]


def test_ctrl_c_ends_the_line_and_the_command(command, run, capfd, monkeypatch):
    def interrupted(*args: Any, **kwargs: Any) -> Iterator[int]:
        yield ord("a")
        raise KeyboardInterrupt

    monkeypatch.setattr(writing, "sampled", interrupted)
    assert command("generate", str(run), "--prompt", "b") == 130
    out, err = capfd.readouterr()
    assert out == "ba\n"
    assert err.endswith("fp8stack: Interrupted.\n")


@pytest.mark.full
def test_a_reader_that_goes_away_ends_it_quietly(run):
    words = [sys.executable, "-m", "fp8stack", "generate", str(run), "--tokens", "5000"]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.read(1)
    child.stdout.close()
    err = child.stderr.read().decode()
    assert child.wait(timeout=60) == 1
    assert "Traceback" not in err
    assert "BrokenPipe" not in err
