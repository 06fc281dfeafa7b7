"""Writes `docs/capabilities.md`: the capabilities of the package, and the tests of each.

`python -m tests.capabilities` writes the page. A test shows a capability if it has the marker
`@pytest.mark.capability("A1")`.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parent
MARKER = "pytest.mark.capability"
PAGE = TESTS.parent / "docs" / "capabilities.md"
SECTIONS = {"A": "Precision", "B": "FP8", "C": "Phases", "D": "Memory and speed", "E": "Hardware"}
CAPABILITIES = {
    "A1": "[configuration](configuration.md): file, flags; bad values exit with 2",
    "A2": "`--recipe fp16`: [loss scale](configuration.md#loss-scaling)",
    "A3": "overflowing steps change nothing",
    "A4": "float32 masters, gradients, moments",
    "A5": "[`fp8stack plan`](plan.md): operations, casts",
    "A6": "[`fp8stack report`](telemetry.md): dead, vanishing, exploding gradients",
    "A7": "fp32 is plain torch",
    "A8": "`guard.overflows`: warning, then bf16",
    "A9": "optimizers that share a loss scale",
    "A10": "`--accumulate`: micro-batches",
    "A11": "[`clip_mode`](configuration.md#clipping): norm, value, adaptive",
    "A12": "TF32; padded vocabulary; unsuitable sizes",
    "A13": "attention in fp32 or [FP8](plan.md#what-is-low-precision) (stand-in); bf16 residuals",
    "A14": "[mixtures of experts](experts.md): routing, balance, records",
    "A15": "[recipes of servers, `eval --agree`](generate.md#from-training-to-serving)",
    "A16": "[optimizers](configuration.md#optimizers)",
    "B1": "formats, [custom ones](numerics.md#formats-of-ones-own) too",
    "B2": "[casts](numerics.md): E4M3, E5M2",
    "B3": "delayed scaling",
    "B4": "current scaling",
    "B5": "HYBRID: E4M3 forward, E5M2 gradients",
    "B6": "MXFP8, block scaling",
    "B7": "`te` (on a stand-in) equals `emulate`",
    "B8": "no loss scale in bf16, FP8",
    "B9": "[`exclude`, `head`](configuration.md#recipe-keys): layers left out of FP8",
    "B10": "FP8 against INT8",
    "B11": "GPUs of AMD, Intel and Apple, 12.x (on pretended machines): what runs, and why not FP8",
    "C1": "[phases](long_runs.md#phases), also for own loops; [branches](long_runs.md#branches)",
    "C2": "memory saved by phases: average, peak",
    "C3": "`guard.quality`: fp32 replaces a harmful recipe",
    "D1": "[`fp8stack estimate`](plan.md#how-much-memory): memory before a run",
    "D2": "[activation checkpointing](plan.md#saving-memory)",
    "D3": "`--compile`",
    "D4": "`workers`: data read ahead",
    "D5": "`--profile`",
    "D6": "[benchmarks](performance.md); a check against slowdowns",
    "D7": "[convergence](../bench/results/cpu/study.md): FP8 within 5 %, bf16 within 1 %",
    "D8": "evaluation without a graph; FP8 state unchanged",
    "D9": "allocators; allocations of a step",
    "D10": "[`--threads`](faq.md#training-stalls-on-a-busy-machine): fewer CPU threads",
    "D11": "[`fp8stack compare`](what_does_it_cost.md): cost in loss, with intervals",
    "D12": "[`fp8stack forecast`](what_does_it_cost.md#what-will-it-cost-me)",
    "E1": "`--recipe auto`: by GPU generation",
    "E2": "substitution with reasons; `--strict`",
    "E3": "[`--parallel`](distributed.md): DDP, FSDP2, one amax history",
    "E4": "[`--grad-compression bf16`](distributed.md)",
}


def marked() -> dict[str, list[str]]:
    """The tests of each capability, as `<file>::<name>`, with "(slow)" after those that are."""
    tests = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        functions = ast.parse(source).body if MARKER in source else []
        for function in functions:
            if isinstance(function, ast.FunctionDef):
                marks = [ast.unparse(mark) for mark in function.decorator_list]
                slow = " (slow)" if "pytest.mark.slow" in marks else ""
                test = f"`{path.relative_to(TESTS).as_posix()}::{function.name}`{slow}"
                for mark in function.decorator_list:
                    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == MARKER:
                        for name in mark.args:
                            tests[ast.literal_eval(name)].append(test)
    return tests


def page() -> str:
    """The page's text."""
    tests, lines = marked(), ["# Capabilities\n\nEach capability, with its tests in `tests/`.\n"]
    for letter, title in SECTIONS.items():
        lines.append(f"\n## {letter}. {title}\n\n| | what | tests |\n|---|---|---|\n")
        for name, text in CAPABILITIES.items():
            if name.startswith(letter):
                lines.append(f"| {name} | {text} | {' '.join(tests[name])} |\n")
    return "".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
