"""The `fp8stack` command: subcommands, errors and exit codes.

torch, accelerate and pydantic are imported inside the commands that need them, to keep `--help`
fast (tests/test_startup.py).
"""

import contextlib
import io
import os
import sys
import traceback
import warnings
from typing import Annotated, Any, NoReturn

import typer

from fp8stack.cli import options
from fp8stack.cli.bench import bench
from fp8stack.cli.compare import compare
from fp8stack.cli.estimate import estimate
from fp8stack.cli.forecast import forecast
from fp8stack.cli.machine import conform, doctor
from fp8stack.cli.options import Command, Group, option
from fp8stack.cli.plan import plan
from fp8stack.cli.prepare import prepare
from fp8stack.cli.pretrain import pretrain
from fp8stack.cli.results import copy, list_, report
from fp8stack.cli.results import show as show_run
from fp8stack.cli.trained import evaluate, export, generate
from fp8stack.common.errors import Interrupted, StorageError, UserError, quoted
from fp8stack.common.terminal import show, silence, warn, write_text
from fp8stack.common.version import __version__

app = typer.Typer(
    name="fp8stack",
    help="Pretrain GPT-style models in FP8, on any machine.",
    invoke_without_command=True,
    cls=Group,
    add_completion=False,  # typer's imports pydantic for every command; ours is below
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
)
app.add_typer(bench)
for function, short, example in (
    (pretrain, "Train a model", "pretrain --recipe delayed --steps 200 --out runs/demo"),
    (compare, "Train in several recipes and compare losses",
     "compare --recipes fp32,delayed,mxfp8 --steps 300"),
    (prepare, "Tokenize documents into shards",
     "prepare texts/ --tokenizer gpt2 --out data/mine"),
    (plan, "Show the precision of every operation",
     "plan --model gpt2-124m --recipe delayed --capability 9.0"),
    (estimate, "Estimate the memory of a run",
     "estimate --model gpt2-1.5b --recipe delayed --capability 9.0"),
    (doctor, "Show what this machine can do", "doctor --capability 9.0"),
    (list_, "List models, recipes or runs", "list recipes"),
    (copy, "Copy a model, recipe or run's configuration", "copy recipe delayed mine.toml"),
    (show_run, "Show a run on the terminal", "show runs/demo"),
    (report, "Report on runs as an HTML page", "report runs/demo"),
    (evaluate, "Compute validation losses", "eval runs/demo --recipes fp32,delayed,nvfp4"),
    (generate, "Generate text", "generate runs/demo --prompt 'def main'"),
    (forecast, "Forecast what each recipe would cost in loss",
     "forecast --model llama-8b --tokens 160B"),
    (export, "Write a model for transformers, vLLM or safetensors",
     "export runs/demo --format hf --out exported"),
    (conform, "Check that this machine computes what formats say", "conform --quick"),
):  # fmt: skip
    name, epilog = example.partition(" ")[0], f"Example: fp8stack {example}"
    app.command(name, cls=Command, short_help=short, epilog=epilog)(function)


COMPLETION = option("Print your shell's completion, to be sourced.", "--completion")


@app.callback()
def _no_command(
    context: typer.Context,
    version: Annotated[bool, option("Print the version.", "--version")] = False,
    completion: Annotated[bool, COMPLETION] = False,
    help: Annotated[bool, options.HELP] = False,
) -> None:
    if version:
        show(f"fp8stack {__version__}")
    elif completion:
        write_text(_completion_script(os.path.basename(os.environ.get("SHELL", ""))) + "\n")
    elif context.invoked_subcommand is None:
        write_text(f"{context.get_help()}\n")


def _completion_script(shell: str) -> str:
    if shell not in ("bash", "zsh", "fish"):
        raise UserError(
            f"No completion for the shell {quoted(shell) or '(SHELL is not set)'}. Set SHELL to "
            "bash, zsh or fish."
        )
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    names = {"prog_name": "fp8stack", "complete_var": COMPLETE, "shell": shell}
    return get_completion_script(**names)


COMPLETE = "_FP8STACK_COMPLETE"
"""The environment variable by which a shell requests completions."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command and exit; see `fp8stack.cli.main`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(
            errors="replace"
        )  # a sample may hold characters that the terminal cannot show
    if arguments is None:
        warnings.showwarning = _print_warning  # type: ignore[assignment]
    try:
        if COMPLETE in os.environ:
            from typer.completion import completion_init  # type: ignore[attr-defined]

            completion_init()
            app(prog_name="fp8stack")
        words = _completed(sys.argv[1:] if arguments is None else arguments)
        code = app(words, standalone_mode=False)
        sys.stdout.flush()  # a full disk behind it is an error of the command
    except UserError as error:
        _fail(str(error), error.exit_code)
    except _UsageError as error:
        _fail(_key_without_flag(error) or f"{_usage_message(error)} See --help.", 2)
    except (typer.Abort, KeyboardInterrupt):
        _fail("interrupted", Interrupted.exit_code)
    except BrokenPipeError:
        silence(sys.stdout)  # its reader has exited
        _exit(1)
    except OSError as error:  # such as a full disk behind a redirected stdout
        if error.filename is None:
            silence(sys.stdout)
        _fail(f"{error.filename or 'output'}: {error.strerror}", StorageError.exit_code)
    except Exception:
        sys.excepthook = _print_traceback
        if _ranks() == 1:
            raise
        _print_traceback(*sys.exc_info())
        _exit(1)
    if code == Interrupted.exit_code:  # typer 0.29 raises this on Ctrl-C
        _fail("Interrupted.", code)
    _exit(code)


def _completed(arguments: list[str]) -> list[str]:
    """The arguments, with a bare `--resume` as `--resume auto`, and `help plan` as `plan
    --help`."""
    if arguments[:1] == ["help"]:
        return [*arguments[1:], "--help"]
    words: list[str] = []
    for argument in [*arguments, "-"]:
        words += ["auto"] if words[-1:] == ["--resume"] and argument.startswith("-") else []
        words.append(argument)
    return words[:-1]


def _usage_message(error: Any) -> str:
    """The error of a command line, as sentences in one line, with the value that pydantic refused,
    which typer 0.29 leaves out."""
    message = " ".join(error.format_message().split()).rstrip(".")
    message += "" if message.endswith("?") else "."
    refused: list[Any] = getattr(error.__cause__, "errors", list)()
    return message.replace("': ", f"' = {refused[0]['input']!r}: ", 1) if refused else message


def _key_without_flag(error: Any) -> str | None:
    """The message for an unknown option that is a key of a run, model or recipe; None if it is
    none."""
    if not hasattr(error, "possibilities") or error.ctx is None:  # not a NoSuchOption
        return None
    option = error.option_name
    if all(parameter.name != "set" for parameter in error.ctx.command.params):
        return None
    from fp8stack.planning.run_config import owner_of

    key = option.lstrip("-").replace("-", "_")
    owner = owner_of(key)
    if owner is None:
        return None
    name = key if owner == "run" else f"{owner}.{key}"
    return f"No such option: {option}. It is a key without a flag: --set {name}=VALUE"


# click's UsageError: from click or, in newer versions (0.29 is one), from typer's copy of it.
_UsageError: Any = typer.BadParameter.__bases__[0]


def _fail(message: str, code: int) -> NoReturn:
    # One rank per machine prints: most errors are the same on all ranks.
    if _ranks() == 1 or os.environ.get("LOCAL_RANK", "0") == "0":
        warn(f"fp8stack: {message}")
    _exit(code)


def _print_traceback(*error: Any) -> None:
    warn(*"".join(traceback.format_exception(*error)).splitlines())


def _print_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, *more: Any
) -> None:
    warn(*warnings.formatwarning(message, category, filename, lineno).splitlines())


def _ranks() -> int:
    """The number of ranks that a launcher started, from WORLD_SIZE."""
    count = os.environ.get("WORLD_SIZE", "1")
    return int(count) if count.isdecimal() else 1


def _exit(code: int | None) -> NoReturn:
    """Exit the process. Ranks use os._exit, because destroying the process group may hang (torch
    2.13's gloo: a thread waits for the GIL, whose holder waits for the thread)."""
    if _ranks() > 1:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code or 0)
    sys.exit(code)
