"""A saved run, resumed as another than it is: what is refused, and with which words."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8stack.errors import UserError
from fp8stack.training.run import Run
from fp8stack.training.setup.start import set_up
from tests.faults.numeric.small_runs import small_run, trained


@dataclass(frozen=True)
class Other:
    """What a resumed run is asked to be, and the difference that is to be named."""

    keys: dict[str, Any]
    named: str


OTHERS = [
    Other({"recipe": "current"}, "recipe.scaling is 'current' here and 'delayed'"),
    Other({"recipe": "fp32"}, "recipe.scaling is 'none' here and 'delayed'"),
    Other({"recipe_overrides": {"margin": 1}}, "recipe.margin is 1 here and 0"),
    Other(
        {"recipe_overrides": {"history_length": 16}}, "recipe.history_length is 16 here and 1024"
    ),
    Other({"model_overrides": {"vocabulary": 300}}, "model.vocabulary is 300 here and 256"),
    Other({"model_overrides": {"layers": 2}}, "model.layers is 2 here and 1"),
    Other({"model_overrides": {"activation": "gelu"}}, "model.activation is 'gelu' here"),
    Other({"data": "other.txt"}, "the data are not those that the run was trained on"),
    Other({"seed": 3}, "seed is 3 here and 0"),
    Other({"batch": 8}, "batch is 8 here and 4"),
    Other({"context": 16}, "context is 16 here and 32"),
    Other({"lr": 0.1}, "lr is 0.1 here and 0.003"),
    Other({"accumulate": 2}, "accumulate is 2 here and 1"),
    Other({"schedule": "wsd"}, "schedule is 'wsd' here and 'cosine'"),
    Other({"warmup_steps": 5}, "warmup_steps is 5 here and 2"),
    Other({"decay_fraction": 0.5}, "decay_fraction is 0.5 here and 0.2"),
    Other({"min_lr": 0.5}, "min_lr is 0.5 here and 0.1"),
    Other({"weight_decay": 0.0}, "weight_decay is 0.0 here and 0.1"),
    Other({"beta1": 0.8}, "beta1 is 0.8 here and 0.9"),
    Other({"beta2": 0.99}, "beta2 is 0.99 here and 0.95"),
    Other({"adam_eps": 1e-6}, "adam_eps is 1e-06 here and 1e-08"),
    Other({"clip": 0.5}, "clip is 0.5 here and 1.0"),
    Other({"clip_mode": "value"}, "clip_mode is 'value' here and 'norm'"),
    Other({"clip_percentile": 90.0}, "clip_percentile is 90.0 here and 95.0"),
    Other({"clip_window": 50}, "clip_window is 50 here and 100"),
    Other({"optimizer": "muon"}, "optimizer is 'muon' here and 'adamw'"),
    Other({"loss_scale": 8.0}, "loss_scale is 8.0 here and None"),
    Other({"first_loss_scale": 8.0}, "first_loss_scale is 8.0 here and 65536.0"),
    Other({"loss_scale_interval": 9}, "loss_scale_interval is 9 here and 2000"),
    Other({"loss_scale_growth": 4.0}, "loss_scale_growth is 4.0 here and 2.0"),
    Other({"loss_scale_backoff": 0.25}, "loss_scale_backoff is 0.25 here and 0.5"),
    Other({"min_loss_scale": 2.0}, "min_loss_scale is 2.0 here and 1.0"),
    Other({"max_loss_scale": 1e6}, "max_loss_scale is 1000000.0 here and 262144.0"),
    Other({"momentum": 0.5}, "momentum is 0.5 here and 0.9"),
    Other({"grad_compression": "bf16"}, "grad_compression is 'bf16' here and 'none'"),
    Other({"phases": "default"}, "phases is"),
    Other({"data_order": "epochs"}, "data_order is 'epochs' here and 'random'"),
    Other({"document_mask": True}, "document_mask is True here and False"),
    Other({"calibration_steps": 3}, "calibration_steps is 3 here and 16"),
]


def saved_run(folder: Path) -> Path:
    """A run in delayed scaling of four steps, saved."""
    run = small_run(folder, "saved", "delayed", steps=4)
    trained(run)
    (folder / "other.txt").write_text("some other text\n" * 500)
    return run.folder.path


def resumed_as(saved: Path, keys: dict[str, Any]) -> Run:
    """The saved run, resumed with some keys changed. Raises what `set_up` raises."""
    shape = {"layers": 1, "heads": 2, "width": 32}
    given = {key: value for key, value in keys.items() if key != "model_overrides"}
    if "data" in given:
        given["data"] = str(saved.parent / given["data"])
    if "model_overrides" in keys:
        given["model_overrides"] = shape | keys["model_overrides"]
    return set_up(given, None, [], str(saved))


def refusal(saved: Path, other: Other) -> str:
    """What is wrong with how a wrong resumption was answered; empty if nothing is."""
    before = _contents(saved)
    try:
        resumed_as(saved, other.keys).folder.release()
    except UserError as error:
        text = str(error)
        if error.exit_code != 2 or "\n" in text or other.named not in text:
            return f"exit code {error.exit_code}: {text}"
        return "" if _contents(saved) == before else "the run's files were changed"
    return "the run was resumed"


def _contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
