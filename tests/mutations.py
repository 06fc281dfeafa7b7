"""Mutation testing: how many one-line faults in `fp8stack/` the tests catch.

    pytest -n 2 --cov --cov-context=test --cov-report= --junitxml=junit.xml -o junit_family=xunit1
    python -m tests.mutations draw .coverage --seed 0 --count 100
    python -m tests.mutations run .coverage --durations junit.xml --results results.jsonl

`draw` writes `tests/mutations.json`: lines drawn at random among those inside functions that a test
covers in its own process, and one mutation of each. `run` applies them one by one to a clone of
HEAD, which the coverage data must be of, and runs tests that cover the line until one fails. A test
that also fails with a comment in place of the mutation does not count.

A mutation is found by the texts of its line and of the lines beside it, so that a later commit can
run the same mutations; the result is "gone" if the line is. `run` skips what has a result.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from coverage import CoverageData

ROOT = Path(__file__).resolve().parents[1]
DRAWN = ROOT / "tests" / "mutations.json"
SWAPS = {  # longer operators first, for the pattern below
    **{"is not": "is", "not in": "in", "<=": "<", ">=": ">", "==": "!=", "!=": "==", "//": "*"},
    **{"is": "is not", "in": "not in", "<": "<=", ">": ">=", "and": "or", "or": "and"},
    **{"+": "-", "-": "+", "*": "/", "/": "*"},
}
OPERATOR = re.compile(rf"[\s()]*({'|'.join(map(re.escape, SWAPS))})=?[\s()]*")
UNMUTATED = (ast.Raise, ast.Assert, ast.JoinedStr)  # messages, and checks of our own code
Edit = tuple[int, int, int, str]  # line from 1, first and last offset in bytes, replacement


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """A line of a file, the lines beside it, and the mutated line; without indentation."""

    file: str
    line: int
    previous: str
    original: str
    following: str
    mutated: str


def edits(node: ast.AST, lines: Sequence[bytes]) -> Iterator[Edit]:
    """Mutations of the code in a node, except annotations and error messages."""
    operands: Sequence[ast.expr] = ()
    replaced: ast.stmt | ast.expr | None = None
    match node:
        case ast.Compare():
            operands = [node.left, *node.comparators]
        case ast.BoolOp():
            operands = node.values
        case ast.BinOp() if not (_is_text(node.left) or _is_text(node.right)):
            operands = [node.left, node.right]
        case ast.AugAssign():
            operands = [node.target, node.value]
        case ast.UnaryOp(op=ast.Not()):
            yield node.lineno, node.col_offset, node.col_offset + len("not "), ""
        case ast.Constant(value=bool(value)):
            replaced, text = node, str(not value)
        case ast.Constant(value=int(value)):
            replaced, text = node, str(value + 1)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            replaced, text = value, "None"
        case ast.If(test=test) | ast.IfExp(test=test):
            if isinstance(test, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
                yield test.lineno, test.col_offset, test.col_offset, "not "
        case ast.Expr(value=ast.Call()):
            replaced, text = node, "pass"
    if replaced is not None and replaced.lineno == replaced.end_lineno:
        yield replaced.lineno, replaced.col_offset, replaced.end_col_offset or 0, text
    for first, second in itertools.pairwise(operands):
        start = first.end_col_offset or 0
        between = lines[second.lineno - 1][start : second.col_offset].decode()
        operator = OPERATOR.fullmatch(between) if first.end_lineno == second.lineno else None
        if operator:
            yield (
                second.lineno,
                start + operator.start(1),
                start + operator.end(1),
                SWAPS[operator[1]],
            )
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not isinstance(child, UNMUTATED):
                    yield from edits(child, lines)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)


def mutations_of(file: str, source: str) -> Iterator[Mutation]:
    """The mutations of the lines inside functions, by line."""
    lines = [line.encode() for line in source.split("\n")]
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body for node in ast.walk(ast.parse(source)) if isinstance(node, functions)]
    unique = {edit for body in bodies for statement in body for edit in edits(statement, lines)}
    for line, start, end, text in sorted(unique):
        code = lines[line - 1]
        yield Mutation(
            file=file,
            line=line,
            previous=lines[line - 2].decode().strip(),
            original=code.decode().strip(),
            following=lines[line].decode().strip(),
            mutated=(code[:start] + text.encode() + code[end:]).decode().strip(),
        )


def draw(candidates: Sequence[Mutation], seed: int, count: int) -> list[Mutation]:
    """`count` lines at random, and of each a mutation at random."""
    by_line = defaultdict(list)
    for mutation in candidates:
        by_line[mutation.file, mutation.line].append(mutation)
    generator = random.Random(seed)
    return [generator.choice(by_line[key]) for key in generator.sample(sorted(by_line), count)]


def locate(mutation: Mutation, sources: Mapping[str, str]) -> tuple[str, int] | None:
    """The file and the line (from 1) of a mutation. None if its line is nowhere, or in several
    places of equal surroundings. In another file, both lines beside it must be the same."""
    scores = {}
    for file, source in sources.items():
        lines = [line.strip() for line in source.split("\n")]
        for line in range(2, len(lines)):
            previous, original, following = lines[line - 2 : line + 1]
            if original == mutation.original:
                beside = (previous == mutation.previous) + (following == mutation.following)
                scores[file, line] = beside + 2 * (file == mutation.file)
    best = max(scores.values(), default=0)
    places = [place for place, score in scores.items() if score == best]
    return places[0] if best >= 2 and len(places) == 1 else None


def mutate(source: str, line: int, mutated: str) -> str:
    """`source` with another text in a line (from 1), of the same indentation."""
    lines = source.split("\n")
    lines[line - 1] = lines[line - 1].replace(lines[line - 1].strip(), mutated)
    return "\n".join(lines)


@cache
def covering_tests(data: CoverageData, file: str) -> dict[int, set[str]]:
    """The node ids of the tests that run a line in the process of pytest itself, by line."""
    root = Path(data.data_filename()).resolve().parent
    return {
        line: {context.rpartition("|")[0] for context in contexts} - {""}
        for line, contexts in data.contexts_by_lineno(str(root / file)).items()
    }


def select(
    tests: set[str], file: str, durations_s: Mapping[str, float], budget_s: float
) -> list[str]:
    """Tests that took `budget_s` together: those whose path is like the file's come first; then the
    shortest case of each function, the second shortest, and so on. They are ordered by their files,
    so that a module's fixtures are made once."""
    by_function = defaultdict(list)
    for test in sorted(tests, key=lambda test: (durations_s[test], test)):
        by_function[test.partition("[")[0]].append(test)
    rounds = itertools.zip_longest(*by_function.values())
    ordered = [test for cases in rounds for test in cases if test]
    ordered.sort(key=lambda test: _shared_folders(test, file), reverse=True)
    sums_s = itertools.accumulate(durations_s[test] for test in ordered)
    chosen = ordered[: max(1, sum(sum_s <= budget_s for sum_s in sums_s))]
    files = list(dict.fromkeys(test.partition("::")[0] for test in chosen))
    return sorted(chosen, key=lambda test: files.index(test.partition("::")[0]))


def _shared_folders(test: str, file: str) -> int:
    mirrored = test.partition("::")[0].replace("tests/", "fp8stack/").replace("test_", "")
    return os.path.commonpath([mirrored, file]).count("/")


def pytest(tree: Path, *arguments: str, limit_s: float = 600) -> tuple[int | None, list[str]]:
    """The exit code of pytest in `tree`, None after `limit_s`, and the lines that it printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*command, f"--basetemp={tree.parent / 'tests'}", *arguments],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(limit_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and the processes that tests started
        process.wait()
        output.seek(0)
        return code, output.read().splitlines()


def first_failure(tree: Path, file: str, text: str, tests: Sequence[str], limit_s: float) -> str:
    """Run tests in order, with `text` in place of a file. Returns the node id of the test that
    fails, "" if all pass, "timeout", or "exit code N" if pytest names no test."""
    path = tree / file
    original, stat = path.read_bytes(), path.stat()
    try:
        path.write_text(text, "utf-8")
        code, lines = pytest(tree, "-x", "--tb=no", "-rfE", "-m", "", *tests, limit_s=limit_s)
    finally:
        path.write_bytes(original)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # its bytecode stays valid
    if code is None:
        return "timeout"
    failures = [line.split(" ", 1)[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    named = (test for test in tests for line in failures if f"{line} ".startswith(f"{test} "))
    return next(named, f"exit code {code}") if code else ""


def judge(tree: Path, file: str, mutated: str, tests: list[str], limit_s: float) -> dict[str, Any]:
    """Run tests on the text of a mutated file. Says whether they catch it, and by which test."""
    while tests:
        failure = first_failure(tree, file, mutated, tests, limit_s)
        if not failure:
            return {"result": "survived", "tests": len(tests)}
        until = tests[: tests.index(failure) + 1] if failure in tests else tests
        unmutated = (tree / file).read_text("utf-8") + "# The same code.\n"
        control = first_failure(tree, file, unmutated, until, limit_s)
        if not control:
            return {"result": "caught", "by": failure, "tests": len(until)}
        if control not in tests:
            return {"result": "undecided", "by": control, "tests": len(until)}
        tests = [test for test in tests if test != control]
    return {"result": "uncovered"}


def run(chosen: argparse.Namespace, data: CoverageData, tree: Path) -> Iterator[dict[str, Any]]:
    """The result of each mutation that has none yet, as soon as it is known."""
    subprocess.run(["git", "clone", "-q", "--shared", ROOT, tree], check=True)
    code, lines = pytest(tree, "--collect-only", "-m", chosen.tier)
    if code:
        sys.exit("\n".join(lines))
    durations_s = defaultdict(lambda: 1.0)
    for case in ElementTree.parse(chosen.durations).iter("testcase"):
        durations_s[f"{case.get('file')}::{case.get('name')}"] = float(case.get("time", 1))
    paths = sorted((tree / "fp8stack").rglob("*.py"))
    sources = {str(path.relative_to(tree)): path.read_text("utf-8") for path in paths}
    mutations = [Mutation(**row) for row in json.loads(DRAWN.read_text("utf-8"))]
    done = {row["mutation"] for row in _rows(chosen.results)}
    for number in sorted({*range(len(mutations))} - done):
        mutation, start_s = mutations[number], time.monotonic()
        result: dict[str, Any] = {"result": "gone"}
        if place := locate(mutation, sources):
            file, line = place
            covering = covering_tests(data, file).get(line, set()) & {*lines}
            tests = select(covering, file, durations_s, chosen.budget)
            limit_s = 300 + 5 * sum(durations_s[test] for test in tests)
            text = mutate(sources[file], line, mutation.mutated)
            result = judge(tree, file, text, tests, limit_s)
        seconds = round(time.monotonic() - start_s)
        yield (
            {"mutation": number, "file": mutation.file, "line": mutation.line}
            | result
            | {"seconds": seconds}
        )


def _rows(results: Path) -> list[dict[str, Any]]:
    return [json.loads(row) for row in results.read_text().splitlines()] if results.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("action", choices=["draw", "run"])
    parser.add_argument("coverage", type=Path, help="coverage data with contexts, in HEAD's folder")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: %(default)s)")
    parser.add_argument("--count", type=int, default=100, help="(default: %(default)s)")
    parser.add_argument("--durations", type=Path, default=Path("junit.xml"), help="of the tests")
    parser.add_argument("--results", type=Path, default=Path("results.jsonl"), help="(%(default)s)")
    parser.add_argument("--tier", default="not slow", help="markers (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=120, help="seconds of tests per mutation")
    parser.add_argument("--against", type=Path, help="earlier results to compare with")
    chosen = parser.parse_args()
    data = CoverageData(str(chosen.coverage))
    data.read()
    if chosen.action == "draw":
        candidates = [
            mutation
            for path in sorted((ROOT / "fp8stack").rglob("*.py"))
            for mutation in mutations_of(str(path.relative_to(ROOT)), path.read_text("utf-8"))
            if covering_tests(data, mutation.file).get(mutation.line)
        ]
        drawn = [json.dumps(asdict(row)) for row in draw(candidates, chosen.seed, chosen.count)]
        DRAWN.write_text("[\n" + ",\n".join(drawn) + "\n]\n", "utf-8")
        return
    with tempfile.TemporaryDirectory() as folder, chosen.results.open("a") as results:
        for row in run(chosen, data, Path(folder) / "checkout"):
            print(json.dumps(row), file=results, flush=True)
    print(dict(Counter(row["result"] for row in _rows(chosen.results))))
    if chosen.against:
        caught, before = (
            {row["mutation"] for row in _rows(path) if row["result"] == "caught"}
            for path in (chosen.results, chosen.against)
        )
        print(f"Of {len(before)} caught in {chosen.against}, {len(before & caught)} are caught.")
        print(f"Not caught: {sorted(before - caught)}")


if __name__ == "__main__":
    main()
