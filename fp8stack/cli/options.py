"""What the commands' options share. No command here."""

from __future__ import annotations

from typing import Any

import typer


def option(help: str, *names: str, **more: Any) -> Any:
    """An option, its default said in its help."""
    return typer.Option(*names, help=help, show_default=False, **more)


def _show(context: typer.Context, asked: bool) -> None:
    if asked:
        print(context.get_help())
        raise typer.Exit


# In place of typer's own --help, for which it imports pydantic whatever the command.
HELP = option("Show this message and exit.", "--help", "-h", is_eager=True, callback=_show)

THREADS = option("CPU threads that torch computes with. [torch's choice]")


def words(text: str) -> list[str]:
    """An option's words, separated by commas."""
    return [word for part in text.split(",") if (word := part.strip())]
