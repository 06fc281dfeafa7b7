"""Transformer Engine's state of delayed scaling, in and out: that of its modules, as models of
Megatron-LM have them, and that of checkpoints (`<module path>._extra_state`), whose pickles run
nothing. TE itself is not imported."""

from __future__ import annotations

import math
import pickle
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

    TE writes a pickle; what it names is neither imported nor called.

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
        state = _Reader(BytesIO(data)).load()
    except Exception as error:  # of whatever kind a damaged pickle leads to
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


# Pickles


class _Opaque:
    """An object of a class that nobody asks for, such as TE's recipe."""

    def __new__(cls, *args: object) -> _Opaque:
        return super().__new__(cls)


class _Reader(pickle._Unpickler):
    """Unpickles plain values and float32 tensors, and refuses all names but those in what TE
    writes. The class in Python: that in C takes as much memory as a damaged pickle says."""

    def find_class(self, module: str, name: str) -> Any:
        """Our own stand-in for a class or function."""
        known = _KNOWN.get(f"{module}.{name}")
        if known is None and not module.startswith("transformer_engine."):
            raise ValueError(f"it names {module}.{name}")
        return known or _Opaque

    def load_build(self: Any) -> None:
        """Leave the state of an object out: it is of one that is `_Opaque`."""
        self.stack.pop()

    dispatch = pickle._Unpickler.dispatch | {pickle.BUILD[0]: load_build}


def _storage(data: bytes) -> Tensor:
    """All elements of a storage, which torch pickles as a file of its own."""
    storage = torch.load(BytesIO(data), "cpu", weights_only=True)
    if not isinstance(storage, torch.storage.TypedStorage) or storage.dtype != torch.float32:
        raise ValueError("a storage that is not of float32")
    return torch.empty(0).set_(storage._untyped_storage)


def _tensor(storage: object, offset: int, size: Any, stride: Any, *_: object) -> Tensor:
    last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if not isinstance(storage, Tensor) or min((offset, *size, *stride)) < 0:
        raise ValueError("a tensor of no storage")
    if math.prod(size) > len(storage) or (math.prod(size) and last >= len(storage)):
        raise ValueError("a tensor larger than its storage")
    return storage.as_strided(size, stride, offset).clone()


_KNOWN: dict[str, Callable[..., object]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch.storage._load_from_bytes": _storage,
    "collections.OrderedDict": dict,  # a tensor's hooks
    "builtins.getattr": _Opaque,  # a member of an enum
}
