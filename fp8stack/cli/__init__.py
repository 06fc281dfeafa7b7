"""The command, a file for each of its subcommands."""

from fp8stack.cli.app import main as main
