"""A run is resumed as what it is: what differs is refused and named, what may change goes through.

Which checkpoint is taken, and what of a damaged one, is in test_resume.py.
"""

from pathlib import Path
from typing import Any

import pytest

from fp8stack.planning.run_config import FREE_ON_RESUME, RunConfig
from tests.faults.numeric.other_runs import OTHERS, refusal, resumed_as, saved_run

# Begins a new run: on a resumed one there is nothing to begin.
NOT_TRIED = {"init_from"}

FREE: list[dict[str, Any]] = [
    {"steps": 6}, {"log_every": 3}, {"eval_every": 5}, {"eval_windows": 2}, {"save_every": 3},
    {"final_eval_windows": 2},
    {"keep_checkpoints": 3}, {"sample_tokens": 4}, {"sample_prompt": "to"}, {"temperature": 0.5},
    {"workers": 1}, {"deterministic": False}, {"telemetry_every": 7},
    {"telemetry_every": 7, "what_if": ["mxfp8"]}, {"guard": {"patience": 7}}, {"strict": False},
    {"activation_checkpointing": "block"}, {"backend": "torch"},
    {"accumulate": 2},
]  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in delayed scaling of four steps."""
    return saved_run(tmp_path_factory.mktemp("other"))


@pytest.mark.parametrize("change", OTHERS, ids=lambda change: str(change.keys))
def test_a_run_that_differs_is_refused_and_the_difference_named(change, saved):
    assert refusal(saved, change) == ""


def test_every_key_that_may_not_change_is_tried():
    tried = {key for change in OTHERS for key in change.keys}
    fixed = set(RunConfig.model_fields) - FREE_ON_RESUME
    assert fixed <= tried | NOT_TRIED


@pytest.mark.parametrize("keys", FREE, ids=str)
def test_what_may_change_goes_through(keys, saved):
    assert keys.keys() <= FREE_ON_RESUME
    run = resumed_as(saved, keys)
    run.folder.release()
    assert run.step == 4
    assert ("accumulate 1 -> 2: losses may differ" in run.notes) == ("accumulate" in keys)
    config = run.config.model_dump()
    for key, value in keys.items():
        if key == "guard":
            assert config[key] | value == config[key]
        else:
            assert config[key] == (tuple(value) if isinstance(value, list) else value)
