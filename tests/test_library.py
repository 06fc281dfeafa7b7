"""fp8stack as a library: in loops of others, with models of others; its names explained."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import fp8stack
from tests.docs.docs_found import ROOT, blocks
from tests.support.backend_models import same

LIBRARY = ROOT / "docs" / "library.md"
PAGE = LIBRARY.read_text(encoding="utf-8")
VALUES = {"Recipe", "FORMATS"}  # not classes or functions: Python keeps no docstring for them


# Names


@pytest.mark.parametrize("module", [fp8stack, fp8stack.numerics], ids=lambda m: m.__name__)
def test_every_public_name_is_explained_in_the_document_and_so_are_a_classs_methods(module):
    part = PAGE.split(f"Of `{module.__name__}`:")[1].split("Of `")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", part, re.M))
    assert list(rows) == list(module.__all__)
    for name, told in rows.items():
        assert told.endswith("."), name
        if name in VALUES:
            continue
        kind = getattr(module, name)
        first = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
        assert re.split(r"(?<=\.) (?=[A-Z])", first)[0] == told, name
        for method, made in vars(kind).items() if inspect.isclass(kind) else ():
            own = inspect.isfunction(made) or isinstance(made, property | classmethod)
            if own and not method.startswith("_"):
                assert inspect.getdoc(getattr(kind, method)), f"{name}.{method}"


# Under transformers' Trainer: with the callback that docs/library.md gives


def callback() -> Any:
    (code,) = (block.text for block in blocks(PAGE) if "class KeepScales" in block.text)
    scope: dict[str, Any] = {}
    exec(code.split("\n\ndef trainer")[0], scope)
    return scope["KeepScales"]()


def trained(folder: Path, *, resume: str | None = None, keep: bool = True) -> tuple[Any, list]:
    """Six steps of two micro-batches under Trainer: the model and the losses; or what is left."""
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=6, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        learning_rate=3e-3, save_steps=3, logging_steps=1, report_to="none", disable_tqdm=True,
        use_cpu=True,
    )  # fmt: skip
    transformers.set_seed(0)
    still: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes: dict[str, Any] = {
        "vocab_size": 256,
        "n_positions": 32,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
    }
    tokens: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **still, **tokens))
    fp8stack.convert(model, fp8stack.resolve("delayed", fp8stack.probe("cpu")))
    text = torch.tensor(list((b"the quick brown fox jumps over the lazy dog; " * 12)[:512]))
    rows = [{"input_ids": row, "labels": row} for row in text.view(16, 32)]
    trainer = transformers.Trainer(
        model, arguments, train_dataset=rows, callbacks=[callback()] if keep else []
    )
    trainer.train(resume_from_checkpoint=resume)
    return model, [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_trainer_trains_in_delayed_scaling_and_goes_on_to_the_bit(tmp_path, one_thread):
    model, losses = trained(tmp_path)
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert all(float(value.abs().sum()) > 0 for value in fp8stack.fp8_state(model).values())
    again, found = trained(tmp_path, resume=f"{tmp_path}/checkpoint-3")
    assert found == losses
    assert same(again.state_dict(), model.state_dict())
    assert same(fp8stack.fp8_state(again), fp8stack.fp8_state(model))
    # Without the callback it forgets the scales, as the document says.
    _, others = trained(tmp_path, resume=f"{tmp_path}/checkpoint-3", keep=False)
    assert others[:3] == losses[:3]
    assert others[3:] != losses[3:]
