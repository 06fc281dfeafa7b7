"""A pytest plugin: `-p tests.support.pretend_gpu` collects the tests for GPUs where there is none,
which imports all that they import. PRETEND_WITHOUT names modules, separated by commas, that appear
not to be installed."""

import os
import sys
from typing import Any

import torch

from bench.gpu_code.pretend import cuda_functions

MISSING = set(filter(None, os.environ.get("PRETEND_WITHOUT", "").split(",")))


class _Without:
    """A finder of modules that does not find `MISSING`."""

    def __init__(self, finder: Any) -> None:
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)

    def find_spec(self, name: str, *where: Any) -> Any:
        return None if name.partition(".")[0] in MISSING else self._finder.find_spec(name, *where)


if MISSING:
    sys.meta_path[:] = [_Without(finder) for finder in sys.meta_path]
for name, function in cuda_functions().items():
    setattr(torch.cuda, name, function)
