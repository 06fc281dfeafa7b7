"""Whatever a file holds, it is taken or refused in one line; the long form is `python -m bench`."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import strategies as st

from tests.faults.input_corruptions import make_run
from tests.faults.input_fuzz import configs, data_files, fuzz, run_files

CONFIGS, DATA_FILES = configs(), data_files()
RUN_FILES = ("metrics.jsonl", "telemetry.jsonl", "plan.json", "run.toml", "rows", "manifests")


# Children are forked, and threads are not.
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("made"))


@pytest.mark.parametrize("name", CONFIGS)
def test_any_configuration_is_taken_or_refused_in_one_line(name: str, tmp_path: Path) -> None:
    assert fuzz(tmp_path, *CONFIGS[name], 50) >= 45


@pytest.mark.parametrize("name", DATA_FILES)
def test_any_data_are_taken_or_refused_in_one_line(name: str, tmp_path: Path) -> None:
    assert fuzz(tmp_path, *DATA_FILES[name], 200) >= 150


@pytest.mark.parametrize("name", RUN_FILES)
def test_any_file_of_a_run_is_read_or_refused_in_one_line(
    name: str, pristine: Path, tmp_path: Path
) -> None:
    assert fuzz(tmp_path, *run_files(pristine)[name], 15) >= 12


def test_an_error_that_is_not_for_users_is_not_let_by(tmp_path: Path) -> None:
    def fails(place: Path, value: int) -> None:
        raise KeyError(value)

    with pytest.raises(KeyError):
        fuzz(tmp_path, st.integers(), fails, 5)
