"""Transformer Engine's state of delayed scaling, in and out: that of its modules, as models of
Megatron-LM have them, and that of checkpoints (`<module path>._extra_state`), which is read without
unpickling. TE itself is not imported."""

from __future__ import annotations

import math
import pickletools
import struct
from collections.abc import Callable, Iterator, Mapping
from io import BytesIO
from typing import Any

import torch
from torch import Tensor, nn

from fp8stack.backends import fp8_state, load_fp8_state
from fp8stack.errors import UserError, quoted

EXTRA_STATE = "_extra_state"
KEYS = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")

# The columns of TE's tensors, which have 3 forward and 2 backward slots for each GEMM: input,
# weight, output; grad_output, grad_input (FP8FwdTensorIdx, FP8BwdTensorIdx of TE 2.20).
COLUMNS = {"input": ("fwd", 0), "weight": ("fwd", 1), "grad_output": ("bwd", 0)}

Rename = Callable[[str], str | None]


def load_extra_state(
    model: nn.Module, state_dict: Mapping[str, Any], rename: Rename | None = None
) -> list[str]:
    """Give a converted model the scales and amax histories of a checkpoint of Transformer Engine.

    A checkpoint's history that is longer than the recipe's gives its newest amaxes; one that is
    shorter is filled up with zeros.

    Args:
        model: a model in delayed scaling.
        state_dict: of a model of TE or Megatron-LM; entries other than `<path>._extra_state` are
            not looked at. Load it with `torch.load(path, weights_only=True)`.
        rename: gives the module path in `model` of a linear's path in the checkpoint, or None to
            leave it out. The two linears of an LayerNormMLP are `<path>.fc1` and `<path>.fc2`.

    Returns:
        The module paths that were in the checkpoint, as `model` names them.

    Raises:
        UserError: an entry is not what TE writes, or names a layer that is not in `model` or not in
            delayed scaling; nothing is changed.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for key, entry in state_dict.items():
        path, _, last = key.rpartition(".")
        if last == EXTRA_STATE and (read := read_extra_state(entry)):
            found |= _by_linear(path, read)
    return _load(model, found, rename)


def load_modules_state(
    model: nn.Module, te_model: nn.Module, rename: Rename | None = None
) -> list[str]:
    """Give a converted model the scales and amax histories of a model of TE modules.

    See `load_extra_state`, except that the state is read from the modules themselves.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for path, tensors in _modules(te_model):
        found |= _by_linear(path, tensors)
    return _load(model, found, rename)


@torch.no_grad()
def store_modules_state(
    model: nn.Module, te_model: nn.Module, rename: Rename | None = None
) -> list[str]:
    """Give a model of TE modules the scales and amax histories of a converted model.

    TE makes a module's FP8 tensors in its first pass under `te.autocast`: run one, in the recipe
    that is to be continued, before this. What TE then saves holds this state.

    Args:
        model: a model in delayed scaling.
        te_model: whose `fp8_meta` is written to.
        rename: see `load_extra_state`; from paths of `te_model` to those of `model`.

    Returns:
        The module paths that were written, as `model` names them.

    Raises:
        UserError: a module has no counterpart in `model`; nothing is changed.
    """
    state, copies, names = fp8_state(model), [], []
    for path, tensors in _modules(te_model):
        for linear, views in _by_linear(path, tensors).items():
            name = linear if rename is None else rename(linear)
            if name is None:
                continue
            names.append(name)
            for key, view in views.items():
                if f"{name}.{key}" not in state:
                    raise _stray(linear, name)
                value = state[f"{name}.{key}"]
                copies.append((view, _resized(value, len(view)) if value.ndim else value))
    for view, value in copies:
        view.copy_(value)
    return names


def read_extra_state(entry: Any) -> dict[str, Tensor]:
    """The tensors in one `_extra_state` entry of a checkpoint: `scale_fwd` [slots],
    `amax_history_fwd` [length, slots], and the same of `bwd`; float32. Empty if the entry is, or
    has no state of delayed scaling.

    TE writes a pickle; its opcodes are read as data, and nothing is imported or called.

    Args:
        entry: uint8 tensor, bytes, or `io.BytesIO`.

    Raises:
        UserError: it holds anything other than what TE writes.
    """
    if isinstance(entry, Tensor) and entry.dtype == torch.uint8:
        entry = entry.detach().cpu().numpy().tobytes()
    data = entry.getvalue() if isinstance(entry, BytesIO) else entry
    if data is None or data == b"":
        return {}
    if not isinstance(data, bytes):
        raise UserError(f"{EXTRA_STATE}: a {type(entry).__name__}, not a uint8 tensor or bytes.")
    try:
        state = _unpickled(BytesIO(data))
    except (*_MALFORMED, RuntimeError, struct.error) as error:
        why = quoted(" ".join(str(error).split()))
        raise UserError(f"{EXTRA_STATE}: not what Transformer Engine writes ({why}).") from None
    tensors = {k: v for k, v in state.items() if k in KEYS} if isinstance(state, dict) else {}
    if not tensors:
        return {}
    for key in KEYS:
        tensor, ndim = tensors.get(key), 2 if "history" in key else 1
        if not isinstance(tensor, Tensor) or tensor.ndim != ndim:
            raise UserError(f"{EXTRA_STATE}: '{key}' is missing or is no tensor of {ndim} dims.")
    return tensors


# Linears


def _by_linear(path: str, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The tensors of a TE module by linear: `<operand>.scale` and `<operand>.amax_history`."""
    gemms, rest = divmod(tensors["scale_fwd"].shape[-1], 3)
    wide = all(tensors[f"{kind}_fwd"].shape[-1] == 3 * gemms for kind in ("scale", "amax_history"))
    wide &= all(tensors[f"{kind}_bwd"].shape[-1] == 2 * gemms for kind in ("scale", "amax_history"))
    if rest or not wide or gemms not in (1, 2):
        raise UserError(f"{quoted(path)}: a module of {gemms} GEMMs; known are modules of 1 or 2.")
    linears = {}
    for gemm in range(gemms):
        views = {}
        for operand, (direction, column) in COLUMNS.items():
            at = (3 if direction == "fwd" else 2) * gemm + column
            views[f"{operand}.scale"] = tensors[f"scale_{direction}"][at]
            views[f"{operand}.amax_history"] = tensors[f"amax_history_{direction}"][:, at]
        linears[path if gemms == 1 else f"{path}.fc{gemm + 1}"] = views
    return linears


def _modules(te_model: nn.Module) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The TE modules in delayed scaling, with their live tensors."""
    for path, part in te_model.named_modules():
        meta: dict[str, Any] = getattr(part, "fp8_meta", {})
        forward: Any = meta.get("scaling_fwd")
        backward: Any = meta.get("scaling_bwd")
        if hasattr(forward, "amax_history") and hasattr(backward, "amax_history"):
            live = (forward.scale, forward.amax_history, backward.scale, backward.amax_history)
            yield path, dict(zip(KEYS, live, strict=True))


def _load(
    model: nn.Module, found: Mapping[str, Mapping[str, Tensor]], rename: Rename | None
) -> list[str]:
    state, names = fp8_state(model), []
    for linear, tensors in found.items():
        name = linear if rename is None else rename(linear)
        if name is None:
            continue
        names.append(name)
        for key, tensor in tensors.items():
            slot = f"{name}.{key}"
            if slot not in state:
                raise _stray(linear, name)
            state[slot] = _resized(tensor, len(state[slot])) if tensor.ndim else tensor.clone()
    load_fp8_state(model, state)
    return names


def _stray(linear: str, name: str) -> UserError:
    return UserError(
        f"'{quoted(linear)}' has no counterpart: '{quoted(name)}' is no layer in delayed scaling. "
        "Pass `rename`, which gives a layer's path in the converted model, or None."
    )


def _resized(history: Tensor, length: int) -> Tensor:
    """Row 0 is being recorded; the others are older amaxes, the newest last."""
    if len(history) == 1 or length == 1:  # a history of one row is both
        row = history[:1] if len(history) == 1 else history[-1:]
        return torch.cat([row.new_zeros(length - 1), row])
    older = history[1:][-(length - 1) :]
    return torch.cat([history[:1], older.new_zeros(length - 1 - len(older)), older])


# Pickles, read as data


class _Opaque:
    """An object of a class that nobody asks for, such as TE's recipe."""


class _Global(str):
    """The name of a class or function, `module.name`."""


_MARK = object()
_MALFORMED = (ValueError, KeyError, IndexError, TypeError, AttributeError)
_TENSOR, _STORAGE, _DICT = (
    "torch._utils._rebuild_tensor_v2",
    "torch.storage._load_from_bytes",
    "collections.OrderedDict",
)
# Of what is named in what TE writes; anything else is refused.
_KNOWN = (_TENSOR, _STORAGE, _DICT, "torch.FloatStorage", "builtins.getattr")
# Opcodes that do not matter to what comes out, or whose argument is the value.
_IGNORED = {"PROTO", "FRAME", "STOP"}
_VALUES = {
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "LONG", "FLOAT", "BINFLOAT"),
    *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
}
_CONSTANTS: dict[str, Callable[[], object]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "MARK": lambda: _MARK,
}  # fmt: skip


def _unpickled(file: BytesIO) -> Any:
    """The next pickle in `file`, of plain values and float32 tensors; objects of other classes are
    `_Opaque`. Raises a ValueError or what a malformed one leads to."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}

    def marked() -> list[Any]:
        at = max(i for i, value in enumerate(stack) if value is _MARK)
        values = stack[at + 1 :]
        del stack[at:]
        return values

    argument: Any
    for opcode, argument, _ in pickletools.genops(file):
        name = opcode.name
        if name in _IGNORED:
            continue
        if name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name in _VALUES:
            stack.append(argument)
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "GLOBAL":
            stack.append(_named(argument.replace(" ", ".")))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(_named(f"{module}.{attribute}"))
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack[-count:] = [tuple(stack[-count:])]
        elif name in ("TUPLE", "LIST"):
            values = marked()
            stack.append(tuple(values) if name == "TUPLE" else values)
        elif name in ("SETITEM", "SETITEMS"):
            pairs = marked() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
            if type(stack[-1]) is dict:
                stack[-1].update(zip(pairs[::2], pairs[1::2], strict=True))
        elif name in ("APPEND", "APPENDS"):
            items = marked() if name == "APPENDS" else [stack.pop()]
            if type(stack[-1]) is list:
                stack[-1].extend(items)
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, called = stack.pop(), stack.pop()
            stack.append(_made(called, arguments) if name == "REDUCE" else _Opaque())
        elif name == "BUILD":
            stack.pop()  # the attributes of an object that is _Opaque
        elif name == "BINPERSID":
            stack.append(("persistent", stack.pop()))
        else:
            raise ValueError(f"opcode {name}")
    (value,) = stack
    return value


def _named(name: str) -> _Global:
    if name not in _KNOWN and not name.startswith("transformer_engine."):
        raise ValueError(f"it names {name}")
    return _Global(name)


def _made(called: object, arguments: tuple[Any, ...]) -> object:
    """What a call in a pickle gives, if it is one of those that make a tensor."""
    if not isinstance(called, _Global):
        raise ValueError("a call of no function")
    if called == _STORAGE:
        return _storage(BytesIO(arguments[0]))
    if called == _TENSOR:
        storage, offset, size, stride = arguments[:4]
        last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        if not isinstance(storage, Tensor) or min((offset, *size, *stride)) < 0:
            raise ValueError("a tensor of no storage")
        if math.prod(size) > len(storage) or (math.prod(size) and last >= len(storage)):
            raise ValueError("a tensor larger than its storage")
        return storage.as_strided(size, stride, offset).clone()
    return {} if called == _DICT else _Opaque()


def _storage(file: BytesIO) -> Tensor:
    """The storage in torch's format before 1.6, which its pickles contain: five pickles (a magic
    number, a version, the machine, what it is, the storages' keys), a length, and the elements."""
    for _ in range(3):
        _unpickled(file)
    described, _ = _unpickled(file), _unpickled(file)
    kind, dtype = described[1][:2]
    if kind != "storage" or dtype != "torch.FloatStorage":
        raise ValueError(f"a {dtype}, not float32")
    (count,) = struct.unpack("<q", file.read(8))
    data = file.read()
    if len(data) != 4 * count:
        raise ValueError("a storage cut short")
    return torch.frombuffer(bytearray(data), dtype=torch.float32) if data else torch.zeros(0)
