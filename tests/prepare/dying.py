"""A worker that dies. In a file of its own: a process that starts imports it and nothing else."""

import os


def dies(item: object) -> None:
    os._exit(9)
