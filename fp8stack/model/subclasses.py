"""Subclasses that replace methods of a module's class, so that isinstance checks still hold."""

from torch import nn


def subclass(kind: type[nn.Module], original: type[nn.Module]) -> type[nn.Module]:
    """A subclass of `original` with the methods of `kind`; its instances can be pickled."""
    if (kind, original) in _SUBCLASSES:
        return _SUBCLASSES[kind, original]

    def reduce(self: nn.Module, protocol: object) -> tuple[object, ...]:
        return _blank, (kind, original), self.__getstate__()  # type: ignore[no-untyped-call]

    name = f"{kind.__name__}[{original.__name__}]"
    new = type(name, (kind, original), {"__reduce_ex__": reduce})
    return _SUBCLASSES.setdefault((kind, original), new)


_SUBCLASSES: dict[tuple[type, type], type[nn.Module]] = {}


def _blank(kind: type[nn.Module], original: type[nn.Module]) -> nn.Module:
    """An instance without attributes, for pickle."""
    new = subclass(kind, original)
    return new.__new__(new)
