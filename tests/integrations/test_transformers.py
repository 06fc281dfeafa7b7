"""FP8 state in the checkpoints of transformers' Trainer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file

from fp8stack import fp8_state, load_fp8_state
from fp8stack.integrations.transformers import FP8StateCallback
from tests.integrations.loops import RECIPES, gpt2, tokens
from tests.support.backend_models import same

pytestmark = pytest.mark.full


def trainer_of(folder: Path, recipe: str, *, callbacks: Any = None, **options: Any) -> Any:
    """A Trainer of six steps of two micro-batches, which saves after three."""
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=6, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        learning_rate=3e-3, save_steps=3, logging_steps=1, report_to="none", disable_tqdm=True,
        use_cpu=True, **options,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for step in range(4) for row in tokens(step)]
    callbacks = [FP8StateCallback()] if callbacks is None else callbacks
    return transformers.Trainer(
        gpt2(recipe), arguments, train_dataset=rows, eval_dataset=rows[:4], callbacks=callbacks
    )


def trained(
    folder: Path, recipe: str, *, resume: str | None = None, **options: Any
) -> tuple[Any, list]:
    """Train all steps, or what is left of them: the model and the losses."""
    trainer = trainer_of(folder, recipe, **options)
    trainer.train(resume_from_checkpoint=resume)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return trainer.model, losses


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_resumed_run_repeats_one_that_was_not_interrupted_to_the_bit(recipe, tmp_path):
    model, losses = trained(tmp_path, recipe)
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert all(float(value.abs().sum()) > 0 for value in fp8_state(model).values())
    resume = f"{tmp_path}/checkpoint-3"
    again, result = trained(tmp_path, recipe, resume=resume)
    assert result == losses
    assert same(again.state_dict(), model.state_dict())
    assert same(fp8_state(again), fp8_state(model))
    # The FP8 state is lost without the callback.
    _, without_callback = trained(tmp_path, recipe, resume=resume, callbacks=[])
    assert without_callback[:3] == losses[:3]
    assert without_callback[3:] != losses[3:]


def test_a_checkpoint_may_be_in_another_folder_and_one_without_the_state_is_told(tmp_path, caplog):
    model, losses = trained(tmp_path / "a", "delayed")
    resume = shutil.move(tmp_path / "a" / "checkpoint-3", tmp_path / "moved")
    callbacks = [FP8StateCallback(resume_from=resume)]
    again, result = trained(tmp_path / "b", "delayed", resume=str(resume), callbacks=callbacks)
    assert result == losses
    assert same(fp8_state(again), fp8_state(model))
    assert "FP8 state" not in caplog.text
    trained(tmp_path / "c", "delayed", resume=str(resume))
    assert "checkpoint-3 has no fp8.safetensors: the FP8 state is not restored" in caplog.text


def test_the_best_checkpoint_that_is_loaded_at_the_end_has_its_own_state(tmp_path):
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 3}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
    options["greater_is_better"] = True  # so that the first checkpoint is the best
    trainer = trainer_of(tmp_path, "delayed", **options)
    trainer.train()
    best, checkpoint = trainer.model, tmp_path / "checkpoint-3"
    assert trainer.state.best_model_checkpoint == str(checkpoint)
    saved = transformers.GPT2LMHeadModel.from_pretrained(checkpoint)
    assert same(best.state_dict(), saved.state_dict())
    assert same(fp8_state(best), load_file(checkpoint / "fp8.safetensors"))
    last = load_file(tmp_path / "checkpoint-6" / "fp8.safetensors")
    assert not same(fp8_state(best), last)
    assert trainer.evaluate()["eval_loss"] == trainer.state.best_metric
    load_fp8_state(best, last)  # evaluation reads the scales: with the last ones it differs
    assert trainer.evaluate()["eval_loss"] != trainer.state.best_metric


def test_a_recipe_without_state_leaves_checkpoints_as_they_are(tmp_path, caplog):
    _, losses = trained(tmp_path, "current")
    resume = f"{tmp_path}/checkpoint-3"
    assert trained(tmp_path, "current", resume=resume)[1] == losses
    assert not list(tmp_path.rglob("fp8.safetensors"))
    assert "FP8 state" not in caplog.text
