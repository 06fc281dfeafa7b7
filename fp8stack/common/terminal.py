"""Printing for commands. Names, samples and messages may come from untrusted files, so characters
that control a terminal are escaped. Only this file and `screen` write to stdout and stderr."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

LAYOUT = "\n\t\xa0\u3000\u200c\u200d"
"""Characters that texts such as samples may contain: line breaks, tabs, spaces and joiners."""


def printable(text: str, keep: str = "") -> str:
    r"""`text` with characters escaped that control a terminal or are invisible, such as control
    characters and direction marks, except for characters in `keep`.

    >>> printable("name\x1b[2J\n")
    'name\\x1b[2J\\n'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def shell_quoted(word: str) -> str:
    r"""`word` quoted as one word of a suggested command, in bash's $'...' if it contains characters
    that are not printable.

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
    """Print and flush lines of a command whose results are in files. If stdout cannot be written
    (its reader has closed it, or the disk is full), this and later output is discarded."""
    _print_or_silence(sys.stdout, lines, keep)


def warn(*lines: str) -> None:
    """Print and flush lines to stderr. If it cannot be written, output is discarded."""
    _print_or_silence(sys.stderr, lines, "")


def show(*lines: str) -> None:
    """Print lines that are a command's result. Raises an OSError if they cannot be written."""
    print(*map(printable, lines), sep="\n")


def show_json(text: str) -> None:
    """Print JSON in ASCII as a command's result. `json` does not escape DEL, so it is escaped here.
    Raises an OSError if it cannot be written."""
    show(*text.replace("\x7f", "\\u007f").splitlines())


def write_text(text: str) -> None:
    """Write and flush text that is a command's result, with its line breaks and tabs. Raises an
    OSError if it cannot be written."""
    print(printable(text, LAYOUT), end="", flush=True)


def is_terminal(stream: IO[str] | None) -> bool:
    """Whether a standard stream (None if it was closed) is a terminal."""
    return stream is not None and stream.isatty()


@contextmanager
def silenced_on_error(stream: IO[str]) -> Iterator[None]:
    """Context in which the first error of writing to `stream` silences the stream."""
    try:
        yield
    except OSError:
        silence(stream)


def silence(stream: IO[str]) -> None:
    """Discard the buffer of `stream` and everything written to it later."""
    with suppress(OSError, ValueError):  # a stream that is no file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _print_or_silence(stream: IO[str] | None, lines: tuple[str, ...], keep: str) -> None:
    if stream is not None:
        with silenced_on_error(stream):
            print(*(printable(line, keep) for line in lines), sep="\n", file=stream, flush=True)
