"""Compiled code: no graph break in any recipe, one compilation for all blocks, eager bytes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.torch_version import TorchVersion

from fp8stack.common.errors import UserError
from fp8stack.layers import compiler, fp8_state
from fp8stack.layers.compiler import is_compiled, reads_rows, require_compilable
from fp8stack.model.config import load_config
from fp8stack.model.gpt import Compilable
from fp8stack.planning.run_config import RunConfig
from fp8stack.precision import Hardware, load_recipe, resolve
from fp8stack.training import run_plans
from fp8stack.training.run_plans import plan_recipe
from fp8stack.training.setup import build
from tests.support import backend_models
from tests.support.backend_models import RECIPES, loss_of, same
from tests.support.gemm_oracle import normal
from tests.support.operators import counting
from tests.support.small_loop import SmallLoop

CPU, H100, B200 = Hardware("cpu"), Hardware("cuda", (9, 0)), Hardware("cuda", (10, 0))
EMULATED = ["nvfp4", "mxfp4", "rowwise"]  # by no torch GEMM

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def gpt(recipe, backend="emulate", hardware=CPU, layers=3):
    backend = "auto" if recipe in ("fp32", "bf16") else backend
    shape = {"width": 128, "heads": 4, "layers": layers}
    return backend_models.gpt(recipe, backend, shape, hardware=hardware)


def train(model, steps, micro_batches=1, evaluate=True):
    """The losses of some steps, each followed by one of an evaluation."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        for micro_batch in range(micro_batches):
            loss = loss_of(model, 10 * step + micro_batch)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if evaluate:
            model.eval()
            with torch.no_grad():
                losses.append(loss_of(model, 99).item())
            model.train()
    return losses


# Models


@pytest.fixture
def cuda_gemm(monkeypatch):
    """torch's FP8 GEMM of blocks, which no CPU has, as an operator that compiled code can call. It
    takes no scales, but keeps its values of their size, so that losses stay finite."""

    def fake(a, b, scale_a, kind_a, scale_b, kind_b, *, output_dtype, **swizzles):
        largest = torch.finfo(a.dtype).max * torch.finfo(b.dtype).max
        return (a.float() @ b.float()).div(largest).to(output_dtype)

    monkeypatch.setattr(F, "scaled_mm", fake)


def made(recipe, backend, layers=2):
    hardware = CPU
    if backend == "torch" and recipe in ("block", "mxfp8"):
        hardware = H100 if recipe == "block" else B200
    return gpt(recipe, backend, hardware, layers)


QUICK = [("delayed", "torch"), ("fp32", "auto")]
REST = [pair for pair in product(RECIPES, ["emulate", "torch"]) if pair not in QUICK]
REST += [(recipe, "emulate") for recipe in EMULATED]
SLOW = [pytest.param(*pair, marks=pytest.mark.slow) for pair in REST]


# Blocks of elements take a quarter of a minute each to compile; a linear of them, and of NVFP4, is
# compiled in tests/conform.
@pytest.mark.capability("D3")
@pytest.mark.parametrize(("recipe", "backend"), [*QUICK, *SLOW])
@pytest.mark.full
def test_a_compiled_model_trains_as_in_eager_mode(cuda_gemm, recipe, backend):
    """And one compilation serves all blocks. Evaluations, which are compiled apart, are in one
    recipe."""
    plain, fast = made(recipe, backend), made(recipe, backend)
    counter = counting("aot_eager")
    fast.compile_blocks(backend=counter)
    evaluate = recipe == "delayed"
    losses, expected = (train(model, 3, 2, evaluate) for model in (fast, plain))
    assert losses == pytest.approx(expected)
    assert same(fp8_state(plain), fp8_state(fast))
    assert counter.frame_count == 2 * (1 + evaluate)  # a block of two, and the loss


@pytest.mark.capability("D3")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "backend"),
    [
        *((recipe, "emulate") for recipe in (*RECIPES, *EMULATED)),
        *(("delayed", "torch"), ("current", "torch")),  # a CPU has no other FP8 GEMMs
    ],
)
def test_a_model_compiled_by_inductor_learns_as_in_eager_mode(recipe, backend):
    plain, fast = made(recipe, backend), made(recipe, backend)
    fast.compile_blocks()
    assert train(fast, 5) == pytest.approx(train(plain, 5), rel=0.01)


class Products(Compilable):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((x * y) + x) * y


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="inductor's C++ code heeds emulate_precision_casts from torch 2.13 on",
)
@pytest.mark.full
def test_compiled_code_rounds_to_bfloat16_as_often_as_eager_code():
    x, y = normal(64, 256).bfloat16(), normal(64, 256, seed=1).bfloat16()
    fast = Products()
    fast.compile_forward("inductor")
    assert torch.equal(fast(x, y), Products()(x, y))
    assert not torch.equal(torch.compile(Products())(x, y), Products()(x, y))


FACTOR = 2.0


class Times(Compilable):
    offset = 3.0

    def forward(self, x: Tensor) -> Tensor:
        return x * FACTOR + self.offset


def test_compiled_code_checks_attributes_and_tensors_but_no_constants_of_files(monkeypatch):
    counter, fast, x = counting("eager"), Times(), torch.ones(2)
    fast.compile_forward(counter)
    assert fast(x).tolist() == [5.0, 5.0]
    monkeypatch.setitem(globals(), "FACTOR", 10.0)  # as nothing does, but this test
    assert fast(x).tolist() == [5.0, 5.0]
    assert counter.frame_count == 1
    fast.offset = 4.0
    assert fast(x).tolist() == [14.0, 14.0]
    assert fast(x[:1]).tolist() == [14.0]
    assert fast(x.double()).dtype == torch.float64
    assert fast(x.requires_grad_()).requires_grad
    assert counter.frame_count == 5


H200 = Hardware("cuda", (9, 0), cuda_version=(13, 0))
H200_WITH_TE = Hardware("cuda", (9, 0), has_te=True, te_version="2.20.2", cuda_version=(13, 0))
NO_TRITON = Hardware("cuda", (9, 0), compiler_problem="triton is not installed: pip install triton")


@pytest.mark.parametrize(
    ("hardware", "recipe", "recompute", "compile_flag", "expected", "note"),
    [
        (H200, "delayed", "none", None, True, "--no-compile turns that off"),
        (H200, "delayed", "none", False, False, ""),
        (H200, "delayed", "none", True, True, ""),
        (H200, "delayed", "selective", None, True, "--no-compile turns that off"),
        (H200_WITH_TE, "delayed", "none", None, True, "around Transformer Engine's modules"),
        (H200_WITH_TE, "delayed", "selective", None, False, "not compiled: activation"),
        (H200_WITH_TE, "bf16", "none", None, True, "--no-compile turns that off"),
        (NO_TRITON, "delayed", "none", None, False, "not compiled: triton is not installed"),
        (CPU, "delayed", "none", None, False, ""),
        (CPU, "delayed", "none", True, True, ""),
    ],
)
def test_a_gpu_compiles_by_default_what_can_be_compiled(
    hardware, recipe, recompute, compile_flag, expected, note
):
    keys: dict[str, Any] = {"model": "gpt-nano", "recipe": recipe, "compile": compile_flag}
    keys |= {"activation_checkpointing": recompute, "parallel": "ddp"}
    config = RunConfig(**{key: value for key, value in keys.items() if value is not None})
    plan = plan_recipe(recipe, config, load_config("gpt-nano"), hardware, 4096)
    compiled, message = is_compiled(compile_flag, plan, hardware, recompute)
    assert compiled == expected
    assert (note in message) if note else message == ""
    assert [reason for reason in plan.reasons if "compile" in reason] == [message] * bool(message)


def test_a_bf16_residual_stream_is_not_compiled_for_a_gpu_for_which_torch_refuses_it():
    recipe = load_recipe("bf16", {"residual": "bf16"})
    turing, ampere = (Hardware("cuda", capability) for capability in ((7, 5), (8, 0)))
    plan = resolve(recipe, turing)
    expected = "training is not compiled: torch compiles no residual stream in bf16 below compute "
    assert is_compiled(None, plan, turing) == (False, expected + "capability 8.0")
    assert is_compiled(False, plan, turing) == (False, "")
    with pytest.raises(UserError, match="--compile: torch compiles no residual stream in bf16"):
        is_compiled(True, plan, turing)
    assert is_compiled(None, resolve("fp16", turing), turing)[0]
    assert is_compiled(None, resolve(recipe, ampere), ampere)[0]


@pytest.mark.parametrize(
    ("hardware", "compiled", "deterministic", "expected"),
    [
        (H200, True, None, False),
        (H200, True, True, True),
        (H200, False, True, True),
        (CPU, True, None, True),
        (CPU, True, False, False),
        (CPU, False, True, False),  # repeats as it is
        (CPU, False, None, False),
    ],
)
def test_a_gpu_is_asked_to_repeat_to_the_bit_only_by_name(
    hardware, compiled, deterministic, expected
):
    config = RunConfig() if deterministic is None else RunConfig(deterministic=deterministic)
    assert build.is_deterministic(config, hardware, compiled) == expected


def test_a_run_on_a_cpu_is_compiled_where_that_is_asked_for_alone(tmp_path, monkeypatch):
    calls: list[Any] = []

    def compiled(call: Callable[..., Any], *, options: Any, **_: Any) -> Callable[..., Any]:
        calls.append(options.get("max_autotune", False))
        return call

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(run_plans, "require_compiler", lambda *_: None)
    monkeypatch.setattr(build, "_be_deterministic", lambda: calls.append("deterministic"))
    assert not SmallLoop(tmp_path / "eager", "fp32").run.compiled
    assert calls == []
    for mode in ("default", "max-autotune-no-cudagraphs"):
        calls.clear()
        small = SmallLoop(tmp_path / mode, "fp32", compile=True, compile_mode=mode)
        assert small.run.compiled
        assert calls == ["deterministic", *[mode != "default"] * 2]  # a block, and the loss


# Weights, quantized once per optimizer step


@pytest.mark.full
def test_a_pass_compiled_as_a_whole_reads_no_weight_that_an_earlier_one_kept():
    model, donor = gpt("current", "torch", layers=1), gpt("current", "torch", layers=1)
    for parameter in donor.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    loss_of(model, 0)
    model.load_state_dict(donor.state_dict())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert loss_of(compiled, 0).item() == pytest.approx(loss_of(donor, 0).item(), rel=1e-5)


def test_inference_tensors_are_quantized_at_each_pass():
    with torch.inference_mode():
        model, donor = gpt("current", "torch"), gpt("current", "torch")
        for parameter in donor.parameters():
            torch.nn.init.normal_(parameter, std=0.05)
        loss_of(model, 0)
        model.load_state_dict(donor.state_dict())
        assert loss_of(model, 0).item() == loss_of(donor, 0).item()


@pytest.mark.full
def test_a_copy_of_a_compiled_model_has_its_own_weights():
    model = gpt("current", layers=1)
    model.compile_blocks(backend="eager")
    before = loss_of(model, 0).item()
    copied = copy.deepcopy(model)
    for parameter in copied.blocks.parameters():
        parameter.data.mul_(0.5)
    assert loss_of(copied, 0).item() != before
    assert loss_of(model, 0).item() == before


def test_no_operator_writes_to_tensors_of_a_list():
    """Inductor of torch 2.11 counts their offsets twice, where they lie within others."""
    wrong = []
    for name in torch._C._dispatch_get_all_op_names():
        space, _, operator = name.partition("::")
        if space == "fp8stack":
            schema = getattr(torch.ops.fp8stack, operator).default._schema
            for argument in schema.arguments:
                is_written = argument.alias_info and argument.alias_info.is_write
                if is_written and "List" in str(argument.type):
                    wrong.append(f"{name} {argument.name}")
    assert wrong == []


@pytest.mark.parametrize(("version", "refused"), [("2.11.0", True), ("2.13.0", False)])
def test_emulated_delayed_scaling_is_not_compiled_by_a_torch_that_loses_its_amaxes(
    version, refused, monkeypatch
):
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    cpu = Hardware("cpu")
    plan = resolve("delayed", cpu)
    if refused:
        with pytest.raises(UserError, match=r"torch 2\.11\.0 loses the amaxes"):
            require_compilable(plan)
    else:
        require_compilable(plan)
    on_gpu = Hardware("cuda", (9, 0), cuda_version=(13, 0))
    emulated = resolve("delayed", on_gpu, "emulate")
    assert is_compiled(None, emulated, on_gpu)[0] is not refused
    for unaffected in (resolve("mxfp8", cpu), resolve("delayed", on_gpu, "torch")):
        require_compilable(unaffected)


@pytest.mark.parametrize(
    ("version", "gpu", "rounds"),
    [("2.10.0", False, False), ("2.10.0", True, True), ("2.11.0", False, True)],
)
def test_code_rounds_as_eager_code_does_but_where_torch_could_not_compile_it(
    monkeypatch, version, gpu, rounds
):
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch, "compile", lambda function, **options: options["options"])
    compile_options: Any = compiler.compiled(abs, "inductor")
    assert compile_options["emulate_precision_casts"] is rounds
    assert compile_options["comprehensive_padding"] is False
    monkeypatch.delattr(torch._inductor.config, "comprehensive_padding")
    compile_options = compiler.compiled(abs, "inductor")
    assert "comprehensive_padding" not in compile_options


def test_which_reductions_read_rows_is_found_for_nodes_without_loops_too():
    import sympy  # type: ignore[import-untyped]
    from torch._inductor.loop_body import MemoryUsageType
    from torch._inductor.sizevars import SizeVarAllocator
    from torch._inductor.virtualized import V

    def reads(*bodies: Any) -> bool:
        """Whether a node that reads "x" and consists of nodes with these bodies reads its rows."""
        nodes = [*(SimpleNamespace(_body=body) for body in bodies), SimpleNamespace()]
        read_writes = SimpleNamespace(reads=[SimpleNamespace(name="x")])
        node: Any = SimpleNamespace(read_writes=read_writes, get_nodes=lambda: nodes)
        return reads_rows(node)

    def loops(index: Any, *symbols: Any, buffer: str = "x") -> Any:
        """A loop body that reads a buffer at `index`."""
        load = SimpleNamespace(buffer_name=buffer, index_name="index0")
        return SimpleNamespace(
            var_ranges=dict.fromkeys(symbols, 64),
            memory_usage={MemoryUsageType.LOAD: [load]},
            indexing_exprs={"index0": index},
        )

    row, column = sympy.symbols("row column", integer=True, nonnegative=True)
    scalar = loops(sympy.Integer(0))
    along_rows, along_columns = loops(64 * row + column, row, column), loops(64 * row, column, row)
    with V.set_graph_handler(SimpleNamespace(sizevars=SizeVarAllocator())):  # type: ignore[arg-type]
        assert reads(along_rows)
        assert reads(scalar, along_rows)
        assert reads(loops(row, row, column))  # the same number for a whole row
        assert not reads(along_columns)
        assert not reads(scalar, along_rows, along_columns)
        inside = loops(64 * row, column, row, buffer="computed by the node itself")
        assert reads(inside, along_rows)
