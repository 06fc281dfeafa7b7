from dataclasses import replace

from tests.mutations import Mutation, draw, locate, mutate, mutations_of

SOURCE = '''
LIMIT = 2


def count(rows: list[int] | None, most: int = 3) -> int:
    """Rows + 1 below 2."""
    if not rows or len(rows) ** 2 >= (most // 2):
        raise ValueError(f"{len(rows) + 1} rows")
    rows.clear()
    return len(rows) if rows else "x" + "y"
'''
LINES = {
    "if not rows or len(rows) ** 2 >= (most // 2):": {
        "if rows or len(rows) ** 2 >= (most // 2):",
        "if not rows and len(rows) ** 2 >= (most // 2):",
        "if not rows or len(rows) ** 3 >= (most // 2):",
        "if not rows or len(rows) ** 2 > (most // 2):",
        "if not rows or len(rows) ** 2 >= (most * 2):",
        "if not rows or len(rows) ** 2 >= (most // 3):",
    },
    "rows.clear()": {"pass"},
    'return len(rows) if rows else "x" + "y"': {
        "return None",
        'return len(rows) if not rows else "x" + "y"',
    },
}


def mutations() -> list[Mutation]:
    return list(mutations_of("fp8stack/a.py", SOURCE))


def test_each_mutation_changes_one_operation_of_a_function_and_no_text():
    assert {(m.original, m.mutated) for m in mutations()} == {
        (line, mutated) for line, texts in LINES.items() for mutated in texts
    }
    for m in mutations():
        expected = SOURCE.replace(m.original, m.mutated)
        assert mutate(SOURCE, m.line, m.mutated) == expected != SOURCE


def test_a_seed_draws_the_same_mutations_of_different_lines():
    drawn = draw(mutations(), seed=1, count=3)
    assert drawn == draw(mutations(), seed=1, count=3)
    assert {mutation.original for mutation in drawn} == set(LINES)


def test_a_mutation_is_found_where_its_line_has_moved_to():
    (mutation,) = (m for m in mutations() if m.mutated == "pass")
    file, renamed = mutation.file, "fp8stack/b.py"
    moved = "\n\n" + SOURCE.replace("    ", "        ")
    assert locate(mutation, {file: moved, renamed: SOURCE}) == (file, 11)
    assert locate(mutation, {renamed: SOURCE}) == (renamed, 9)
    assert locate(replace(mutation, previous="else:"), {renamed: SOURCE}) is None
    assert locate(mutation, {file: SOURCE + SOURCE}) is None
