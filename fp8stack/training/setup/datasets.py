"""The data of a run: training and validation sets, and their tokenizer."""

from pathlib import Path

from fp8stack import data
from fp8stack.config import RunConfig, training_preset
from fp8stack.errors import UserError, quoted
from fp8stack.terminal import shell_quoted
from fp8stack.tokenizer import Tokenizer, alike, load_tokenizer
from fp8stack.training.run import RunData
from fp8stack.training.run_folder import RunFolder

MOST_OF_BYTES = 512
"""Up to this vocabulary (256 with padding), text without a tokenizer is read as bytes."""


def read(config: RunConfig, vocabulary: int, context: int, source: Path | None = None) -> RunData:
    """Open the data of a run, whose sequences have `context` tokens. Text is tokenized by the
    tokenizer that `config` names, else by `source`, the `tokenizer.json` of the initial weights,
    else by that of the model; as bytes for a model with about 256 tokens.

    Raises a UserError if the data cannot be used, or are tokens of another tokenizer.
    """
    texts = _for_texts(config, vocabulary, source) if data.holds_text(config.data) else None
    tokenizer = _tokenizer(config, vocabulary, texts, source)
    end = None if tokenizer is None else tokenizer.end_of_text
    train, validation = data.load_corpora(config.data, vocabulary, end_of_text=end, texts=texts)
    sizes = {"count": config.eval_windows, "context": context, "vocabulary": vocabulary}
    windows = data.validation_windows(validation, **sizes, documents=config.document_mask)
    return RunData(train=train, validation=validation, windows=windows, tokenizer=tokenizer)


def _for_texts(config: RunConfig, vocabulary: int, source: Path | None) -> Tokenizer:
    name = config.tokenizer or (None if source is None else str(source))
    name = name or ("bytes" if vocabulary <= MOST_OF_BYTES else None)
    name = name or training_preset(config.model).get("tokenizer")
    if name is not None:
        return load_tokenizer(name)
    text = shell_quoted(config.data or "TEXT")
    raise UserError(
        f"The data are text, and nothing names the tokenizer of model {config.model}, whose "
        f"vocabulary is {vocabulary}. Give --tokenizer PATH, a tokenizer.json, or --tokenizer "
        f"bytes to train on bytes; or make tokens first: fp8stack prepare {text} --tokenizer PATH "
        "--out tokens"
    )


def _tokenizer(
    config: RunConfig, vocabulary: int, texts: Tokenizer | None, source: Path | None
) -> Tokenizer | None:
    """The tokenizer of the run's data, `texts` for text; None if neither the data nor `config`
    names one. Raises a UserError if it cannot be loaded, has more tokens than the model's
    vocabulary, or differs from that of `config` or, if it names none, from that of the initial
    weights."""
    found = data.tokenizer_of(config.data, texts)
    if config.tokenizer is not None:
        asked = load_tokenizer(config.tokenizer)
        if found is not None and not alike(found, asked):
            raise UserError(
                f"--tokenizer {config.tokenizer} is not that of the data, {found.name}. Leave it "
                f"out, or tokenize them: fp8stack prepare "
                f"{shell_quoted(config.data or 'TEXT')} --tokenizer "
                f"{shell_quoted(config.tokenizer)} --out DIR"
            )
        found = asked
    elif source is not None and found is not None and not alike(found, load_tokenizer(str(source))):
        raise UserError(
            f"The data's tokenizer, {found.name}, is not that of the weights, {source}: their ids "
            f"mean other text. Tokenize with it: fp8stack prepare TEXT --tokenizer "
            f"{shell_quoted(str(source))} "
            "--out DIR; or train anyway, with the data's tokenizer as --tokenizer."
        )
    if found is not None and found.vocabulary > vocabulary:
        raise UserError(
            f"The data's tokenizer, {found.name}, has {found.vocabulary} tokens; model "
            f"{config.model} has a vocabulary of {vocabulary}. Give --set "
            f"model.vocabulary={found.vocabulary}"
        )
    return found


def tokenizer_of_run(run_or_checkpoint: str | Path, name: str | None = None) -> Tokenizer | None:
    """The tokenizer of a run or checkpoint if it is known, else the one called `name`. Raises a
    UserError if it cannot be loaded, or `name` is not the run's."""
    path = Path(run_or_checkpoint)
    folder = path.parent.parent if path.parent.name == "checkpoints" else path
    file = RunFolder(folder).tokenizer
    own = load_tokenizer(str(file)) if file.is_file() else None
    if name is None:
        return own
    asked = load_tokenizer(name)
    if own is not None and not alike(own, asked):
        raise UserError(
            f"{quoted(str(path))} was trained on tokens of {own.name}, not of --tokenizer "
            f"{quoted(name)}. Leave that out."
        )
    return asked
