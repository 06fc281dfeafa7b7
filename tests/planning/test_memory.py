"""The estimated memory of a run against the tensors that are really allocated on a CPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import fp8stack
from fp8stack.layers import build_backend
from fp8stack.layers.linear import LowPrecisionLayer, QuantizedLinear
from fp8stack.model.config import Experts, GPTConfig, load_config, plan_for, workload
from fp8stack.model.gpt import GPT, Recompute
from fp8stack.planning.estimate import Answer, PhaseEstimate, memory_of
from fp8stack.planning.memory import Estimate, Setting, estimate, optimizer_bytes
from fp8stack.planning.run_config import RunConfig
from fp8stack.planning.run_keys import OptimizerName
from fp8stack.planning.savings import largest_batch, savings
from fp8stack.planning.trace import trace
from fp8stack.precision import Hardware, assumed, load_recipe
from fp8stack.training.optim.optimizer import build_optimizer
from tests.support.cases import case
from tests.support.live_bytes import Live, kept_bytes
from tests.support.study_recipes import BACKWARD_HIGH

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = Hardware("cpu")
Estimated = Callable[..., dict[str, Any]]
EXPERTS = Experts(count=4, per_token=2, width=64, shared=1, first_dense=1, bias=0.1)
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "nano": {
        "norm": "rmsnorm", "activation": "relu2", "positions": "rope", "qk_norm": True,
        "bias": False, "tied": False,
    },
    "llama": {
        "norm": "rmsnorm", "activation": "swiglu", "positions": "rope", "kv_heads": 2,
        "bias": False, "tied": False, "mlp_width": 352,
    },
    "mixture": {
        "norm": "rmsnorm", "activation": "swiglu", "positions": "rope", "qk_norm": "width",
        "bias": False, "tied": False, "experts": EXPERTS,
    },
    "odd": {"width": 96, "qk_norm": True, "activation": "gelu", "bias": False, "dropout": 0.1},
}  # fmt: skip
LOW_BIT = {"adamw8bit": "AdamW8bit", "adamwfp8": "AdamWFp8"}
"""torchao's optimizers, by our names."""


def build(shape: str, recipe: str, backend: str = "auto", **keys: Any) -> tuple[GPT, Setting]:
    """A tiny model, and the setting of a micro-batch of four sequences of 24 tokens."""
    overrides = keys.pop("recipe_overrides", {})
    sizes = {"vocabulary": 250, "context": 64, "layers": 2, "width": 128, "heads": 4}
    config = GPTConfig(**(sizes | SHAPES[shape]))
    plan = plan_for(config, load_recipe(recipe, overrides), CPU, backend)
    model = GPT(config, build_backend(plan))
    model.backend.weights.only_tracked_changes = True  # as in a run
    keys = {"sequences": 4, "context": 24} | keys
    setting = Setting(config=config, plan=plan, **keys)
    model.recompute = setting.checkpointing
    return model, setting


def loss_of(model: GPT, setting: Setting) -> Tensor:
    tokens = torch.randint(model.config.vocabulary, (setting.sequences, setting.context + 1))
    return model(tokens[:, :-1], tokens[:, 1:])


def saved_bytes(model: GPT, setting: Setting) -> int:
    """The bytes of tensors that a forward pass leaves, except the loss and the load of experts; and
    of the tokens."""
    shape = setting.sequences, setting.context + 1
    tokens = torch.randint(model.config.vocabulary, shape)
    record = model.routing
    live_bytes = kept_bytes(model, tokens) + tokens.nbytes
    return live_bytes - sum(x.nbytes for x in (record.counts, record.balance) if x is not None)


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """The bytes of all storages of some tensors."""
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


IN_ALL_SHAPES = [("bf16", "auto"), ("delayed", "emulate")]
IN_ONE_SHAPE = [
    *IN_ALL_SHAPES,
    *(("fp32", "auto"), ("fp16", "auto"), ("current", "torch"), ("rowwise_wgrad_hp", "torch")),
    *((x, "emulate") for x in ("block", "mxfp8", "nvfp4", BACKWARD_HIGH, "rowwise_wgrad_hp")),
]


CHANGED: list[tuple[str, str, str, dict[str, Any]]] = [
    ("bf16", "auto", "llama", {"residual": "bf16"}),
    ("bf16", "auto", "odd", {"attention": "fp32"}),
    ("delayed", "auto", "mixture", {"residual": "bf16"}),
    ("fp16", "auto", "gpt2", {"attention": "fp32"}),
]


@pytest.mark.capability("D1")
@pytest.mark.parametrize(
    ("recipe", "backend", "shape", "changes"),
    [
        *(
            case(*run, shape, {}, quick=run in IN_ALL_SHAPES or shape == "llama")
            for run in IN_ONE_SHAPE
            for shape in SHAPES
        ),
        *CHANGED,
    ],
)
@pytest.mark.full
def test_tensors_saved_for_backward_are_estimated_within_a_tenth(shape, recipe, backend, changes):
    checkpointing: Recompute
    for checkpointing in get_args(Recompute):
        keys = {"recipe_overrides": changes, "checkpointing": checkpointing}
        model, setting = build(shape, recipe, backend, **keys)
        assert estimate(setting).saved == pytest.approx(saved_bytes(model, setting), rel=0.1)


@pytest.fixture
def _small_chunks(monkeypatch):
    """Losses in chunks of 128 rows."""
    monkeypatch.setattr("fp8stack.model.loss.chunk_rows", lambda _: 128)
    trace.cache_clear()
    yield
    trace.cache_clear()


@pytest.mark.capability("D1")
@pytest.mark.parametrize(
    ("shape", "recipe", "checkpointing", "micro_batches"),
    [
        ("gpt2", "fp32", "none", 1), ("gpt2", "bf16", "block", 1), ("llama", "delayed", "none", 2),
        ("llama", "fp32", "selective", 2), ("llama", "mxfp8", "none", 1),
        ("nano", "bf16", "none", 2), ("mixture", "bf16", "none", 1),
        ("mixture", "delayed", "block", 2),
    ],
)  # fmt: skip
@pytest.mark.full
def test_the_peak_of_a_step_is_estimated_within_a_tenth(
    shape, recipe, checkpointing, micro_batches
):
    model, setting = build(
        shape, recipe, checkpointing=checkpointing, micro_batches=micro_batches, context=64
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        for _ in range(micro_batches):
            loss_of(model, setting).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    with Live() as live:
        step()
    expected = estimate(setting)
    measured = live.peak + expected.parameters + expected.optimizer + expected.buffers
    assert expected.peak == pytest.approx(measured, rel=0.1)


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize("recipe", ["fp32", "bf16", "delayed"])
def test_the_peak_in_a_loss_in_chunks_is_estimated_within_a_tenth(recipe, monkeypatch):
    sizes = {"vocabulary": 4096, "layers": 1, "width": 32, "heads": 2}
    monkeypatch.setitem(SHAPES, "wide", sizes)
    model, setting = build("wide", recipe, sequences=6, context=64)
    with Live() as live:
        loss_of(model, setting).backward()
    expected = estimate(setting)
    assert expected.peak - expected.lasting == pytest.approx(live.peak, rel=0.1)


# Parameters, gradients, the optimizer, and copies of weights


@pytest.mark.capability("D1")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("optimizer", sorted(set(get_args(OptimizerName)) - {*LOW_BIT}))
def test_weights_gradients_and_state_are_estimated_to_the_byte(shape, optimizer):
    model, setting = build(shape, "mxfp8", optimizer=optimizer)  # with a padded vocabulary
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert model.config.parameter_shapes(len(model.embedding.weight)) == shapes
    stepping = build_optimizer(model, RunConfig(optimizer=optimizer))
    loss_of(model, setting).backward()
    expected, weights = estimate(setting), list(model.parameters())
    assert expected.parameters == bytes_of(weights)
    assert expected.gradients == bytes_of([p.grad for p in weights if p.grad is not None])
    stepping.step()
    assert expected.optimizer == bytes_of([t for p in weights for t in stepping.state[p].values()])


def test_moments_of_a_byte_are_estimated_to_the_byte():
    torchao = pytest.importorskip("torchao.optim")
    shapes = {"blocks.0.mlp.up.weight": (128, 64), "blocks.0.mlp.down.weight": (64, 30)}
    name: Any
    for name, kind in ((name, getattr(torchao, kind)) for name, kind in LOW_BIT.items()):
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes.values()]
        total = 4 * len(parameters)  # the step counts
        for moment in (kind(parameters)._new_buffer(p, s) for p in parameters for s in (1, 0)):
            tensors = [getattr(moment, key) for key in getattr(moment, "tensor_attrs", [])]
            total += sum(tensor.nbytes for tensor in tensors or [moment])
        assert optimizer_bytes(shapes, name) == total


@pytest.mark.parametrize(
    ("recipe", "backend"),
    [("bf16", "auto"), *((x, "torch") for x in ("delayed", "current", "rowwise_wgrad_hp"))],
)
def test_weights_that_layers_keep_are_estimated_to_the_byte(recipe, backend):
    model, setting = build("llama", recipe, backend)
    loss_of(model, setting)
    layers: list[Any] = [x for x in model.modules() if isinstance(x, QuantizedLinear)]
    caches = [layer.quantizers["weight"].cached_weight for layer in layers]
    copies = [copy for cache in caches if cache for copy in cache.copies]
    tensors = [x for copy in copies for x in (copy.data, copy.inv_scale)]
    low: list[Any] = [x for x in model.modules() if isinstance(x, LowPrecisionLayer)]
    tensors += [layer.casts["weight"].copies for layer in low if layer.casts]
    # All but the scales of one per tensor.
    assert estimate(setting).cast_weights == bytes_of([x for x in tensors if x.numel() > 1])


def test_amax_histories_and_tables_of_rope_are_estimated():
    changes = {"quantizer": {"history_length": 512}, "weight": {"dgrad": {"history_length": 600}}}
    for shape, slots in (("llama", 3 * 8 + 8), ("mixture", 4 * (8 + 2 * 4))):
        model, setting = build(shape, "delayed", "emulate", recipe_overrides=changes)
        delayed: Any = model.delayed_scaling
        assert delayed.history.history.shape == (600, slots)
        loss_of(model, setting)
        tables = [x for pair in model._rotations.values() for x in pair]
        measured = bytes_of([delayed.history.history, delayed.history.scales, *tables])
        assert estimate(setting).buffers == pytest.approx(measured, rel=0.01)


def test_fsdp_shards_tensors_that_ddp_replicates():
    _, setting = build("llama", "fp32")
    alone = estimate(setting)
    ddp = estimate(replace(setting, ranks=4))
    fsdp = estimate(replace(setting, ranks=4, parallel="fsdp"))
    assert (ddp.parameters, ddp.optimizer) == (alone.parameters, alone.optimizer)
    assert ddp.peak > alone.peak  # its buckets keep the gradients
    assert alone.parameters / 4 <= fsdp.parameters < alone.parameters / 3.9
    shapes = setting.config.parameter_shapes()
    block = sum(4 * torch.Size(s).numel() for n, s in shapes.items() if n.startswith("blocks.0."))
    root = alone.parameters - 2 * block  # of two blocks
    head = 4 * torch.Size(shapes["embedding.weight"]).numel()  # its gradient
    assert fsdp.gathered == root + head + 3 * block
    _, in_bf16 = build("llama", "bf16")
    low = estimate(replace(in_bf16, ranks=4, parallel="fsdp"))
    assert low.gathered < fsdp.gathered
    assert low.weight_copies == low.cast_weights == 0


@pytest.mark.capability("C2")
def test_savings_are_an_average_over_the_phases_and_the_peak():
    saved = fp8stack.savings([(10, 4), (20, 4), (60, 2), (10, 4)], reference=4)
    assert (saved.average, saved.peak) == (pytest.approx(0.70), 1.0)
    halved = savings([(1, 200e6 + 100e6 / 2)], reference=200e6 + 100e6)  # a third, halved
    assert round(100 * (1 - halved.peak)) == 17
    for phases in ([], [(0, 4)], [(1, 4), (-1, 2)]):
        with pytest.raises(ValueError, match="shares above 0"):
            savings(phases, reference=4)


def test_the_largest_batch_is_the_largest_that_fits():
    def peak_of(sequences: int) -> int:
        return 7 * sequences + sequences**2 // 50

    for memory in (6, 7, 10, 64, 400, 1000):
        fitting = [n for n in range(1, 200) if peak_of(n) <= memory]
        assert largest_batch(peak_of, memory) == max(fitting, default=0)


@pytest.fixture
def estimated(command, capsys) -> Estimated:
    """The JSON of `fp8stack estimate` with some arguments."""

    def run(*arguments: str) -> dict[str, Any]:
        assert command("estimate", "--json", *arguments) == 0
        return json.loads(capsys.readouterr().out)

    return run


@pytest.mark.full
def test_one_sequence_more_than_the_largest_batch_does_not_fit(estimated):
    table = estimated("--capability", "none", "--recipe", "bf16", "--memory", "0.2")
    config = load_config("gpt-nano")
    plan = plan_for(config, "bf16", CPU)
    for kind in ("none", "block"):
        setting = Setting(
            config=config, plan=plan, sequences=1, context=config.context, checkpointing=kind
        )
        largest = table["largest_batch"][kind]
        peaks = [estimate(replace(setting, sequences=largest + more)).peak for more in (0, 1)]
        assert peaks[0] <= table["memory"] < peaks[1]


@pytest.mark.parametrize("memory_gib", [0.02, 0.1, 10])
@pytest.mark.full
def test_the_fewest_micro_batches_of_a_batch_that_fit_are_proposed(
    memory_gib, estimated, command, capsys
):
    arguments = ["--capability", "none", "--recipe", "bf16", "--memory", str(memory_gib)]
    arguments += ["--batch", "96", "--accumulate", "32"]
    config, memory = load_config("gpt-nano"), memory_gib * 2**30
    setting = Setting(
        config=config, plan=plan_for(config, "bf16", CPU), sequences=1, context=config.context
    )
    counts = [
        count
        for count in range(1, 97)
        if 96 % count == 0
        and estimate(replace(setting, sequences=96 // count, micro_batches=count)).peak <= memory
    ]
    assert estimated(*arguments)["micro_batches"] == min(counts, default=0)
    assert command("estimate", *arguments) == 0
    proposal = f"--batch 96 --accumulate {min(counts, default=0)}\n"
    assert (proposal in capsys.readouterr().out) == bool(counts)


@pytest.mark.capability("D1")
@pytest.mark.full
def test_a_billion_parameters_do_not_fit_into_12_gib(estimated, command, capsys):
    sizes: dict[str, Any] = {"vocabulary": 32000, "layers": 24, "width": 1728, "heads": 27}
    sizes |= {"context": 256, "mlp_width": 4779, "tied": "true"}
    arguments = ["--recipe", "fp32", "--capability", "8.0", "--batch", "1", "--memory", "12"]
    arguments += [f"--set=model_overrides.{key}={value}" for key, value in sizes.items()]
    table = estimated(*arguments)
    count = table["asked"]["parameters"]
    assert count == pytest.approx(1e9, rel=0.12)
    uncheckpointed = table["phases"][0]["estimates"]["none"]
    least = sum(uncheckpointed["parts"][name] for name in ("parameters", "gradients", "optimizer"))
    assert 16 * count <= least < 16.001 * count
    assert set(table["largest_batch"].values()) == {0}
    assert command("estimate", *arguments) == 0
    printed = capsys.readouterr().out
    floor = f"{uncheckpointed['floor'] / 1e9:.1f} GB"
    for piece in ("No batch fits into 12.00 GiB", floor, "--parallel fsdp", "adamw8bit"):
        assert piece in printed


def test_advice_names_nothing_that_is_set_already():
    setting = build("gpt2", "fp32", checkpointing="block")[1]
    estimates: dict[Recompute, Estimate] = {"block": estimate(setting)}
    for room, optimizer, named, settled in (
        (-1, "adamw", ["--optimizer adamw8bit"], ["block", "--context"]),
        (1, "adamw8bit", ["a shorter --context"], ["block", "adamw8bit"]),
    ):
        answer = Answer(
            run={"optimizer": optimizer},
            checkpointing="block",
            phases=(PhaseEstimate(name="", steps=1, plan=setting.plan, estimates=estimates),),
            fp32_peak=1,
            recipes={},
            memory=estimates["block"].floor + room,
        )
        advice = answer.remedy().partition("Use more memory, a smaller model, ")[2]
        assert all(way in advice for way in [*named, "--parallel fsdp"])
        assert not any(way in advice for way in settled)


def test_a_gpu_that_is_named_stands_for_no_other():
    assert memory_of(Hardware("cuda", (9, 0), name="NVIDIA H200")) == (141 * 10**9, "H200")
    memory, name = memory_of(Hardware("cuda", (9, 0)))
    assert memory is not None
    assert name.endswith(", which stands for compute capability 9.0; others: --memory")
    assert memory_of(CPU) == (None, "")


@pytest.mark.capability("C2")
def test_each_phase_is_estimated_and_the_peak_is_the_highest(estimated, command, capsys):
    arguments = ("--phases", "default", "--recipe", "delayed", "--capability", "none")
    table = estimated(*arguments)
    peaks = {p["name"]: p["estimates"]["none"]["peak"] for p in table["phases"]}
    steps = [p["steps"] for p in table["phases"]]
    assert sum(steps) == 1200
    assert table["peak"] == max(peaks.values()) == peaks[table["worst_phase"]]
    average = sum(n * peak for n, peak in zip(steps, peaks.values(), strict=True)) / 1200
    assert table["average"] == pytest.approx(average, abs=1)
    assert table["average"] < table["peak"]
    # FP8 elements are a byte, bf16's two, fp32's four.
    elements = sum(n * size for n, size in zip(steps, (2, 1, 2), strict=True)) / 1200 / 4
    assert table["relative_to_fp32_by_element"]["average"] == pytest.approx(elements)
    assert command("estimate", *arguments) == 0
    assert "The peak is what has to fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--batch 9 --ranks 2", "cannot be shared equally by 2 ranks"),
        (
            "--ranks 2 --parallel fsdp --capability 9.0 --recipe delayed --backend te",
            "--parallel fsdp cannot share out Transformer Engine's layers",
        ),
        ("--context 4096", "--context 4096 is more than the 128"),
        ("--phases defualt", "Did you mean 'default'?"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(arguments, message, refused):
    assert message in refused("estimate", *arguments.split())


# GPUs that are not here


def on(gpu: Hardware, config: GPTConfig, recipe: str, tokens: int, **keys: Any) -> Setting:
    """One sequence of a micro-batch on a GPU."""
    plan = plan_for(config, load_recipe(recipe, keys), gpu, work=workload(config, tokens))
    return Setting(config=config, plan=plan, sequences=1, context=tokens)


@pytest.mark.parametrize(
    ("recipe", "has_te", "size"),
    [
        ("delayed", False, 1), ("mxfp8", False, 1 + 1 / 32), ("mxfp8", True, 1 + 1 / 32),
        ("nvfp4", True, 1 / 2 + 1 / 16),
    ],
)  # fmt: skip
def test_quantized_operands_take_their_bits_and_scales(recipe, has_te, size):
    config = load_config("llama-1b")
    setting = on(assumed("10.0", has_te=has_te), config, recipe, 1024)
    plain = on(assumed("10.0", has_te=has_te), config, "bf16", 1024)
    assert setting.plan.backend == ("te" if has_te else "torch")
    linears = [layer for layer in setting.plan.layers if layer.fp8]
    elements = sum(layer.in_features * layer.out_features for layer in linears)
    memory, in_bf16 = estimate(setting), estimate(plain)
    head = 0 if has_te else 2 * config.width * setting.plan.layer("lm_head").out_features
    assert memory.cast_weights == 2 * elements * size + head  # both copies, and bf16
    # In place of bf16 inputs. Attention saves that of the linear after it too.
    inputs = sum(
        layer.in_features * (size - 2 * (not layer.name.endswith("attention.output")))
        for layer in linears
    )
    if has_te:  # a fused norm saves its input in bf16, not in float32
        inputs -= 2 * 2 * config.width * config.layers
    more = memory.activations - in_bf16.activations
    assert more == pytest.approx(1024 * inputs, rel=0.01)
