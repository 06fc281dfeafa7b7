"""The windows that runs are evaluated on, and how many bytes of text their labels stand for. N
windows, T tokens."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8stack import data
from fp8stack.common.errors import UserError, quoted
from fp8stack.data import Corpus
from fp8stack.data.tokenizer import Tokenizer, alike
from fp8stack.model.config import GPTConfig
from fp8stack.planning.run_config import RunConfig
from fp8stack.training.dataloader import inputs_of
from fp8stack.training.run_plans import context_of

BATCH, BATCH_TOKENS = 32, 4096
"""The most windows and tokens per forward pass, where no run says how many."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Windows:
    """The windows that a run is evaluated on."""

    name: str  # the name of the data
    tokens: Tensor  # int64 [N, T + 1], or with documents [N, 2, T + 1], see `StepBatches`
    # UTF-8 bytes that each label stands for, int64 [N, T]; or bytes per window, [N, 1], if the
    # bytes of single tokens are unknown; None if the tokenizer is unknown.
    text_bytes: Tensor | None

    @property
    def usual_batch(self) -> int:
        """The windows per forward pass, where no run says how many."""
        context = self.tokens.shape[-1] - 1
        return max(1, min(BATCH, BATCH_TOKENS // context))


def require_text(run: str, config: RunConfig | None, data_path: str | None) -> None:
    """Raise a UserError if neither the `config` of `run` nor `data_path` names data."""
    if config is None and data_path is None:
        raise UserError(
            f"{quoted(run)} comes without text. Give some that it was not trained on: --data FILE"
        )


def windows_for(
    run: str,
    config: RunConfig,
    model: GPTConfig,
    tokenizer: Tokenizer | None,
    data_path: str | None,
    count: int | None,
    context: int | None,
    trained_on: Mapping[str, str] | None = None,
) -> Windows:
    """The windows for the run that the user calls `run`. They are evenly spaced, and by default the
    same as in the run's own last evaluation.

    Args:
        tokenizer: the tokenizer of the run, if it is known.
        data_path: the data; None for the held-out split of the run's own data. Of other data the
            held-out split is used, too, but all of a single file that the run was not trained on.
        count: the number of windows; None for as many as the run's own last evaluation has.
        context: tokens per window; None for the context of the run.
        trained_on: the fingerprints of the run's data, which may have moved, see `RunData`.

    Raises:
        UserError: the data cannot be used, or belong to another tokenizer than the run's.
    """
    if context is not None and context > model.context:
        raise UserError(
            f"--context {context} is more than the {model.context} that the model takes. Lower it."
        )
    path = config.data if data_path is None else data_path
    holds_text = data.holds_text(path)
    if tokenizer is None and holds_text:
        raise UserError(
            f"The data are text, and the tokenizer of {quoted(run)} is unknown. Give --tokenizer: "
            "bytes, gpt2, or the path of a tokenizer.json."
        )
    texts = tokenizer if holds_text else None
    data_tokenizer = data.tokenizer_of(path, texts)
    if (
        data_tokenizer is not None
        and tokenizer is not None
        and not alike(data_tokenizer, tokenizer)
    ):
        raise UserError(
            f"{quoted(str(path))} is read as tokens of {data_tokenizer.name}, and {quoted(run)} "
            f"was trained on those of {tokenizer.name}. Give text, or tokens that `fp8stack "
            "prepare` made of it with the tokenizer.json of the run."
        )
    tokenizer = tokenizer or data_tokenizer
    end = None if tokenizer is None else tokenizer.end_of_text
    train, held_out = data.load_corpora(path, model.vocabulary, end_of_text=end, texts=texts)
    is_run_data = path == config.data
    if path is not None and config.data is not None:
        is_run_data = is_run_data or data.absolute(path) == config.data
    if not is_run_data and path is not None and os.path.isfile(path):
        fingerprints = {"train": train.fingerprint(), "validation": held_out.fingerprint()}
        if fingerprints != trained_on:
            held_out = Corpus(name=path, segments=(*train.segments, *held_out.segments))
    tokens = data.validation_windows(
        held_out,
        count=config.last_eval_windows if count is None else count,
        context=context or context_of(config, model),
        vocabulary=model.vocabulary,
        documents=config.document_mask and held_out.has_documents,
    )
    return Windows(name=held_out.name, tokens=tokens, text_bytes=_text_bytes(tokens, tokenizer))


def _text_bytes(tokens: Tensor, tokenizer: Tokenizer | None) -> Tensor | None:
    labels_NT = inputs_of(tokens)[1]
    if tokenizer is None or int(labels_NT.max()) >= tokenizer.vocabulary:
        return None  # the data belong to another tokenizer
    if (lengths := tokenizer.byte_lengths()) is not None:
        return torch.from_numpy(lengths)[labels_NT]
    rows: Sequence[list[int]] = labels_NT.tolist()
    return torch.tensor([[len(tokenizer.decode(row).encode())] for row in rows])
