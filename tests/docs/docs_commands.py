"""Finds the commands in the documents, in code blocks and in inline code.

Text that could be output or a command becomes a command that no runner knows, so that no command is
missed.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))]
SHELLS = ("", "bash", "sh", "shell", "console")
OTHERS = ("toml", "json", "text", "mermaid", "yaml", "python")  # other languages of code blocks

PROGRAMS = (
    *("fp8stack", "python", "python3", "torchrun", "accelerate", "pip", "pytest", "git", "cd"),
    *(".", "srun", "sbatch", "tensorboard", "trackio", "wandb", "vllm", "lm_eval", "make"),
)
_COMMAND = re.compile(rf"(?:[A-Z][A-Z0-9_]*=\S* +)*(?:{'|'.join(map(re.escape, PROGRAMS))}) ")
_WHOLE = re.compile(
    r"(?:[A-Z][A-Z0-9_]*=\S* )*"
    r"(?:fp8stack [a-z]|python -m (?:bench|fp8stack)|torchrun |accelerate launch |pip install |"
    r"pytest -|make [a-z])"
)
_HERE = re.compile(r"^(?:cat > \S+|python -) <<'(\w+)'\n.*?^\1$\n?", re.M | re.S)  # here-documents
_SCRIPT = re.compile(r"^(?:#!|for |while |if |export |srun )|[|;<]| > |\$\(", re.M)


@dataclass(frozen=True)
class Command:
    """A command in a page.

    Attributes:
        block: number of the code block in its page; None: inline code. The commands of a block run
            in one session, in the same folder.
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


def commands(page: str, text: str | None = None) -> list[Command]:
    """All commands of a page, in order.

    Raises:
        ValueError: a code block is in an unknown language.
    """
    text = (ROOT / page).read_text(encoding="utf-8") if text is None else text
    result: list[Command] = []
    for number, block in enumerate(blocks(text)):
        if block.language not in (*SHELLS, *OTHERS):
            raise ValueError(f"{page}:{block.line}: a code block in '{block.language}'")
        if block.language in SHELLS:
            result += _of_block(page, number, block)
    return sorted([*result, *_inline(page, text)], key=lambda command: command.line)


def _of_block(page: str, number: int, block: Block) -> list[Command]:
    """The commands of a block; empty if it is output or a tree of files."""
    files = [
        Command(page, block.line + block.text[: x.start()].count("\n"), x[0], number, script=True)
        for x in _HERE.finditer(block.text)
    ]
    if files:
        remaining = _HERE.sub(lambda match: "\n" * match[0].count("\n"), block.text)
        return [*files, *_of_block(page, number, Block(block.line, block.language, remaining))]
    lines = _logical_lines(block)
    prompted = [(line, text[2:]) for line, text in lines if text.startswith("$ ")]
    if not prompted and not any(_COMMAND.match(text + " ") for _, text in lines):
        if block.language:  # marked as a shell block
            return [Command(page, block.line, block.text, number, script=True)]
        return []
    if not prompted and _SCRIPT.search(re.sub(r"<[^<>\n]*>", "", _bare(block.text))):
        return [Command(page, block.line, block.text, number, script=True)]
    return [
        Command(page, line, piece.strip(), number)
        for line, text in prompted or lines
        for piece in text.split(" && ")
    ]


def _bare(text: str) -> str:
    """`text` without quoted strings and comments, which contain no shell syntax."""
    return re.sub(r"'[^'\n]*'|\"[^\"\n]*\"|(?<=\s)#[^!\n].*", "", text)


def _logical_lines(block: Block) -> list[tuple[int, str]]:
    """The lines of a block, without comments and empty lines; lines that end in a backslash are
    joined."""
    lines: list[tuple[int, str]] = []
    is_continued = False
    for line, text in enumerate(block.text.splitlines(), block.line):
        text = text.strip()
        if is_continued:
            lines[-1] = (lines[-1][0], f"{lines[-1][1]} {text}")
        elif text and not text.startswith("#"):
            lines.append((line, text))
        else:
            continue
        last = lines[-1]
        is_continued = last[1].endswith("\\")
        lines[-1] = (last[0], last[1].removesuffix("\\").rstrip())
    return lines


def _inline(page: str, text: str) -> list[Command]:
    """The inline code of a page that is a complete command."""
    fence = re.compile(r"^ *```.*?^ *```$", re.M | re.S)
    text = fence.sub(lambda match: "\n" * match[0].count("\n"), text)
    result = []
    # A span of code ends with its paragraph, or with its row of a table.
    for piece in re.finditer(r"(?:^(?!\|).*\S.*\n?)+|^\|.*\n?", text, re.M):
        for span in re.finditer(r"(?<!`)`([^`]+)`(?!`)", piece[0]):
            code = " ".join(span[1].replace("\\|", "|").split())
            if _WHOLE.match(code):
                line = text.count("\n", 0, piece.start() + span.start()) + 1
                result.append(Command(page, line, code))
    return result
