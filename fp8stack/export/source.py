"""The trained model that is to be exported, from its checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fp8stack.checkpoint.validation import model_of
from fp8stack.errors import UserError
from fp8stack.model.config import GPTConfig
from fp8stack.tokenizer import Tokenizer
from fp8stack.training.load import find_checkpoint
from fp8stack.training.setup.datasets import tokenizer_of_run

Dtype = Literal["fp32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model out of a checkpoint."""

    path: Path  # of the checkpoint
    step: int  # that it was saved after
    config: GPTConfig
    weights: Mapping[str, Tensor]  # float32, of every parameter, the vocabulary not padded
    plan: Mapping[str, Any]  # of the run, as JSON data
    fp8: Mapping[str, Tensor]  # the state of delayed scaling, if the run had any
    dtype: torch.dtype  # what the weights are to be saved in
    notes: tuple[str, ...]  # what is to be told

    def tokenizer(self, name: str | None) -> Tokenizer | None:
        """The tokenizer called `name`, else the run's own, if it is known. Raises a UserError if it
        cannot be loaded, or has more ids than the model's vocabulary."""
        found = tokenizer_of_run(self.path, name)
        if found is not None and found.vocabulary > self.config.vocabulary:
            raise UserError(
                f"Tokenizer {found.name} has {found.vocabulary} tokens, the model a vocabulary of "
                f"{self.config.vocabulary}. Give the one that the data were tokenized with."
            )
        return found


def load_source(run_or_checkpoint: str | Path, dtype: torch.dtype) -> Source:
    """The model of a run's newest good checkpoint, or of one. Raises what `find_checkpoint`
    does."""
    checkpoint, path, passed_over = find_checkpoint(run_or_checkpoint)
    return Source(
        path=path,
        step=checkpoint.step,
        config=model_of(checkpoint),
        weights=checkpoint.tensors["model"],
        plan=checkpoint.info["plan"],
        fp8=checkpoint.tensors.get("fp8", {}),
        dtype=dtype,
        notes=tuple(f"passed over: {reason}" for reason in passed_over),
    )
