"""Finds the commands in the documents, in code blocks and in inline code."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))]
SHELLS = ("", "bash", "sh", "shell", "console")

_COMMAND = re.compile(
    r"(?:[A-Z][A-Z0-9_]*=\S* +)*(?:fp8stack|python3?|torchrun|accelerate|pip|git|cd|\.|make) "
)
_INLINE = re.compile(
    r"(?:[A-Z][A-Z0-9_]*=\S* )*(?:fp8stack [a-z]|python -m (?:bench|fp8stack)|torchrun |"
    r"accelerate launch |pip install )"
)
_HERE = re.compile(r"^(?:cat > \S+|python -) <<'(\w+)'\n.*?^\1$\n?", re.M | re.S)  # here-documents


@dataclass(frozen=True)
class Command:
    """A command in a page; `line` is that of its code block.

    Attributes:
        block: number of the code block in its page; None: inline code. The commands of a block run
            in one folder.
        script: whether it is a shell script rather than a command.
    """

    page: str
    line: int
    text: str
    block: int | None = None
    script: bool = False

    @property
    def place(self) -> str:
        """Page and line: `docs/data.md:4`."""
        return f"{self.page}:{self.line}"

    @property
    def words(self) -> list[str]:
        """The words of the command, without comments."""
        return shlex.split(self.text, comments=True)


@dataclass(frozen=True)
class Block:
    """A fenced code block: the number of its first line, its language and its text."""

    line: int
    language: str
    text: str


def blocks(text: str) -> list[Block]:
    """The fenced code blocks of a page."""
    result = []
    for match in re.finditer(r"^( *)```([a-z]*)[^\n]*\n(.*?)^ *```$", text, re.M | re.S):
        line = text.count("\n", 0, match.start(3)) + 1
        result.append(Block(line, match[2], match[3]))
    return result


def commands(page: str) -> list[Command]:
    """All commands of a page, in order of their blocks."""
    text = (ROOT / page).read_text(encoding="utf-8")
    result: list[Command] = []
    for number, block in enumerate(blocks(text)):
        if block.language not in SHELLS:
            continue
        scripts = [match[0] for match in _HERE.finditer(block.text)]
        body = re.sub(r" *\\\n\s*", " ", _HERE.sub("", block.text))  # lines that are continued
        if re.search(r"^(?:for|while) ", body, re.M):
            scripts, body = [body], ""
        lines = [line.strip() for line in body.splitlines()]
        prompted = [line[2:] for line in lines if line.startswith("$ ")]
        pieces = [piece.strip() for line in prompted or lines for piece in line.split(" && ")]
        result += [Command(page, block.line, script, number, script=True) for script in scripts]
        result += [
            Command(page, block.line, piece, number)
            for piece in pieces
            if _COMMAND.match(f"{piece} ")
        ]
    plain = re.sub(
        r"^ *```.*?^ *```$", lambda match: "\n" * match[0].count("\n"), text, flags=re.M | re.S
    )
    # A span of code ends with its paragraph, or with its row of a table.
    for piece in re.finditer(r"(?:^(?!\|).*\S.*\n?)+|^\|.*\n?", plain, re.M):
        for span in re.finditer(r"(?<!`)`([^`]+)`(?!`)", piece[0]):
            code = " ".join(span[1].replace("\\|", "|").split())
            if _INLINE.match(code):
                line = plain.count("\n", 0, piece.start() + span.start()) + 1
                result.append(Command(page, line, code))
    return result
