"""The `fp8stack` command, a file for each group of subcommands."""

from fp8stack.cli.app import main as main
