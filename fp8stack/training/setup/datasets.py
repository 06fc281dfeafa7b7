"""The data of a run: training and validation sets, and their tokenizer."""

from pathlib import Path

from fp8stack import data
from fp8stack.config import RunConfig, training_preset
from fp8stack.errors import UserError, quoted
from fp8stack.model.config import load_config
from fp8stack.terminal import shell_quoted
from fp8stack.tokenizer import NAMED, Tokenizer, TokenizerIdentity, alike, load_tokenizer
from fp8stack.training.run import RunData
from fp8stack.training.run_folder import RunFolder

MOST_OF_BYTES = 512
"""Up to this vocabulary (256 with padding), text without a tokenizer is read as bytes."""


def with_vocabulary(config: RunConfig) -> RunConfig:
    """The configuration of a new run whose model has as many tokens as its data's tokenizer, if
    that is known, unless the user gave a vocabulary or initial weights. Raises a UserError if the
    data or the tokenizer cannot be read."""
    if config.init_from or "vocabulary" in config.model_overrides:
        return config
    vocabulary = data.vocabulary_of(config.data)
    if vocabulary is None and config.tokenizer is not None:
        vocabulary = load_tokenizer(config.tokenizer).vocabulary
    if vocabulary in (None, load_config(config.model, config.model_overrides).vocabulary):
        return config
    overrides = {**config.model_overrides, "vocabulary": vocabulary}
    return config.model_copy(update={"model_overrides": overrides})


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


def tokenizer_of_run(
    run_or_checkpoint: str | Path, name: str | None, recorded: TokenizerIdentity | None
) -> Tokenizer | None:
    """The tokenizer of a run or checkpoint; None if it is unknown.

    Args:
        name: the tokenizer to use, a name or path; None: the run's own.
        recorded: the tokenizer that its checkpoint records; older ones record none.

    Raises:
        UserError: it cannot be loaded, or is not the tokenizer that the run was trained with.
    """
    path = Path(run_or_checkpoint)
    folder = path.parent.parent if path.parent.name == "checkpoints" else path
    file = RunFolder(folder).tokenizer
    if name is None:
        return own_tokenizer(file, recorded)
    named = load_tokenizer(name)
    trained_with = recorded
    if recorded is None and file.is_file():
        trained_with = load_tokenizer(str(file)).identity
    if trained_with is not None and not trained_with.is_alike(named.identity):
        raise UserError(
            f"{quoted(str(path))} was trained on tokens of {quoted(trained_with.name)}, not of "
            f"--tokenizer {quoted(name)}. Leave that out."
        )
    return named


def own_tokenizer(file: Path, recorded: TokenizerIdentity | None) -> Tokenizer | None:
    """The tokenizer in `file`, a run's `tokenizer.json`. None if there is no file and none is
    recorded. Without its file, a tokenizer that has a name is found by that. Raises a UserError if
    it is not the one `recorded`."""
    tokenizer = load_tokenizer(str(file)) if file.is_file() else None
    if recorded is None:
        return tokenizer
    if tokenizer is None and recorded.name in NAMED:
        tokenizer = load_tokenizer(recorded.name)
    if tokenizer is not None and tokenizer.sha256 == recorded.sha256:
        return tokenizer
    problem = "is missing" if tokenizer is None else f"is another one ({tokenizer.sha256[:8]})"
    raise UserError(
        f"{quoted(str(file))} {problem}: the run was trained on tokens of "
        f"{quoted(recorded.name)} ({recorded.sha256[:8]}). Put that file back, or name it by "
        "--tokenizer."
    )
