"""`convert` on models that are not ours: tiny ones of transformers and of torch, from configs."""

from __future__ import annotations

import argparse
import copy
import functools
import logging
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from fp8stack import (
    Hardware,
    UserError,
    convert,
    fp8_state,
    load_recipe,
    resolve,
)
from fp8stack.precision import Plan
from tests.support.backend_models import (
    CPU,
    PER_TENSOR,
    RECIPES,
    filled,
    grad,
    gradients,
    normal,
    same,
    scales,
)
from tests.support.gemm_oracle import assert_all_close, oracle
from tests.support.gemm_oracle import normal as columns

TURING, AMPERE, HOPPER = (Hardware("cuda", c) for c in ((7, 5), (8, 0), (9, 0)))
RUNS = [*((r, "emulate") for r in RECIPES), *((r, "torch") for r in PER_TENSOR)]


def plan(recipe="delayed", backend="emulate", hardware=CPU, strict=False, **options):
    chosen = load_recipe(recipe, options)
    return resolve(chosen, hardware, "auto" if recipe in ("fp32", "bf16") else backend, strict)


def gpt2(layers=2, **options):
    """Conv1D linears and a head that is tied to the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config: dict[str, Any] = {"vocab_size": 256, "n_positions": 32, "n_layer": layers}
    config |= {"bos_token_id": 0, "eos_token_id": 0, "n_head": 2, "n_embd": 32} | options
    config |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**config))


def llama(layers=2):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config: dict[str, Any] = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": layers}
    config |= {"intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(**config))


MODELS = {"gpt2": gpt2, "llama": llama}
LINEARS = {
    "gpt2": ("transformer.h", ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]),
    "llama": ("model.layers", [*(f"self_attn.{p}_proj" for p in "qkvo"), "mlp.gate_proj",
                               "mlp.up_proj", "mlp.down_proj"]),
}  # fmt: skip
IN_FP8 = {
    name: [f"{blocks}.{i}.{linear}" for i in range(2) for linear in linears]
    for name, (blocks, linears) in LINEARS.items()
}


class MLP(nn.Module):
    def __init__(self, inputs=32, width=64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(inputs, width), nn.Linear(width, inputs)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Blocks(nn.Module):
    def __init__(self, count=3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLP() for _ in range(count))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


@functools.cache
def text() -> Tensor:
    return torch.tensor(list(Path(argparse.__file__).read_bytes()))


def batch(step, rows=16) -> Tensor:
    """Windows of 32 bytes of Python's own source."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text()) - 32, (rows,), generator=generator).tolist()
    return torch.stack([text()[start : start + 32] for start in starts])


def loss_of(model, step, rows=4) -> Tensor:
    x = batch(step, rows)
    return model(input_ids=x, labels=x).loss


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def train(model, steps, optimizer=None, rows=4) -> list[float]:
    optimizer = optimizer or adamw(model)
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step, rows)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def fit(model, steps=3, call=None) -> list[float]:
    """Losses of steps of a model of vectors, by `call` if it is not the model that is called."""
    call = model if call is None else call
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = call(normal(8, 32, seed=step)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def values(model) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def in_fp8(model) -> list[str]:
    return [layer.name for layer in model.fp8_plan.layers if layer.fp8]


def replaced(model) -> list[str]:
    """The paths of the layers that are not what they were, by their looks."""
    return [name for name, module in model.named_modules() if hasattr(module, "keeps_dtype")]


def plan_in(model: nn.Module) -> Plan:
    """The plan that `convert` stored in a model."""
    assert isinstance(model.fp8_plan, Plan)
    return model.fp8_plan


def reason(model, name) -> str:
    reasons = [r for r in model.fp8_plan.reasons if r.startswith(f"{name}: ")]
    assert len(reasons) == 1, model.fp8_plan.reasons
    return reasons[0].removeprefix(f"{name}: ")


def relative(tensor: Tensor, reference: Tensor) -> float:
    return ((tensor - reference).norm() / reference.norm()).item()


# A converted model is the same model


@pytest.mark.parametrize(
    ("recipe", "backend"), [("delayed", "emulate"), ("bf16", "auto"), ("fp32", "auto")]
)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_names_shapes_and_values_of_the_state_dict_do_not_change(make, recipe, backend):
    plain, model = make(), make()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    assert convert(model, plan(recipe, backend)) is model
    assert list(model.state_dict()) == list(plain.state_dict())
    assert same(model.state_dict(), plain.state_dict())
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameters[name] for name in parameters)
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    if recipe == "fp32":
        assert replaced(model) == []
        assert train(model, range(2)) == train(plain, range(2))
        assert same(gradients(model), gradients(plain))


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(("backend", "hardware"), [("emulate", CPU), ("torch", HOPPER)])
def test_the_linears_of_blocks_run_in_fp8_and_the_head_does_not(backend, hardware, make):
    name, chosen = make.__name__, plan("delayed", backend, hardware)
    model = convert(make(), chosen)
    assert in_fp8(model) == replaced(model) == IN_FP8[name]
    assert type(model.lm_head) is nn.Linear
    assert reason(model, "lm_head") == "unchanged, the recipe says head = false"
    assert model.fp8_plan.layer("lm_head").precision == "unchanged"
    headed = convert(make(), plan("delayed", backend, hardware, head=True))
    assert in_fp8(headed) == replaced(headed) == [*IN_FP8[name], "lm_head"]
    assert chosen.layers == ()  # a plan serves several models


def test_ties_stay_ties_also_after_a_step():
    model = convert(gpt2(), plan(head=True))
    before = model.lm_head.weight.detach().clone()
    train(model, range(2))
    assert model.lm_head.weight is model.transformer.wte.weight
    assert not torch.equal(model.lm_head.weight, before)
    model.tie_weights()
    assert len(list(model.parameters())) == len(list(gpt2().parameters()))


# The numbers of one linear


def one_linear(kind, inputs, outputs, bias=True):
    """A model of one linear, called "linear"."""
    layer: Any = nn.Linear(inputs, outputs, bias)
    if kind == "conv1d":
        from transformers.pytorch_utils import Conv1D

        layer = Conv1D(outputs, inputs)
    with torch.no_grad():
        layer.weight.copy_(columns(*layer.weight.shape, seed=1))
        if layer.bias is not None:
            layer.bias.copy_(normal(outputs, seed=2))
    return nn.Sequential().append(layer)


@pytest.mark.parametrize(("recipe", "backend"), RUNS)
@pytest.mark.parametrize("kind", ["linear", "no bias", "conv1d"])
def test_a_first_step_equals_a_float64_oracle(kind, recipe, backend):
    inputs, outputs = (48, 160) if backend == "torch" else (50, 140)
    model = one_linear(kind, inputs, outputs, bias=kind != "no bias")
    layer = convert(model, plan(recipe, backend))[0]
    x = columns(3, 7, inputs, seed=3, std=30.0).requires_grad_()
    dy = columns(3, 7, outputs, seed=4, std=0.1)
    y = model(x)
    y.backward(dy)
    weight, gradient = layer.weight.detach(), layer.weight.grad
    if kind == "conv1d":
        weight, gradient = weight.t(), gradient.t()
    usual: Any = SimpleNamespace(
        weight=weight, bias=layer.bias, in_features=inputs, out_features=outputs
    )
    db = None if layer.bias is None else layer.bias.grad
    expected = oracle(recipe, usual, x.detach(), dy)
    assert_all_close([y.detach(), x.grad, gradient, db], expected)
    plain = F.linear(x.detach(), weight, None if layer.bias is None else layer.bias.detach())
    assert 1e-3 < relative(y.detach(), plain) < 0.2  # it was FP8, and it was near


# Delayed scaling, with no call of ours in the loop


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_generation_and_evaluation_in_between_change_no_state(make):
    model, twin = convert(make(), plan()), convert(make(), plan())
    optimizers = [adamw(model), adamw(twin)]
    for step in range(2):
        assert train(model, [step], optimizers[0]) == train(twin, [step], optimizers[1])
        before = fp8_state(model)
        # In train mode, as it is called from a training loop.
        model.generate(batch(0, rows=1)[:, :5], max_new_tokens=4, do_sample=False)
        model.eval()
        with torch.no_grad():
            loss_of(model, 9)
        model.train()
        assert same(before, fp8_state(model))
    assert same(fp8_state(model), fp8_state(twin))


def test_parts_of_a_model_are_converted_under_their_own_names():
    model = nn.ModuleDict({"encoder": MLP(), "decoder": MLP()})
    convert(model["decoder"], plan())
    assert replaced(model) == ["decoder.up", "decoder.down"]
    model["decoder"](model["encoder"](normal(8, 32))).sum().backward()
    assert {name.split(".")[0] for name in fp8_state(model["decoder"])} == {"up", "down"}
    assert filled(model["decoder"], "up")[2] == 1
    convert(model["encoder"], plan())
    model["decoder"](model["encoder"](normal(8, 32))).sum().backward()
    assert len(fp8_state(model)) == 2 * 2 * 3 * 2


@pytest.mark.parametrize("call", ["a part", "forward"])
def test_a_model_is_trained_through_the_module_that_was_converted(call):
    model = convert(Blocks(), plan())
    fit(model)
    state = fp8_state(model)
    bypass = model.blocks[0] if call == "a part" else model.forward
    with pytest.raises(UserError, match="Call the module that was converted"):
        bypass(normal(8, 32))
    with torch.no_grad():  # evaluation may call what it likes
        bypass(normal(8, 32))
    assert same(state, fp8_state(model))
    convert(Blocks(), plan("current")).blocks[0](normal(8, 32)).sum().backward()


def test_a_model_may_call_itself():
    class Twice(MLP):
        def forward(self, x, again=True):
            if again:
                with torch.no_grad():
                    x = x + self(x, again=False)
            return super().forward(x)

    model = convert(Twice(), plan())
    model(normal(8, 32)).sum().backward()
    assert filled(model, "up")[2] == 1


def test_a_frozen_part_of_a_model_gets_scales():
    class Headed(MLP):
        top: nn.Module

        def forward(self, x):
            with torch.no_grad():
                x = super().forward(x)
            return self.top(x)

    plain = Headed()
    plain.top = nn.Linear(32, 32)
    model = convert(copy.deepcopy(plain), plan())
    for linear in (model.up, model.down):
        linear.requires_grad_(False).eval()
    for step in range(3):
        model(normal(8, 32, seed=step, std=1e3)).sum().backward()
    x = normal(8, 32, std=1e3)
    with torch.no_grad():
        assert relative(MLP.forward(model, x), MLP.forward(plain, x)) < 0.1


# Dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("recipe", "backend"), RUNS)
def test_autocast_rounds_the_output_and_nothing_inside(recipe, backend, dtype):
    model, twin = (convert(nn.Sequential(MLP().up), plan(recipe, backend)) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    x = normal(8, 32)
    dy = normal(8, 64, seed=1, std=1e-2).to(dtype)
    inside, outside = x.clone().requires_grad_(), x.clone().requires_grad_()
    with torch.autocast("cpu", dtype):
        y = model(inside)
        y.backward(dy)
    expected = twin(outside)
    expected.backward(dy.float())
    assert y.dtype == dtype
    assert torch.equal(y, expected.to(dtype))
    assert torch.equal(grad(inside), grad(outside))
    assert same(gradients(model), gradients(twin))
    assert same(fp8_state(model), fp8_state(twin))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    ("recipe", "backend", "kind"),
    [*((*run, "linear") for run in RUNS), ("current", "emulate", "conv1d")],
)
def test_a_model_of_another_dtype_keeps_it_and_rounds_once(kind, recipe, backend, dtype):
    linear = one_linear(kind, 32, 64)
    if kind == "conv1d":
        linear.to(dtype)  # before it is converted
    model = convert(linear, plan(recipe, backend)).to(dtype)
    twin = convert(one_linear(kind, 32, 64), plan(recipe, backend))
    twin.load_state_dict(model.state_dict())
    x, dy = normal(8, 32).to(dtype).requires_grad_(), normal(8, 64, seed=1).to(dtype)
    wide = x.detach().float().requires_grad_()
    y, expected = model(x), twin(wide)
    y.backward(dy)
    expected.backward(dy.float())
    weights = [grad(converted.get_parameter("0.weight")) for converted in (model, twin)]
    for got, exact in ((y, expected), (grad(x), grad(wide)), weights):
        assert got.dtype == dtype
        assert torch.equal(got, exact.to(dtype))
    assert model[0].bias.grad.dtype == dtype
    assert relative(model[0].bias.grad.float(), twin[0].bias.grad) < 1e-2
    assert {v.dtype for v in fp8_state(model).values()} <= {torch.float32}


# torch.compile, copies, pickles


@pytest.mark.parametrize("compiles_all", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.full
def test_compiled_code_computes_what_the_eager_model_does(compiles_all):
    eager, model = (convert(Blocks(1), plan("delayed", "torch")) for _ in range(2))
    model.load_state_dict(eager.state_dict())
    called: Any = model
    if compiles_all:
        called = torch.compile(model, backend="aot_eager", fullgraph=True)
    else:
        model.blocks[0].compile(backend="aot_eager")
    assert fit(model, call=called) == fit(eager)
    assert same(model.state_dict(), eager.state_dict())
    assert same(fp8_state(called), fp8_state(eager))
    assert int((fp8_state(model)["blocks.0.up.grad_output.amax_history"] != 0).sum()) == 3


@pytest.mark.parametrize(
    ("recipe", "backend"),
    [("delayed", "emulate"), ("block", "emulate"), ("delayed", "torch"), ("bf16", "auto")],
)
def test_copies_and_whole_models_that_were_saved_train_by_themselves(recipe, backend, tmp_path):
    model, twin = (convert(gpt2(), plan(recipe, backend)) for _ in range(2))
    for trained in (model, twin):
        train(trained, range(2))
    weights, state = values(model), fp8_state(model)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    expected = train(twin, range(2, 4))
    for copied in (copy.deepcopy(model), loaded, pickle.loads(pickle.dumps(model))):
        assert same(fp8_state(copied), state)
        assert copied.fp8_plan == model.fp8_plan
        assert train(copied, range(2, 4)) == expected
        assert same(fp8_state(copied), fp8_state(twin))
    assert same(weights, model.state_dict())
    assert same(state, fp8_state(model))


# Layers that are not converted, and the reasons


def test_attention_of_torch_keeps_the_linear_that_it_never_calls():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.mlp = nn.MultiheadAttention(32, 2, batch_first=True), MLP()

        def forward(self, x):
            return self.mlp(self.attention(x, x, x)[0])

    model = convert(Model(), plan())
    assert replaced(model) == ["mlp.up", "mlp.down"]
    assert reason(model, "attention.out_proj").startswith("unchanged, nn.MultiheadAttention")
    model(normal(2, 5, 32)).sum().backward()
    assert model.attention.out_proj.weight.grad is not None
    # An encoder layer runs in FP8 where it calls its linears.
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    plain, x = nn.Sequential(layer).eval(), normal(2, 5, 32)
    assert relative(convert(copy.deepcopy(plain), plan("current"))(x), plain(x)) > 1e-3


@pytest.mark.parametrize(
    ("make", "options", "exclude", "quantized", "reasons"),
    [
        (gpt2, {}, ["*.attn.*", "transformer.h.1.mlp.c_fc"],
         [n for n in IN_FP8["gpt2"] if "attn" not in n and "1.mlp.c_fc" not in n],
         {"transformer.h.0.attn.c_attn": "excluded by the pattern '*.attn.*'"}),
        (llama, {"exclude": ("*.mlp.*",)}, (), [n for n in IN_FP8["llama"] if "mlp" not in n],
         {"model.layers.0.mlp.up_proj": "excluded by the pattern '*.mlp.*'"}),
        (lambda: gpt2(layers=4), {"exclude_first_blocks": 1, "exclude_last_blocks": 2}, (),
         [n for n in IN_FP8["gpt2"] if ".1." in n],
         {"transformer.h.0.mlp.c_fc": "in the first 1 block",
          "transformer.h.3.mlp.c_fc": "in the last 2 blocks"}),
        (Blocks, {"exclude_last_blocks": 1}, ["blocks.2.*"],  # blocks left out count as well
         [f"blocks.{i}.{linear}" for i in (0, 1) for linear in ("up", "down")], {}),
        (lambda: nn.Sequential(*[nn.Linear(32, 32)] * 2, MLP()), {}, "*up", ["0", "2.down"], {}),
    ],
)  # fmt: skip
def test_what_is_excluded_stays_as_it_is_and_says_why(make, options, exclude, quantized, reasons):
    plain = make()
    model = convert(copy.deepcopy(plain), plan("delayed", **options), exclude=exclude)
    assert in_fp8(model) == replaced(model) == quantized
    assert {path.rpartition(".")[0] for path in scales(model)} == set(quantized)
    for name, expected in reasons.items():
        assert reason(model, name) == f"unchanged, {expected}"
        layer, before = model.get_submodule(name), plain.get_submodule(name)
        assert type(layer) is type(before)


def test_a_pattern_that_matches_nothing_is_an_error_that_names_it():
    model = gpt2()
    with pytest.raises(UserError, match=r"'\*\.mpl\.\*' matches no layer.*mlp\.c_fc"):
        convert(model, plan(), exclude=["*.mlp.*", "*.mpl.*"])
    with pytest.raises(UserError, match=r"'blocks\.\*' in exclude matches no layer"):
        convert(model, plan(exclude=("blocks.*",)))
    assert replaced(model) == []
    assert not hasattr(model, "fp8_plan")
    convert(model, plan())  # nothing had been changed


@pytest.mark.parametrize(
    ("key", "setting", "usual", "hardware", "backend"),
    [
        ("attention", "current", "compute", Hardware("cuda", (10, 0), has_te=True), "te"),
        ("residual", "bf16", "fp32", CPU, "emulate"),
    ],
)
def test_a_recipe_that_speaks_of_other_than_linears_is_refused(
    key, setting, usual, hardware, backend
):
    chosen, model = plan("mxfp8", backend, hardware, **{key: setting}), MLP()
    with pytest.raises(UserError, match=rf"{key} = '{setting}'. Set it to '{usual}'"):
        convert(model, chosen)
    assert replaced(model) == []


@pytest.mark.parametrize("recipe", ["delayed", "fp16"])
def test_a_gpu_without_bf16_leaves_the_model_as_it_is_and_says_how_fp16_is_had(recipe):
    plain, model = gpt2(), convert(gpt2(), plan(recipe, hardware=TURING, backend="auto"))
    assert replaced(model) == in_fp8(model) == []
    assert "pass scaled_loss=True" in reason(model, "transformer.h.0.attn.c_attn")
    assert train(model, range(2)) == train(plain, range(2))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_computed_weights_are_left_alone():
    def linear():
        return nn.Linear(32, 32)

    model = nn.Sequential(
        nn.utils.weight_norm(linear()),
        parametrizations.weight_norm(linear()),
        prune.random_unstructured(linear(), "weight", 0.5),
        prune.random_unstructured(linear(), "bias", 0.5),
        linear(),
    )
    names = list(model.state_dict())
    convert(model, plan())
    assert replaced(model) == ["4"]
    computed = "unchanged, its weight is computed and no parameter"
    assert [reason(model, str(i)) for i in range(3)] == [computed] * 3
    assert reason(model, "3") == computed.replace("weight", "bias")
    model(normal(8, 32)).sum().backward()
    assert list(model.state_dict()) == names
    assert model[3].bias_orig.grad is not None


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_lazy_linear_and_one_without_elements_are_left_alone():
    model = convert(nn.Sequential(nn.LazyLinear(32), nn.Linear(32, 32)), plan())
    assert reason(model, "0") == "unchanged, it has no size before its first pass"
    model(normal(8, 20)).sum().backward()
    assert replaced(model) == ["1"]
    model = convert(nn.Sequential(nn.Linear(0, 32), nn.Linear(32, 32)), plan())
    assert reason(model, "0") == "unchanged, its weight has no elements"
    assert model(torch.zeros(8, 0)).shape == (8, 32)


def test_a_model_without_linears_has_nothing_to_convert():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.LSTM(8, 8))
    with pytest.raises(UserError, match="Nothing to convert: no linear layer"):
        convert(model, plan())
    assert convert(model, plan("fp32")) is model
    with pytest.raises(UserError, match=r"in FP8 \(out_proj: nn\.MultiheadAttention"):
        convert(nn.MultiheadAttention(32, 2), plan())
    assert in_fp8(convert(nn.ModuleList([nn.LSTM(8, 8), nn.Linear(8, 8)]), plan())) == ["1"]
    with pytest.raises(UserError, match="wrap it in a module"):
        convert(nn.Linear(32, 32), plan())


@pytest.mark.parametrize("first", ["delayed", "fp32"])
def test_a_model_is_converted_once(first):
    model = convert(MLP(), plan(first))
    for outer in (model, nn.ModuleList([MLP(), model])):
        with pytest.raises(UserError, match="converted already"):
            convert(outer, plan("current"))
    assert model.fp8_plan.recipe.name == first


# Hooks, attributes and subclasses of a linear


def test_hooks_of_a_linear_stay_on_it():
    model, calls = MLP(), []
    up = model.up
    up.register_full_backward_hook(lambda m, dx, dy: calls.append(cast(Any, dy)[0].shape))
    up.register_forward_pre_hook(lambda m, args: calls.append("before"))
    up.register_forward_hook(lambda m, args, y: 2 * y)
    up.register_forward_hook(
        lambda m, args, kwargs, y: calls.append("with kwargs"), with_kwargs=True
    )
    up.register_state_dict_post_hook(lambda m, s, p, d: calls.append("state"))
    y = up(normal(8, 32))
    calls.clear()
    convert(model, plan("current"))
    assert relative(model.up(normal(8, 32)), y) < 0.1
    model.state_dict()
    model(normal(8, 32).requires_grad_()).sum().backward()
    assert calls == ["before", "with kwargs", "state", "before", "with kwargs", (8, 64)]


def test_what_a_user_changed_in_a_linear_is_not_lost(monkeypatch):
    model = MLP()
    model.up.register_buffer("mask", torch.ones(2))
    model.up.register_parameter("gain", nn.Parameter(torch.ones(1)))
    model.up.eval()
    inner = model.down.forward
    monkeypatch.setattr(model.down, "forward", lambda x: 0 * inner(x))
    names = list(model.state_dict())
    assert list(convert(model, plan()).state_dict()) == names
    assert (model.up.training, model.down.training) == (False, True)
    assert model(normal(8, 32).requires_grad_()).abs().max() == 0
    assert reason(model, "down") == "unchanged, it has a forward of its own"
    model(normal(8, 32)).sum().backward()
    assert filled(model, "up")[0] == 2  # in a pass of a model that trains, all record


# The report


def test_the_report_says_what_was_converted_and_what_not(caplog):
    model = nn.ModuleDict({"body": MLP(), "odd": nn.Linear(20, 32), "lm_head": nn.Linear(32, 64)})
    with caplog.at_level(logging.INFO, logger="fp8stack"):
        convert(model, plan("delayed", "torch"), exclude=["body.down"])
    summary = plan_in(model).summary()
    assert summary[0] == "plan: delayed, FP8 GEMMs by torch's scaled_mm, on cpu"
    unchanged = [
        "body.down: unchanged, excluded by the pattern 'body.down'",
        "odd: unchanged, 20 in features, not divisible by 16",
        "lm_head: unchanged, the recipe says head = false",
    ]
    share = 32 * 64 / (2 * 32 * 64 + 20 * 32 + 32 * 64)
    headline = f"FP8: {100 * share:.0f} % of GEMM FLOPs (1 of 4 linears)"
    assert summary[-1] == "; ".join([headline, *unchanged])
    assert [record.message for record in caplog.records] == summary
    assert {record.levelname for record in caplog.records} == {"INFO"}
    assert in_fp8(model) == ["body.up"]
    assert model.fp8_plan.reasons == (
        "torch's scaled_mm on a CPU, as --backend torch asks",
        *unchanged,
    )
