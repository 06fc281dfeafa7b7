"""What the pages for newcomers say is so: predictions, examples of code, figures, links within."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fp8stack
from fp8stack.precision import Hardware, resolve
from fp8stack.precision.gpus import gpu_named
from fp8stack.precision.profit import least_ratio
from tests.conftest import Command
from tests.support.gemm_oracle import assert_all_close, normal, oracle, run

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))]
GPUS = {"9.0": ["delayed", "current", "block"], "8.9": ["delayed", "current"]}
GPUS["10.0"] = ["delayed", "mxfp8"]
WORDS = {"parallel", "resumable", "bytes", "names"}  # of the list of rooms, that name no module
MADE_UP = {"fp8stack/backends/exact.py"}  # or another project's
MADE_UP |= {"compressed_tensors_w8a8_fp8.py", "quantization/quant_scheme.py"}
MADE_UP |= {"quantization/lifecycle/initialize.py"}
MODELS = ["gpt2-124m", "gpt2-350m", "gpt2-774m", "gpt2-1.5b", "llama-8b"]


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_every_module_that_the_list_of_rooms_names_is_there() -> None:
    rooms = re.search(r"## Rooms\n\n```\n(.*?)```", _text("docs/architecture.md"), re.S)
    assert rooms is not None
    gone = []
    for room, told in re.findall(r"^  ([\w/]+)/ +(.*(?:\n {12,}.*)*)", rooms[1], re.M):
        plain = re.sub(r"\([^)]*\)", "", " ".join(told.split())).partition(":")
        for word in re.split(r"[,;]|\band\b", plain[2] or plain[0]):
            name = word.strip()
            if re.fullmatch(r"[a-z_0-9]+", name) and name not in WORDS:
                gone += [f"{room}/{name}"] * (
                    not (ROOT / "fp8stack" / room / f"{name}.py").exists()
                )
    assert gone == []


def test_every_file_of_the_repository_that_a_page_or_a_docstring_names_is_there() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no checkout")
    files = ["/" + name for name in listed.stdout.split()]
    texts = {name: _text(name) for name in PAGES}
    for path in sorted((ROOT / "fp8stack").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        told = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
        texts[str(path.relative_to(ROOT))] = "\n".join(told)
    gone = []
    for name, text in texts.items():
        text = re.sub(r"https?://\S+|Source:[^.]*\.", "", text)
        for found in re.findall(r"(?<![\w*/.-])(?:\w+/)*\w+\.py\b", text):
            if found not in MADE_UP and not any(file.endswith(f"/{found}") for file in files):
                gone.append(f"{name}: {found}")
    assert gone == []


@pytest.mark.parametrize("model", MODELS)
def test_the_predicted_speeds_are_those_that_the_command_prints(
    model: str, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["1", "8192"] if model == "llama-8b" else ["8", "1024"]
    cells = []
    for capability, recipes in GPUS.items():
        words = ["--model", model, "--capability", capability, "--batch", sizes[0]]
        assert command("bench", "roofline", *words, "--context", sizes[1]) == 0
        said = capsys.readouterr().out
        for recipe in recipes:
            (row,) = re.findall(rf"^\| {recipe} \|.*\| ([\d.]+) \|$", said, re.M)
            cells.append(row)
    assert f"| {model} | {' | '.join(cells)} |" in _text("docs/choosing_a_recipe.md")


@pytest.mark.parametrize("scaling", ["delayed", "current", "block, mxfp8"])
def test_where_fp8_pays_is_what_plans_go_by(scaling: str) -> None:
    text = _text("docs/performance.md")
    (names,) = re.findall(r"^\| scaling \| [^|]*c \| (.*) \|$", text, re.M)
    (bounds,) = re.findall(rf"^\| {scaling} \| [^|]* read[^|]*\| (.*) \|$", text, re.M)
    for one in scaling.split(", "):
        found = [least_ratio(gpu_named(name), one) for name in names.split(" | ")]
        assert [f"{bound:.0f}" for bound in found] == bounds.split(" | ")


def test_the_memory_that_the_faq_tells_is_the_estimate(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    text = _text("docs/faq.md")
    (asked,) = re.findall(r"^fp8stack (estimate .*)$", text, re.M)
    assert command(*asked.split(), "--json") == 0
    text = " ".join(text.split())
    found = json.loads(capsys.readouterr().out)
    peaks = {recipe: one["peak"] / 2**30 for recipe, one in found["recipes"].items()}
    assert f"{peaks['delayed']:.2f} GiB in delayed scaling, {peaks['bf16']:.2f} GiB in bf16" in text
    model = fp8stack.load_config("gpt2-1.5b")
    assert f"of which {16 * model.parameters() / 2**30:.0f} GiB are" in text


@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "mxfp8"])
def test_the_backend_of_the_example_computes_what_the_casts_give(recipe: str) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", _text("docs/adding.md"), re.S)
    scope: dict[str, object] = {"__name__": "exact"}
    exec(compile(code, "docs/adding.md", "exec"), scope)
    example = SimpleNamespace(**scope)
    plan = resolve(recipe, Hardware("cpu"), "emulate").for_layers({"layer": (130, 33)})
    backend = example.ExactBackend(plan)
    layer = backend.linear("layer", 130, 33, True)
    backend.attach(layer)
    x, dy = normal(2, 3, 130, seed=1, std=30), normal(2, 3, 33, seed=2, std=30)
    assert_all_close(run(layer, x, dy), oracle(recipe, layer, x, dy), 1e-6)
    assert backend.fp8_gemms() == 3
    assert layer.gemm.dtype_on(torch.device("cpu")) == torch.float64


def _anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of the headings."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_to_a_part_of_a_page_lead_to_a_heading(page: str) -> None:
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#([^)]+)\)", _text(page)):
        other = (ROOT / page).parent / target if target else ROOT / page
        assert anchor in _anchors(other.read_text(encoding="utf-8")), f"{target}#{anchor}"


def test_the_faqs_list_has_every_question() -> None:
    text = _text("docs/faq.md")
    listed = re.findall(r"^- \[(.*)\]\(#", text, re.M)
    assert listed == re.findall(r"^## (.*)$", text, re.M)


def test_make_and_ci_call_the_same_checks() -> None:
    makefile, script = _text("Makefile"), _text(".ci/check")
    known = set(re.findall(r"^ {8}(\w+)\) ", script, re.M))
    called = set(re.findall(r"^\t\.ci/check (\w+)$", makefile, re.M))
    assert known == called == {"lint", "types", "audit", "tests", "kinds"}
    (usual,) = re.findall(r"^\[ \$# -gt 0 \] \|\| set -- (.*)$", script, re.M)
    assert set(usual.split()) == known - {"kinds"}  # it runs the tests twice
    assert _text(".ci/run").rstrip().endswith("\n.ci/check")
    ended = subprocess.run([ROOT / ".ci/check", "nope"], capture_output=True, text=True)
    assert (ended.returncode, "Known: lint, types" in ended.stderr) == (2, True)


def test_every_target_that_contributors_are_told_of_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", _text("Makefile"), re.M))
    for words in re.findall(r"^make ([a-z -]+?) *#", _text("CONTRIBUTING.md"), re.M):
        assert set(words.split()) <= targets, words


def test_the_changelog_has_the_version() -> None:
    assert fp8stack.__version__ in _text("CHANGELOG.md")
