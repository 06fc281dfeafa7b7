"""fp8stack as a library: in loops of others, with models of others; its names explained."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import fp8stack
from tests.docs.docs_found import ROOT, blocks

LIBRARY = ROOT / "docs" / "library.md"
PAGE = LIBRARY.read_text(encoding="utf-8")
VALUES = {"Recipe", "FORMATS"}  # not classes or functions: Python keeps no docstring for them


# Names


@pytest.mark.parametrize("module", [fp8stack, fp8stack.numerics], ids=lambda m: m.__name__)
def test_every_public_name_is_in_the_document_with_what_it_is(module: ModuleType) -> None:
    part = PAGE.split(f"Of `{module.__name__}`:")[1].split("Of `")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", part, re.M))
    assert list(rows) == list(module.__all__)
    for name, told in rows.items():
        assert told.endswith("."), name
        if name not in VALUES:
            first = " ".join((inspect.getdoc(getattr(module, name)) or "").split("\n\n")[0].split())
            assert re.split(r"(?<=\.) (?=[A-Z])", first)[0] == told, name


@pytest.mark.parametrize("module", [fp8stack, fp8stack.numerics], ids=lambda m: m.__name__)
def test_every_public_class_explains_its_public_methods(module: ModuleType) -> None:
    for name in set(module.__all__) - VALUES:
        kind = getattr(module, name)
        if not inspect.isclass(kind):
            continue
        for method, made in vars(kind).items():
            own = inspect.isfunction(made) or isinstance(made, property | classmethod)
            if own and not method.startswith("_"):
                assert inspect.getdoc(getattr(kind, method)), f"{name}.{method}"


def test_the_package_says_that_it_has_types() -> None:
    assert (Path(fp8stack.__file__).parent / "py.typed").is_file()


# Models of transformers


def gpt2(recipe: str | None = "delayed") -> Any:
    """A small GPT-2 of transformers, always with the same weights; None: as it is."""
    transformers.set_seed(0)
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=32, n_embd=64, n_layer=2, n_head=4, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    if recipe is not None:
        fp8stack.convert(model, fp8stack.resolve(recipe, fp8stack.probe("cpu")))
    return model


def text() -> torch.Tensor:
    """Rows of text that repeats, so that a model learns it: [16, 32]."""
    content = b"the quick brown fox jumps over the lazy dog; " * 12
    return torch.tensor(list(content[:512])).view(16, 32)


def train(model: nn.Module, steps: int) -> list[float]:
    """A plain loop: its losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        loss = model(text(), labels=text()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("recipe", ["delayed", "current", "mxfp8"])
def test_a_gpt2_of_transformers_learns_in_a_plain_loop(recipe: str, one_thread: None) -> None:
    plain, model = gpt2(None), gpt2(recipe)
    named = {name: parameter.shape for name, parameter in plain.named_parameters()}
    assert {name: parameter.shape for name, parameter in model.named_parameters()} == named
    assert model.lm_head.weight is model.transformer.wte.weight
    losses, reference = train(model, 25), train(plain, 25)
    assert losses[-1] < 0.6 * losses[0]
    assert losses[:5] == pytest.approx(reference[:5], rel=0.02)  # later, small things grow
    assert losses != reference, "nothing was cast to FP8"
    if recipe == "delayed":
        state = fp8stack.fp8_state(model)
        scales = [value for name, value in state.items() if name.endswith(".scale")]
        assert len(scales) == 2 * 4 * 3  # blocks, linears, operands
        assert all(float(scale) not in (0.0, 1.0) for scale in scales)


def test_a_trained_gpt2_is_saved_and_loaded_as_transformers_does(
    tmp_path: Path, one_thread: None
) -> None:
    model = gpt2("delayed")
    train(model, 5)
    model.save_pretrained(tmp_path)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded.transformer.h[0].mlp.c_fc).__name__ == "Conv1D"
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


# Trainer: with the callback that docs/library.md gives


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
    model = gpt2("delayed")
    rows = [{"input_ids": row, "labels": row} for row in text()]
    trainer = transformers.Trainer(
        model, arguments, train_dataset=rows, callbacks=[callback()] if keep else []
    )
    trainer.train(resume_from_checkpoint=resume)
    return model, [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_trainer_trains_in_delayed_scaling_and_goes_on_to_the_bit(
    tmp_path: Path, one_thread: None
) -> None:
    model, losses = trained(tmp_path)
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert all(float(value.abs().sum()) > 0 for value in fp8stack.fp8_state(model).values())
    again, same = trained(tmp_path, resume=f"{tmp_path}/checkpoint-3")
    assert same == losses
    for ours, theirs in (
        (again.state_dict(), model.state_dict()),
        (fp8stack.fp8_state(again), fp8stack.fp8_state(model)),
    ):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_without_the_callback_trainer_forgets_the_scales_as_the_document_says(
    tmp_path: Path, one_thread: None
) -> None:
    _, losses = trained(tmp_path)
    _, others = trained(tmp_path, resume=f"{tmp_path}/checkpoint-3", keep=False)
    assert others[:3] == losses[:3]
    assert others[3:] != losses[3:]
