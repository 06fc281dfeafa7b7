"""fp8stack as a library: in loops of others, with models of others; its names explained."""

from __future__ import annotations

import inspect
import re

import pytest

import fp8stack
from tests.docs.docs_found import ROOT

LIBRARY = ROOT / "docs" / "library.md"
PAGE = LIBRARY.read_text(encoding="utf-8")
VALUES = {"Recipe", "FORMATS"}  # not classes or functions: Python keeps no docstring for them


# Names


@pytest.mark.parametrize("module", [fp8stack, fp8stack.numerics], ids=lambda m: m.__name__)
def test_every_public_name_is_in_the_document_and_explained_and_so_are_a_classs_methods(module):
    part = PAGE.split(f"Of `{module.__name__}`:")[1].split("Of `")[0]
    assert re.findall(r"`(\w+)`", part) == list(module.__all__)
    for name in module.__all__:
        kind = getattr(module, name)
        if name in VALUES:
            continue
        first = (inspect.getdoc(kind) or "").split("\n\n")[0]
        assert first.endswith("."), name
        for method, made in vars(kind).items() if inspect.isclass(kind) else ():
            own = inspect.isfunction(made) or isinstance(made, property | classmethod)
            if own and not method.startswith("_"):
                assert inspect.getdoc(getattr(kind, method)), f"{name}.{method}"
