"""FP8 as a precision plugin of Lightning's Trainer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fp8stack
from fp8stack import UserError, fp8_state
from fp8stack.integrations.lightning import FP8Precision
from tests.integrations.loops import RECIPES, adamw, converted, gpt2, tokens
from tests.support.backend_models import same

pytestmark = pytest.mark.full


class Lit(pl.LightningModule):
    """A LightningModule as people write it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("val_loss", self.model(input_ids=batch, labels=batch).loss)

    def configure_optimizers(self) -> Any:
        return adamw(self)


def trainer_of(recipe: str | None, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        plugins=[FP8Precision(recipe)] if recipe else None, **options,
    )  # fmt: skip


def fit(lit: Lit, folder: Path, recipe: str | None, epochs: int, resume: Path | None = None) -> Any:
    """An epoch has three steps."""
    options: dict[str, Any] = {"enable_checkpointing": False, "default_root_dir": folder}
    trainer = trainer_of(recipe, max_epochs=epochs, **options)
    steps: Any = [tokens(step) for step in range(3)]
    trainer.fit(lit, DataLoader(steps, batch_size=None), ckpt_path=resume and str(resume))
    return trainer


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_resumed_run_repeats_one_that_was_not_interrupted_to_the_bit(recipe, tmp_path, caplog):
    straight = Lit(gpt2(None))
    fit(straight, tmp_path, recipe, 2)
    assert len(straight.losses) == 6
    state = fp8_state(straight)
    assert state
    assert all(float(value.abs().sum()) > 0 for value in state.values())
    first = Lit(gpt2(None))
    fit(first, tmp_path, recipe, 1).save_checkpoint(tmp_path / "last.ckpt")
    again = Lit(gpt2(None, seed=1))
    fit(again, tmp_path, recipe, 2, tmp_path / "last.ckpt")
    assert first.losses + again.losses == straight.losses
    assert same(again.state_dict(), straight.state_dict())
    assert same(fp8_state(again), state)
    assert "load_fp8_state" not in caplog.text


def test_the_plugin_trains_as_a_plain_loop_with_the_converted_model_does(tmp_path):
    lit, plain = Lit(gpt2(None)), Lit(converted(gpt2(None), "delayed"))
    fit(lit, tmp_path, "delayed", 1)
    fit(plain, tmp_path, None, 1)
    assert lit.losses == plain.losses
    assert same(fp8_state(lit), fp8_state(plain))
    fit(lit, tmp_path, "delayed", 1)  # a second fit converts nothing again
    assert len(lit.losses) == 6


def best_of(folder: Path, weights_only: bool = False) -> tuple[pl.Trainer, Lit, DataLoader]:
    """Two epochs in delayed scaling, of which the first has the "best", the largest, loss."""
    keep = ModelCheckpoint(
        folder, monitor="val_loss", mode="max", filename="best", save_weights_only=weights_only
    )
    trainer = trainer_of("delayed", max_epochs=2, callbacks=[keep])
    batches: Any = [tokens(step) for step in range(3)]
    lit, steps = Lit(gpt2(None)), DataLoader(batches, batch_size=None)
    trainer.fit(lit, steps, steps)
    return trainer, lit, steps


def test_the_best_checkpoint_is_evaluated_with_its_own_state(tmp_path, caplog):
    trainer, lit, steps = best_of(tmp_path)
    last = fp8_state(lit)
    best = float(trainer.checkpoint_callback.best_model_score)
    saved = torch.load(tmp_path / "best.ckpt", weights_only=True)["FP8Precision"]
    assert not same(last, saved)
    assert trainer.validate(lit, steps, ckpt_path="best")[0]["val_loss"] == best
    assert same(fp8_state(lit), saved)
    fresh = Lit(gpt2(None, seed=1))  # evaluated without training
    result = trainer_of("delayed").validate(fresh, steps, ckpt_path=tmp_path / "best.ckpt")
    assert result[0]["val_loss"] == best
    assert same(fp8_state(fresh), saved)
    assert "FP8 state" not in caplog.text


def test_a_checkpoint_of_weights_alone_is_told_with_the_remedy(tmp_path, caplog):
    trainer, lit, steps = best_of(tmp_path, weights_only=True)
    trainer.validate(lit, steps, ckpt_path="best")
    assert "save_weights_only" in caplog.text


def test_a_checkpoint_without_fp8_state_is_told(tmp_path, caplog):
    fit(Lit(gpt2(None)), tmp_path, None, 1).save_checkpoint(tmp_path / "plain.ckpt")
    with caplog.at_level(logging.WARNING, "fp8stack"):
        fit(Lit(gpt2(None)), tmp_path, "delayed", 2, tmp_path / "plain.ckpt")
    assert "The checkpoint has no FP8 state" in caplog.text


class Parts(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(32, 32), nn.ReLU())
        self.decoder = nn.Sequential(nn.Linear(32, 32))
        self.probe = nn.Linear(32, 2)
        self.norm = nn.LayerNorm(32)


def test_a_pattern_may_match_in_one_module_alone():
    plan = fp8stack.resolve("delayed", fp8stack.probe("cpu"))
    module: Any = Parts()
    module.decoder.append(nn.Linear(32, 32))
    converted = FP8Precision(plan, exclude=iter(["1"])).convert_module(module)
    names = {name.rpartition(".")[0] for name in fp8_state(converted)}
    assert {name for name in names if name.endswith("weight")} == {
        "encoder.0.weight", "decoder.0.weight",
    }  # fmt: skip
    module = Parts()
    with pytest.raises(UserError, match=r"'nothing' of `exclude` matches no layer in encoder, de"):
        FP8Precision(plan, exclude=["0", "nothing"]).convert_module(module)
    assert not hasattr(module.encoder, "fp8_plan")


def test_which_modules_are_converted_can_be_said(caplog):
    plan = fp8stack.resolve("delayed", fp8stack.probe("cpu"))
    with caplog.at_level(logging.INFO, "fp8stack"):
        converted: Any = FP8Precision(plan).convert_module(Parts())
    assert "probe: unchanged, a linear layer by itself" in caplog.text
    assert {name.rpartition(".")[0] for name in fp8_state(converted)} == {
        f"{name}.0.{operand}"
        for name in ("encoder", "decoder")
        for operand in ("input", "weight", "grad_output")
    }
    decoder_only: Any = FP8Precision(plan, modules=("decoder",)).convert_module(Parts())
    assert not hasattr(decoder_only.encoder, "fp8_plan")
    assert hasattr(decoder_only.decoder, "fp8_plan")
    with pytest.raises(UserError, match=r"no module 'model'. Modules: encoder, decoder, probe"):
        FP8Precision(plan, modules="model").convert_module(Parts())
    bare = pl.LightningModule()
    bare.head = nn.Linear(32, 32)
    with pytest.raises(UserError, match="Wrap them in a module"):
        FP8Precision(plan).convert_module(bare)
    assert torch.equal(bare.head(torch.zeros(1, 32)), bare.head.bias[None])
