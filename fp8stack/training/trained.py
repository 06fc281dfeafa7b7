"""A trained model to run: of a run, of a checkpoint, or of transformers."""

from pathlib import Path

from fp8stack.hf import path_in
from fp8stack.training.load import Trained, find_checkpoint, trained_run
from fp8stack.training.setup.init_from import find_source


def find_trained(name: str) -> Trained:
    """Find a trained model: of a run's newest usable checkpoint, one checkpoint, `hf:` and a folder
    that transformers saved, or `hf:owner/name[@revision]`. Raises what `find_source` and
    `find_checkpoint` raise."""
    if path_in(name) is None:
        checkpoint, path, passed_over = find_checkpoint(name)
        return trained_run(checkpoint, path, tuple(f"passed over: {why}" for why in passed_over))
    source = find_source(name)
    return Trained(
        path=Path(source.name),
        shape=source.shape,
        weights=source.weights,
        notes=source.notes,
        tokenizer=None if source.tokenizer is None else str(source.tokenizer),
    )
