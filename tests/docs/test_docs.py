"""Tests that the documents are true: defaults, names, predictions, examples, figures, links."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin

import pytest
import typer

import fp8stack
from fp8stack.analysis.forecast.forecast import forecast_by_size
from fp8stack.analysis.forecast.law import fitted
from fp8stack.cli import app as cli
from fp8stack.common.io import json_lines
from fp8stack.model.config import GPTConfig
from fp8stack.planning.run_config import GuardConfig, RunConfig, parse_config
from fp8stack.precision import Hardware, resolve
from fp8stack.precision import recipe_file as recipes
from fp8stack.precision.hardware import machine_for
from fp8stack.training.run_plans import plan_run
from tests import capabilities
from tests.support.gemm_oracle import assert_all_close, normal, oracle, run

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))]
WORDS = {"parallel", "resumable", "bytes", "names"}  # of the list of rooms, that name no module
MADE_UP = {"fp8stack/layers/exact.py", "train.py"}  # or another project's
MADE_UP |= {"compressed_tensors_w8a8_fp8.py", "quantization/quant_scheme.py"}
MADE_UP |= {"quantization/lifecycle/initialize.py", "module/grouped_linear.py"}
COSTS = "docs/what_does_it_cost.md"
COMMANDS: dict[str, Any] = vars(typer.main.get_command(cli.app))["commands"]


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(("keys", "prefix"), [(RunConfig, ""), (GuardConfig, "guard.")])
def test_every_key_is_documented_with_its_default(keys, prefix):
    flags = {option.name for option in COMMANDS["pretrain"].params} if keys is RunConfig else ()
    text = _text("docs/configuration.md")
    for key, field in keys.model_fields.items():
        name = f"--{key.replace('_', '-')}" if key in flags else prefix + key
        row = re.search(rf"^\| `{name}` \| (.*?) \|", text, re.M)
        assert row, name
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        expected = str(default).lower() if isinstance(default, bool) else str(default)
        expected = "see below" if isinstance(default, GuardConfig) else expected
        expected = "" if default is None else expected
        assert row[1].strip("` ") == expected, key


def test_every_flag_is_documented_and_every_documented_flag_exists():
    flags = {f"--{option.name.replace('_', '-')}" for option in COMMANDS["pretrain"].params}
    documented = set(re.findall(r"`(--[a-z-]+)", _text("docs/configuration.md")))
    assert documented - {"--no-guard", "--init", "--learning-rate"} == flags - {"--help"}


def test_recipe_and_model_keys_are_documented():
    text = _text("docs/configuration.md")
    keys = {*recipes.RecipeFile.model_fields, *recipes.QuantizerFields.model_fields}
    keys = keys | GPTConfig.model_fields.keys()
    for key in keys - {"name", "description"}:
        assert f"`{key}`" in text, key


def _choices(annotation: object) -> set[str]:
    """The strings that a key may be set to, at any depth of its annotation."""
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return {value for value in arguments if isinstance(value, str)}
    return set().union(*map(_choices, arguments))


@pytest.mark.parametrize("keys", [RunConfig, GPTConfig, recipes.QuantizerFields])
def test_every_choice_of_a_key_is_documented(keys):
    text = _text("docs/configuration.md")
    for key, field in keys.model_fields.items():
        for choice in _choices(field.annotation):
            assert re.search(rf'`"?{choice}"?`', text), f"{key} = {choice}"


def test_every_field_of_a_runs_log_is_documented(pristine):
    rows = json_lines(pristine / "metrics.jsonl")
    fields = set().union(*rows)
    text = _text("docs/architecture.md").partition("Rows of `metrics.jsonl`:")[2]
    assert {"loss", "step_ms", "val_loss"} <= fields
    assert fields - set(re.findall(r"`(\w+)`", text)) == set()
    rows = json_lines(pristine / "telemetry.jsonl")
    fields = set().union(*rows)
    assert {"layer", "sqnr_db", "gradient"} <= fields
    assert fields - set(re.findall(r"`(\w+)`", _text("docs/telemetry.md"))) == set()


def test_the_readme_shows_every_command_and_the_changelog_the_version():
    assert set(re.findall(r"fp8stack ([a-z]+)", _text("README.md"))) >= COMMANDS.keys() - {"bench"}
    assert fp8stack.__version__ in _text("CHANGELOG.md")
    script = _text(".ci/check")
    checks = set(re.findall(r"^ {8}(\w+)\) ", script, re.M))
    assert checks == set(re.findall(r"^\t\.ci/check (\w+)$", _text("Makefile"), re.M))


@pytest.mark.full
def test_every_capability_is_shown_by_tests_and_the_page_is_the_one_that_they_give():
    assert capabilities.marked().keys() == capabilities.CAPABILITIES.keys()
    assert _text("docs/capabilities.md") == capabilities.page(), "python -m tests.capabilities"


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("FP8", ["delayed", "current", "block", "mxfp8", "rowwise"]),
        ("FP6", ["mxfp6_e2m3", "mxfp6_e3m2"]),
        ("FP4", ["mxfp4", *(f"nvfp4{form}" for form in ("", "_nearest", "_no_hadamard"))]),
    ],
)
def test_the_readmes_gaps_are_those_of_the_committed_study(kind, names):
    cells = json.loads(_text("bench/results/cpu/study.json"))["cells"]
    gaps = [cell["gap"]["mean"] for cell in cells if cell["recipe"] in names]
    (bound,) = re.findall(rf"below ([\d.]+) % in {kind}\b", " ".join(_text("README.md").split()))
    assert float(bound) / 2 < max(gaps) < float(bound)


def test_the_forecasts_of_the_documents_are_the_commands():
    names = re.findall(
        r"^\| `(\w+)` \| [\d.]+ \| [\d.]+ to [\d.]+ \| [\d.]+ \|$", _text(COSTS), re.M
    )
    assert len(names) == 6
    readme = " ".join(_text("README.md").split())
    for expected in forecast_by_size("llama-8b", 160 * 10**9, names).recipes:
        gap, extra = expected.percent, expected.extra_tokens
        assert gap is not None
        assert extra is not None
        interval = f"{gap.low:.2f} to {gap.high:.2f}"
        tokens = f"{extra.mean:.1f}" if extra.mean < 10 else f"{extra.mean:.0f}"
        cells = f"| `{expected.recipe}` | {gap.mean:.2f} | {interval} | {tokens} |"
        assert cells in _text(COSTS)
        if expected.recipe in ("delayed", "nvfp4"):
            share = f"{gap.mean:.2f} % in `{expected.recipe}`"
            assert re.search(rf"{share} \((90 % interval )?{interval}\)", readme), share
    law = fitted()
    formula = f"{law.level:.2f} x (min(D / N, {law.cap:.0f}) / 20)^{law.exponent:.2f}"
    assert formula in _text(COSTS)


def test_the_times_of_the_documents_are_the_plans():
    table = r"^\| (?:model \| H100|gpt2-|llama-).*\|$"
    header, *rows = re.findall(table, _text("docs/recipes.md"), re.M)
    gpus = [cell.partition(",")[0] for cell in header.strip("| ").split(" | ")[1:]]
    assert (len(rows), gpus) == (6, ["H100", "H200", "RTX 4090", "B200"])
    for row in rows:
        model, *ranges = row.strip("| ").split(" | ")
        for gpu, expected in zip(gpus, ranges, strict=True):
            config = parse_config(
                None, {"model": model, "recipe": "mxfp8" if gpu == "B200" else "delayed"}
            )
            planned = plan_run(config, machine_for(None, False, gpu=gpu), 1, will_train=False)
            (time,) = planned.plans[0].times
            assert f"{time.ratio.low:.2f} to {time.ratio.high:.2f}" == expected, (model, gpu)


def test_the_table_of_costs_is_that_of_the_committed_study():
    cells = json.loads(_text("bench/results/cpu/study.json"))["cells"]
    rows = re.findall(r"^\| FP[468]: (.*?) \| (.*?) \| (.*?) \|$", _text(COSTS), re.M)
    assert len(rows) == 5
    for title, *ranges in rows:
        names = re.findall(r"`(\w+)`", title)
        for ratio, cell in zip((2, 8), ranges, strict=True):
            chosen = [c for c in cells if c["recipe"] in names and c["ratio"] == ratio]
            gaps = sorted(round(cell["gap"]["mean"], 2) + 0.0 for cell in chosen)
            least, most = f"{gaps[0]:.2f}", f"{gaps[-1]:.2f}"
            assert cell == (least if least == most else f"{least} to {most}"), title


# Pages: predictions, examples of code, figures, links


def test_every_module_that_the_list_of_rooms_names_is_there():
    rooms = re.search(r"## Rooms\n.*?```\n(.*?)```", _text("docs/architecture.md"), re.S)
    assert rooms is not None
    missing = []
    for room, description in re.findall(r"^  ([\w/]+)/ +(.*(?:\n {12,}.*)*)", rooms[1], re.M):
        plain = re.sub(r"\([^)]*\)", "", " ".join(description.split())).partition(":")
        for word in re.split(r"[,;]|\band\b", plain[2] or plain[0]):
            name = word.strip()
            if re.fullmatch(r"[a-z_0-9]+", name) and name not in WORDS:
                missing += [f"{room}/{name}"] * (
                    not (ROOT / "fp8stack" / room / f"{name}.py").exists()
                )
    assert missing == []


@pytest.mark.full
def test_every_file_of_the_repository_that_a_page_or_a_docstring_names_is_there():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no checkout")
    files = ["/" + name for name in listed.stdout.split()]
    texts = {name: _text(name) for name in PAGES}
    for path in sorted((ROOT / "fp8stack").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        docstrings = [
            ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)
        ]
        texts[str(path.relative_to(ROOT))] = "\n".join(docstrings)
    missing = []
    for name, text in texts.items():
        text = re.sub(r"https?://\S+|Source:[^.]*\.", "", text)
        for mentioned in re.findall(r"(?<![\w*/.-])(?:\w+/)*\w+\.py\b", text):
            if mentioned not in MADE_UP and not any(
                file.endswith(f"/{mentioned}") for file in files
            ):
                missing.append(f"{name}: {mentioned}")
    assert missing == []


@pytest.mark.full
def test_the_memory_that_the_faq_tells_is_the_estimate(command, capsys):
    text = _text("docs/faq.md")
    (words,) = re.findall(r"^fp8stack (estimate .*)$", text, re.M)
    assert command(*words.split(), "--json") == 0
    text = " ".join(text.split())
    estimate = json.loads(capsys.readouterr().out)
    peaks = {recipe: memory["peak"] / 2**30 for recipe, memory in estimate["recipes"].items()}
    assert f"{peaks['delayed']:.0f} GiB in delayed scaling, {peaks['bf16']:.0f} GiB in bf16" in text
    model = fp8stack.load_config("gpt2-1.5b")
    assert f"of which {16 * model.parameters() / 2**30:.0f} GiB are" in text


@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "mxfp8"])
def test_the_backend_of_the_example_computes_what_the_casts_give(recipe):
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
    assert layer.backend is backend


def _anchors(text: str) -> set[str]:
    """The anchors that GitHub derives from the headings."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in headings}


def test_links_lead_to_a_file_and_a_heading_of_it():
    for page in PAGES:
        for target, anchor in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]+))?\)", _text(page)):
            file = (ROOT / page).parent / target if target else ROOT / page
            assert file.exists(), (page, target)
            if anchor:
                anchors = _anchors(file.read_text(encoding="utf-8"))
                assert anchor in anchors, f"{page}: {target}#{anchor}"
