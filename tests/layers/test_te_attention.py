"""Attention in FP8 by the te backend, on a CPU: its numbers, its state, and where it is refused.
What stands for Transformer Engine is in te_stand_in.py."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8stack import numerics
from fp8stack.analysis.conform.oracles import DelayedSlot
from fp8stack.common.errors import UserError
from fp8stack.layers import delayed, fp8_state
from fp8stack.layers.backend import Backend
from fp8stack.layers.shared_amaxes import SharedAmaxes
from fp8stack.model.config import GPTConfig
from fp8stack.model.config import plan_for as real_plan_for
from fp8stack.precision import Hardware, load_recipe, resolve
from fp8stack.training.guard import policy
from fp8stack.training.load import find_source
from fp8stack.training.telemetry.operand_errors import Telemetry
from tests.conftest import TINY as FLAGS
from tests.conftest import losses, metrics
from tests.layers.test_te import checkpoint_tensors, distance
from tests.support import backend_models
from tests.support.backend_models import (
    B200,
    CPU,
    H100,
    PARTS,
    TINY,
    adam,
    checkpointed,
    grad,
    loss_of,
    normal,
    same,
)
from tests.support.cases import case
from tests.support.study_recipes import NEAREST
from tests.support.te import te_stand_in

pytestmark = pytest.mark.usefixtures("one_thread")

WIDE = {"width": 64, "heads": 2, "kv_heads": 1, "context": 128}
PATHS = ["blocks.0.attention", "blocks.1.attention"]
SLOTS = {"delayed": ("QKV", "S", "O", "dO", "dP", "dQKV"), "current": ("S", "dP"), "mxfp8": ()}
# The recipe, and its attention; on 10.x, which has all of them.
KINDS = [
    ("delayed", "delayed"),
    ("current", "delayed"),
    ("mxfp8", "delayed"),
    ("delayed", "current"),
    ("current", "current"),
    (NEAREST, "current"),
    ("mxfp8", "mxfp8"),
    (NEAREST, "mxfp8"),
]


def gpt(recipe, attention, **options):
    return backend_models.gpt(
        recipe, "te", WIDE, hardware=B200, **{"attention": attention} | options
    )


def state_of(model) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in fp8_state(model).items()}


def made(te) -> int:
    return sum(name == "DotProductAttention" for name, _ in te.constructed)


# Its numbers


def in_mxfp8(x: Tensor) -> Tensor:
    """Cast in blocks of 32 elements."""
    rows = x.bfloat16().reshape(-1, x.shape[-1])
    mxfp8 = numerics.Quantizer(block=(1, 32), scale="e8m0")
    values = numerics.dequantize(numerics.quantize(rows, mxfp8))
    return values.double().view(x.shape)


def with_scale(x: Tensor, scale: float) -> Tensor:
    return (x.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() / scale


def attention_of(kind: str, q: Tensor, k: Tensor, v: Tensor, scales: dict[str, float]) -> Tensor:
    """Attention in float64, on operands cast as Transformer Engine casts them."""
    if kind == "mxfp8":  # along what is summed over: elements, or keys
        q, k, v = in_mxfp8(q), in_mxfp8(k), in_mxfp8(v.transpose(-1, -2)).transpose(-1, -2)
    else:
        amax = max(float(x.abs().max()) for x in (q, k, v))  # one scale for the three
        qkv_scale = scales.get("QKV", 448 / amax)
        q, k, v = (with_scale(x, qkv_scale) for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) / 32**0.5
    weights = scores.masked_fill(torch.ones(128, 128).triu(1).bool(), -torch.inf).softmax(-1)
    if kind == "mxfp8":
        return weights @ v
    y = with_scale(weights, scales["S"]) @ v
    return with_scale(y, scales["O"]) if kind == "delayed" else y


@pytest.mark.capability("A13")
@pytest.mark.parametrize(("recipe", "kind"), KINDS[-4:] + KINDS[:1])
def test_attention_in_fp8_is_transformer_engines(te, recipe, kind):
    backend = gpt(recipe, kind).backend
    scales = dict(zip(SLOTS[kind], (2.0**5, 2.0**8, 2.0**6, 1.0, 1.0, 1.0), strict=False))
    if kind == "current":
        scales = {"S": 2.0**8, "dP": 1.0}
    for operand, scale in scales.items():  # of the second block; the first keeps 1
        backend.delayed.history.scale(f"{PATHS[1]}.{operand}").fill_(scale)
    q, k, v = (normal(2, heads, 128, 32, seed=n) for n, heads in enumerate((2, 1, 1)))
    leaves = [x.to(torch.bfloat16).requires_grad_() for x in (q, k, v)]
    y = backend.attention(*leaves, dropout=0.0, path=PATHS[1])
    assert (y.shape, y.dtype) == (q.shape, torch.bfloat16)
    exact = Backend.attention(backend, *leaves, dropout=0.0)
    operands = [leaf.detach().double() for leaf in leaves]
    expected = attention_of(kind, operands[0], operands[1], operands[2], scales)
    # bfloat16 rounds the output, and casts of float32 and float64 may fall to other sides.
    assert distance(expected, y) < 0.005 < distance(expected, exact)
    y.float().pow(2).sum().backward()
    again = [leaf.detach().requires_grad_() for leaf in leaves]
    Backend.attention(backend, *again, dropout=0.0).float().pow(2).sum().backward()
    # E5M2 has steps of 2^-2, and several operands of a gradient are cast to it.
    assert all(distance(grad(a), grad(b)) < 0.2 for a, b in zip(leaves, again, strict=True))


@pytest.mark.parametrize("kind", SLOTS)
def test_each_layer_has_a_module_if_it_has_a_state(te, kind):
    model = gpt("mxfp8", kind)
    for _ in range(2):
        loss_of(model, 1, length=128).backward()
    assert made(te) == (2 if SLOTS[kind] else 1)
    calls = [call for call in te.calls if type(call.module).__name__ == "DotProductAttention"]
    assert len({call.module for call in calls[:2]}) == made(te)
    assert [call.module for call in calls[:2]] == [call.module for call in calls[2:]]
    # Also without gradients: on Hopper, FlashAttention 3 would take calls that do not train.
    assert all(call.is_first_microbatch for call in calls)  # it trains
    with torch.no_grad():
        loss_of(model, 1, length=128)
    call = next(call for call in reversed(te.calls) if call.module is calls[-1].module)
    assert call.is_first_microbatch == bool(SLOTS[kind])


@pytest.mark.parametrize("kind", SLOTS)
def test_attention_of_anything_but_whole_sequences_is_in_the_compute_dtype(te, kind):
    backend, plain = gpt("mxfp8", kind).backend, gpt("mxfp8", "compute").backend
    q, k, v = (normal(1, heads, 160, 32, seed=n).bfloat16() for n, heads in enumerate((2, 1, 1)))
    mask = torch.zeros(1, 1, 128, 128, dtype=torch.bfloat16)
    long: Any = tuple(x[:, :, :128] for x in (q, k, v))
    cases: list[Any] = [((q, k, v), {}), ((q[:, :, -1:], k, v), {}), (long, {"mask": mask})]
    # Nor is it where the guard took a layer out of FP8.
    for operands, more in [*cases, (long, {"path": None})]:
        options = {"path": PATHS[0]} | more
        y = backend.attention(*operands, dropout=0.0, **options)
        expected = plain.attention(*operands, dropout=0.0, **options)
        assert torch.equal(y, expected)
    assert made(te) == 0


@pytest.mark.parametrize(
    ("recipe", "kind"), [case(*x, quick=x[0] in ("delayed", "mxfp8")) for x in KINDS]
)
def test_a_model_trains_with_attention_in_fp8(te, recipe, kind):
    def trained(attention):
        model = gpt(recipe, attention)
        optimizer = adam(model)
        loss_values = []
        for step in range(4):
            optimizer.zero_grad()
            loss = loss_of(model, step, length=128)
            loss.backward()
            optimizer.step()
            loss_values.append(float(loss.detach()))
        return loss_values

    in_fp8, expected = trained(kind), trained("compute")
    assert in_fp8 != expected
    assert in_fp8 == pytest.approx(expected, rel=0.03)
    assert Counter(type(call.module).__name__ for call in te.calls)["DotProductAttention"] == 8
    assert te.registered == []  # it does not update scales by itself


@pytest.mark.parametrize("kind", SLOTS)
def test_the_recipe_reaches_transformer_engine(te, monkeypatch, kind):
    from fp8stack.layers.te import te_attention_recipe

    te_recipe = te_attention_recipe(load_recipe("mxfp8", {"attention": kind}))
    predicate = {"delayed": "delayed", "current": "float8_current_scaling", "mxfp8": "mxfp8"}
    assert getattr(te_recipe, predicate[kind])()
    assert (te_recipe.fp8_dpa, te_recipe.fp8_mha) == (True, False)
    assert te_recipe.backward_override is None
    assert te_recipe.fp8_format.name == ("E4M3" if kind == "mxfp8" else "HYBRID")
    if kind == "delayed":
        assert (te_recipe.amax_history_len, te_recipe.amax_compute_algo) == (1, "most_recent")
        assert te_recipe.reduce_amax is False
    if kind == "current":
        assert te_recipe.use_power_2_scales is False


# Its state


def recorded(te, model, backward=True, **options) -> dict[str, float]:
    """The amaxes of a training pass, by slot, as attention saw them."""
    te.attention_casts.clear()
    loss = loss_of(model, length=128, **options)
    if backward:
        loss.backward()
    paths = {core.module: key[0] for key, core in model.backend._attention.items()}
    return {f"{paths[module]}.{operand}": amax for module, operand, amax in te.attention_casts}


OPTIONS = [
    ("delayed", {"history_length": 3, "margin": 1}),
    ("delayed", {"history_length": 4, "amax_algorithm": "most_recent"}),
    ("current", {}),  # as Transformer Engine has it by default: the newest amax
]


@pytest.mark.capability("A13")
@pytest.mark.parametrize(("recipe", "options"), OPTIONS, ids=str)
@pytest.mark.parametrize("kind", [case("delayed", quick=True), case("current", quick=False)])
def test_scales_follow_from_the_amaxes_of_earlier_passes(te, recipe, options, kind):
    model = gpt(recipe, kind, **options)
    slots = [f"{path}.{operand}" for path in PATHS for operand in SLOTS[kind]]
    state = state_of(model)
    assert {n for n in state if ".attention." in n and n.count(".") == 4} == {
        f"{slot}.{field}" for slot in slots for field in ("amax_history", "scale")
    }
    length, algorithm = options.get("history_length", 1), options.get("amax_algorithm", "max")
    expected = {
        slot: DelayedSlot(
            "e5m2" if slot.rpartition(".")[2][0] == "d" else "e4m3",
            *(length, options.get("margin", 0), algorithm),
        )
        for slot in slots
    }
    optimizer = adam(model)
    for step in range(6):
        for micro_batch in range(2):
            amaxes = recorded(te, model, step=2 * step + micro_batch)
            state = state_of(model)
            for slot, reference in expected.items():
                reference.record(amaxes[slot])
                reference.update()
                assert float(state[f"{slot}.scale"]) == reference.scale, (slot, step, micro_batch)
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:  # evaluations, and a sequence that is not whole, leave no trace
            before = state_of(model)
            with torch.no_grad():
                loss_of(model, 99, length=128)
            model.eval()
            loss_of(model, 98, length=128)
            loss_of(model.train(), 97, length=96)
            after = state_of(model)
            assert all(torch.equal(before[n], after[n]) for n in before if ".attention." in n
                       and n.count(".") == 4)  # fmt: skip
    # The first token attends to itself alone, so the largest of each softmax is 1.
    assert len({float(state[f"{slot}.scale"]) for slot in slots}) == len(slots) - 1


@pytest.mark.parametrize("kind", ["delayed", "current"])
def test_casts_are_made_with_those_scales(te, monkeypatch, kind):
    """Updated scales apply at once; the backward pass casts with the scales of its forward pass."""
    model = gpt("delayed", kind)
    used: list[tuple[Any, float]] = []
    cast = te_stand_in.AttentionQuantizer.__call__

    def spy(self, *tensors):
        if not self.current:
            used.append(((self.module, self.operand), float(self.scale)))
        return cast(self, *tensors)

    monkeypatch.setattr(te_stand_in.AttentionQuantizer, "__call__", spy)
    for step in range(3):
        state = state_of(model)
        used.clear()
        loss_of(model, step, length=128).backward()
        paths = {core.module: key[0] for key, core in model.backend._attention.items()}
        assert len(used) == 2 * len(SLOTS[kind])
        for (module, operand), scale in used:
            assert scale == float(state[f"{paths[module]}.{operand}.scale"]), (step, operand)
            assert (scale == 1) == (step == 0)


@pytest.mark.parametrize("kind", ["delayed", "current"])
def test_ranks_share_the_largest_amaxes(te, monkeypatch, kind):
    """They share the collective of linears. The other rank here has twice the amaxes."""
    alone, shared = gpt("current", kind), gpt("current", kind)
    for model in (alone, shared):
        loss_of(model, 1, length=128).backward()
    alone.backend.delayed.apply_pending_update()
    monkeypatch.setattr(SharedAmaxes, "active", True)
    monkeypatch.setattr(delayed, "reduce_amaxes", lambda recorded, key: 2 * recorded)
    shared.backend.delayed.apply_pending_update()
    scales = [
        {name: float(x) for name, x in fp8_state(model).items() if name.endswith(".scale")}
        for model in (alone, shared)
    ]
    assert len(scales[0]) == 2 * len(SLOTS[kind])
    assert all(scales[1][name] == scale / 2 != 1 for name, scale in scales[0].items())


@pytest.mark.parametrize("kind", ["delayed", "current"])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.full
def test_a_block_that_runs_again_records_what_it_recorded_before(te, kind, use_reentrant):
    models = gpt("delayed", kind), checkpointed(gpt("delayed", kind), use_reentrant)
    optimizers = [adam(model) for model in models]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            loss_of(model, step, length=128).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert same(*map(fp8_state, models)), step


@pytest.mark.parametrize(("recipe", "kind"), [*KINDS[:2], KINDS[4], KINDS[6]])
@pytest.mark.full
def test_telemetry_shows_the_amaxes_and_scales_that_are_known(te, recipe, kind):
    model = gpt(recipe, kind)
    telemetry = Telemetry(model.backend.plan, 1)
    slots = [f"{path}.{operand}" for path in PATHS for operand in SLOTS[kind]]
    for step in range(3):
        scales = state_of(model)
        with telemetry.sampling(model):
            amaxes = recorded(te, model, step=step)
        recorded(te, model, step=9)  # another micro-batch, which is not sampled
        sample = telemetry.finish(step, None)
        rows = {f"{r['layer']}.{r['operand']}": r for r in sample.rows if r.get("layer") in PATHS}
        assert list(rows) == slots
        for slot, row in rows.items():
            scale = float(scales[f"{slot}.scale"])
            assert (row["amax"], row["scale"]) == pytest.approx((amaxes[slot], scale), rel=1e-8)
            top = 57344 if slot.rpartition(".")[2][0] == "d" else 448
            bits = math.log2(top / (row["amax"] * scale))
            assert row["headroom_bits"] == pytest.approx(bits, rel=1e-5, abs=1e-6)
            unknown = {"saturated", "underflow", "nonfinite", "sqnr_db"}
            assert {row[figure] for figure in unknown} == {None}
            assert f"fp8/amax/{slot}" in sample.numbers
            assert f"fp8/sqnr_db/{slot}" not in sample.numbers
    model.blocks[0].attention.in_fp8 = False
    with telemetry.sampling(model):
        loss_of(model, 4, length=128).backward()
    layers = {row.get("layer") for row in telemetry.finish(4, None).rows}
    assert layers.isdisjoint(PATHS[:1])
    assert not slots or PATHS[1] in layers


RUN = [*FLAGS, "--steps", "8", "--eval-every", "4", "--schedule", "constant", "--context", "128"]
RUN += ["--set", "model_overrides.context=128", "--no-compile"]


def flags_of(recipe: str, kind: str, gpu: str) -> list[str]:
    """The flags of a run whose heads this GPU takes."""
    width, heads = {"9.0": (128, 1), "10.x": (64, 2)}[gpu]
    flags = ["--recipe", recipe, *RUN, "--set", f"recipe.attention={kind}"]
    flags += ["--set", f"model_overrides.width={width}"]
    return [*flags, "--set", f"model_overrides.heads={heads}"]


@pytest.mark.capability("A13")
@pytest.mark.parametrize(
    ("recipe", "kind", "gpu"),
    [
        case("delayed", "delayed", "9.0", quick=True),
        case("current", "delayed", "9.0", quick=False),
        case("mxfp8", "current", "10.x", quick=False),
        case("nvfp4", "delayed", "10.x", quick=False),
    ],
)
@pytest.mark.full
def test_a_whole_run_saves_and_resumes_to_the_bit(
    te, recipe, kind, gpu, command, tmp_path, on_gpus, capsys
):
    flags = [*flags_of(recipe, kind, gpu), "--accumulate", "2", "--telemetry-every", "4"]
    assert command("pretrain", "--out", "whole", *flags) == 0
    printed = capsys.readouterr().out
    assert f"attention: {kind}, the recipe says so" in printed
    assert "GEMMs by Transformer Engine" in printed
    assert {row["fp8_gemms"] for row in metrics(tmp_path / "whole")} == {2 * 3 * 4}
    assert command("pretrain", "--out", "cut", *flags, "--steps", "3") == 0
    assert command("pretrain", "--resume", "cut", "--steps", "8") == 0
    straight, resumed = losses(tmp_path / "whole"), losses(tmp_path / "cut")
    assert [row[:4] for row in resumed] == [row[:4] for row in straight]
    assert resumed[-1] == straight[-1]
    tensors, of_resumed = (checkpoint_tensors(tmp_path / run, 8) for run in ("whole", "cut"))
    assert same(tensors, of_resumed)
    for operand in SLOTS[kind]:
        assert float(tensors[f"fp8 {PATHS[0]}.{operand}.scale"]) != 1
        assert f"fp8 {PATHS[0]}.{operand}.amax_history" in tensors
    assert json.loads((tmp_path / "whole/plan.json").read_text())["attention"] == kind
    rows = (tmp_path / "whole/telemetry.jsonl").read_text().splitlines()
    changes = [row["scale_changes"] for row in map(json.loads, rows) if "scale_changes" in row]
    assert changes[-1] > 0


@pytest.mark.parametrize(
    ("recipe", "gpu"),
    [case("delayed", "9.0", quick=True), case("mxfp8", "10.x", quick=False)],
)
def test_a_run_of_attention_in_fp8_is_loaded_on_a_cpu_with_attention_in_the_compute_dtype(
    te, recipe, gpu, command, on_gpus, capsys
):
    assert command("pretrain", "--out", "r", *flags_of(recipe, "delayed", gpu), "--steps", "2") == 0
    capsys.readouterr()
    assert command("eval", "r", "--windows", "2", "--device", "cpu") == 0
    reason = "attention = 'delayed' needs Transformer Engine on compute capability 9.0 or 10.x"
    assert f"{reason}: attention runs in the compute dtype" in capsys.readouterr().out
    options = ["--recipe", recipe, "--device", "cpu", "--tokens", "2"]
    assert command("generate", "r", "--prompt", "a", *options) == 0
    assert f"because {reason}" in capsys.readouterr().err
    trained = find_source("r")
    assert trained.checkpoint is not None
    saved = trained.checkpoint.tensors["fp8"]
    assert f"{PATHS[0]}.S.scale" in saved
    state = fp8_state(trained.model(recipe, CPU))  # those of linears, as they were saved
    assert same(state, {name: x for name, x in saved.items() if name in state})
    assert len(state) == (24 if recipe == "delayed" else 0) * trained.shape.layers


ON_HOPPER = [*flags_of("delayed", "delayed", "9.0"), "--out", "r"]


def test_a_run_of_attention_in_fp8_cannot_go_on_on_a_cpu_but_a_branch_can(
    te, command, monkeypatch, tmp_path, on_gpus, capsys
):
    assert command("pretrain", *ON_HOPPER, "--steps", "1") == 0
    monkeypatch.undo()
    run, new = str(tmp_path / "r"), str(tmp_path / "new")
    capsys.readouterr()
    assert command("pretrain", "--resume", run, "--steps", "2", "--device", "cpu") == 2
    reason = "attention = 'delayed' needs Transformer Engine on compute capability 9.0 or 10.x"
    error = capsys.readouterr().err
    assert f"Cannot resume {run}: {reason}" in error
    assert f"--resume {run} --out NEW --set recipe.attention=compute" in error
    branch = ["pretrain", "--resume", run, "--out", new, "--steps", "2", "--device", "cpu"]
    assert command(*branch) == 2
    error = capsys.readouterr().err
    assert f"Cannot begin {new} with {run}/checkpoints/step-000001: attention =" in error
    assert command(*branch, "--set", "recipe.attention=compute") == 0
    assert command("pretrain", *ON_HOPPER[:-1], str(tmp_path / "fresh"), "--device", "cpu") == 2
    assert reason in capsys.readouterr().err


@pytest.mark.full
def test_the_scales_of_attention_begin_at_1_in_their_phase(
    te, command, tmp_path, on_gpus, capsys, undrawn
):
    flags = ["--phases", "default", "--set", "warmup_steps=2", "--telemetry-every", "1"]
    assert command("pretrain", *ON_HOPPER, *flags) == 0
    lines = (tmp_path / "r/telemetry.jsonl").read_text().splitlines()
    first = next(r for r in map(json.loads, lines) if r.get("operand") == "QKV")
    assert (first["step"], first["scale"]) == (3, 1)
    capsys.readouterr()
    assert command("show", "r") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "QKV" not in next(line for line in lines if line.startswith("SQNR"))
    assert command("report", "r") == 0


def test_no_validation_loss_has_scales_of_attention_that_nothing_sets(refused, te, on_gpus):
    run = ["pretrain", *ON_HOPPER, "--set"]
    phases = 'phases=[{name="early", recipe="bf16", until=2}, {name="main"}, {name="evaluation"}]'
    refused(*run, phases, message="validation losses in delayed scaling need a first phase")


@pytest.mark.parametrize("most", [case(3, quick=True), case(0, quick=False)])
@pytest.mark.full
def test_the_guard_takes_attention_out_of_fp8(te, monkeypatch, most, command, tmp_path, on_gpus):
    """The attention whose amax goes wrong; or all that is in FP8, if no more layers may leave it
    one by one."""
    cast = te_stand_in.AttentionQuantizer.__call__
    bad: list[Any] = []

    def spoil(self, *tensors):
        cast_tensors = cast(self, *tensors)
        if self.operand == "dP" and len(te.calls) > 40:
            bad[:] = bad or [self.module]
            if self.module is bad[0]:
                self.amax.fill_(torch.inf)
        return cast_tensors

    def attending(since=0) -> list[Any]:
        names = [type(call.module).__name__ for call in te.calls]
        named_calls = zip(te.calls[since:], names[since:], strict=True)
        return [call.module for call, name in named_calls if name == "DotProductAttention"]

    monkeypatch.setattr(te_stand_in.AttentionQuantizer, "__call__", spoil)
    monkeypatch.setattr(policy, "MOST_LAYERS", most)
    flags = ["--set", "model_overrides.layers=2", "--set", "guard.layer_steps=0"]
    assert command("pretrain", *ON_HOPPER, *flags, "--steps", "20", "--save-every", "4") == 0
    (event,) = [row for row in metrics(tmp_path / "r") if row.get("event") == "demote"]
    assert event["precision"] == "bf16"
    where = (PATHS[1], "dP") if most else ("*", None)
    assert (event["layer"], event.get("operand")) == where
    assert "the amax of blocks.1.attention.dP is" in event["why"] or most
    saved = json.loads((tmp_path / "r/checkpoints/step-000020/checkpoint.json").read_text())
    demoted = set(saved["info"]["guard"]["demoted"])
    linears = {f"blocks.{i}.{linear_name}" for i in range(2) for linear_name in PARTS}
    assert demoted == ({PATHS[1]} if most else {*PATHS, *linears})
    # It stays out of FP8 when the run resumes.
    before = len(te.calls)
    assert command("pretrain", "--resume", "r", "--steps", "22") == 0
    assert len(set(attending(before))) == (1 if most else 0)
    assert len(te.calls) > before or not most


# Refusals


GPUS = [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0)]
HAVE = {"delayed": {(9, 0), (10, 0), (10, 3)}, "current": {(10, 0), (10, 3)}}
HAVE["mxfp8"] = HAVE["current"]


@pytest.mark.parametrize("kind", SLOTS)
@pytest.mark.parametrize("recipe", ["delayed", "bf16", "mxfp8"])
def test_attention_in_fp8_is_refused_on_gpus_that_have_none(kind, recipe):
    chosen = load_recipe(recipe, {"attention": kind})
    for capability in [None, *GPUS]:
        hardware = CPU if capability is None else Hardware("cuda", capability, has_te=True)
        by_te = resolve(load_recipe(recipe), hardware).backend == "te"
        if by_te and capability in HAVE[kind]:
            assert resolve(chosen, hardware).recipe.attention == kind
        else:
            least = "9.0 or 10.x" if kind == "delayed" else "10.x"
            message = f"'{kind}' needs Transformer Engine on compute capability {least}. "
            with pytest.raises(UserError, match=re.escape(f"attention = {message}")):
                resolve(chosen, hardware)


PLANNED = [
    ("delayed", "delayed", H100, {"width": 256}, ""),
    ("delayed", "delayed", B200, {"width": 96}, ""),
    ("delayed", "current", B200, {"width": 256}, ""),
    ("delayed", "mxfp8", B200, {"width": 64}, ""),
]
REFUSED = [
    ("mxfp8", "mxfp8", CPU, {}, "This is a CPU, with mxfp8 run by emulate. Give another"),
    ("rowwise", "delayed", B200, {}, "with rowwise run by torch"),
    ("mxfp8", "mxfp8", B200, {"width": 96}, "needs heads of 32, 64, 96 or 128 elements, not 48"),
    ("mxfp8", "mxfp8", B200, {"width": 512}, "elements, not 256"),
    ("delayed", "delayed", H100, {"width": 128}, "needs heads of 128 elements on compute capabili"),
    ("delayed", "delayed", B200, {"width": 48}, "needs heads of 16, 32, 48 ... 128 elements, not"),
    ("delayed", "current", B200, {"width": 288}, "elements, not 144"),
    ("mxfp8", "mxfp8", B200, {"dropout": 0.1}, "'mxfp8' has no dropout"),
    ("delayed", "delayed", B200, {"dropout": 0.1}, "'delayed' has no dropout"),
]


@pytest.mark.parametrize(("recipe", "kind", "hardware", "model", "message"), [*PLANNED, *REFUSED])
def test_attention_in_fp8_is_planned_where_it_runs_or_refused(
    recipe, kind, hardware, model, message
):
    config, chosen = GPTConfig(**TINY | WIDE | model), load_recipe(recipe, {"attention": kind})
    if message:
        with pytest.raises(UserError, match=re.escape(message)):
            real_plan_for(config, chosen, hardware)
    else:
        plan = real_plan_for(config, chosen, hardware)
        assert (plan.backend, plan.attention_precision) == ("te", kind)
        assert [layer.backend for layer in plan.layers if layer.fp8] == [None] * 8


@pytest.mark.parametrize(
    ("kind", "good", "bad", "deterministic"),
    [
        ("mxfp8", (92100, 92400), (92000, 92300, 92301), False),
        ("current", (91400,), (91399,), False),
        ("delayed", (91200,), (91199,), False),
        ("delayed", (91900,), (91802,), True),
        ("current", (91900,), (91802,), True),
    ],
)
def test_attention_in_fp8_needs_a_cudnn_that_has_it(
    te, monkeypatch, kind, good, bad, deterministic
):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    for version in (*good, *bad):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
        if version in good:
            gpt("mxfp8", kind)
            continue
        with pytest.raises(UserError, match=rf"'{kind}' needs cuDNN 9\.\d+ or later"):
            gpt("mxfp8", kind)
        gpt("mxfp8", "compute")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NVTE_DPA_FP8_RECIPE", "F16"),
        ("NVTE_DPA_FP8CS_O_in_F16", "0"),
        ("NVTE_FP8_DPA_BWD", "0"),
        ("NVTE_FUSED_ATTN", "0"),
        ("NVTE_UnfusedDPA_Emulate_FP8", "1"),
    ],
)
def test_settings_that_make_attention_something_else_are_refused(te, monkeypatch, name, value):
    monkeypatch.setenv(name, {"1": "0", "0": "1"}.get(value, ""))
    gpt("mxfp8", "current")
    monkeypatch.setenv(name, value)
    for kind in SLOTS:
        with pytest.raises(UserError, match=f"environment variable {name} = '{value}'. Unset it"):
            gpt("mxfp8", kind)
    gpt("mxfp8", "compute")


@pytest.mark.parametrize("kind", ["delayed", "mxfp8"])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--context", "64"], "needs a --context divisible by 128, not 64"),
        (["--context", "128", "--document-mask"], "takes no --document-mask"),
    ],
)
def test_a_run_whose_sequences_attention_in_fp8_does_not_take_is_refused(
    te, kind, flags, message, command, on_gpus, capsys
):
    shape = ["--set", "model.width=64", "--set", "model.heads=2"]
    shape += ["--set", f"recipe.attention={kind}"]
    assert command("pretrain", "--recipe", "mxfp8", *FLAGS, *shape, *flags) == 2
    assert f"attention = '{kind}' {message}" in capsys.readouterr().err


def test_a_run_whose_attention_cudnn_does_not_take_ends_in_a_line(te, command, on_gpus, capsys):
    te.no_kernel = True
    assert command("pretrain", "--out", "r", *flags_of("mxfp8", "current", "10.x")) == 2
    last_line = capsys.readouterr().err.strip().splitlines()[-1]
    assert last_line == (
        "fp8stack: attention = 'current': No dot product attention backend is available"
    )
