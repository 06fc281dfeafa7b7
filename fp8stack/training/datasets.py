"""The data of a run: training and validation sets, and their tokenizer."""

from pathlib import Path

from torch import Tensor

from fp8stack import data
from fp8stack.common.errors import UserError
from fp8stack.common.terminal import shell_quoted
from fp8stack.data.tokenizer import Tokenizer, alike, load_tokenizer
from fp8stack.model.config import load_config
from fp8stack.planning.run_config import RunConfig, training_preset
from fp8stack.training.run import RunData

MOST_OF_BYTES = 512
"""Up to this vocabulary (256 with padding), text without a tokenizer is read as bytes."""


def with_vocabulary(
    config: RunConfig, *, is_new: bool = True
) -> tuple[RunConfig, Tokenizer | None]:
    """The configuration of a run, and the tokenizer that it names, if any. The model of a new run
    has as many tokens as its data, or else as that tokenizer, unless the user gave a vocabulary or
    initial weights. Raises a UserError if the data cannot be read, and what `load_tokenizer`
    raises."""
    named = None if config.tokenizer is None else load_tokenizer(config.tokenizer)
    if not is_new or config.init_from or "vocabulary" in config.model_overrides:
        return config, named
    vocabulary = data.vocabulary_of(config.data)
    if vocabulary is None and named is not None:
        vocabulary = named.vocabulary
    if vocabulary in (None, load_config(config.model, config.model_overrides).vocabulary):
        return config, named
    overrides = {**config.model_overrides, "vocabulary": vocabulary}
    return config.model_copy(update={"model_overrides": overrides}), named


def read(
    config: RunConfig,
    vocabulary: int,
    context: int,
    named: Tokenizer | None,
    source: Path | None = None,
) -> RunData:
    """Open the data of a run, whose sequences have `context` tokens. Text is tokenized by `named`,
    the tokenizer that `config` names, else by `source`, the `tokenizer.json` of the initial
    weights, else by the model's tokenizer; as bytes for a model with about 256 tokens.

    Raises a UserError if the data cannot be used, or are tokens of another tokenizer.
    """
    texts = None
    if data.holds_text(config.data):
        texts = named or load_tokenizer(_name_for_texts(config, vocabulary, source))
    tokenizer = data.tokenizer_of(config.data, texts)
    if named is not None:
        if tokenizer is not None and not alike(tokenizer, named):
            raise UserError(
                f"--tokenizer {config.tokenizer} is not that of the data, {tokenizer.name}. Leave "
                "it out, or tokenize the text that they were made of: fp8stack prepare TEXT "
                f"--tokenizer {shell_quoted(config.tokenizer or '')} --out DIR"
            )
        tokenizer = named
    elif source is not None and tokenizer is not None and texts is None:
        _require_alike(tokenizer, source)
    if tokenizer is not None and tokenizer.vocabulary > vocabulary:
        raise UserError(
            f"The data's tokenizer, {tokenizer.name}, has {tokenizer.vocabulary} tokens; model "
            f"{config.model} has a vocabulary of {vocabulary}. Give --set "
            f"model.vocabulary={tokenizer.vocabulary}"
        )
    end = None if tokenizer is None else tokenizer.end_of_text
    train, validation = data.load_corpora(config.data, vocabulary, end_of_text=end, texts=texts)

    def windows(count: int) -> Tensor:
        sizes = {"count": count, "context": context, "vocabulary": vocabulary}
        return data.validation_windows(validation, **sizes, documents=config.document_mask)

    usual = windows(config.eval_windows)
    final = usual if config.final_eval_windows is None else windows(config.final_eval_windows)
    return RunData(
        train=train, validation=validation, windows=usual, final_windows=final, tokenizer=tokenizer
    )


def _name_for_texts(config: RunConfig, vocabulary: int, source: Path | None) -> str:
    """The name of the tokenizer of text for which `config` names none. Raises a UserError if
    nothing else names one."""
    name = None if source is None else str(source)
    name = name or ("bytes" if vocabulary <= MOST_OF_BYTES else None)
    name = name or training_preset(config.model).get("tokenizer")
    if name is not None:
        return str(name)
    text = shell_quoted(config.data or "TEXT")
    raise UserError(
        f"The data are text, and nothing names the tokenizer of model {config.model}, whose "
        f"vocabulary is {vocabulary}. Give --tokenizer PATH, a tokenizer.json, or --tokenizer "
        f"bytes to train on bytes; or make tokens first: fp8stack prepare {text} --tokenizer PATH "
        "--out tokens"
    )


def _require_alike(tokenizer: Tokenizer, source: Path) -> None:
    """Raise a UserError if the tokenizer of the data is not the one of the initial weights."""
    if not alike(tokenizer, load_tokenizer(str(source))):
        raise UserError(
            f"The data's tokenizer, {tokenizer.name}, is not that of the weights, {source}: their "
            f"ids mean other text. Tokenize with it: fp8stack prepare TEXT --tokenizer "
            f"{shell_quoted(str(source))} "
            "--out DIR; or train anyway, with the data's tokenizer as --tokenizer."
        )
