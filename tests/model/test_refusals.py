"""Wrong arguments of the Python API, and transforms that converted models do not run under: one
line of a UserError each."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap

import fp8stack
from fp8stack import (
    Hardware,
    UserError,
    convert,
    fp8_state,
    load_fp8_state,
    load_recipe,
    numerics,
    resolve,
)
from fp8stack.model.convert import require_one_device
from fp8stack.numerics import Quantizer
from tests.conftest import refusal
from tests.support.backend_models import CPU, normal

NANO = fp8stack.load_config("gpt-nano")


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def converted(recipe: str = "delayed", backend: str = "emulate") -> nn.Sequential:
    return convert(plain(), resolve(load_recipe(recipe), CPU, backend))


# Arguments


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (None, "not None"),
        (plain, "not a function"),
        (nn.Linear, r"not the class 'Linear': make one first, such as convert\(Linear\("),
        (torch.Tensor, "not the class 'Tensor'"),
        (lambda: torch.jit.script(nn.Sequential(nn.Linear(32, 32))), "TorchScript"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_is_no_model_is_not_converted(model, message):
    if message == "TorchScript":
        model = model()
    with pytest.raises(UserError, match=message):
        convert(model, "delayed")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exclude": None}, "exclude: None is no pattern"),
        ({"exclude": ["0", 3]}, "exclude: an int is no pattern"),
        ({"exclude": nn.Linear}, "exclude: the class 'Linear' is no pattern"),
        ({"also": "FalconLinear"}, "also: a str is no class"),
        ({"also": (nn.Linear, 3)}, "also: an int is no class"),
        ({"amax_group": "wrld"}, "amax_group: a str is no group"),
        ({"plan": fp8stack.Plan}, r"needs a recipe or a plan, .* not the class 'Plan'"),
        ({"recipe": "delayed"}, "a plan or a recipe, not both"),
    ],
)
def test_an_argument_of_another_type_is_named(options, message):
    model = plain()
    with pytest.raises(UserError, match=message):
        convert(model, **{"plan": "delayed", **options})
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: resolve(3, CPU), "A recipe is a name, a path or a Recipe, not an int"),  # type: ignore[arg-type]
        (lambda: resolve("delayed", None), "resolve needs hardware, such as probe(), not None"),  # type: ignore[arg-type]
        (lambda: resolve("delayed", CPU, 3), "A backend is given by its name, not by an int"),  # type: ignore[arg-type]
        (lambda: load_recipe(None), "A recipe is given by name or path, not by None"),  # type: ignore[arg-type]
        (lambda: fp8stack.load_config([]), "A model is given by name or path, not by a list"),  # type: ignore[arg-type]
        (lambda: fp8stack.probe(3), "No device '3'"),  # type: ignore[arg-type]
        (lambda: fp8stack.build_backend("te"), "build_backend needs a plan"),  # type: ignore[arg-type]
        (lambda: fp8stack.load(None), "not by None"),  # type: ignore[arg-type]
        (lambda: fp8stack.pretrain(stpes=1), "Did you mean 'steps'?"),
        (lambda: fp8stack.plan_for("gpt-nano", "delayed", CPU), "plan_for needs a GPTConfig"),  # type: ignore[arg-type]
        (lambda: fp8stack.GPT("gpt-nano"), "GPT needs a GPTConfig and a backend"),  # type: ignore[arg-type]
        (lambda: fp8stack.GPT(NANO, resolve("fp32", CPU)), "not a GPTConfig and a Plan"),  # type: ignore[arg-type]
        (lambda: fp8stack.plan(plain(), capability=9.0), "given as '9.0', not by a float"),  # type: ignore[arg-type]
        (lambda: Hardware("gpu", (9, 0)), "No device 'gpu'. Known: cpu, cuda, xpu."),
        (lambda: Hardware("cuda"), "A CUDA device has a compute capability"),
        (lambda: Hardware("cuda", "9.0"), "a pair such as (9, 0), not '9.0'"),  # type: ignore[arg-type]
        (lambda: fp8stack.LossScaler(65536.0), "pass first"),  # type: ignore[arg-type]
        (lambda: fp8stack.load_tokenizer(None), "by name or path, not by None"),  # type: ignore[arg-type]
        (lambda: fp8stack.generate(None), "not by None"),  # type: ignore[arg-type]
        (lambda: fp8stack.evaluate(None), "not by None"),  # type: ignore[arg-type]
        (lambda: fp8stack.evaluate([3]), "not by an int"),  # type: ignore[list-item]
        (lambda: fp8stack.precision_for_phase(3, "delayed"), "No phase '3'"),  # type: ignore[arg-type]
    ],
)
def test_other_functions_name_what_they_need(call, message):
    assert message in refusal(call)


DRAWING = Quantizer(rounding="stochastic")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: numerics.unpack(torch.ones(4)), "a Tensor is no Quantized"),  # type: ignore[arg-type]
        (lambda: numerics.current_scale(torch.ones(()), "e4m3"), "a str is no Quantizer"),  # type: ignore[arg-type]
        (lambda: numerics.quantize(torch.ones(4), Quantizer(), dim=None), "no dimension None"),  # type: ignore[arg-type]
        (lambda: Quantizer(format=None), "No format 'None'"),  # type: ignore[arg-type]
        (lambda: numerics.quantize(torch.ones(4), DRAWING, 0, 42), "Give it RandomBits(seed=0"),  # type: ignore[arg-type]
    ],
)
def test_functions_of_numerics_name_what_they_need(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_delayed_scaling_needs_a_module_that_the_loop_calls():
    block = plain()
    convert(nn.ModuleList([block]), resolve("delayed", CPU))
    assert "convert the module that your loop calls instead" in refusal(block, normal(8, 32))


def test_a_weight_that_is_quantized_already_stays_out():
    model: Any = plain()
    dtype = torch.float8_e4m3fn
    model[0].weight = nn.Parameter(model[0].weight.detach().to(dtype), requires_grad=False)
    plan: Any = convert(model, resolve("current", CPU, "emulate")).fp8_plan
    assert plan.layers[0].reason == f"its weight is quantized already ({str(dtype)[6:]})"
    assert [layer.fp8 for layer in plan.layers] == [False, True]
    torchao = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(plain(), plain())
    torchao.quantize_(model[0], torchao.Int8WeightOnlyConfig())
    plan = convert(model, resolve("current", CPU, "emulate")).fp8_plan
    assert [layer.fp8 for layer in plan.layers] == [False, False, True, True]
    assert "its weight is a" in plan.layers[0].reason


# FP8 state


def test_a_model_that_was_not_converted_has_no_fp8_state():
    message = "was not converted and has no FP8 state: call fp8stack.convert(model, recipe) first"
    for call, *args in ((fp8_state,), (load_fp8_state, {})):
        for model in (plain(), nn.ModuleDict(), nn.Embedding(2, 2)):
            assert message in refusal(call, model, *args)
        assert "FP8 state is in a model that fp8stack.convert" in refusal(call, None, *args)
    for recipe in ("mxfp8", "bf16", "fp32"):
        model = converted(recipe, "auto")
        assert fp8_state(model) == {}
        load_fp8_state(model, {})
    assert fp8_state(nn.ModuleList([converted(), plain()])).keys() == fp8_state(converted()).keys()
    assert fp8_state(converted()[0])  # a part has the state of the model


@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_state_of_other_types_is_refused_by_name(recipe):
    model = converted(recipe)
    state = fp8_state(model)
    name = next(iter(state))
    assert "FP8 state is the dictionary that" in refusal(load_fp8_state, model, [1])
    values = {"an int": 3, "None": None, "a Tensor": state[name].to("meta")}
    for words, value in values.items():
        message = refusal(load_fp8_state, model, {**state, name: value})
        assert f"'{name}' is {words}" in message
    assert "'1' is an int" in refusal(load_fp8_state, model, {1: 2})
    for tensor in (torch.ones(3), torch.ones((), dtype=torch.float64)):
        assert f"'{name}' is {tensor.dtype} " in refusal(
            load_fp8_state, model, {**state, name: tensor}
        )
    assert all(torch.equal(value, state[key]) for key, value in fp8_state(model).items())


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_state_with_a_scale_that_is_no_scale_is_refused(value):
    model = converted("delayed")
    state = fp8_state(model)
    name = next(name for name in state if name.endswith(".scale"))
    message = refusal(load_fp8_state, model, {**state, name: torch.full_like(state[name], value)})
    assert message.startswith(f"FP8 state: '{name}' is negative or not finite.")
    assert all(torch.equal(value, state[key]) for key, value in fp8_state(model).items())


# Transforms

FP8 = ["delayed", "current", "mxfp8", "nvfp4"]


@pytest.mark.parametrize(
    ("recipe", "backend"), [*((recipe, "emulate") for recipe in FP8), ("delayed", "torch")]
)
@pytest.mark.parametrize("train", [True, False])
def test_transforms_of_torch_func_are_refused_in_a_line(recipe, train, backend):
    model, x = converted(recipe, backend).train(train), normal(8, 32)
    before = fp8_state(model)
    weights = {name: value.detach() for name, value in model.named_parameters()}

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(model, parameters, (x,)).sum()

    for call in (
        lambda: grad(loss)(weights),
        lambda: vmap(model)(x[None]),
        lambda: jvp(model, (x,), (x,)),
        lambda: torch.func.functionalize(model)(x),
    ):
        assert "cannot run under torch.func's grad, vmap or jacrev: call backward()" in refusal(
            call
        )

    def forward_mode() -> None:
        with forward_ad.dual_level():
            model(forward_ad.make_dual(x, x))

    state = fp8_state(model)
    assert all(torch.equal(value, state[name]) for name, value in before.items())
    assert "no forward-mode derivatives: call backward()" in refusal(forward_mode)
    model(x).sum().backward()  # nothing is broken


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_torch_jit_and_fx_are_refused_in_a_line(recipe):
    x = normal(8, 32)
    model = converted(recipe)
    for module in (model, model[0]):
        assert "traced by torch.jit: use torch.compile" in refusal(torch.jit.trace, module, x)
        assert "compiled by torch.jit: use torch.compile" in refusal(torch.jit.script, module)
    assert "torch.fx: trace the model first" in refusal(torch.fx.symbolic_trace, model)
    assert torch.equal(torch.jit.trace(in_bf16 := converted("bf16", "auto"), x)(x), in_bf16(x))
    traced = torch.fx.symbolic_trace(plain())
    convert(traced, resolve(recipe, CPU, "emulate"))(x).sum().backward()


def test_data_parallel_is_refused_in_a_line_in_fp8_alone():
    """nn.DataParallel, which takes two GPUs, calls this method of each module."""
    assert "DistributedDataParallel" in refusal(converted()[0]._replicate_for_data_parallel)
    assert isinstance(converted("bf16", "auto")[0]._replicate_for_data_parallel(), nn.Linear)


def test_state_on_one_device_is_refused_for_layers_on_several():
    def on(device: str) -> Any:
        parameter = SimpleNamespace(device=torch.device(device))
        return SimpleNamespace(parameters=lambda recurse: [parameter])

    layers = [on("cuda:0"), on("cuda:1"), on("meta")]
    plans = {name: resolve(name, Hardware("cuda", (9, 0))) for name in ("delayed", "current")}
    with pytest.raises(UserError, match=r"\(cuda:0, cuda:1\), and recipe 'delayed' keeps"):
        require_one_device(layers, plans["delayed"])
    require_one_device(layers[1:], plans["delayed"])
    require_one_device(layers, plans["current"])
