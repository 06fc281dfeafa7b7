"""Sharded checkpoints: reading them with another number of ranks, and comparing such runs."""

import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from fp8stack.common.errors import UserError
from fp8stack.training.checkpoint import reader as checkpoints
from fp8stack.training.checkpoint.sharded import (
    SharedGroup,
    file_of,
    write_rows,
)
from tests.conftest import Command, metrics
from tests.faults.processes import last_step, run_ranks, tensors
from tests.faults.rank_rows import ODD
from tests.faults.twins import SMALL, TEXT
from tests.support.small_loop import changed

# The content of a checkpoint of FSDP2's ranks


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run `r` of 6 steps by 3 ranks with FSDP2, saved after steps 3 and 6, whose
    vocabulary is padded and whose widths no 3 ranks share equally; and `one`, like it by one."""
    folder = tmp_path_factory.mktemp("shared")
    (folder / "text.txt").write_text(TEXT)
    for name, count in (("one", 1), ("r", 3)):
        words = ["pretrain", *_flags(), "--steps", "6", "--out", name]
        ended = run_ranks([*words, "--parallel", "fsdp"], folder, count)
        assert [rank.code for rank in ended] == [0] * count, ended
    return folder


def _flags() -> list[str]:
    small = [*SMALL, *ODD, "--batch", "6", "--save-every", "3", "--set", "sample_tokens=0"]
    return ["--data", "text.txt", "--recipe", "delayed", "--backend", "torch", *small]


@pytest.fixture
def run(shared: Path, tmp_path: Path, command: Command) -> Path:
    """A copy of that run, where commands run."""
    shutil.copytree(shared / "r", tmp_path / "r")
    shutil.copy(shared / "text.txt", tmp_path)
    return tmp_path / "r"


def _newest(run: Path) -> Path:
    return checkpoints.candidates(run / "checkpoints")[0]


@pytest.mark.full
def test_each_rank_writes_its_rows_and_the_main_one_the_rest(shared):
    saved = _newest(shared / "r")
    for group in ("model", "optimizer"):
        files = sorted(path.name for path in (saved / group).iterdir())
        assert files == [file_of(rank) for rank in range(3)]
    weight = [load_file(saved / "model" / file_of(r))["lm_head.weight"] for r in range(3)]
    assert [len(rows) for rows in weight] == [91, 91, 257 - 182]  # 272 rows, less the padding
    assert "lm_head.weight.step" in load_file(saved / "optimizer" / file_of(0))
    assert "lm_head.weight.step" not in load_file(saved / "optimizer" / file_of(1))
    by_one_rank = _newest(shared / "one")
    sharded, unsharded = tensors(saved), tensors(by_one_rank)
    assert {k: (v.shape, v.dtype) for k, v in sharded.items() if not k.startswith("rng")} == {
        k: (v.shape, v.dtype) for k, v in unsharded.items() if not k.startswith("rng")
    }


@pytest.mark.full
def test_three_ranks_share_rows_that_they_cannot_share_equally(shared):
    three_ranks, one_rank = ([row["loss"] for row in metrics(shared / run)] for run in ("r", "one"))
    assert three_ranks[0] == pytest.approx(one_rank[0], rel=1e-5)
    assert three_ranks == pytest.approx(one_rank, rel=5e-3)


@pytest.mark.full
def test_torchs_own_reader_reads_what_ranks_wrote(shared):
    saved = _newest(shared / "r")
    saved_tensors = tensors(saved)
    for group in ("model", "optimizer"):
        written = {
            name.removeprefix(f"{group}:"): of
            for name, of in saved_tensors.items()
            if name.startswith(f"{group}:")
        }
        into = {name: torch.full_like(of, -1) for name, of in written.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp_load(into, storage_reader=HuggingFaceStorageReader(str(saved / group)))
        assert changed(into, written) == []


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def _swap(file: Path) -> None:
    main_file = file.with_name(file_of(0))
    mine, main_bytes = file.read_bytes(), main_file.read_bytes()
    file.write_bytes(main_bytes)
    main_file.write_bytes(mine)


def _add(file: Path) -> None:
    shutil.copy(file, file.with_name(file_of(7)))


@pytest.mark.full
@pytest.mark.parametrize("damage", [_flip, Path.unlink, _swap, _add])
@pytest.mark.parametrize("group", ["model", "optimizer"])
def test_a_damaged_shard_is_named(damage, group, shared, tmp_path):
    saved = Path(shutil.copytree(_newest(shared / "r"), tmp_path / "step-000006"))
    damage(saved / group / file_of(1))
    named = {_add: file_of(7), _swap: file_of(0)}.get(damage, file_of(1))
    with pytest.raises(UserError, match=named):
        checkpoints.load(saved)


@pytest.mark.full
def test_with_a_damaged_shard_the_checkpoint_before_is_taken_and_with_all_damaged_none(
    run, command, refused, capsys
):
    _flip(_newest(run) / "optimizer" / file_of(1))
    assert command("pretrain", "--resume", "r", "--steps", "6") == 0
    printed = capsys.readouterr().out
    for piece in ("resumed from", "step-000003", file_of(1)):
        assert piece in printed
    assert last_step(run) == 6
    for saved in checkpoints.candidates(run / "checkpoints"):
        checkpoints.load(saved)
        for file in saved.rglob("*.safetensors"):
            _flip(file)
    refused("pretrain", "--resume", "r", code=3)


WHOLE = torch.arange(10.0).view(5, 2)


def _written(folder: Path, *chunks: tuple[int, Tensor]) -> SharedGroup:
    """Files, each with some rows of a tensor `a` and which the first of them is."""
    for rank, (first, rows) in enumerate(chunks):
        write_rows(folder / file_of(rank), {"a": rows}, {"a": first})
    return SharedGroup(folder, {file_of(rank) for rank in range(len(chunks))})


@pytest.mark.parametrize(
    "rows",
    [
        [(0, 3), (2, 5)],
        [(0, 3), (4, 5)],
        [(0, 3), (2, 3), (4, 5)],  # as many as the whole has
        [(1, 5)],
    ],
)
def test_rows_that_make_no_whole_are_refused(rows, tmp_path):
    group = _written(tmp_path, *((first, WHOLE[first:end]) for first, end in rows))
    with pytest.raises(UserError, match="holds only parts of 'a', or some twice"):
        group["a"]


@pytest.mark.parametrize("rows", [[(0, 3), (3, 5)], [(0, 5)], [(0, 1), (1, 1), (1, 5)]])
def test_rows_that_follow_each_other_are_read(rows, tmp_path):
    group = _written(tmp_path, *((first, WHOLE[first:end]) for first, end in rows))
    assert list(group) == ["a"]
    assert torch.equal(group["a"], WHOLE)


def test_what_is_no_shard_is_refused_by_name(tmp_path):
    (tmp_path / file_of(0)).write_bytes(b"\x08\0\0\0\0\0\0\0no JSON.")
    with pytest.raises(UserError, match="holds no shards of tensors"):
        SharedGroup(tmp_path, {file_of(0)})
    with pytest.raises(UserError, match=r"does not belong to the checkpoint"):
        SharedGroup(tmp_path, set())
