"""Errors that a user can cause, each with the exit code it ends in. No torch here. `UserError` is a
`ValueError`: its message is one line that names the thing, its value and the remedy, and the
command prints it without a traceback. An `assert` marks our own bugs."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input: an unknown name, a wrong file, sizes that do not fit. Exit code 2."""

    exit_code = 2
    told = False  # to the other ranks of a run


class UnservedAttention(UserError):
    """FP8 attention that this machine, backend or model does not have; `why` in a few words."""

    def __init__(self, why: str, more: str = "") -> None:
        super().__init__(f"{why}.{more}")
        self.why = why


class NoUsableCheckpoint(UserError):
    """A run was to be resumed and no checkpoint of it can be loaded. Exit code 3."""

    exit_code = 3


class StorageError(UserError):
    """The disk is full or a path cannot be written. Exit code 4."""

    exit_code = 4


class NumericFailure(UserError):
    """Steps go wrong and training cannot go on. Exit code 5."""

    exit_code = 5


class RankLost(UserError):
    """Another process of the run died, or does not answer. Exit code 4."""

    exit_code = 4


class DataWorkerLost(UserError):
    """A process that reads data is gone, or gives no batch; the run is saved. Exit code 75, on
    which a restart goes on."""

    exit_code = 75

    def __init__(self, message: str) -> None:
        super().__init__(raised_in_worker(message))


class Interrupted(UserError):
    """The user did not want to wait for a checkpoint. Exit code 130."""

    exit_code = 130


def raised_in_worker(message: str) -> str:
    """The message of an error, in one line. One that a DataLoader worker raised is made again in
    the main process, by torch, with the worker's whole traceback as its message."""
    if "\nOriginal Traceback" not in message:
        return message
    return message.rstrip().rsplit("\n", 1)[-1].partition(": ")[2]


def quoted(name: str) -> str:
    """`name` as it can stand within one line: whatever a terminal would act on is escaped."""
    shown = name if len(name) <= 200 else f"{name[:200]}..."
    return shown if shown.isprintable() else repr(shown)[1:-1]


def described(value: object) -> str:
    """`value` as an error message names something of the wrong type.

    >>> described([1, 2]), described(None), described(int)
    ('a list', 'None', "the class 'int'")
    """
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class '{value.__name__}'"
    name = type(value).__name__
    return f"a{'n' * (name[0] in 'aeiouAEIO')} {name}"


def unknown(kind: str, name: str, known: Iterable[str], meant: str | None = None) -> UserError:
    """The error for a name that is not among `known`, with `meant`, if that is, or the
    nearest one suggested.

    >>> str(unknown("recipe", "mxpf8", ["mxfp8", "bf16"]))
    "No recipe 'mxpf8'. Did you mean 'mxfp8'? Known: bf16, mxfp8."
    """
    names = sorted(known)
    name = quoted(name)
    near = [meant] if meant in names else difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return UserError(f"No {kind} '{name}'.{hint} Known: {', '.join(names)}.")
