"""Finds the commands in the documents: those in code blocks, and inline code that is a whole one.

What cannot be told from output becomes a command that no runner knows, so that nothing escapes.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))]
SHELLS = ("", "bash", "sh", "shell", "console")
OTHERS = ("toml", "json", "text", "mermaid", "yaml", "python")  # what a block may also be in

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
    """A command as a page has it.

    Attributes:
        block: number of the code block in its page; None: inline code. The commands of a block are
            one session in one folder.
        script: it is a whole shell script rather than one command.
    """

    page: str
    line: int
    text: str
    block: int | None = None
    script: bool = False

    @property
    def place(self) -> str:
        """Where it stands, `docs/report.md:4`."""
        return f"{self.page}:{self.line}"

    @property
    def words(self) -> list[str]:
        """Its words, without comments."""
        return shlex.split(self.text, comments=True)


@dataclass(frozen=True)
class Block:
    """A fenced code block: where its first line is, its language and its text."""

    line: int
    language: str
    text: str


def blocks(text: str) -> list[Block]:
    """The fenced code blocks of a page."""
    found = []
    for match in re.finditer(r"^( *)```([a-z]*)[^\n]*\n(.*?)^ *```$", text, re.M | re.S):
        line = text.count("\n", 0, match.start(3)) + 1
        found.append(Block(line, match[2], match[3]))
    return found


def commands(page: str, text: str | None = None) -> list[Command]:
    """All commands of a page, in the order in which they stand.

    Raises:
        ValueError: a code block is in a language that nobody knows what to do with.
    """
    text = (ROOT / page).read_text(encoding="utf-8") if text is None else text
    found: list[Command] = []
    for number, block in enumerate(blocks(text)):
        if block.language not in (*SHELLS, *OTHERS):
            raise ValueError(f"{page}:{block.line}: a code block in '{block.language}'")
        if block.language in SHELLS:
            found += _of_block(page, number, block)
    return sorted([*found, *_inline(page, text)], key=lambda one: one.line)


def _of_block(page: str, number: int, block: Block) -> list[Command]:
    """A block's commands; none if it is output or a tree of files."""
    files = [
        Command(page, block.line + block.text[: x.start()].count("\n"), x[0], number, script=True)
        for x in _HERE.finditer(block.text)
    ]
    if files:
        rest = _HERE.sub(lambda one: "\n" * one[0].count("\n"), block.text)
        return [*files, *_of_block(page, number, Block(block.line, block.language, rest))]
    lines = _logical_lines(block)
    prompted = [(line, said[2:]) for line, said in lines if said.startswith("$ ")]
    if not prompted and not any(_COMMAND.match(said + " ") for _, said in lines):
        if block.language:  # it says that it is for a shell
            return [Command(page, block.line, block.text, number, script=True)]
        return []
    if not prompted and _SCRIPT.search(re.sub(r"<[^<>\n]*>", "", _bare(block.text))):
        return [Command(page, block.line, block.text, number, script=True)]
    return [
        Command(page, line, part.strip(), number)
        for line, said in prompted or lines
        for part in said.split(" && ")
    ]


def _bare(text: str) -> str:
    """`text` without what is quoted and without comments, which hold no syntax of the shell."""
    return re.sub(r"'[^'\n]*'|\"[^\"\n]*\"|(?<=\s)#[^!\n].*", "", text)


def _logical_lines(block: Block) -> list[tuple[int, str]]:
    """The lines of a block with those put together that end in a backslash; neither comments nor
    empty ones."""
    found: list[tuple[int, str]] = []
    going_on = False
    for line, said in enumerate(block.text.splitlines(), block.line):
        said = said.strip()
        if going_on:
            found[-1] = (found[-1][0], f"{found[-1][1]} {said}")
        elif said and not said.startswith("#"):
            found.append((line, said))
        else:
            continue
        last = found[-1]
        going_on = last[1].endswith("\\")
        found[-1] = (last[0], last[1].removesuffix("\\").rstrip())
    return found


def _inline(page: str, text: str) -> list[Command]:
    """Inline code that is a whole command."""
    fence = re.compile(r"^ *```.*?^ *```$", re.M | re.S)
    text = fence.sub(lambda match: "\n" * match[0].count("\n"), text)
    found = []
    # A span of code ends with its paragraph, or with its row of a table.
    for piece in re.finditer(r"(?:^(?!\|).*\S.*\n?)+|^\|.*\n?", text, re.M):
        for span in re.finditer(r"(?<!`)`([^`]+)`(?!`)", piece[0]):
            said = " ".join(span[1].replace("\\|", "|").split())
            if _WHOLE.match(said):
                line = text.count("\n", 0, piece.start() + span.start()) + 1
                found.append(Command(page, line, said))
    return found
