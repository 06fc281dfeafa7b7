"""The estimated memory of a run against the tensors that are really allocated on a CPU."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fp8stack
from fp8stack.layers import build_backend
from fp8stack.layers.kernels.activations import ACTIVATIONS
from fp8stack.layers.linear import QuantizedLinear
from fp8stack.model.config import Experts, GPTConfig, load_config, plan_for
from fp8stack.model.gpt import GPT
from fp8stack.planning.estimate import Answer, PhaseEstimate, memory_of
from fp8stack.planning.memory import Setting, estimate, optimizer_bytes
from fp8stack.planning.operations import casts_of, operations_of
from fp8stack.planning.run_config import RunConfig
from fp8stack.planning.run_keys import OptimizerName
from fp8stack.planning.savings import largest_batch, savings
from fp8stack.precision import Hardware, assumed, load_recipe
from fp8stack.training.optim.optimizer import build_optimizer
from tests.support.cases import case
from tests.support.live_bytes import Live, kept_bytes
from tests.support.study_recipes import BACKWARD_HIGH, NEAREST, NO_HADAMARD

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
RUNS = [
    *((recipe, "auto") for recipe in ("fp32", "bf16", "fp16")),
    *((recipe, "emulate") for recipe in ("delayed", "current", "block", "mxfp8", "mxfp6_e3m2")),
    *((recipe, "emulate") for recipe in ("nvfp4", BACKWARD_HIGH, "nvfp4_forward_high", "mxfp4")),
    *((recipe, "emulate") for recipe in ("rowwise_wgrad_hp", NO_HADAMARD)),
    *((recipe, "torch") for recipe in ("delayed", "current", "rowwise_wgrad_hp")),
]


LOW_BIT = {"adamw8bit": "AdamW8bit", "adamwfp8": "AdamWFp8"}
"""torchao's optimizers, by our names."""


def build(shape: str, recipe: str, backend: str = "auto", **keys: Any) -> tuple[GPT, Setting]:
    """A tiny model, and the setting of a micro-batch of three sequences of 24 tokens."""
    overrides = keys.pop("recipe_overrides", {})
    sizes = {"vocabulary": 250, "context": 64, "layers": 2, "width": 128, "heads": 4}
    config = GPTConfig(**(sizes | SHAPES[shape]))
    plan = plan_for(config, load_recipe(recipe, overrides), CPU, backend)
    model = GPT(config, build_backend(plan))
    keys = {"sequences": 3, "context": 24} | keys
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
    with_loads = kept_bytes(model, tokens) + tokens.nbytes
    return with_loads - sum(tensor.nbytes for tensor in loads_of(model))


def loads_of(model: GPT) -> list[Tensor]:
    """The counts and losses that routers report for a micro-batch."""
    record = model.routing
    return [x for x in (record.counts, record.balance) if x is not None]


def id_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


# Runs that are not slow: a few in the shape with the most kinds of layers, two in every shape.
IN_ALL_SHAPES = [("bf16", "auto"), ("delayed", "emulate")]
IN_ONE_SHAPE = [
    *IN_ALL_SHAPES,
    *(("fp32", "auto"), ("current", "torch"), ("rowwise_wgrad_hp", "torch")),
    *((recipe, "emulate") for recipe in ("block", "mxfp8", "nvfp4", "rowwise_wgrad_hp")),
]
CASES = [
    case(*run, shape, quick=run in (IN_ONE_SHAPE if shape == "llama" else IN_ALL_SHAPES))
    for run in RUNS
    for shape in SHAPES
]


@pytest.mark.parametrize(("recipe", "backend", "shape"), CASES)
def test_tensors_saved_for_backward_are_estimated_to_the_byte(shape, recipe, backend):
    model, setting = build(shape, recipe, backend)
    assert estimate(setting).saved == saved_bytes(model, setting)


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [("bf16", {}), ("mxfp8", {"quantizer": {"block": (1, 64)}}), ("delayed", {})],
)
def test_an_activation_and_a_quantizer_that_are_added_are_planned_and_estimated(
    recipe, changes, monkeypatch
):
    monkeypatch.setitem(ACTIVATIONS, "cubed", lambda hidden: F.softplus(hidden) * hidden.square())
    config = GPTConfig(vocabulary=250, context=64, layers=2, width=128, heads=4)
    config = config.model_copy(update={"activation": "cubed"})
    plan = plan_for(config, load_recipe(recipe, changes), CPU, "auto")
    setting = Setting(config=config, plan=plan, sequences=3, context=24)
    assert estimate(setting).saved == saved_bytes(GPT(config, build_backend(plan)), setting)
    operations = {
        (operation.path, operation.name): operation for operation in operations_of(config, plan)
    }
    activation = operations["blocks.1.mlp", "activation"]
    assert (activation.operands, activation.output) == ((plan.compute_dtype,), plan.compute_dtype)
    casts = [operation for operation in casts_of(config, plan) if operation.to_fp8]
    assert len(casts) == (0 if recipe == "bf16" else 3 * 8)


@pytest.mark.parametrize(
    ("recipe", "shape"),
    [
        case(recipe, shape, quick=recipe in ("bf16", "delayed") and shape in ("llama", "odd"))
        for recipe in ("fp32", "bf16", "delayed", "mxfp8")
        for shape in SHAPES
    ],
)
def test_checkpointed_blocks_keep_their_inputs_and_the_estimate_says_so(shape, recipe):
    model, setting = build(shape, recipe, checkpointing="block", sequences=5)
    assert estimate(setting).saved == saved_bytes(model, setting)
    if recipe == "bf16":  # whose attention may be in float32, which keeps float32 copies
        for recipe in ("bf16", "fp16"):
            model, setting = build(shape, recipe, recipe_overrides={"attention": "fp32"})
            assert estimate(setting).saved == saved_bytes(model, setting)
    changed = {"residual": "bf16"}
    for checkpointing in ("none", "block"):
        model, setting = build(
            shape, recipe, checkpointing=checkpointing, recipe_overrides=changed, sequences=5
        )
        assert estimate(setting).saved == saved_bytes(model, setting)


@pytest.mark.parametrize("shape", ["gpt2", "nano", "llama"])
@pytest.mark.parametrize(
    ("recipe", "backend", "residual"),
    [
        ("fp32", "auto", "fp32"), ("bf16", "auto", "fp32"), ("bf16", "auto", "bf16"),
        ("block", "emulate", "fp32"),
    ],
)  # fmt: skip
def test_selective_checkpointing_keeps_the_outputs_of_gemms_and_attention(
    shape, recipe, backend, residual
):
    changed = {"residual": residual}
    model, setting = build(
        shape, recipe, backend, checkpointing="selective", recipe_overrides=changed
    )
    assert estimate(setting).saved == saved_bytes(model, setting)


@pytest.mark.parametrize(
    ("recipe", "backend", "head"),
    [
        case("bf16", "auto", False, quick=True), case("delayed", "torch", True, quick=True),
        case("fp32", "auto", False, quick=False), case("fp16", "auto", False, quick=False),
        *(case("delayed", "emulate", head, quick=False) for head in (False, True)),
        case("mxfp8", "emulate", True, quick=False),
    ],
)  # fmt: skip
def test_a_loss_in_chunks_keeps_no_probabilities(recipe, backend, head, monkeypatch):
    overrides = {"head": True} if head else {}
    for sequences in (8, 29):  # two chunks, and more than a trace runs
        keys: dict[str, Any] = {"recipe_overrides": dict(overrides), "sequences": sequences}
        model, setting = build("nano", recipe, backend, **keys)
        unchunked = estimate(setting)
        with monkeypatch.context() as patched:
            patched.setattr("fp8stack.model.loss.chunk_rows", lambda _: 128)
            assert estimate(setting).saved == saved_bytes(model, setting)
            assert estimate(setting).saved != unchunked.saved


@pytest.mark.parametrize(
    ("shape", "recipe", "checkpointing", "micro_batches"),
    [
        ("gpt2", "fp32", "none", 1), ("gpt2", "bf16", "block", 1), ("llama", "delayed", "none", 2),
        ("llama", "fp32", "selective", 2), ("llama", "mxfp8", "none", 1),
        ("nano", "bf16", "none", 2), ("mixture", "bf16", "none", 1),
        ("mixture", "delayed", "block", 2),
    ],
)  # fmt: skip
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


@pytest.mark.parametrize(
    ("recipe", "backend", "head"),
    [
        ("fp32", "auto", False), ("bf16", "auto", False), ("fp16", "auto", False),
        ("delayed", "emulate", True), ("delayed", "torch", True), ("mxfp8", "emulate", True),
    ],
)  # fmt: skip
def test_the_peak_in_a_loss_in_chunks_is_estimated_within_a_tenth(
    recipe, backend, head, monkeypatch
):
    sizes = {"vocabulary": 4096, "layers": 1, "width": 32, "heads": 2}
    monkeypatch.setitem(SHAPES, "wide", sizes)
    monkeypatch.setattr("fp8stack.model.loss.chunk_rows", lambda _: 128)
    overrides = {"head": True} if head else {}
    keys: dict[str, Any] = {"recipe_overrides": overrides, "sequences": 6, "context": 64}
    model, setting = build("wide", recipe, backend, **keys)
    with Live() as live:
        loss_of(model, setting).backward()
    expected = estimate(setting)
    assert expected.peak - expected.lasting == pytest.approx(live.peak, rel=0.1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("recipe", ["fp32", "bf16", "mxfp8"])
@pytest.mark.parametrize("optimizer", sorted(set(get_args(OptimizerName)) - {*LOW_BIT}))
def test_weights_gradients_and_state_are_estimated_to_the_byte(shape, recipe, optimizer):
    model, setting = build(shape, recipe, optimizer=optimizer)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert model.config.parameter_shapes(len(model.embedding.weight)) == shapes
    stepping = build_optimizer(model, RunConfig(optimizer=optimizer))
    loss_of(model, setting).backward()
    expected = estimate(setting)
    weights = list(model.parameters())
    gradients = [p.grad for p in weights if p.grad is not None]
    assert expected.parameters == sum(p.untyped_storage().nbytes() for p in weights)
    assert expected.gradients == sum(g.untyped_storage().nbytes() for g in gradients)
    stepping.step()
    states = [t for p in model.parameters() for t in stepping.state[p].values()]
    assert expected.optimizer == sum(t.untyped_storage().nbytes() for t in states)


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


@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise_wgrad_hp"])
def test_fp8_weights_that_layers_keep_are_estimated_to_the_byte(recipe):
    model, setting = build("llama", recipe, "torch")
    loss_of(model, setting)
    weights: list[Any] = [
        cached
        for module in model.modules()
        if isinstance(module, QuantizedLinear)
        and (cached := module.quantizers["weight"].cached_weight)
    ]
    copies = [copy for weight in weights for copy in weight.copies]
    tensors = [x for copy in copies for x in (copy.data, copy.inv_scale)]
    storages = {id_of(x): x.untyped_storage().nbytes() for x in tensors}
    assert estimate(setting).fp8_weights == sum(storages.values())


def test_the_history_is_as_long_as_the_longest_window_and_layers_count_their_random_bits():
    gradients = {"amax": "current", "block": "tensor", "rounding": "stochastic"}
    changes: dict[str, Any] = {"quantizer": {"history_length": 8}, "grad_output": gradients}
    changes["weight"] = {"dgrad": {"history_length": 20}}
    model, setting = build("gpt2", "delayed", "emulate", recipe_overrides=changes)
    delayed: Any = model.delayed_scaling
    assert delayed.history.history.shape == (20, 3 * 8)  # input, weight, weight.dgrad
    tensors = [delayed.history.history, delayed.history.scales, *delayed.history._rules]
    tensors += [*delayed.history.all_recorded, delayed.weight_scales, delayed.unrecorded]
    tensors += [delayed.weights.flag, *(slot._column_indices for slot in delayed.slots.values())]
    draws: Any = model.stochastic_rounding
    tensors += draws.state_dict().values()
    assert estimate(setting).buffers == sum(tensor.nbytes for tensor in tensors)


def test_experts_have_a_history_each_and_biases_and_a_load():
    model, setting = build("mixture", "delayed", "emulate")
    loss_of(model, setting)
    delayed: Any = model.delayed_scaling
    assert delayed.history.history.shape[1] == 3 * (8 + 2 * 4)  # 8 linears, and 2 for experts
    tensors = [delayed.history.history, delayed.history.scales, *delayed.history._rules]
    tensors += [*delayed.history.all_recorded, delayed.weight_scales, delayed.unrecorded]
    tensors += [delayed.weights.flag, *(slot._column_indices for slot in delayed.slots.values())]
    tensors += [
        *model.buffers(),
        *loads_of(model),
        *(x for t in model._rotations.values() for x in t),
    ]
    assert estimate(setting).buffers == sum(tensor.nbytes for tensor in tensors)


def test_an_element_takes_what_its_quantizer_has_on_average_over_gemms_and_layers():
    def bytes_of(recipe: str, **changes: Any) -> float:
        plan = build("gpt2", recipe, recipe_overrides=changes)[1].plan
        return PhaseEstimate(name="", steps=1, plan=plan, estimates={}).element_bytes

    assert [bytes_of(name) for name in ("fp32", "delayed", "mxfp6_e2m3", "nvfp4")] == [4, 1, 1, 0.5]
    assert bytes_of("rowwise_wgrad_hp") == (1 + 1 + 4) / 3
    half = bytes_of("mxfp8", layers=[{"match": "blocks.*.mlp.*", "recipe": "mxfp4"}])
    assert half == (1 + 0.5) / 2


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


def test_fsdp_gathers_weights_in_fp8_where_the_bytes_are_those_of_the_full_weight():
    def bytes_of(recipe: str, backend: str = "torch", **changes: Any) -> int:
        _, setting = build("llama", recipe, backend, recipe_overrides=changes)
        return estimate(replace(setting, ranks=4, parallel="fsdp")).gathered

    one_byte, in_float32 = bytes_of("current"), bytes_of("fp32", "reference")
    two_bytes = bytes_of("rowwise")
    assert one_byte < two_bytes < in_float32
    assert two_bytes > bytes_of("bf16", "reference") > one_byte  # scales of rows; no norms
    no_wgrad: Any = {"input": {"wgrad": "none"}, "grad_output": {"wgrad": "none"}}
    assert bytes_of("current", **no_wgrad) == one_byte
    assert bytes_of("current", backward="high_precision") >= in_float32  # a padded head
    assert bytes_of("rowwise_wgrad_hp", weight={"fprop": {"block": "tensor"}}) == one_byte
    assert bytes_of("current", head=True) == bytes_of("delayed", head=True) <= one_byte


def test_savings_are_an_average_over_the_phases_and_the_peak():
    saved = fp8stack.savings([(10, 4), (20, 4), (60, 2), (10, 4)], reference=4)
    assert (saved.average, saved.peak) == (pytest.approx(0.70), 1.0)
    halved = savings([(1, 200e6 + 100e6 / 2)], reference=200e6 + 100e6)  # a third, halved
    assert round(100 * (1 - halved.peak)) == 17
    for phases in ([], [(0, 4)], [(1, 4), (-1, 2)]):
        with pytest.raises(ValueError, match="shares above 0"):
            savings(phases, reference=4)


def test_the_largest_batch_is_the_largest_that_fits():
    def peak_of(sequences: int) -> int:  # the loss takes less from 40 sequences on
        return 7 * sequences + (3 * sequences if sequences <= 39 else 50)

    for memory in (9, 10, 64, 65, 100, 399, 400, 401, 1000):
        fitting = [n for n in range(1, 200) if peak_of(n) <= memory]
        assert largest_batch(peak_of, memory, 39) == max(fitting, default=0)


@pytest.fixture
def estimated(command, capsys) -> Estimated:
    """The JSON of `fp8stack estimate` with some arguments."""

    def run(*arguments: str) -> dict[str, Any]:
        assert command("estimate", "--json", *arguments) == 0
        return json.loads(capsys.readouterr().out)

    return run


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


def test_a_gpu_that_is_not_here_has_its_memory_and_a_run_in_fp32_casts_no_weight(estimated):
    arguments = ["--model", "gpt2-124m", "--capability", "8.0", "--batch", "8", "--recipe"]
    table = estimated(*arguments, "bf16")
    assert table["memory"] == 80 * 10**9  # by the data sheet
    assert table["largest_batch"]["block"] > table["largest_batch"]["none"] > 8
    for kind in estimated(*arguments, "fp32")["phases"][0]["estimates"].values():
        assert kind["parts"]["weight_copies"] == 0
        assert kind["parts"]["loss"] > 4 * 768 * 50257  # the head's gradient, of a loss in chunks


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


@pytest.mark.parametrize(
    ("room", "keys", "checkpointing", "ways"),
    [
        (-1, {}, "none", ["--optimizer adamw8bit", "shards of the model: --ranks N"]),
        (-1, {"optimizer": "adamw8bit"}, "none", ["shards of the model: --ranks N"]),
        (-1, {"ranks": 2, "parallel": "fsdp"}, "block", ["--optimizer adamw8bit", "more --ranks"]),
        (1, {}, "selective", ["a shorter --context", "--activation-checkpointing block"]),
        (1, {"ranks": 2, "parallel": "ddp"}, "block", ["a shorter --context", "shards of the"]),
        (1, {"parallel": "fsdp"}, "block", ["a shorter --context", "more --ranks"]),
    ],
)
def test_advice_names_nothing_that_is_set_already(room, keys, checkpointing, ways):
    setting = build("gpt2", "fp32", checkpointing=checkpointing)[1]
    estimates = {checkpointing: estimate(setting)}
    answer = Answer(
        run={"optimizer": "adamw"} | keys,
        checkpointing=checkpointing,
        phases=(PhaseEstimate(name="", steps=1, plan=setting.plan, estimates=estimates),),
        fp32_peak=1,
        recipes={},
        memory=estimates[checkpointing].floor + room,
    )
    advice = answer.remedy().partition("Use more memory, a smaller model, ")[2]
    assert all(way in advice for way in ways)
    settled = {"adamw8bit": keys.get("optimizer"), "fsdp": keys.get("parallel")}
    settled["block"] = checkpointing
    assert not any(name in advice for name, key in settled.items() if name == key)


def test_a_gpu_that_is_named_stands_for_no_other():
    assert memory_of(Hardware("cuda", (9, 0), name="NVIDIA H200")) == (141 * 10**9, "H200")
    memory, name = memory_of(Hardware("cuda", (9, 0)))
    assert memory is not None
    assert name.endswith(", which stands for compute capability 9.0; others: --memory")
    assert memory_of(CPU) == (None, "")


def test_the_active_parameters_of_a_mixture_are_told(estimated):
    run = estimated("--model", "gpt-nano-moe", "--recipe", "fp32")["asked"]
    assert (run["parameters"], run["active_parameters"]) == (2_102_656, 923_008)


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
        ("--recipe fp9", "No recipe 'fp9'"),
        ("--batch 9 --ranks 2", "cannot be shared equally by 2 ranks"),
        (
            "--ranks 2 --parallel fsdp --capability 9.0 --recipe delayed --backend te",
            "--parallel fsdp cannot share out Transformer Engine's layers",
        ),
        ("--context 4096", "--context 4096 is more than the 128"),
        ("--phases defualt", "Did you mean 'default'?"),
        ("--capability hopper", "is no compute capability"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(arguments, message, refused):
    assert message in refused("estimate", *arguments.split())


def on(gpu: Hardware, config: GPTConfig, recipe: str, tokens: int, **keys: Any) -> Setting:
    """One sequence of a micro-batch on a GPU."""
    plan = plan_for(config, load_recipe(recipe, keys), gpu, tokens=tokens)
    return Setting(config=config, plan=plan, sequences=1, context=tokens)


def test_fp8_weights_of_a_gpu_are_two_bytes_per_element_and_scales():
    gpu, config = assumed("10.0", has_te=False), load_config("llama-1b")
    settings = {name: on(gpu, config, name, 8192) for name in ("delayed", "mxfp8")}
    layers = settings["mxfp8"].plan.layers
    elements = sum(la.in_features * la.out_features for la in layers if la.fp8)
    fp8_weights = {name: estimate(setting).fp8_weights for name, setting in settings.items()}
    assert fp8_weights["mxfp8"] == 2 * elements * (1 + 1 / 32)  # a byte of scale for 32 elements
    assert 2 * elements < fp8_weights["delayed"] < 2.001 * elements


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_torch_keeps_fp8_weights_of_experts_and_gathers_them_in_float32(recipe):
    config = build("mixture", "fp32")[1].config
    setting = on(assumed("9.0", has_te=False), config, recipe, 64)
    layers = [layer for layer in setting.plan.layers if layer.fp8]
    elements = sum(la.in_features * la.out_features * (la.groups or 1) for la in layers)
    rows = sum((la.in_features + la.out_features) * (la.groups or 1) for la in layers)
    scales = 4 * rows if recipe == "rowwise" else 4 * 2 * sum(la.groups or 1 for la in layers)
    estimates = estimate(setting)
    assert 2 * elements < estimates.fp8_weights <= 2 * elements + scales
    fsdp = estimate(replace(setting, ranks=2, parallel="fsdp"))
    assert fsdp.fp8_weights == 0
    shapes = config.parameter_shapes()
    blocks = {n: 4 * math.prod(s) for n, s in shapes.items() if n.startswith("blocks.")}
    last = sum(size for name, size in blocks.items() if name.startswith("blocks.1."))
    root = estimates.parameters - sum(blocks.values())
    # Two blocks, and a gradient: linears are gathered in a byte per element, or two and scales.
    linears = [la for la in layers if la.name.startswith("blocks.1.") and not la.groups]
    elements = sum(la.in_features * la.out_features for la in linears)
    in_fp8 = 2 * elements + 4 * sum(la.out_features for la in linears)
    saved = 4 * elements - (in_fp8 if recipe == "rowwise" else elements)
    head = setting.plan.layer("lm_head")
    in_bf16 = 0 if config.tied else 2 * head.in_features * head.out_features
    gradient = 4 * head.in_features * head.out_features  # padded
    assert fsdp.gathered == root + gradient + 3 * last - 2 * saved - in_bf16


def test_nvfp4_by_transformer_engine_keeps_half_a_byte_per_element_and_a_scale_of_16():
    gpu, config = assumed("10.0"), load_config("llama-1b")
    settings = {name: on(gpu, config, name, 1024) for name in ("mxfp8", "nvfp4", NEAREST)}
    assert {setting.plan.backend for setting in settings.values()} == {"te"}
    estimates = {name: estimate(setting) for name, setting in settings.items()}
    layers = [layer for layer in settings[NEAREST].plan.layers if layer.fp8]
    assert estimates["nvfp4"].fp8_weights == sum(
        2 * la.in_features * la.out_features * (1 / 2 + 1 / 16) for la in layers
    )
    saved = sum(1024 * la.in_features for la in layers)  # of each input
    less = estimates["mxfp8"].saved - estimates["nvfp4"].saved
    assert less == pytest.approx(saved * (1 + 1 / 32 - 1 / 2 - 1 / 16), abs=1024)
    assert estimates[NEAREST].saved == estimates["nvfp4"].saved


def test_attention_in_mxfp8_keeps_two_copies_of_its_operands():
    sizes: dict[str, Any] = {"vocabulary": 64, "layers": 2, "width": 128, "heads": 4, "kv_heads": 2}
    config, gpu = GPTConfig(**sizes, context=128), Hardware("cuda", (10, 0), has_te=True)
    plain, low = (
        estimate(on(gpu, config, "mxfp8", 128, attention=attention))
        for attention in ("compute", "mxfp8")
    )
    # 33 bytes for 32 elements, twice, in place of bf16; per token and block 4 + 2 + 2 heads of 32.
    more = config.layers * 128 * 8 * 32 * (2 * 33 / 32 - 2)
    assert low.activations - plain.activations == more
    same = [replace(memory, activations=0, first_block=0) for memory in (plain, low)]
    assert same[0] == same[1]


@pytest.mark.parametrize(("kind", "output", "slots"), [("delayed", 1, 6), ("current", 2, 2)])
def test_attention_in_fp8_keeps_bytes_and_has_amax_histories(kind, output, slots):
    sizes: dict[str, Any] = {"vocabulary": 64, "layers": 2, "width": 128, "heads": 4, "kv_heads": 2}
    config, gpu = GPTConfig(**sizes, context=128), Hardware("cuda", (10, 0), has_te=True)
    plain, low = (
        estimate(on(gpu, config, "mxfp8", 128, attention=attention))
        for attention in ("compute", kind)
    )
    # A byte in place of bf16, per token and block of 4 + 2 + 2 heads of 32, and of the output.
    more = config.layers * 128 * 32 * (8 * (1 - 2) + 4 * (output - 2))
    assert low.activations - plain.activations == more
    # A row, four float32, two bools and two places for each; and a flag.
    assert low.buffers - plain.buffers == config.layers * slots * (4 * (1 + 4) + 2 + 2 * 8) + 1
    same = [replace(memory, activations=0, first_block=0, buffers=0) for memory in (plain, low)]
    assert same[0] == same[1]


def test_selective_checkpointing_keeps_nothing_that_transformer_engine_gave():
    sizes: dict[str, Any] = {"vocabulary": 64, "layers": 2, "width": 128, "heads": 4, "kv_heads": 2}
    config, gpu = GPTConfig(**sizes, context=128), Hardware("cuda", (10, 0), has_te=True)
    attention_bytes = {}
    for attention in ("compute", "delayed"):
        setting = on(gpu, config, "mxfp8", 128, attention=attention)
        kinds = [replace(setting, checkpointing=kind) for kind in ("selective", "block")]
        selective, block = (estimate(kind).activations for kind in kinds)
        attention_bytes[attention] = selective - block
    # torch's attention keeps its bf16 output, and a float32 statistic for each row of a head.
    assert attention_bytes == {"compute": config.layers * 128 * (2 * 128 + 4 * 4), "delayed": 0}
