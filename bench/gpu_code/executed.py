"""Training steps in the code that torch generates for a GPU, run on a machine without one.

Each case is compiled for a pretended GPU, and trains for one step. All kernels, inductor's and
fp8stack's, run in Triton's interpreter, each in one configuration; GEMMs and attention are computed
in float32, and are the same functions as in the step that each case is compared with: eager, by
torch's operators on the CPU, as emulation computes. The operands of scaled GEMMs, their scales, and
the amaxes and scales of delayed scaling have to be equal to the byte. The loss and the gradients
may differ by the order of float32 sums, and by elements that are rounded to another bfloat16
because of it: by 0.05 % of a tensor's norm, or 1.6 % where flex attention is compiled, which rounds
attention weights. For the same reason, up to 16 bytes may differ where inductor computes GELU.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

from bench.cells import failure
from bench.gpu_code.process import told
from bench.report import Report, Row, heading, markdown, report_of
from fp8stack.common.errors import UserError

SCENARIO = "gpu-code-executed"
SMALL: dict[str, dict[str, Any]] = {
    "llama-8b": {"heads": 2, "kv_heads": 1, "mlp_width": 256},
    "gpt2-124m": {"heads": 2},
    "gpt-nano-moe": {
        "heads": 2,
        "experts": {"count": 4, "per_token": 2, "width": 128, "shared": 1},
    },
}
"""Sizes of the models, which have one block of width 128."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training step.

    Attributes:
        model: the preset of the block, which is made small.
        recipe: the recipe.
        capability: the compute capability of the pretended GPU.
        sizes: more entries of the model's configuration.
        tokens: the tokens of a micro-batch.
        micro_batches: the number of micro-batches.
        documents: how attention is kept within documents, if it is: by a mask that is added to the
            scores, "dense", or by flex attention, "blocks", which is compiled into the block.
        flips: the bytes of operands that may differ, because what is not exact in float32 was
            rounded to the next bfloat16.
        recompute: whether the block is computed again in the backward pass.
    """

    model: str
    recipe: str
    capability: str = "9.0"
    sizes: dict[str, Any] = field(default_factory=dict)
    tokens: int = 128
    micro_batches: int = 1
    documents: Literal["", "dense", "blocks"] = ""
    flips: int = 0
    recompute: bool = False

    @property
    def name(self) -> str:
        """The model, the capability, and what else is not the default."""
        words = [f"{self.model} on {self.capability}"]
        words += [f"{key} {value}" for key, value in self.sizes.items()]
        if self.tokens != Case.tokens:
            words.append(f"{self.tokens} tokens")
        if self.micro_batches > 1:
            words.append(f"{self.micro_batches} micro-batches")
        if self.documents:
            words.append(f"documents ({self.documents})")
        words += ["recompute"] * self.recompute
        return ", ".join(words)


_RESIDUAL = [f"bench/recipes/{name}_bf16_residual.toml" for name in ("delayed", "current")]
# A flip behind the norm of queries and keys changes the amax of a row, or of the tensor.
_NO_QK_NORM = {"qk_norm": False}
CASES = (
    *(Case(model="llama-8b", recipe=name) for name in ("bf16", "delayed", "current", "block")),
    *(Case(model="llama-8b", recipe=name) for name in ("rowwise", "rowwise_wgrad_hp", *_RESIDUAL)),
    *(
        Case(model="llama-8b", recipe=name, capability="10.0")
        for name in ("mxfp8", "nvfp4", "nvfp4_forward_high", "rowwise")
    ),
    *(Case(model="gpt2-124m", recipe=name) for name in ("delayed", "current", "block")),
    *(Case(model="gpt2-124m", recipe=name, capability="10.0") for name in ("mxfp8", "nvfp4")),
    Case(model="llama-8b", recipe="delayed", tokens=100),
    Case(model="gpt2-124m", recipe="current", tokens=100),
    Case(model="gpt2-124m", recipe="mxfp8", capability="10.0", tokens=100, flips=16),
    Case(model="llama-8b", recipe="delayed", micro_batches=2),
    Case(model="llama-8b", recipe="nvfp4", capability="10.0", micro_batches=2),
    Case(model="llama-8b", recipe="delayed", recompute=True),
    Case(model="gpt2-124m", recipe="mxfp8", capability="10.0", recompute=True),
    Case(model="llama-8b", recipe="delayed", documents="dense"),
    Case(model="gpt2-124m", recipe="block", documents="dense"),
    Case(model="llama-8b", recipe="bf16", documents="blocks"),
    *(Case(model="gpt-nano-moe", recipe=name) for name in ("delayed", "current")),
    Case(model="gpt-nano-moe", recipe="rowwise", sizes=_NO_QK_NORM),
    Case(model="gpt-nano-moe", recipe="mxfp8", capability="10.0"),
    Case(model="gpt-nano-moe", recipe="nvfp4", capability="10.0", sizes=_NO_QK_NORM),
)


def measure(arguments: argparse.Namespace) -> Report:
    """Run the chosen cases, each in a separate process."""
    rows: list[Row] = []
    for case in CASES:
        chosen = case.capability in arguments.capabilities
        chosen &= case.model in (arguments.models or SMALL)
        if chosen and case.recipe in (arguments.recipes or [case.recipe]):
            rows += arguments.cells.rows(case.name, [case.recipe], partial(_row, case))
    settings = {"width": 128, "blocks": 1}
    return report_of("cpu", settings, rows, ("triton",)) | {"scenario": SCENARIO}


def _row(case: Case) -> list[Row]:
    try:
        return [{"case": case.name, "arm": case.recipe, **executed(case)}]
    except UserError as error:
        return [failure(case.name, case.recipe, error)]


def executed(case: Case) -> Row:
    """The comparison of a case, see `comparison.Comparison`, and the seconds that it took.

    Raises:
        UserError: torch could not compile it, or a kernel cannot run in the interpreter.
    """
    fields = json.dumps(asdict(case))
    row: Row = told(case.model, case.recipe, case.capability, "--execute", fields, interpret=True)
    return row


def table(data: Report) -> str:
    header = ["model on capability", "recipe", "kernels", "scaled GEMMs", "bytes compared"]
    header += ["wrong bytes", "largest difference of sums", "seconds of the CPU"]
    cells = [
        [
            *(row["case"], row["arm"], str(row["kernels"]), str(row["gemms"])),
            *(f"{row['bytes']:,}", str(row["wrong_bytes"])),
            *(f"{row['largest_difference']:.1e}", f"{row['cpu_s']:.0f}"),
        ]
        for row in data["results"]
    ]
    wrong = [
        f"- {row['case']}, {row['arm']}: {line}" for row in data["results"] for line in row["wrong"]
    ]
    text = (__doc__ or "").partition("\n\n")[2].strip()
    lines = "\n".join(["", *wrong, ""]) if wrong else ""
    return heading(data, "Code for GPUs, executed", text) + markdown(header, cells) + lines
