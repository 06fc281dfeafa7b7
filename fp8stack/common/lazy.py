"""Public names of a package that are imported when they are first used."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module


def lazy_names(
    package: str, names: Mapping[str, Sequence[str]], public: Sequence[str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` for a package, so that importing it imports none of its modules.

    Args:
        package: the package's `__name__`.
        names: for each module, relative to the package, the names that it defines; a module that
            is itself a public name has none.
        public: the names that `dir` lists.
    """
    modules = {name: module for module, defined in names.items() for name in defined}

    def get(name: str) -> object:
        if name in modules:
            return getattr(import_module(f"{package}.{modules[name]}"), name)
        if name in names:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module '{package}' has no attribute '{name}'")

    return get, lambda: list(public)
