"""Nothing that a user hands us is ever executed, and the code has no way to."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.inputs.input_pickles import DOORS, PAYLOADS, executed

ROOT = Path(__file__).parents[2]
MODULES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
MODULES |= {"yaml", "jsonpickle", "copyreg"}
CALLS = {
    *("torch.load", "torch.save", "torch.jit.load", "torch.hub.load", "torch.package"),
    *("numpy.load", "np.load", "np.loadtxt", "os.system", "os.popen", "pandas.read_pickle"),
}
BUILTINS = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "read_pickle", "load_checkpoint_and_dispatch"),
}
KEYWORDS = {"shell", "allow_pickle", "trust_remote_code"}


def uses(tree: ast.AST) -> Iterator[str]:
    """The calls in a module that could execute the content of a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module.split(".")[0] in MODULES:
                yield module
            yield from (f"{module}.{a.name}" for a in node.names if f"{module}.{a.name}" in CALLS)
            yield from (a.name for a in node.names if a.name in ATTRIBUTES)
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name in CALLS or node.attr in ATTRIBUTES:
                yield name
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in BUILTINS:
                yield node.func.id
            for keyword in node.keywords:
                value = ast.unparse(keyword.value)
                if keyword.arg in KEYWORDS and value != "False":
                    yield f"{keyword.arg}={value}"


def test_no_module_can_execute_what_it_reads():
    calls = {
        f"{path.relative_to(ROOT)}: {use}"
        for folder in ("fp8stack", "bench")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for use in uses(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert calls == set()


# Every fourth in the short form; each goes through every door.
@pytest.mark.parametrize(
    "name",
    [
        name if number % 4 == 0 else pytest.param(name, marks=pytest.mark.slow)
        for number, name in enumerate(PAYLOADS)
    ],
)
def test_a_malicious_file_is_executed_nowhere(name, pristine, tmp_path):
    assert len(DOORS) >= 15
    assert executed(pristine, tmp_path, name) == []
