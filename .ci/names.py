"""Refuse names that do not say what they hold: `python .ci/names.py FOLDER...`.

Local variables and parameters are checked, in every Python file of the folders. A name such as
`found` or `part` says how a value came about, or that it belongs to something; the reader needs
what it is: `missing_slots`, `layer`, `shard`. Fields of classes are not checked, as their names
may be keys of files, such as `asked` in plan.json.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

VAGUE = {
    *("found", "made", "told", "asked", "given", "kept", "left", "wanted", "seen", "shown", "said"),
    *("taken", "had", "gone", "known", "one", "own", "other", "others", "rest", "part", "parts"),
    *("whole", "each", "both", "some", "alike", "ours", "theirs", "thing", "things"),
    *("how", "why", "there", "here", "what", "which", "who"),
}


def names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Variables, wherever a value is bound to them, and parameters, with their lines."""
    fields = {
        statement.target
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Name(ctx=ast.Store()) if node not in fields:
                yield node.lineno, node.id
            case ast.arg():
                yield node.lineno, node.arg
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                yield node.lineno, name
            case ast.MatchStar(name=str(name)):
                yield node.lineno, name


def vague_names(path: Path) -> list[str]:
    """A line for each vague name in a file, in the order of the file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        f"{path}:{line}: '{name}' does not say what it holds. Give it the name of its content."
        for line, name in sorted(names(tree))
        if name in VAGUE
    ]


if __name__ == "__main__":
    files = sorted(path for folder in sys.argv[1:] for path in Path(folder).rglob("*.py"))
    complaints = [line for path in files for line in vague_names(path)]
    print("\n".join(complaints) or f"Files with plain names only: {len(files)}.")
    sys.exit(bool(complaints))
