"""The windows that runs are evaluated on, and how many bytes of text their labels stand for. N
windows, T tokens."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8stack import data
from fp8stack.config import RunConfig
from fp8stack.data import Corpus
from fp8stack.errors import UserError, quoted
from fp8stack.model.config import GPTConfig
from fp8stack.terminal import shell_quoted
from fp8stack.tokenizer import Tokenizer, alike
from fp8stack.training.dataloader import inputs_of
from fp8stack.training.run_plans import context_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Windows:
    """What is evaluated."""

    name: str  # of the data
    tokens: Tensor  # int64 [N, T + 1], or with documents [N, 2, T + 1], see `StepBatches`
    # Int64 [N, T], how many bytes of UTF-8 each label stands for; [N, 1], those of a window's
    # labels together, where single tokens do not say; None if nobody knows.
    text_bytes: Tensor | None


def require_text(run: str, config: RunConfig | None, data_path: str | None) -> None:
    """Raise a UserError if neither `run`, by its `config`, nor `data_path` names data."""
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
) -> Windows:
    """The windows for the run that the user calls `run`: evenly spaced, as those of its own
    evaluations, unless asked otherwise.

    Args:
        tokenizer: what its tokens are of, if that is known.
        data_path: None for the run's own held-out part. Other data are taken as `--data` of a run
            is, their held-out part; but a single file as a whole, if the run was not trained on it.
        count: how many windows; None for as many as the run's own evaluations have.
        context: tokens of each; None for the run's.

    Raises:
        UserError: the data cannot be used, or are of another tokenizer than the run's.
    """
    if context is not None and context > model.context:
        raise UserError(
            f"--context {context} is more than the {model.context} that the model takes. Lower it."
        )
    path = config.data if data_path is None else data_path
    own = path == config.data
    if path is not None and config.data is not None:
        own = own or data.absolute(path) == config.data
    holds_text = data.holds_text(path)
    if tokenizer is None and holds_text:
        raise UserError(
            f"The data are text, and the tokenizer of {quoted(run)} is unknown. Give --tokenizer: "
            "bytes, gpt2, or the path of a tokenizer.json."
        )
    texts = tokenizer if holds_text else None
    found = data.tokenizer_of(path, texts)
    if found is not None and tokenizer is not None and not alike(found, tokenizer):
        raise UserError(
            f"{quoted(str(path))} is read as tokens of {found.name}, and {quoted(run)} was trained "
            f"on those of {tokenizer.name}. Make them: fp8stack prepare {shell_quoted(str(path))} "
            f"--tokenizer {shell_quoted(run)} --out DIR"
        )
    tokenizer = tokenizer or found
    end = None if tokenizer is None else tokenizer.end_of_text
    train, held_out = data.load_corpora(path, model.vocabulary, end_of_text=end, texts=texts)
    if not own and path is not None and os.path.isfile(path):
        held_out = Corpus(name=path, parts=(*train.parts, *held_out.parts))
    tokens = data.validation_windows(
        held_out,
        count=config.eval_windows if count is None else count,
        context=context or context_of(config, model),
        vocabulary=model.vocabulary,
        documents=config.document_mask and held_out.has_documents,
    )
    return Windows(name=held_out.name, tokens=tokens, text_bytes=_text_bytes(tokens, tokenizer))


def _text_bytes(tokens: Tensor, tokenizer: Tokenizer | None) -> Tensor | None:
    labels_NT = inputs_of(tokens)[1]
    if tokenizer is None or int(labels_NT.max()) >= tokenizer.vocabulary:
        return None  # they are of another tokenizer
    if (lengths := tokenizer.byte_lengths()) is not None:
        return torch.from_numpy(lengths)[labels_NT]
    rows: Sequence[list[int]] = labels_NT.tolist()
    return torch.tensor([[len(tokenizer.decode(row).encode())] for row in rows])
