"""What runs where: the whole table as data, for every GPU generation, decided on a CPU."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from fp8stack import presets
from fp8stack.errors import UserError
from fp8stack.model.config import load_config, plan_for
from fp8stack.precision import (
    Hardware,
    Plan,
    Recipe,
    assumed,
    auto_recipe,
    load_recipe,
    resolve,
    rules,
)
from fp8stack.precision.gpus import gpu_named
from fp8stack.precision.hardware import TE_REMEDY
from fp8stack.precision.plan import block_indices
from fp8stack.precision.recipe import Block
from tests.conftest import refusal
from tests.support.study_recipes import BACKWARD_HIGH

CPU = Hardware("cpu")
CPU_BF16 = Hardware("cpu", cpu_bf16=True)
OLD_CPU = Hardware("cpu", torch_version="2.11.0+cpu")


def gpu(
    major: int, minor: int, te: bool = True, cuda: tuple[int, int] | None = (12, 9)
) -> Hardware:
    return Hardware("cuda", (major, minor), has_te=te, cuda_version=cuda)


P100, V100, T4 = gpu(6, 0), gpu(7, 0), gpu(7, 5)
A100, A40, L4 = gpu(8, 0), gpu(8, 6), gpu(8, 9)
H100 = Hardware("cuda", (9, 0), has_te=True)
B200, RTX5090 = gpu(10, 0), gpu(12, 0)

MACHINES = {
    "cpu": CPU,
    "cpu-bf16": CPU_BF16,
    "6.0": P100,
    "7.0": V100,
    "7.5": T4,
    "8.0": A100,
    "8.6": A40,
    "8.9": L4,
    "9.0": H100,
    "10.0": B200,
    "12.0": RTX5090,
}
NVFP4 = ("nvfp4",)
FP8 = ("delayed", "current", "block", "mxfp8", "rowwise", *NVFP4)
EMULATED = ("mxfp8", *NVFP4)  # where a GPU with bf16 does not serve them
PLAIN = ("bf16", "fp16", "fp32", "tf32")
RECIPES = ("auto", *FP8, *PLAIN)

# The software that a machine can have, beside the CUDA version.
BROKEN = "importing Transformer Engine 2.20.0 failed (ImportError: cudnn): pip install --force"
TOO_OLD = "Transformer Engine 2.9.0 is older than 2.20: pip install --upgrade"
OLD_TORCH = "2.9.1+cu128"
SOFTWARE: dict[str, dict[str, Any]] = {
    "te": {"has_te": True},
    "te, old torch": {"has_te": True, "torch_version": OLD_TORCH},
    "no te": {"has_te": False},
    "broken te": {"has_te": False, "te_version": "2.20.0", "te_problem": BROKEN},
    "old te": {"has_te": False, "te_version": "2.9.0", "te_problem": TOO_OLD},
    "neither": {"has_te": False, "torch_version": OLD_TORCH},
}
MORE_SOFTWARE = {  # for some tests alone
    "broken te, old torch": SOFTWARE["broken te"] | {"torch_version": OLD_TORCH},
    "old te, old torch": SOFTWARE["old te"] | {"torch_version": OLD_TORCH},
}


def having(machine: Hardware, software: str) -> Hardware:
    """`machine` with some of `SOFTWARE`; Transformer Engine is never looked for on a CPU."""
    held = (SOFTWARE | MORE_SOFTWARE)[software]
    if machine.capability is None:
        held = {key: value for key, value in held.items() if key == "torch_version"}
    return dataclasses.replace(machine, **held)


# The table of which recipe runs where, with Transformer Engine installed.
#   bf16 ...  this precision runs, in plain torch, as asked (or as "auto" means)
#   !         it runs instead of what was asked: a substitution, with its reason
#   ?         it runs as asked, and something is worth a sentence
#   fp8       the recipe as asked, natively through TE, else torch; other layers in bf16
#   te        the recipe as asked, natively through TE alone
#   torch     the recipe as asked, natively through torch alone
#   em32 em16 the recipe as asked, emulated with float32 or bfloat16 GEMMs
# A row with a * is that of each of `NVFP4`.
TABLE = """
asked    cpu   cpu-bf16  6.0    7.0    7.5    8.0    8.6    8.9          9.0          10.0       12.0
auto     fp32  bf16      fp32?  fp16   fp16   bf16   bf16   delayed:fp8  delayed:fp8  mxfp8:fp8  delayed:fp8
delayed  em32! em32!     fp32!  fp16!  fp16!  bf16!  bf16!  fp8          fp8          fp8        fp8
current  em32! em32!     fp32!  fp16!  fp16!  bf16!  bf16!  fp8          fp8          fp8        fp8
block    em32! em32!     fp32!  fp16!  fp16!  bf16!  bf16!  bf16!        fp8          te         bf16!
mxfp8    em32! em32!     fp32!  fp16!  fp16!  em16!  em16!  em16!        em16!        fp8        em16!
rowwise  em32! em32!     fp32!  fp16!  fp16!  em16!  em16!  em16!        torch        torch      torch
nvfp4*   em32! em32!     fp32!  fp16!  fp16!  em16!  em16!  em16!        em16!        fp8        torch
bf16     bf16? bf16      fp32!  fp16!  fp16!  bf16   bf16   bf16         bf16         bf16       bf16
fp16     fp16? fp16?     fp16   fp16   fp16   fp16   fp16   fp16         fp16         fp16       fp16
fp32     fp32  fp32      fp32   fp32   fp32   fp32   fp32   fp32         fp32         fp32       fp32
tf32     fp32! fp32!     fp32!  fp32!  fp32!  tf32   tf32   tf32         tf32         tf32       tf32
"""  # noqa: E501


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """What the table says of one recipe on one machine with some software."""

    asked: str
    machine: str
    software: str
    recipe: str
    backend: str
    native: bool
    compute_dtype: str
    reason: bool = False
    substituted: bool = False
    cause: str = ""  # what a substitution's reason names

    @property
    def hardware(self) -> Hardware:
        return having(MACHINES[self.machine], self.software)


def cell(asked: str, machine: str, code: str, software: str) -> Cell:
    named, _, how = code.rstrip("!?").rpartition(":")
    recipe = named or asked
    substituted, reason = code.endswith("!"), code[-1] in "!?"
    # fp32 on an old GPU for "auto" is what "auto" stands for there, and native; it has a reason.
    native = not reason or asked == "auto"
    cpu = MACHINES[machine].capability is None
    cause = f"this is {'a CPU' if cpu else f'compute capability {machine}'}"
    backend, dtype = "reference", how
    if how in ("fp8", "te"):
        backend, dtype = "te", "bf16"
        if not software.startswith("te"):
            backend, reason = "torch", software != "no te"
            if how == "te" or software == "neither":
                reason = substituted = True
                native, cause = False, "Transformer Engine"
                backend = "emulate" if recipe in EMULATED else "reference"
                recipe = recipe if recipe in EMULATED else "bf16"
    elif how == "torch":
        backend, dtype = "torch", "bf16"
        if SOFTWARE[software].get("torch_version"):
            backend, native, cause = "emulate", False, "torch 2.10 or later"
            reason = substituted = True
    elif how.startswith("em"):
        backend, native = "emulate", False
        dtype = {"em16": "bf16", "em32": "fp32"}[how]
    else:
        recipe = how
    return Cell(
        asked=asked,
        machine=machine,
        software=software,
        recipe=recipe,
        backend=backend,
        native=native,
        compute_dtype=dtype,
        reason=reason,
        substituted=substituted,
        cause=cause,
    )


def cells() -> list[Cell]:
    header, *rows = (line.split() for line in TABLE.strip().splitlines())
    assert header[1:] == list(MACHINES)
    rows = [[name, *row[1:]] for row in rows for name in (NVFP4 if "*" in row[0] else row[:1])]
    assert [row[0] for row in rows] == list(RECIPES)
    return [
        cell(row[0], machine, code, software)
        for row in rows
        for machine, code in zip(header[1:], row[1:], strict=True)
        for software in SOFTWARE
        # Other software changes nothing for the rest: a test below says so.
        if software == "te" or (row[0] not in PLAIN and MACHINES[machine].device == "cuda")
    ]


def ordered(value: object) -> str:
    """A parameter as a test's name, the same in every process."""
    return str(sorted(value) if isinstance(value, set) else value)


def sentences(made: Plan) -> str:
    return " | ".join(made.reasons)


# The table


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test that uses this asks this machine's CUDA."""

    def touched(*args: object, **options: object) -> None:
        raise AssertionError("resolve asked the machine")

    for name in ("is_available", "device_count", "get_device_properties", "init", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, touched)


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("asked", RECIPES)
def test_a_recipe_runs_on_every_machine_as_the_table_says(asked):
    for expected in cells():
        if expected.asked == asked:
            check_cell(expected)


def check_cell(expected: Cell) -> None:
    made = resolve(expected.asked, expected.hardware)
    assert made.asked == expected.asked
    assert made.recipe.name == expected.recipe
    assert (made.backend, made.native) == (expected.backend, expected.native)
    assert made.compute_dtype == expected.compute_dtype
    assert made.device == MACHINES[expected.machine].device
    assert made.is_fp8 == (expected.recipe in FP8)
    kernel = "nvfp4" if expected.recipe in NVFP4 else expected.recipe
    assert made.kernel == (kernel if expected.recipe in FP8 else None)
    suffix = "-emulated" if made.backend == "emulate" else ""
    assert made.precision == expected.recipe + suffix
    assert made.loss_scaling == (expected.compute_dtype == "fp16")
    multiple = VOCABULARY_MULTIPLES.get(expected.recipe, 1)
    by_torch = made.backend == "torch" and expected.recipe == "block"
    assert made.vocabulary_multiple == (128 if by_torch else multiple)
    assert bool(made.reasons) == expected.reason, made.reasons
    check_substitution(expected, made)


@pytest.mark.parametrize("asked", RECIPES)
def test_a_plan_is_told_in_lines_and_in_json_with_all_of_its_reasons(asked):
    for machine in ("cpu", "7.0", "9.0", "10.0"):
        made = resolve(asked, MACHINES[machine]).for_layers(shapes())
        lines = made.summary()
        assert all("\n" not in line for line in lines)
        assert all(any(reason in line for line in lines) for reason in made.reasons)
        assert any(line.startswith("FP8: ") for line in lines) == made.is_fp8
        data = made.to_json()
        assert json.loads(json.dumps(data, allow_nan=False)) == data
        assert type(made.recipe).model_validate_json(json.dumps(data["recipe"])) == made.recipe
    for key in ("asked", "backend", "native", "device", "compute_dtype", "loss_scaling"):
        assert data[key] == getattr(made, key)
    assert data["recipe"]["name"] == made.recipe.name
    assert [layer["name"] for layer in data["layers"]] == list(shapes())
    assert data["layers"][0]["fp8"] == made.is_fp8


VOCABULARY_MULTIPLES = {
    "delayed": 16,
    "current": 16,
    "block": 16,
    "mxfp8": 32,
    "rowwise": 16,
    **dict.fromkeys(NVFP4, 32),
    "bf16": 8,
    "fp16": 8,
}


def check_substitution(expected: Cell, made: Plan) -> None:
    """What runs instead of what was asked names its cause; --strict refuses that alone."""
    if not expected.substituted:
        strict = resolve(expected.asked, expected.hardware, strict=True)
        assert strict == dataclasses.replace(made, strict=True)
        return
    reasons = sentences(made)
    assert reasons.count(expected.cause) == 1
    assert ("emulated" if made.backend == "emulate" else expected.recipe) in reasons
    assert not made.loss_scaling or "loss scaling" in reasons
    message = refusal(resolve, expected.asked, expected.hardware, strict=True)
    assert "--strict" in message
    assert f"'{expected.asked}'" in message
    assert made.reasons[0] in message


@pytest.mark.parametrize("asked", RECIPES)
def test_te_and_the_version_of_torch_matter_to_fp8_on_a_gpu_alone(asked):
    for here in MACHINES.values():
        if asked in PLAIN or here.capability is None:
            plans = {software: resolve(asked, having(here, software)) for software in SOFTWARE}
            assert plans == dict.fromkeys(SOFTWARE, resolve(asked, here))


@pytest.mark.parametrize(
    ("machine", "expected"), [(gpu(8, 7), "bf16"), (gpu(10, 3), "mxfp8"), (gpu(12, 1), "delayed")],
    ids=str,
)  # fmt: skip
def test_auto_stands_for_the_recipe_of_the_generation(machine, expected):
    found = {software: auto_recipe(having(machine, software)) for software in SOFTWARE}
    assert found == dict.fromkeys(SOFTWARE, expected)
    assert resolve("auto", machine).recipe.name == expected


@pytest.mark.parametrize("machine", [gpu(10, 3), gpu(10, 1)], ids=str)
@pytest.mark.parametrize("asked", FP8)
def test_every_blackwell_10_x_is_as_10_0(asked, machine):
    assert resolve(asked, machine) == resolve(asked, B200)


# Backends by name


@pytest.mark.parametrize("asked", FP8)
def test_emulation_that_was_asked_for_is_told_and_no_substitution(asked):
    for here in MACHINES.values():
        made = resolve(asked, here, "emulate", strict=True)
        assert (made.recipe.name, made.backend, made.native) == (asked, "emulate", False)
        bf16 = here.capability is not None and here.capability >= (8, 0)
        assert made.compute_dtype == ("bf16" if bf16 else "fp32")
        assert made.reasons == ("emulated, as --backend emulate asks",)


@pytest.mark.parametrize("asked", FP8)
def test_the_reference_backend_replaces_an_fp8_recipe_and_says_so(asked):
    for machine, here in MACHINES.items():
        made = resolve(asked, here, "reference")
        dtype = {"cpu": "fp32", "6.0": "fp32", "7.0": "fp16", "7.5": "fp16"}.get(machine, "bf16")
        assert (made.recipe.name, made.backend, made.compute_dtype) == (dtype, "reference", dtype)
        assert not made.is_fp8
        assert "reference backend has no FP8" in sentences(made)
        assert dtype in made.reasons[0].rpartition(":")[2]
        with pytest.raises(UserError, match="reference backend has no FP8"):
            resolve(asked, here, "reference", strict=True)


@pytest.mark.parametrize("backend", ["te", "torch", "emulate"])
@pytest.mark.parametrize("asked", ["bf16", "fp16", "fp32", "tf32"])
def test_an_fp8_backend_for_a_plain_recipe_is_replaced_by_reference(asked, backend):
    assert resolve(asked, H100, "reference", strict=True).native
    made = resolve(asked, H100, backend)
    assert (made.recipe.name, made.backend) == (asked, "reference")
    assert "reference" in sentences(made)
    with pytest.raises(UserError, match="reference"):
        resolve(asked, H100, backend, strict=True)


@pytest.mark.parametrize(
    ("machine", "asked", "backend", "runs", "said"),
    [
        (CPU, "delayed", "te", "emulate", "Transformer Engine needs a CUDA GPU"),
        (having(CPU, "neither"), "delayed", "torch", "emulate", OLD_TORCH),
        (CPU, "mxfp8", "te", "emulate", "Transformer Engine needs a CUDA GPU"),
        (CPU, "mxfp8", "torch", "emulate", "scaled_mm on a CPU has no mxfp8 scaling"),
        (CPU_BF16, "block", "torch", "emulate", "scaled_mm on a CPU has no block scaling"),
        (H100, "mxfp8", "te", "emulate", "9.0"),
        (L4, "rowwise", "torch", "emulate", "rowwise needs compute capability 9.0"),
        (OLD_CPU, "rowwise", "torch", "emulate", "on a CPU has no rowwise scaling before torch"),
        (A100, "mxfp8", "torch", "emulate", "8.0"),
        (A100, "delayed", "te", "reference", "8.0"),
        (V100, "delayed", "te", "reference", "7.0"),
        (T4, "current", "torch", "reference", "7.5"),
        (A40, "current", "te", "reference", "8.6"),
        (L4, "block", "te", "reference", "8.9"),
        (RTX5090, "block", "torch", "reference", "12.0"),
        (RTX5090, "mxfp8", "te", "emulate", "12.0"),
        (H100, "nvfp4", "te", "emulate", "nvfp4 needs compute capability 10.x or 12.x"),
    ],
)
def test_a_backend_that_cannot_serve_is_replaced_and_said(machine, asked, backend, runs, said):
    made = resolve(asked, machine, backend)
    assert made.backend == runs
    assert said in sentences(made)
    assert {"emulate": "emulated", "reference": made.compute_dtype}[runs] in sentences(made)
    with pytest.raises(UserError, match="--strict"):
        resolve(asked, machine, backend, strict=True)


@pytest.mark.parametrize("machine", [CPU, CPU_BF16], ids=str)
@pytest.mark.parametrize("asked", ["delayed", "current"])
def test_torchs_gemm_runs_per_tensor_scaling_on_a_cpu_that_asks_for_it(asked, machine):
    made = resolve(asked, machine, "torch", strict=True)
    assert (made.recipe.name, made.backend, made.native) == (asked, "torch", False)
    assert (made.compute_dtype, made.precision) == ("fp32", asked)
    assert "--backend torch" in sentences(made)
    odd = {"blocks.0.mlp.up": (64, 24), "blocks.0.mlp.down": (64, 64)}
    assert left_out(resolve(asked, machine, "torch").for_layers(odd)) == {"blocks.0.mlp.up"}
    with pytest.raises(UserError, match="24 out features, not divisible by 16"):
        made.for_layers(odd)


@pytest.mark.parametrize("machine", [L4, H100, B200, RTX5090], ids=str)
@pytest.mark.parametrize("first", ["te", "torch"])
def test_the_preferred_backend_runs_where_both_can_and_none_is_named(monkeypatch, first, machine):
    assert rules.PREFERENCE == ("te", "torch")
    monkeypatch.setattr(rules, "PREFERENCE", sorted(["te", "torch"], key=lambda n: n != first))
    made = resolve("delayed", machine, strict=True)
    assert (made.backend, made.native, made.reasons) == (first, True, ())


@pytest.mark.parametrize(
    ("backend", "near"),
    [("emulator", "emulate"), ("ref", "reference"), ("pytorch", "torch"), ("TE", None), ("", None)],
)
@pytest.mark.parametrize("asked", ["delayed", "bf16", "auto"])
def test_an_unknown_backend_is_refused_with_the_nearest_name(asked, backend, near):
    message = refusal(resolve, asked, H100, backend)
    assert message.startswith(f"No backend '{backend}'.")
    assert (f"Did you mean '{near}'?" in message) == (near is not None)
    assert message.endswith("Known: auto, emulate, reference, te, torch.")


# Software that is missing or too old


def check(asked, backend: str, here: Hardware, runs: str, said: tuple[str, ...], **more) -> None:
    """Whether the plan is by `runs`, a substitution if that ends in "!", for one reason."""
    made = resolve(asked, here, backend, **more)
    who = runs.rstrip("!")
    assert (made.recipe.name if who in PLAIN else made.backend) == who
    assert made.native == (who in ("te", "torch", asked))
    assert len(made.reasons) == bool(said)
    for piece in said:
        assert made.reasons[0].count(piece) == 1
    if runs.endswith("!"):
        message = refusal(resolve, asked, here, backend, strict=True, **more)
        assert "--strict" in message
        assert made.reasons[0] in message
    else:
        strict = resolve(asked, here, backend, strict=True, **more)
        assert strict == dataclasses.replace(made, strict=True)


@pytest.mark.parametrize("cuda", [(11, 8), (12, 6), (12, 8), (12, 9), (13, 0), None], ids=str)
@pytest.mark.parametrize(
    ("asked", "capability", "least"),
    [
        ("block", (9, 0), (12, 9)),
        ("block", (10, 0), (12, 9)),
        ("block", (10, 3), (12, 9)),
        ("mxfp8", (10, 0), (12, 8)),
        ("nvfp4", (10, 3), (12, 8)),
        ("nvfp4", (10, 0), (12, 8)),
        ("nvfp4", (12, 1), (12, 8)),
        ("delayed", (9, 0), (0, 0)),
        ("current", (9, 0), (0, 0)),
    ],
)
def test_a_recipe_is_native_from_its_least_cuda_version_on(asked, capability, least, cuda):
    here = gpu(capability[0], capability[1], cuda=cuda)
    if cuda is None or cuda >= least:
        assert resolve(asked, here, strict=True).native
        return
    made = resolve(asked, here)
    runs = (asked, "emulate") if asked in EMULATED else ("bf16", "reference")
    assert (made.recipe.name, made.backend) == runs
    assert (made.native, made.compute_dtype) == (False, "bf16")
    lacks = "{} needs CUDA {}.{}".format(made.kernel or asked, *least)
    assert lacks in sentences(made)
    assert ("emulated" if asked in EMULATED else "bf16") in sentences(made)
    with pytest.raises(UserError, match=lacks):
        resolve(asked, here, strict=True)


NO_TE = f"Transformer Engine is not installed ({TE_REMEDY})"
OLD = (
    f"the torch backend needs torch 2.10 or later, this is {OLD_TORCH} "
    "(pip install --upgrade 'torch>=2.10')"
)
NO_BLOCK = "the torch backend has no block scaling on 10.x"
NO_NVFP4 = "Transformer Engine's NVFP4 works on 10.x alone"

# What is asked, of which backend, where, with which software: who runs it, and what is said.
#   !  who runs it is a substitution
SOFTWARE_CASES = [
    ("delayed", "te", H100, "te", "te", ()),
    ("block", "te", B200, "te", "te", ()),
    ("delayed", "torch", H100, "te", "torch", ()),
    ("block", "torch", H100, "te", "torch", ()),
    ("mxfp8", "torch", B200, "te", "torch", ()),
    ("delayed", "auto", H100, "broken te", "torch", (f"{BROKEN}; until then torch runs",)),
    ("block", "auto", H100, "old te", "torch", (f"{TOO_OLD}; until then torch runs",)),
    ("delayed", "te", H100, "no te", "torch!", (f"{NO_TE}; torch runs instead",)),
    ("mxfp8", "te", B200, "no te", "torch!", (f"{NO_TE}; torch runs instead",)),
    ("delayed", "te", L4, "broken te", "torch!", (f"{BROKEN}; torch runs instead",)),
    ("current", "te", RTX5090, "old te", "torch!", (f"{TOO_OLD}; torch runs instead",)),
    ("delayed", "torch", H100, "te, old torch", "te!", (f"{OLD}; te runs instead",)),
    ("block", "torch", B200, "te", "te!", (f"{NO_BLOCK}; te runs instead",)),
    ("block", "auto", B200, "no te", "bf16!", (NO_TE, f"{NO_BLOCK}: bf16")),
    ("block", "te", B200, "no te", "bf16!", (NO_TE, f"{NO_BLOCK}: bf16")),
    ("block", "auto", B200, "broken te", "bf16!", (BROKEN, f"{NO_BLOCK}: bf16")),
    ("block", "te", B200, "old te", "bf16!", (TOO_OLD, f"{NO_BLOCK}: bf16")),
    ("auto", "auto", H100, "neither", "bf16!", (NO_TE, f"{OLD}: bf16")),
    ("current", "te", H100, "neither", "bf16!", (NO_TE, f"{OLD}: bf16")),
    ("mxfp8", "auto", B200, "neither", "emulate!", (NO_TE, f"{OLD}: emulated by bf16 GEMMs")),
    ("delayed", "auto", H100, "broken te, old torch", "bf16!", (BROKEN, f"{OLD}: bf16")),
    ("current", "te", L4, "old te, old torch", "bf16!", (TOO_OLD, f"{OLD}: bf16")),
    ("mxfp8", "torch", B200, "broken te, old torch", "emulate!", (BROKEN, f"{OLD}: emulated")),
    ("mxfp8", "te", B200, "neither", "emulate!", (NO_TE, f"{OLD}: emulated by bf16 GEMMs")),
    ("nvfp4", "te", B200, "te", "te", ()),
    ("nvfp4", "auto", B200, "te, old torch", "te", ()),
    ("nvfp4", "torch", B200, "te", "torch", ()),
    ("nvfp4", "auto", B200, "no te", "torch", ()),
    ("nvfp4", "te", B200, "old te", "torch!", (f"{TOO_OLD}; torch runs instead",)),
    ("nvfp4", "te", RTX5090, "te", "torch!", (f"{NO_NVFP4}; torch runs instead",)),
    ("nvfp4", "auto", RTX5090, "broken te", "torch", ()),
    ("nvfp4", "auto", RTX5090, "te, old torch", "emulate!", (NO_NVFP4, f"{OLD}: emulated")),
    ("nvfp4", "torch", H100, "te", "emulate!", ("nvfp4 needs compute capability 10.x", "9.0:")),
]


@pytest.mark.parametrize(
    ("asked", "backend", "machine", "software", "runs", "said"),
    [
        pytest.param(*case, id="-".join([case[0], case[1], str(case[2].capability), case[3]]))
        for case in SOFTWARE_CASES
    ],
)
def test_software_that_is_missing_is_named_with_its_remedy_and_who_runs_instead(
    asked, backend, machine, software, runs, said
):
    check(asked, backend, having(machine, software), runs, said)


@pytest.mark.parametrize("software", ["broken te", "old te"])
@pytest.mark.parametrize("backend", ["torch", "emulate", "reference"])
@pytest.mark.parametrize("asked", ["delayed", "block"])
def test_a_te_that_cannot_be_used_is_not_spoken_of_where_nobody_wants_it(asked, backend, software):
    made = resolve(asked, having(H100, software), backend)
    assert made == resolve(asked, having(H100, "no te"), backend)


@pytest.mark.parametrize(
    ("version", "old"),
    [
        ("2.9.1", True),
        ("2.9.1+cu128", True),
        ("2.1", True),
        ("1.13.1", True),
        ("2.10.0", False),
        ("2.10.0a0+git1234", False),
        ("2.13.0+cpu", False),
        ("3.0", False),
        ("", False),
        ("unknown", False),
    ],
)
def test_torch_runs_fp8_from_2_10_on_and_a_version_not_known_counts_as_current(version, old):
    here = dataclasses.replace(having(H100, "no te"), torch_version=version)
    made = resolve("delayed", here)
    assert (made.backend, made.native) == (("reference", False) if old else ("torch", True))
    assert (f"needs torch 2.10 or later, this is {version}" in sentences(made)) == old


NOT_COMPILED = {"te": "TE cannot be compiled"}


@pytest.mark.parametrize(
    ("asked", "backend", "machine", "software", "runs", "said"),
    [
        ("delayed", "auto", H100, "te", "torch", ("TE cannot be compiled: torch runs",)),
        ("auto", "auto", B200, "te", "torch", ("TE cannot be compiled: torch runs",)),
        ("delayed", "auto", H100, "no te", "torch", ()),
        ("delayed", "auto", H100, "old te", "torch", ()),
        ("delayed", "torch", H100, "te", "torch", ()),
        ("delayed", "te", H100, "te", "te", ()),
        ("block", "auto", B200, "te", "bf16!", ("TE cannot be compiled", f"{NO_BLOCK}: bf16")),
        ("delayed", "auto", H100, "te, old torch", "bf16!", ("TE cannot", f"{OLD}: bf16")),
        ("nvfp4", "auto", B200, "te", "torch", ("TE cannot be compiled: torch runs",)),
        ("nvfp4", "te", B200, "te", "te", ()),
        ("bf16", "auto", H100, "te", "bf16", ()),
        ("mxfp8", "auto", CPU, "te", "emulate!", ("this is a CPU",)),
    ],
)
def test_where_te_cannot_do_what_else_is_asked_torch_runs_and_the_plan_says_so(
    asked, backend, machine, software, runs, said
):
    check(asked, backend, having(machine, software), runs, said, without=NOT_COMPILED)


# Recipes that not every FP8 unit multiplies

E5M2 = {"forward_format": "e5m2"}
TWO_E5M2 = "one E5M2 operand at most"
RCEIL = "Transformer Engine rounds MXFP8's scales by rceil, not"
NO_GEMM = "no GEMM of the GPU backends takes these operands: emulated"
POWER = "Transformer Engine's block scaling on 10.x needs power_of_two = true"

# As above, with keys of the recipe changed.
SPECIAL_CASES: list[tuple[Any, ...]] = [
    ("delayed", {"backward_format": "e4m3"}, "auto", H100, "te", "te", ()),
    ("current", {"backward_format": "e4m3"}, "torch", H100, "te", "torch", ()),
    ("delayed", E5M2, "auto", H100, "te", "emulate!", (TWO_E5M2, ": emulated")),
    ("current", E5M2, "auto", L4, "no te", "emulate!", (TWO_E5M2, ": emulated")),
    ("current", E5M2, "te", B200, "te", "emulate!", (TWO_E5M2, ": emulated")),
    ("delayed", E5M2, "torch", RTX5090, "te", "emulate!", (TWO_E5M2, ": emulated")),
    ("delayed", E5M2, "auto", H100, "neither", "emulate!", (TWO_E5M2, ": emulated")),
    ("delayed", E5M2, "auto", H100, "broken te", "emulate!", (TWO_E5M2, ": emulated")),
    ("delayed", E5M2, "auto", T4, "te", "fp16!", ("7.5", ": fp16")),
    ("delayed", E5M2, "torch", CPU, "te", "emulate!", (TWO_E5M2, ": emulated")),
    ("delayed", E5M2, "auto", CPU, "te", "emulate!", ("this is a CPU", ": emulated")),
    ("mxfp8", {"scale_rounding": "floor"}, "auto", B200, "te", "torch", ()),
    ("mxfp8", {"scale_rounding": "even"}, "torch", B200, "te", "torch", ()),
    (
        *("mxfp8", {"scale_rounding": "floor"}, "te", B200, "te", "torch!"),
        (f"{RCEIL} floor; torch runs instead",),
    ),
    (
        *("mxfp8", {"scale_rounding": "even"}, "auto", B200, "te, old torch", "emulate!"),
        (f"{RCEIL} even; {OLD}: emulated",),
    ),
    ("block", {"power_of_two": False}, "auto", H100, "te", "te", ()),
    ("block", {"power_of_two": False}, "torch", H100, "te", "torch", ()),
    ("block", {"power_of_two": False}, "auto", B200, "te", "bf16!", (POWER, f"{NO_BLOCK}: bf16")),
    ("block", {"power_of_two": False}, "torch", B200, "te", "bf16!", (POWER, f"{NO_BLOCK}: bf16")),
    # What no setting of Transformer Engine's has.
    ("nvfp4", {"weight": {"block": [1, 16]}}, "auto", B200, "te", "te", ()),
    ("nvfp4", {"hadamard": 32}, "auto", B200, "te", "emulate!", (NO_GEMM,)),
    ("nvfp4", {"weight": {"rounding": "stochastic"}}, "auto", B200, "te", "emulate!", (NO_GEMM,)),
    (
        *("nvfp4", {"grad_output": {"wgrad": {"rounding": "nearest"}}}, "auto", B200, "te"),
        *("emulate!", (NO_GEMM,)),
    ),
    ("nvfp4", {"backward": "dequantized"}, "auto", B200, "te", "emulate!", (NO_GEMM,)),
    ("nvfp4_forward_high", {}, "te", B200, "te", "emulate!", (NO_GEMM,)),
]


@pytest.mark.parametrize(
    ("asked", "over", "backend", "machine", "software", "runs", "said"),
    [
        pytest.param(
            *case,
            id="-".join(map(str, [case[0], *case[1].values(), case[2], case[3], case[4]])),
        )
        for case in SPECIAL_CASES
    ],
)
def test_a_recipe_that_not_every_fp8_unit_multiplies_is_run_by_one_that_does_or_replaced(
    asked, over, backend, machine, software, runs, said
):
    check(changed(asked, **over), backend, having(machine, software), runs, said)


def test_torchs_block_gemm_takes_sizes_that_divide_by_128():
    layers = {"blocks.0.mlp.up": (128, 256), "blocks.0.mlp.down": (64, 128), "h": (128, 144)}
    made = resolve("block", H100, "torch")
    assert made.vocabulary_multiple == 128
    assert left_out(made.for_layers(layers)) == {"blocks.0.mlp.down", "h"}
    assert "144 out features, not divisible by 128" in sentences(made.for_layers(layers))
    with pytest.raises(UserError, match="64 in features, not divisible by 128"):
        resolve("block", H100, "torch", strict=True).for_layers(layers)
    assert left_out(resolve("block", H100, "te", strict=True).for_layers(layers)) == set()


def test_layers_that_a_cpus_scaled_mm_cannot_multiply_are_emulated():
    rules = [{"match": "*.mlp.down", "recipe": "mxfp8"}, {"match": "*.mlp.up", "recipe": "rowwise"}]
    asked = changed(layers=rules)
    layers = dict.fromkeys(["blocks.0.mlp.up", "blocks.0.mlp.down", "blocks.0.q"], (64, 64))
    made = resolve(asked, CPU, "torch").for_layers(layers)
    ran = {layer.name: layer.backend for layer in made.layers}
    assert ran == {"blocks.0.mlp.up": None, "blocks.0.mlp.down": "emulate", "blocks.0.q": None}
    why = "blocks.0.mlp.down: mxfp8, torch's scaled_mm on a CPU has no mxfp8 scaling: emulated"
    assert why in made.reasons


def test_strict_refuses_a_layer_that_is_emulated_where_the_others_are_not():
    asked = changed(layers=[{"match": "*.mlp.down", "recipe": "mxfp8"}])
    layers = {"blocks.0.mlp.down": (64, 64), "blocks.0.q": (64, 64)}
    for machine, backend in ((CPU, "torch"), (H100, "auto"), (H100, "torch")):
        with pytest.raises(UserError, match=r"--strict: blocks\.0\.mlp\.down .* mxfp8"):
            resolve(asked, machine, backend, strict=True).for_layers(layers)
    for machine, backend in ((B200, "auto"), (H100, "emulate")):
        made = resolve(asked, machine, backend, strict=True).for_layers(layers)
        assert [layer.fp8 for layer in made.layers] == [True, True]


# A user's own recipe


def test_a_users_own_fp8_recipe_keeps_its_settings_where_fp8_runs():
    assert resolve(load_recipe("delayed"), H100) == resolve("delayed", H100)
    mine = changed(name="mine", history_length=16)
    made = resolve(mine, H100)
    assert (made.asked, made.recipe, made.precision) == ("mine", mine, "mine")
    assert resolve(mine, H100, "emulate").precision == "mine-emulated"


def test_a_users_own_recipe_is_substituted_by_what_it_asks_for_not_by_its_name():
    mine = changed("bf16", name="delayed")
    assert resolve(mine, H100).compute_dtype == "bf16"
    made = resolve(mine, T4)
    assert (made.asked, made.recipe.name, made.compute_dtype) == ("delayed", "fp16", "fp16")


# Layers

WIDTH, VOCABULARY = 768, 50257


def shapes(blocks: int = 6, vocabulary: int = VOCABULARY) -> dict[str, tuple[int, int]]:
    found = {}
    for i in range(blocks):
        found[f"blocks.{i}.attention.qkv"] = (WIDTH, 3 * WIDTH)
        found[f"blocks.{i}.attention.output"] = (WIDTH, WIDTH)
        found[f"blocks.{i}.mlp.up"] = (WIDTH, 4 * WIDTH)
        found[f"blocks.{i}.mlp.down"] = (4 * WIDTH, WIDTH)
    found["lm_head"] = (WIDTH, vocabulary)
    return found


def changed(asked: str = "delayed", **over: object) -> Recipe:
    """A recipe that ships, changed by `over`."""
    return load_recipe(asked, over)


def layered(
    machine: Hardware = H100, asked: str = "delayed", strict: bool = False, **over: object
) -> Plan:
    """A plan with layers, the recipe changed by `over`."""
    return resolve(changed(asked, **over), machine, strict=strict).for_layers(shapes())


def left_out(made: Plan) -> set[str]:
    return {layer.name for layer in made.layers if not layer.fp8}


@pytest.mark.parametrize("asked", FP8)
def test_every_layer_but_the_head_is_in_fp8_by_default(asked):
    for machine in (CPU, H100, B200):
        made = layered(machine, asked)
        assert [layer.name for layer in made.layers] == list(shapes())
        assert left_out(made) == {"lm_head"}
        head = made.layer("lm_head")
        assert head.precision == made.compute_dtype
        assert "head = false" in head.reason
        first = made.layer("blocks.0.mlp.up")
        assert (first.precision, first.reason) == (asked, "")
        assert (first.in_features, first.out_features) == (WIDTH, 4 * WIDTH)


@pytest.mark.parametrize("asked", ["bf16", "fp16", "fp32"])
def test_no_layer_of_a_plain_recipe_is_in_fp8(asked):
    made = resolve(asked, H100, strict=True).for_layers(shapes())
    assert {layer.precision for layer in made.layers} == {asked}
    assert left_out(made) == set(shapes())


@pytest.mark.parametrize("over", [{"exclude": ("*.none",)}, {"exclude_first_blocks": 99}], ids=str)
def test_a_recipe_that_fell_back_has_no_fp8_layers_and_checks_no_exclusion(over):
    made = layered(A100, **over)
    assert left_out(made) == set(shapes())
    assert {layer.precision for layer in made.layers} == {"bf16"}


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (("*.qkv",), {f"blocks.{i}.attention.qkv" for i in range(6)}),
        (("blocks.0.*",), {name for name in shapes() if name.startswith("blocks.0.")}),
        (("blocks.[01].mlp.up",), {"blocks.0.mlp.up", "blocks.1.mlp.up"}),
        (("blocks.3.mlp.down", "*.output"), None),
        (("lm_head",), set()),
        (("*",), set(shapes())),
        ((), set()),
    ],
    ids=ordered,
)
def test_layers_that_match_a_pattern_stay_out_and_name_it(patterns, expected):
    if expected is None:
        expected = {"blocks.3.mlp.down"} | {f"blocks.{i}.attention.output" for i in range(6)}
    made = layered(exclude=patterns, strict=True)
    assert left_out(made) == expected | {"lm_head"}
    for name in expected - {"lm_head"}:
        assert any(f"'{pattern}'" in made.layer(name).reason for pattern in patterns)
        assert made.layer(name).precision == "bf16"


@pytest.mark.parametrize("pattern", ["*.QKV", "qkv", "blocks.6.*", "transformer.*", "", "lm_heads"])
@pytest.mark.parametrize("machine", [CPU, H100], ids=str)
def test_a_pattern_that_matches_no_layer_is_refused_and_the_layers_are_named(machine, pattern):
    message = refusal(layered, machine, exclude=("*.qkv", pattern))
    assert f"'{pattern}'" in message
    assert "blocks.0.attention.qkv" in message


# How models name their layers: their list of blocks, what a block holds, what is outside.
NAMINGS = {
    "ours": ("blocks.", "attention.qkv mlp.up", "lm_head"),
    "GPT-2": ("transformer.h.", "attn.c_attn attn.c_proj mlp.c_fc mlp.c_proj", "lm_head"),
    "Llama": ("model.layers.", "self_attn.q_proj mlp.up_proj", "lm_head"),
    "GPT-NeoX": ("gpt_neox.layers.", "attention.dense", "embed_out"),
    "BERT": ("bert.encoder.layer.", "attention.self.query", "bert.pooler.dense"),
    "Sequential": ("", "0 up", "head"),
    "MoE": ("model.layers.", "self_attn.q experts.0.up experts.15.up mlp.0.1.gate", "lm_head"),
    "numbers in names": ("layer2.blocks3.", "conv1 2fc.x", ""),
    "one numbered module beside it": ("decoder.layers.", "q k", "pooler.0.q h.0"),
}


def inside(naming: str, blocks: Iterable[int] = range(12)) -> dict[str, Block]:
    stem, parts, _ = NAMINGS[naming]
    return {f"{stem}{i}.{part}": Block(i, 12) for i in blocks for part in parts.split()}


def test_an_encoder_and_a_decoder_have_first_and_last_blocks_each():
    names = [
        f"{part}.layers.{i}.q" for part, n in (("encoder", 2), ("decoder", 3)) for i in range(n)
    ]
    assert [block_indices(names)[name].count for name in names] == [2, 2, 3, 3, 3]
    made = resolve(changed(exclude_first_blocks=1), H100).for_layers(dict.fromkeys(names, (64, 64)))
    assert left_out(made) == {"encoder.layers.0.q", "decoder.layers.0.q"}


@pytest.mark.parametrize("turned", [False, True], ids=["in order", "backwards"])
@pytest.mark.parametrize("naming", NAMINGS)
def test_a_layers_block_is_found_in_any_naming(naming, turned):
    names = [*NAMINGS[naming][2].split(), *inside(naming)]
    assert block_indices(reversed(names) if turned else names) == inside(naming)


@pytest.mark.parametrize(
    "names",
    [
        (),
        ("lm_head",),
        ("0", "1", "2"),  # nn.Sequential of layers: no block holds them
        ("encoder.0", "encoder.1"),
        ("fc1", "fc2", "layer1.conv"),
        ("a.1x.b", "a.x1.b", "1x.b"),
        ("blocks.first.up", "blocks.-1.up", "blocks..up"),
    ],
    ids=str,
)
def test_a_model_without_numbered_blocks_has_no_block_indices(names):
    assert block_indices(names) == {}


def test_blocks_without_a_layer_of_their_own_still_count():
    names = ["h.0.up", "h.4.up", "h.9.up"]
    assert block_indices(names) == dict(
        zip(names, [Block(0, 10), Block(4, 10), Block(9, 10)], strict=True)
    )


@pytest.mark.parametrize("naming", NAMINGS)
def test_the_first_and_last_blocks_stay_out_in_any_naming(naming):
    recipe = changed(exclude_first_blocks=1, exclude_last_blocks=2)
    layers = dict.fromkeys([*NAMINGS[naming][2].split(), *inside(naming)], (64, 64))
    made = resolve(recipe, H100, strict=True).for_layers(layers, heads=())
    assert left_out(made) == set(inside(naming, (0, 10, 11)))


@pytest.mark.parametrize("over", [{"exclude_first_blocks": 1}, {"exclude_last_blocks": 2}], ids=str)
@pytest.mark.parametrize("machine", [CPU, H100], ids=str)
@pytest.mark.parametrize("names", [("fc1", "fc2"), ("0", "2", "4"), ("net.0", "net.2")], ids=str)
def test_leaving_blocks_out_of_a_model_without_any_is_refused_with_a_way_out(names, machine, over):
    recipe = changed("current", **over)
    message = refusal(resolve(recipe, machine).for_layers, dict.fromkeys(names, (64, 64)))
    for said in ("numbered blocks", "'current'", next(iter(over)), "Use exclude instead"):
        assert said in message


@pytest.mark.parametrize(
    ("heads", "head", "out"),
    [
        (("lm_head",), False, {"lm_head"}),
        (("score", "embed_out"), False, {"score", "embed_out"}),
        ((), False, set()),
        (("model.lm_head",), False, set()),
        (("lm_head", "score"), True, set()),
    ],
    ids=ordered,
)
def test_the_layers_that_are_named_as_heads_stay_out_and_no_others(heads, head, out):
    recipe = changed(head=head)
    names = ["h.0.up", "h.0.lm_head.up", "lm_head", "score", "embed_out"]
    made = resolve(recipe, H100, strict=True).for_layers(dict.fromkeys(names, (64, 64)), heads)
    assert left_out(made) == out
    for name in out:
        assert made.layer(name).reason == "the recipe says head = false"


def test_the_head_is_in_fp8_when_the_recipe_says_so():
    recipe = changed(head=True)
    made = resolve(recipe, H100, strict=True).for_layers(shapes(vocabulary=50304))
    assert left_out(made) == set()
    assert made.layer("lm_head").precision == "delayed"
    assert (
        "FP8: 100 % of GEMM FLOPs (25 of 25 linears)" in made.summary()
    )  # and no reason behind it


@pytest.mark.parametrize(
    ("asked", "machine", "shape", "said"),
    [
        ("delayed", H100, (768, 50257), "50257 out features, not divisible by 16"),
        ("delayed", H100, (100, 64), "100 in features, not divisible by 16"),
        ("current", L4, (64, 8), "8 out features, not divisible by 16"),
        ("block", H100, (64, 24), "24 out features, not divisible by 16"),
        ("mxfp8", B200, (64, 48), "48 out features, not divisible by 32"),
        ("mxfp8", B200, (16, 64), "16 in features, not divisible by 32"),
    ],
)
def test_a_native_layer_of_a_shape_that_does_not_divide_stays_out(asked, machine, shape, said):
    layers = {"blocks.0.mlp.up": (64, 64), "blocks.0.mlp.down": shape}
    made = resolve(asked, machine).for_layers(layers)
    assert left_out(made) == {"blocks.0.mlp.down"}
    assert made.layer("blocks.0.mlp.down").reason == said
    assert made.layer("blocks.0.mlp.down").precision == "bf16"
    message = refusal(resolve(asked, machine, strict=True).for_layers, layers)
    assert "blocks.0.mlp.down" in message
    assert said in message


@pytest.mark.parametrize("asked", FP8)
@pytest.mark.parametrize("machine", [CPU, H100], ids=str)
def test_an_emulated_layer_is_padded_so_any_shape_is_in_fp8(asked, machine):
    recipe = changed(asked, head=True)
    odd = {"blocks.0.mlp.up": (7, 13), "lm_head": (7, 50257)}
    made = resolve(recipe, machine, "emulate", strict=True).for_layers(odd)
    assert left_out(made) == set()


def test_strict_forgives_a_requested_exclusion_whose_shape_does_not_divide():
    recipe = changed(exclude=("*.odd",))
    made = resolve(recipe, H100, strict=True).for_layers(
        {"blocks.0.odd": (7, 7), "blocks.0.mlp.up": (64, 64), "lm_head": (7, 50257)}
    )
    assert left_out(made) == {"blocks.0.odd", "lm_head"}


def test_each_layer_that_is_not_in_fp8_adds_a_sentence_to_the_plans_reasons():
    """No layer leaves FP8 silently."""
    made = layered(exclude=("blocks.0.mlp.up",), exclude_last_blocks=1)
    assert made.for_layers(shapes()) == made  # decided once for good
    assert len(left_out(made)) == 6
    for name in left_out(made):
        assert name in sentences(made)


# What FP8 pays for

SQUARE = {"blocks.0.attention.output": (768, 768)}  # K N / (K + N) = 384
TINY = {"blocks.0.attention.output": (480, 512)}  # 248; on an H200 FP8 pays from 247 on


def on(name: str) -> Hardware:
    """A machine with a GPU whose data sheet is known, as its driver names it."""
    return Hardware("cuda", gpu_named(name).capability, has_te=True, name=f"NVIDIA {name}")


H200 = on("H200")


def decided(layers, asked="auto", machine=H200, backend="auto", strict=False, **given) -> Plan:
    return resolve(asked, machine, backend, strict).for_layers(layers, heads=(), **given)


@pytest.mark.parametrize(
    ("asked", "name", "least"),
    [
        ("delayed", "H200", 247),
        ("current", "H200", 370),
        ("block", "H200", 250),
        ("delayed", "H100", 353),
        ("delayed", "L4", 481),
        ("delayed", "RTX 4090", 196),
        ("mxfp8", "B200", 355),
        ("nvfp4", "B200", 283),
    ],
)
def test_a_layer_pays_by_its_own_gpus_rates(asked, name, least):
    """Computed anew: what three GEMMs save per row against the bytes of the casts."""
    moved = {"delayed": 4, "current": 6, "block": 4 + 2 / 32, "mxfp8": 4 + 2 / 32}
    moved |= {"nvfp4": 5 + 2 / 16}  # amaxes and copies read bf16 once each
    gpu = gpu_named(name)
    peak = gpu.fp4_tflops if asked == "nvfp4" else gpu.fp8_tflops
    assert peak
    half, fp8 = gpu.half_tflops * 700 / 989, peak * 1300 / 1979  # assumed: reached
    bound = moved[asked] / (gpu.memory_tb_per_s * 4.1 / 4.8) / (6 / half - 6 / fp8)
    assert bound == pytest.approx(least, rel=0.01)
    size = int(bound) // 16 * 32  # K = N: K N / (K + N) is half of it
    layers = {"wide": (size + 64, size + 64), "narrow": (size - 32, size - 32)}
    made = decided(layers, asked, on(name), tokens=2**16)
    assert left_out(made) == set()
    assert made.layer("wide").doubt == ""
    assert made.layer("narrow").doubt == (
        f"65536 x {size - 32} -> {size - 32} on {name}: K N / (K + N) = {size / 2 - 16:.0f}, "
        f"below {bound:.0f}"
    )


@pytest.mark.parametrize(("tokens", "pays"), [(4096, False), (6700, False), (6800, True)])
def test_a_layer_with_too_little_work_does_not_pay(tokens, pays):
    made = decided(SQUARE | {"wide": (4096, 4096)}, tokens=tokens)
    assert left_out(made) == (set() if pays else set(SQUARE))
    if tokens == 4096:
        reason = "FP8 does not pay for 4096 x 768 -> 768 on H200: M K N = 2.4e+09, below 4e+09"
        assert made.layers[0].reason == reason


def test_the_narrow_side_of_a_layer_decides_which_side_it_is_on_does_not():
    layers = {"up": (240, 2**14), "down": (2**14, 240), "square": (512, 512)}
    assert left_out(decided(layers, tokens=2**16)) == {"up", "down"}  # 237, and 256


@pytest.mark.parametrize("model", ["gpt-nano", "gpt2-124m"])
@pytest.mark.parametrize("asked", ["delayed", "current", "block"])
@pytest.mark.parametrize("backend", ["te", "torch"])
def test_a_recipe_asked_for_by_name_runs_in_every_layer_that_the_hardware_serves(
    model, asked, backend
):
    config = load_config(model)
    made = plan_for(config, asked, assumed("9.0"), backend, tokens=config.context)
    assert left_out(made) == {"lm_head"}
    assert made == plan_for(config, made.recipe, assumed("9.0"), backend, tokens=config.context)
    (note,) = made.notes
    assert note.startswith("FP8 may not pay in ")
    assert "on H200: K N / (K + N) = " in note or "on H200: M K N = " in note
    assert f"note: {note}" in made.summary()
    assert made.to_json()["notes"] == [note]
    assert note not in sentences(made)


def test_a_gpu_that_is_not_known_is_never_judged_by_another_ones_rates():
    unknown = dataclasses.replace(H200, name="NVIDIA H900")
    assert decided(TINY, "auto", unknown, tokens=8) == decided(TINY, "auto", unknown)
    assert decided(TINY, "delayed", unknown, tokens=8).notes == []


@pytest.mark.parametrize("asked", ["auto", "delayed"])
def test_shapes_alone_say_nothing_of_what_pays(asked):
    made = decided(TINY, asked)
    assert (left_out(made), made.notes) == (set(), [])


def test_strict_changes_nothing_where_nothing_is_substituted():
    for asked in ("auto", "delayed"):
        lenient, strict = (decided(TINY, asked, strict=on, tokens=8) for on in (False, True))
        assert strict == dataclasses.replace(lenient, strict=True)


@pytest.mark.parametrize(
    ("asked", "machine", "backend"),
    [
        ("delayed", CPU, "auto"),
        ("delayed", CPU, "torch"),
        ("delayed", H200, "emulate"),
        ("auto", H200, "emulate"),
        ("mxfp8", H200, "auto"),
    ],
    ids=["CPU", "scaled_mm on a CPU", "emulated", "auto emulated", "mxfp8 on Hopper"],
)
def test_what_is_not_native_is_for_its_numerics_and_has_no_doubts(asked, machine, backend):
    made = decided(TINY, asked, machine, backend, tokens=8)
    assert (left_out(made), made.notes) == (set(), [])


def test_what_is_left_out_anyway_is_not_doubted():
    made = decided({"a": (100, 100)}, "delayed", tokens=8)
    assert made.layers[0].reason == "100 in features, not divisible by 16"
    head = resolve("delayed", H200).for_layers({"lm_head": (64, 64)}, tokens=8)
    assert head.layers[0].reason == "the recipe says head = false"
    assert made.notes + head.notes == []


def test_the_summary_says_once_what_is_the_same_in_many_blocks():
    figure = "4096 x 768 -> 768 on H200: M K N = 2.4e+09, below 4e+09"
    made = resolve("auto", H200).for_layers(shapes(6), tokens=4096)
    assert made.summary()[1:] == [
        "FP8: 48 % of GEMM FLOPs (18 of 25 linears); 6 layers blocks.*.attention.output: bf16, FP8 "
        f"does not pay for {figure}; lm_head: bf16, the recipe says head = false"
    ]
    assert len(made.reasons) == 7
    named = resolve("delayed", H200).for_layers(shapes(6), tokens=4096)
    assert named.summary()[1:] == [
        "FP8: 52 % of GEMM FLOPs (24 of 25 linears); lm_head: bf16, the recipe says head = false",
        f"note: FP8 may not pay in 6/25 layers: 6 layers blocks.*.attention.output, {figure}",
    ]


def test_blocks_that_differ_in_their_reason_are_told_apart():
    made = layered(exclude=("blocks.2.*",), exclude_first_blocks=2)
    (line,) = made.summary()[1:]
    assert "2 layers blocks.*.mlp.up: bf16, in the first 2 blocks" in line
    assert "blocks.2.mlp.up: bf16, excluded by the pattern 'blocks.2.*'" in line


@pytest.mark.parametrize(
    ("machine", "recipe"), [(H200, "delayed"), (on("B200"), "mxfp8")], ids=["H200", "B200"]
)
def test_auto_is_bf16_where_fp8_pays_for_no_layer(machine, recipe):
    made = resolve("auto", machine).for_layers(shapes(6), tokens=1024)
    assert (made.asked, made.recipe.name, made.backend) == ("auto", "bf16", "reference")
    assert (made.native, made.is_fp8, made.runs_fp8) == (True, False, False)
    assert (made.precision, made.compute_dtype) == ("bf16", "bf16")
    assert made.vocabulary_multiple == resolve("bf16", machine).vocabulary_multiple
    assert made.layers == resolve("bf16", machine).for_layers(shapes(6)).layers
    assert made.summary() == [
        "plan: auto -> bf16, plain torch, on cuda",
        *(f"  because {reason}" for reason in made.reasons),
    ]
    first, *others = made.reasons
    assert first == f"auto stands for {recipe} here, and no layer would run in it: bf16"
    assert len(others) == 5
    assert others[1].startswith("6 layers blocks.*.attention.output: bf16, FP8 does not pay for")
    assert made.for_layers(shapes(6), tokens=1024) == made
    assert json.loads(json.dumps(made.to_json())) == made.to_json()


def test_auto_is_bf16_where_the_hardware_can_serve_no_layer():
    made = resolve("auto", H100).for_layers({"a": (7, 7), "b": (9, 9)})
    assert made.recipe.name == "bf16"
    assert "a: bf16, 7 in features, not divisible by 16" in made.reasons


def test_a_recipe_asked_for_by_name_stays_the_plan_though_no_layer_runs_in_it():
    made = resolve("delayed", H100).for_layers({"a": (7, 7), "b": (9, 9)})
    assert (made.recipe.name, made.backend, made.is_fp8) == ("delayed", "te", True)
    assert left_out(made) == {"a", "b"}
    assert not made.runs_fp8
    assert made.precision == "bf16"
    first, second = made.summary()
    assert first == "plan: delayed, with no layer in FP8, on cuda"
    assert second.startswith(
        "FP8: 0 % of GEMM FLOPs (0 of 2 linears); a: bf16, 7 in features, not divisible by 16"
    )


def test_a_plan_without_a_layer_in_fp8_has_no_reason_for_emulating_it():
    made = layered(CPU, exclude=("*",))
    assert not made.runs_fp8
    assert "emulated" not in " ".join(made.summary() + made.to_json()["reasons"])
    assert "emulated" in " ".join(layered(CPU).to_json()["reasons"])


@pytest.mark.parametrize(("machine", "word"), [(H100, "delayed"), (CPU, "delayed-emulated")])
def test_the_active_precision_is_that_of_the_recipe_if_any_layer_runs_in_it(machine, word):
    assert resolve("delayed", machine).precision == word
    assert layered(machine).precision == word
    assert layered(machine, exclude=("*",)).precision == layered(machine).compute_dtype


@pytest.mark.parametrize("asked", ["bf16", "delayed"])
@pytest.mark.parametrize("otherwise", [None, "unchanged"])
def test_what_the_caller_leaves_out_has_its_reason_with_and_without_fp8(asked, otherwise):
    layers = {"a": (64, 64), "b": (64, 64)}
    made = resolve(asked, H100).for_layers(layers, (), {"a": "it is mine"}, otherwise)
    assert made.layer("a").reason == "it is mine"
    assert made.layer("a").precision == (otherwise or "bf16")
    assert (made.layer("b").reason, made.layer("b").precision) == ("", asked)
    sentence = f"a: {otherwise or 'bf16'}, it is mine"
    assert made.reasons == (sentence,)
    assert any(sentence in line for line in made.summary())


def test_auto_that_turns_to_bf16_keeps_what_the_caller_left_out():
    layers = TINY | {"mine": (64, 64)}
    plan = resolve("auto", H200)
    made = plan.for_layers(layers, (), {"mine": "it is mine"}, "unchanged", tokens=8)
    assert made.recipe.name == "bf16"
    assert [layer.precision for layer in made.layers] == ["bf16", "unchanged"]
    assert made.reasons[-1] == "mine: unchanged, it is mine"
    assert "blocks.0.attention.output: bf16, FP8 does not pay" in made.reasons[1]
    assert len(made.reasons) == 3


# What is printed and stored


@pytest.mark.parametrize("machine", [CPU, H100], ids=str)
def test_the_summary_counts_fp8_work_and_says_why_the_head_is_not(machine):
    made = layered(machine)
    blocks, head = 6 * (3 + 1 + 4 + 4) * 768, 50257
    line = (
        f"FP8: {100 * blocks / (blocks + head):.0f} % of GEMM FLOPs (24 of 25 linears); lm_head: "
    )
    assert f"{line}{made.compute_dtype}, the recipe says head = false" in made.summary()
    why = "bf16, 50257 out features, not divisible by 16"
    assert f"{line}{why}" in layered(head=True).summary()


@pytest.mark.parametrize(
    ("recipe", "gemms"),
    [("delayed", 3), ("rowwise", 3), ("rowwise_wgrad_hp", 2), ("nvfp4_forward_high", 2),
     (BACKWARD_HIGH, 1)],
)  # fmt: skip
def test_a_gemm_that_is_not_quantized_is_no_work_in_fp8(recipe, gemms):
    made = resolve(recipe, CPU).for_layers({"a": (64, 32), "b": (64, 64)}, heads=())
    assert made.fp8_share == gemms / 3
    percent = {3: "100", 2: "67", 1: "33"}[gemms]
    assert made.summary()[-1] == f"FP8: {percent} % of GEMM FLOPs (2 of 2 linears)"


def test_the_headline_rounds_neither_to_all_nor_to_nothing():
    shapes = {"large": (4096, 4096), "small": (16, 16)}
    for left_out, percent in (("small", ">99"), ("large", "<1")):
        made = resolve("current", CPU).for_layers(shapes, (), {left_out: "it is mine"})
        assert f"FP8: {percent} % of GEMM FLOPs (1 of 2 linears); {left_out}" in made.summary()[-1]
    alone = resolve("current", CPU).for_layers({"a": (16, 16)}, ())
    assert alone.summary()[-1] == "FP8: 100 % of GEMM FLOPs (1 of 1 linear)"


MIXED = {f"layers.{i}.mlp.{name}": (64, 64) for i in range(2) for name in ("up", "gate.wg")}


@pytest.mark.parametrize(
    ("changes", "out"),
    [
        ({}, {"layers.0.mlp.gate.wg", "layers.1.mlp.gate.wg"}),
        ({"router": True}, set()),
        ({"router": True, "exclude": ["*.0.mlp.gate.wg"]}, {"layers.0.mlp.gate.wg"}),
        ({"layers": [{"match": "router", "recipe": "current"}]}, set()),
        ({"layers": [{"match": "*.gate.*", "recipe": "current"}]}, set()),
        ({"layers": [{"match": "*.1.mlp.gate.wg", "recipe": "current"}]}, {"layers.0.mlp.gate.wg"}),
        # Not meant for the router in the MLP, nor in the block:
        ({"layers": [{"match": "*.mlp.*", "recipe": "current"}]}, {*list(MIXED)[1::2]}),
        ({"layers": [{"match": "first 2 blocks", "recipe": "current"}]}, {*list(MIXED)[1::2]}),
        ({"layers": [{"match": "*.mlp.*", "recipe": "current"}], "router": True}, set()),
    ],
)  # fmt: skip
def test_routers_are_in_fp8_only_where_the_recipe_says_so(changes, out):
    routers = list(MIXED)[1::2]
    made = resolve(changed(**changes), CPU).for_layers(
        MIXED, (), None, "unchanged", routers=routers
    )
    assert left_out(made) == out
    for name in out:
        reason = made.layer(name).reason
        assert reason in (
            "a router: the recipe says router = false",
            "excluded by the pattern '*.0.mlp.gate.wg'",
        )
        assert made.layer(name).precision == "unchanged"


def test_a_rule_for_routers_needs_one():
    recipe = changed(layers=[{"match": "router", "recipe": "current"}])
    with pytest.raises(UserError, match="'router' matches no layer"):
        resolve(recipe, CPU).for_layers({"a": (64, 64)}, ())


@pytest.mark.parametrize("machine", [CPU, H100], ids=str)
def test_a_router_stays_as_it_is_in_half_precision_too(machine):
    plain = resolve("bf16", machine).for_layers(MIXED, (), None, "unchanged", routers=MIXED.keys())
    reason = "a router, which stays in the model's own precision"
    assert {layer.reason for layer in plain.layers} == {reason}
    assert not any(line.startswith("FP8") for line in plain.summary())
    exact = resolve("fp32", machine).for_layers(MIXED, (), None, "unchanged", routers=MIXED.keys())
    assert {layer.reason for layer in exact.layers} == {""}


@pytest.mark.parametrize(
    ("asked", "machine", "backend", "first"),
    [
        ("delayed", H100, "auto", "delayed, FP8 GEMMs by Transformer Engine, on cuda"),
        ("delayed", H100, "torch", "delayed, FP8 GEMMs by torch's scaled_mm, on cuda"),
        ("nvfp4", RTX5090, "auto", "nvfp4, FP4 GEMMs by torch's scaled_mm, on cuda"),
        ("delayed", CPU, "torch", "delayed, FP8 GEMMs by torch's scaled_mm, on cpu"),
        ("auto", H100, "auto", "auto -> delayed, FP8 GEMMs by Transformer Engine, on cuda"),
        ("auto", CPU, "auto", "auto -> fp32, plain torch, on cpu"),
        ("delayed", A100, "auto", "delayed -> bf16, plain torch, on cuda"),
        ("mxfp8", A100, "auto", "mxfp8, emulated by bf16 GEMMs on the exact operands, on cuda"),
        ("mxfp8", CPU, "auto", "mxfp8, emulated by fp32 GEMMs on the exact operands, on cpu"),
    ],
)
def test_the_summary_starts_with_what_was_asked_and_what_runs(asked, machine, backend, first):
    assert resolve(asked, machine, backend).summary()[0] == f"plan: {first}"


# Values


def test_a_plan_and_its_parts_are_never_mutated():
    made: Any = layered()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.reasons = ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.layers[0].fp8 = True
    with pytest.raises(ValidationError):
        made.recipe.margin = 3


# Quantizers that no hardware multiplies as they are


@pytest.mark.parametrize("asked", [name for name in rules.shipped() if name not in RECIPES])
@pytest.mark.parametrize(
    ("machine", "runs"), [(CPU, "fp32"), (V100, "fp16"), (A100, "bf16"), (B200, "bf16")], ids=str
)
def test_other_quantizers_are_emulated_where_the_gpu_has_bf16(asked, machine, runs):
    made = resolve(asked, machine).for_layers(shapes())
    emulated = runs != "fp16"
    assert (made.recipe.name, made.compute_dtype) == (asked if emulated else "fp16", runs)
    assert (made.backend, made.native) == ("emulate" if emulated else "reference", False)
    assert made.kernel is None
    assert made.notes == []
    assert json.loads(json.dumps(made.to_json())) == made.to_json()


def test_recipes_are_in_the_order_of_what_runs_them():
    found = rules.shipped()
    assert found[: len(FP8)] == list(FP8)
    assert found[-4:] == ["bf16", "fp16", "tf32", "fp32"]
    assert found.index("rowwise_wgrad_hp") < found.index("mxfp6_e2m3") < found.index("mxfp4")
    assert sorted(found) == presets.names("recipes")
