"""Errors that a user can cause, with their exit codes. No torch here.

`UserError` is a `ValueError` whose message is one line that names the thing, its value and the
remedy. The command prints it without a traceback. An `assert` marks fp8stack's own bugs.
"""

import difflib
from collections.abc import Iterable
from importlib.util import find_spec


class UserError(ValueError):
    """Bad input: an unknown name, a wrong file, sizes that do not fit. Exit code 2."""

    exit_code = 2
    is_shared = False  # whether the other ranks of the run already know of it


class UnservedAttention(UserError):
    """FP8 attention that this machine, backend or model does not support. `reason`: a few words."""

    def __init__(self, reason: str, more: str = "") -> None:
        super().__init__(f"{reason}.{more}")
        self.reason = reason


class MissingRequirement(UserError):
    """This machine, or this version of fp8stack, lacks what sound input needs: a package, memory,
    a permission. Exit code 2."""


def require(package: str, needed_by: str) -> None:
    """Raise a MissingRequirement that says what to install if `package` is not installed."""
    if find_spec(package) is None:
        raise MissingRequirement(f"{quoted(needed_by)} needs {package}: pip install {package}")


class NoUsableCheckpoint(UserError):
    """No checkpoint of the run to resume can be loaded. Exit code 3."""

    exit_code = 3


class StorageError(UserError):
    """The disk is full or a path cannot be written. Exit code 4."""

    exit_code = 4


class NumericFailure(UserError):
    """Losses or gradients are bad, and training cannot continue. Exit code 5."""

    exit_code = 5


class RankLost(UserError):
    """Another process of the run has died or does not answer. Exit code 4."""

    exit_code = 4


class DataWorkerLost(UserError):
    """A process that reads data has died or gives no batch. The run is saved. Exit code 75, after
    which a restart resumes the run."""

    exit_code = 75

    def __init__(self, message: str) -> None:
        super().__init__(raised_in_worker(message))


class Interrupted(UserError):
    """The user interrupted the wait for a checkpoint. Exit code 130."""

    exit_code = 130


def raised_in_worker(message: str) -> str:
    """The one-line message of an error. For an error of a DataLoader worker torch raises a copy in
    the main process, with the worker's traceback in its message."""
    if "\nOriginal Traceback" not in message:
        return message
    return message.rstrip().rsplit("\n", 1)[-1].partition(": ")[2]


def quoted(name: str) -> str:
    """`name` for use in a line: shortened, with characters escaped that control a terminal."""
    text = name if len(name) <= 200 else f"{name[:200]}..."
    return text if text.isprintable() else repr(text)[1:-1]


def described(value: object) -> str:
    """`value` as an error message describes a value of the wrong type.

    >>> described([1, 2]), described(None), described(int)
    ('a list', 'None', "the class 'int'")
    """
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class '{value.__name__}'"
    name = type(value).__name__
    return f"a{'n' * (name[0] in 'aeiouAEIO')} {name}"


def unknown(kind: str, name: object, names: Iterable[str], meant: str | None = None) -> UserError:
    """The error for a name that does not exist. It suggests `meant`, if that is among `names`, or
    else the most similar name, and lists all names, but of keys only the nearest three.

    >>> str(unknown("recipe", "mxpf8", ["mxfp8", "bf16"]))
    "No recipe 'mxpf8'. Did you mean 'mxfp8'? Known: bf16, mxfp8."
    """
    options = sorted(names)
    text = quoted(str(name))
    near = (
        [meant] if meant in options else difflib.get_close_matches(text, options, n=1, cutoff=0.5)
    )
    hint = f" Did you mean '{near[0]}'?" if near else ""
    listed = f"Known: {', '.join(options)}"
    if kind.startswith("key"):
        nearest = difflib.get_close_matches(text, options, n=3, cutoff=0)
        listed = f"Nearest: {', '.join(nearest)}"
    return UserError(f"No {kind} '{text}'.{hint} {listed}.")
