"""fp8stack as a library: its functions do what commands do, and its names are explained."""

from __future__ import annotations

import inspect
import math
import re

import pytest
import torch
from torch import nn

import fp8stack
from fp8stack.common.errors import UserError
from tests.conftest import TINY, exit_code
from tests.docs.docs_commands import ROOT

PAGE = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
VALUES = {"Recipe", "FORMATS"}  # not classes or functions: Python keeps no docstring for them


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    out = str(tmp_path_factory.mktemp("library") / "run")
    assert exit_code("pretrain", *TINY, "--recipe", "current", "--steps", "2", "--out", out) == 0
    return out


def test_generate_is_the_text_that_the_command_prints(run, command, capsys):
    capsys.readouterr()
    text = fp8stack.generate(run, "def ", tokens=20, seed=3, temperature=0.5)
    assert fp8stack.generate(run, "def ", tokens=20, seed=4, temperature=0.5) != text
    words = ["--tokens", "20", "--seed", "3", "--temperature", "0.5"]
    assert command("generate", run, "--prompt", "def ", *words) == 0
    assert capsys.readouterr().out == f"{text}\n"
    assert text.startswith("def ")
    with pytest.raises(UserError, match="Use 1 or more"):
        fp8stack.generate(run, tokens=0)


def test_evaluate_gives_the_losses_of_recipes_on_the_same_windows(run):
    current, exact = fp8stack.evaluate(run, "current", "fp32", windows=4)
    (alone,) = fp8stack.evaluate([run], windows=4)
    assert alone.recipe == "current"
    assert alone.loss == current.loss
    assert exact.difference == pytest.approx(exact.loss - current.loss)
    assert current.perplexity == math.exp(current.loss)


def test_a_model_is_converted_by_a_recipes_name():
    named, planned = (nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)) for _ in "ab")
    planned.load_state_dict(named.state_dict())
    fp8stack.convert(named, "mxfp8")
    hardware = fp8stack.probe("cpu")
    fp8stack.convert(planned, fp8stack.resolve("mxfp8", hardware))
    x = torch.randn(8, 32)
    assert torch.equal(named(x), planned(x))
    with pytest.raises(UserError, match="Did you mean 'mxfp8'"):
        fp8stack.convert(nn.Sequential(nn.Linear(32, 32)), "mxpf8")


@pytest.mark.parametrize("module", [fp8stack, fp8stack.numerics], ids=lambda m: m.__name__)
def test_every_public_name_is_in_the_document_and_explained_and_so_are_a_classs_methods(module):
    section = PAGE.split(f"Of `{module.__name__}`:")[1].split("Of `")[0]
    assert re.findall(r"`(\w+)`", section) == list(module.__all__)
    for name in module.__all__:
        kind = getattr(module, name)
        if name in VALUES:
            continue
        first = (inspect.getdoc(kind) or "").split("\n\n")[0]
        assert first.endswith("."), name
        for method, member in vars(kind).items() if inspect.isclass(kind) else ():
            is_method = inspect.isfunction(member) or isinstance(member, property | classmethod)
            if is_method and not method.startswith("_"):
                assert inspect.getdoc(getattr(kind, method)), f"{name}.{method}"
