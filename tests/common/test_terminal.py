"""Printing: escaped, quoted, and without a traceback where a stream cannot be written."""

from __future__ import annotations

import ast
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.text import Text

import fp8stack
from fp8stack.common.screen import Screen
from fp8stack.common.tables import aligned, markdown, rich_table
from fp8stack.common.terminal import LAYOUT, printable, say, shell_quoted, show, warn, write_text

SOURCE = Path(fp8stack.__file__).parent
ACTIVE = [
    *map(chr, range(0x20)), "\x7f", *map(chr, range(0x80, 0xA0)),
    *map(chr, (0x61C, 0x200E, 0x200F, 0x2028, 0x2029)),
    *map(chr, [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]),
]  # fmt: skip
EVIL = "n\x1b]0;X\a\n[red]:smile:\u202e"


def test_every_character_that_a_terminal_acts_on_is_escaped_and_no_letter_is(capsys):
    for character in ACTIVE:
        assert printable(f"a{character}b").isprintable()
        as_text = printable(character, LAYOUT)
        assert as_text == character if character in "\n\t" else as_text.isprintable()
    assert printable("é☃😀 [red]\\") == "é☃😀 [red]\\"
    assert printable("\udcff") == "\\udcff"
    write_text("a\tb\nc\x1b[2J\r")
    assert capsys.readouterr().out == "a\tb\nc\\x1b[2J\\r"


@pytest.mark.parametrize(
    "word", ["two words", "$(id)", "n\x1b\n\a\t", "é\u202e\\'", "", os.fsdecode(b"a\xff\x9bb")]
)
def test_a_quoted_word_is_that_word_to_bash_and_no_more(word):
    quoted = shell_quoted(word)
    assert quoted.isprintable()
    environment = os.environ | {"LC_ALL": "C.UTF-8"}
    printed_word = subprocess.run(
        ["bash", "-c", f"printf %s {quoted}"], capture_output=True, env=environment, check=True
    )
    assert os.fsdecode(printed_word.stdout) == word


@pytest.mark.parametrize("printed", [say, show, warn])
def test_a_line_stays_one_line(printed, capsys):
    printed(EVIL, "second")
    lines = "".join(capsys.readouterr())
    assert lines == "n\\x1b]0;X\\x07\\n[red]:smile:\\u202e\nsecond\n"


def test_a_screen_takes_names_literally_in_lines_tables_and_titles(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    console = Screen()
    console.print(EVIL, Text(EVIL))
    console.print(rich_table(EVIL, [EVIL], [[EVIL]]))
    text = stream.getvalue()
    assert printable(text, LAYOUT) == text
    assert text.count("[red]:smile:") == 5


def test_cells_of_tables_are_escaped_before_they_are_aligned():
    for lines in (aligned([[EVIL, "b"], ["c", "d"]]), markdown([EVIL], [[EVIL]])):
        assert all(line.isprintable() for line in lines)


@pytest.mark.full
def test_only_the_terminals_own_files_print():
    """`print` is refused by ruff."""
    for path in SOURCE.rglob("*.py"):
        calls = [n for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.Call)]
        names = {ast.unparse(call.func) for call in calls}
        assert not names & {"Console", "typer.echo", "sys.stdout.write", "sys.stderr.write"}, path


class _Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_work_goes_on_where_its_lines_cannot_be_written_and_a_result_says_so(monkeypatch):
    for stream in (_Full(), None):
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        say("a")
        warn("b")
        Screen(lasting=True).print("c")
        Screen(stderr=True).print("d")
    monkeypatch.setattr(sys, "stdout", _Full())
    with pytest.raises(OSError, match="No space"):
        show("a")
