"""The printing of commands. Names, samples and messages may come from a stranger's files, so every
character that a terminal would act on is escaped. Only this file and `screen` write to stdout and
stderr."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

LAYOUT = "\n\t\xa0\u3000\u200c\u200d"
"""Characters that text such as a sample has: its lines, tabs, spaces and joiners of letters."""


def printable(text: str, keep: str = "") -> str:
    r"""`text` with every character escaped that a terminal would act on or not show, such as
    control characters and marks of writing direction, except those in `keep`.

    >>> printable("name\x1b[2J\n")
    'name\\x1b[2J\\n'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def shell_quoted(word: str) -> str:
    r"""`word` as one word of a suggested command, in bash's $'...' where it has characters that
    are not printed as they are.

    >>> shell_quoted("my run"), shell_quoted("it's\n")
    ("'my run'", "$'it\\'s\\n'")
    """
    if word.isprintable():
        import shlex

        return shlex.quote(word)
    return f"$'{''.join(map(_in_bash, word))}'"


def _in_bash(character: str) -> str:
    if character in "\\'":
        return f"\\{character}"
    if "\udc80" <= character <= "\udcff":  # a byte of a file name that is not UTF-8
        return f"\\x{ord(character) - 0xDC00:x}"
    return printable(character)


def say(*lines: str, keep: str = "") -> None:
    """Print lines of a command whose results are in files, at once. Work goes on in silence if
    stdout cannot be written: its reader has gone, or its disk is full."""
    _print_or_silence(sys.stdout, lines, keep)


def warn(*lines: str) -> None:
    """Print lines to stderr, at once. Work goes on if it cannot be written."""
    _print_or_silence(sys.stderr, lines, "")


def show(*lines: str) -> None:
    """Print lines that are a command's result. Raises an OSError if they cannot be written."""
    print(*map(printable, lines), sep="\n")


def show_json(text: str) -> None:
    """Print JSON in ASCII as a result, still JSON where a string has the character that `json`
    leaves as it is, DEL. Raises an OSError if it cannot be written."""
    show(*text.replace("\x7f", "\\u007f").splitlines())


def write_text(text: str) -> None:
    """Write text that is a command's result, with its own line breaks and tabs, at once. Raises an
    OSError if it cannot be written."""
    print(printable(text, LAYOUT), end="", flush=True)


def is_terminal(stream: IO[str] | None) -> bool:
    """Whether a standard stream, None where it was closed, is a terminal."""
    return stream is not None and stream.isatty()


@contextmanager
def silenced_on_error(stream: IO[str]) -> Iterator[None]:
    """A context in which the first error of writing to `stream` silences it."""
    try:
        yield
    except OSError:
        silence(stream)


def silence(stream: IO[str]) -> None:
    """Discard what `stream` still holds and what is written to it from now on."""
    with suppress(OSError, ValueError):  # a stream that is no file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _print_or_silence(stream: IO[str] | None, lines: tuple[str, ...], keep: str) -> None:
    if stream is not None:
        with silenced_on_error(stream):
            print(*(printable(line, keep) for line in lines), sep="\n", file=stream, flush=True)
