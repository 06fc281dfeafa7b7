"""The state of Transformer Engine's modules and checkpoints, in and out. TE's modules are the
stand-in's; what writes `_extra_state` is TE's own source."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import pickle
import textwrap
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8stack import UserError, fp8_state
from fp8stack.integrations import transformer_engine as te_state
from fp8stack.integrations.transformer_engine import (
    KEYS,
    load_extra_state,
    load_modules_state,
    read_extra_state,
    store_modules_state,
)
from tests.integrations.loops import converted
from tests.support.backend_models import normal, same
from tests.support.te import te_stand_in

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTH = 16  # of TE's histories here


@pytest.fixture(scope="module")
def te() -> Any:
    with te_stand_in.installed() as stand_in:
        yield stand_in


class TEModel(nn.Module):
    """One linear and one module of two GEMMs, as in Megatron-LM's layers."""

    def __init__(self) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        options = {"params_dtype": torch.float32, "device": "cpu", "bias": False}
        self.proj = te.Linear(32, 32, **options)
        self.mlp = te.LayerNormMLP(32, 64, activation="srelu", normalization="RMSNorm", **options)
        for seed, parameter in enumerate(self.parameters()):
            with torch.no_grad():
                parameter.copy_(normal(*parameter.shape, seed=seed, std=0.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.proj(x))


def trained_te(length: int = LENGTH, steps: int = 3) -> TEModel:
    from transformer_engine.common.recipe import DelayedScaling, Format
    from transformer_engine.pytorch import autocast

    recipe = DelayedScaling(
        fp8_format=Format.HYBRID, amax_history_len=length, amax_compute_algo="max"
    )
    model = TEModel()
    for step in range(steps):
        with torch.autocast("cpu", torch.bfloat16), autocast(enabled=True, recipe=recipe):
            y = model(normal(32, 32, seed=step, std=step + 1))
        y.float().square().mean().backward()
    return model


class Ours(nn.Module):
    """The same linears by other names."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(32, 32, bias=False)
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.out(x)).relu())


RENAME = {"proj": "out", "mlp.fc1": "up", "mlp.fc2": "down"}.get


def extra_state(module: nn.Module) -> Tensor:
    """What TE's own `get_extra_state` gives for a module."""
    node = te_stand_in.NOW.source.node(f"{te_stand_in.BASE}.get_extra_state")
    scope = {
        "torch": SimpleNamespace(
            **{name: getattr(torch, name) for name in ("Tensor", "empty", "empty_like", "uint8")},
            frombuffer=torch.frombuffer,
            cuda=SimpleNamespace(synchronize=lambda: None),
        ),
        "pickle": pickle,
        "is_stateless_recipe": lambda recipe: not recipe.delayed(),
        "_has_delayed_scaling_state": lambda meta: "scaling_fwd" in meta,
    }
    exec(textwrap.dedent(ast.unparse(node)), scope)
    fields: Any = SimpleNamespace(fp8_meta=module.fp8_meta, fp8=True, fp8_calibration=False)
    entry: Tensor = scope["get_extra_state"](fields)  # type: ignore[operator]
    return entry


def checkpoint(model: TEModel) -> dict[str, Tensor]:
    return {
        "proj.weight": model.proj.weight.detach(),
        "proj._extra_state": extra_state(model.proj),
        "mlp._extra_state": extra_state(model.mlp),
        "core_attention._extra_state": torch.empty(0, dtype=torch.uint8),
    }


def live(module: Any) -> dict[str, Tensor]:
    forward, backward = module.fp8_meta["scaling_fwd"], module.fp8_meta["scaling_bwd"]
    tensors = forward.scale, forward.amax_history, backward.scale, backward.amax_history
    return dict(zip(KEYS, (tensor.clone() for tensor in tensors), strict=True))


def test_the_columns_are_those_of_tes_source(te):
    for operand, (direction, column) in te_state.COLUMNS.items():
        forward = direction == "fwd"
        for gemm in (1, 2):
            at = (3 if forward else 2) * (gemm - 1) + column
            assert te.source.index(forward, operand, gemm) == at


@pytest.mark.parametrize("protocol", range(3, 6))
def test_what_te_writes_is_read_as_unpickling_it_would(te, protocol, monkeypatch):
    dumps = pickle.dumps
    monkeypatch.setattr(pickle, "dumps", lambda value: dumps(value, protocol))
    model = trained_te()
    for module in (model.proj, model.mlp):
        entry = extra_state(module)
        unpickled = pickle.loads(entry.numpy().tobytes())
        assert type(unpickled["recipe"]).__name__ == "DelayedScaling"
        read = read_extra_state(entry)
        assert same(read, {key: unpickled[key] for key in KEYS})
        assert same(read, live(module))
        assert read["amax_history_fwd"].shape[0] == LENGTH
        assert same(read_extra_state(io.BytesIO(entry.numpy().tobytes())), read)


def test_a_checkpoint_of_te_goes_into_a_converted_model_and_back_into_te(te):
    model = trained_te()
    ours = converted(Ours(), "delayed")
    before = fp8_state(ours)
    length = len(before["up.input.amax_history"])
    assert length > LENGTH
    assert load_extra_state(ours, checkpoint(model), RENAME) == ["out", "up", "down"]
    state, mlp = fp8_state(ours), live(model.mlp)
    assert torch.equal(state["down.weight.scale"], mlp["scale_fwd"][4])
    assert torch.equal(state["down.grad_output.scale"], mlp["scale_bwd"][2])
    history = state["up.input.amax_history"]
    assert torch.equal(history[-LENGTH + 1 :], mlp["amax_history_fwd"][1:, 0])
    assert history[-1] > 0
    assert not history[1 : -LENGTH + 1].any()
    direct = converted(Ours(), "delayed")
    load_modules_state(direct, model, RENAME)
    assert same(fp8_state(direct), state)
    # Back, into a model of TE with other amaxes. (TE updates all models in one list.)
    written = {name: live(getattr(model, name)) for name in ("proj", "mlp")}
    other = trained_te(steps=1)
    assert not same(live(other.mlp), written["mlp"])
    assert store_modules_state(ours, other, RENAME) == ["out", "up", "down"]
    for name in ("proj", "mlp"):
        there, back = written[name], live(getattr(other, name))
        for key in KEYS:  # what TE keeps of outputs, nobody reads
            columns = [c for c in range(there[key].shape[-1]) if "bwd" in key or c % 3 < 2]
            columns = [c for c in columns if "fwd" in key or c % 2 == 0]
            assert torch.equal(back[key][..., columns], there[key][..., columns]), key
    # And it trains on, from these scales.
    ours(normal(32, 32)).square().mean().backward()
    assert not same(fp8_state(ours), state)


@pytest.mark.parametrize("length", [1, 2, 2000])
def test_a_history_of_another_length_keeps_its_newest_amaxes(te, length):
    model = trained_te(length, steps=4)
    ours = converted(Ours(), "delayed")
    load_extra_state(ours, checkpoint(model), RENAME)
    theirs = live(model.proj)["amax_history_fwd"][:, 0]
    found = fp8_state(ours)["out.input.amax_history"]
    rows = theirs[1:] if length > 1 else theirs
    count = min(len(rows), len(found) - 1)
    assert torch.equal(found[-count:], rows[-count:])
    other = trained_te(length, steps=1)
    store_modules_state(ours, other, RENAME)
    again = live(other.proj)["amax_history_fwd"][:, 0]
    assert torch.equal(again[-count:], theirs[-count:])


def test_layers_without_a_counterpart_are_refused_by_name_and_nothing_changes(te):
    model, ours = trained_te(), converted(Ours(), "delayed")
    for load in (
        lambda rename: load_extra_state(ours, checkpoint(model), rename),
        lambda rename: load_modules_state(ours, model, rename),
        lambda rename: store_modules_state(ours, model, rename),
    ):
        before, theirs = fp8_state(ours), live(model.proj)
        with pytest.raises(UserError, match=r"'mlp.fc1' has no counterpart: 'mlp.fc1' is no layer"):
            load(lambda path: "out" if path == "proj" else path)
        assert same(fp8_state(ours), before)
        assert same(live(model.proj), theirs)
        assert load(lambda path: "out" if path == "proj" else None) == ["out"]
    assert load_modules_state(ours, trained_te(steps=0)) == []  # no module in FP8 yet
    with pytest.raises(UserError, match="is no layer in delayed scaling"):
        load_extra_state(converted(Ours(), "current"), checkpoint(model), RENAME)
    wide = {key: torch.zeros(LENGTH, 9) if "history" in key else torch.zeros(9) for key in KEYS}
    with pytest.raises(UserError, match="known are modules of 1 or 2"):
        load_extra_state(ours, {"experts._extra_state": blob(wide)}, None)


# What is not TE's


def blob(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


class Runs:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def tensors(**changed: Any) -> dict[str, Any]:
    made = {k: torch.ones(LENGTH, 3) if "history" in k else torch.ones(3) for k in KEYS[:2]}
    made |= {k: torch.ones(LENGTH, 2) if "history" in k else torch.ones(2) for k in KEYS[2:]}
    return made | changed


def test_what_would_run_is_refused_and_does_not_run(tmp_path):
    marker = tmp_path / "ran"
    inner = io.BytesIO()
    torch.save(Runs(marker), inner, _use_new_zipfile_serialization=False)

    class Nested:
        def __reduce__(self) -> tuple[Any, ...]:
            return torch.storage._load_from_bytes, (inner.getvalue(),)

    for evil in (Runs(marker), tensors(recipe=Runs(marker)), tensors(recipe=Nested())):
        entry = blob(evil)
        with pytest.raises(UserError, match="not what Transformer Engine writes"):
            read_extra_state(entry)
        assert not marker.exists()
    pickle.loads(blob(Runs(marker)).numpy().tobytes())
    assert marker.exists()  # a real one


def test_states_without_scales_are_empty_and_others_are_refused():
    assert len(read_extra_state(blob(tensors()))) == 4  # TE 1.x: no recipe
    for nothing in (None, b"", torch.empty(0, dtype=torch.uint8), blob(None), blob({})):
        assert read_extra_state(nothing) == {}
    odd: list[Any] = [
        17, torch.zeros(3), blob(tensors(scale_fwd=torch.ones(3).double())), b"\x80\x04.", b"junk",
        blob(tensors(scale_bwd=[1.0, 1.0])), blob(tensors(scale_fwd=torch.ones(2, 3))),
        blob({"scale_fwd": torch.ones(3)}), blob(OrderedDict(scale_fwd=1)), blob(tensors(x={1})),
    ]  # fmt: skip
    for entry in odd:
        with pytest.raises(UserError, match="_extra_state: "):
            read_extra_state(entry)


def test_a_tensor_that_is_larger_than_its_storage_is_refused():
    storage = torch.storage.TypedStorage(4)

    class Huge:
        size: tuple[int, ...]
        stride: tuple[int, ...]

        def __reduce__(self) -> tuple[Any, ...]:
            return torch._utils._rebuild_tensor_v2, (storage, 0, self.size, self.stride, False, {})

    for size, stride in (((1 << 40,), (0,)), ((5,), (1,)), ((2,), (9,)), ((-2,), (1,))):
        huge = Huge()
        huge.size, huge.stride = size, stride
        with pytest.raises(UserError, match="storage"):
            read_extra_state(blob(tensors(scale_fwd=huge)))


def test_a_damaged_entry_is_refused_and_no_other_error_comes_out():
    whole = blob(tensors()).numpy().tobytes()
    for length in range(1, len(whole) - 1, 7):
        with pytest.raises(UserError):
            read_extra_state(whole[:length])
    generator = torch.Generator().manual_seed(0)
    for place in torch.randint(len(whole), (400,), generator=generator).tolist():
        damaged = bytearray(whole)
        damaged[place] ^= 1 + place % 255
        with contextlib.suppress(UserError):  # some bytes are values
            read_extra_state(bytes(damaged))
