"""Tensors that ranks share out, by rows: which rows are here, and their files.

A group of a checkpoint is then a folder with one file per rank, in the layout of
torch.distributed.checkpoint's safetensors storage, whose reader takes from them whatever rows are
asked for: so a run may go on with another number of ranks. Nothing is pickled. (Its writer is not
used: it cannot leave out the rows that pad a vocabulary, nor write copies of a GPU's rows in the
background.)
"""

import json
import warnings
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fp8stack.backends.fsdp import local_shard
from fp8stack.errors import UserError

# What torch 2.13's writer calls them.
_HEADER, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"


def first_row(tensor: Tensor) -> int:
    """The index of this rank's first row in the whole tensor."""
    if not isinstance(tensor, DTensor) or not tensor.ndim:
        return 0
    shape, mesh = tensor.shape, tensor.device_mesh
    _, offsets = compute_local_shape_and_global_offset(shape, mesh, tensor.placements)
    return offsets[0]


def copy_into(into: Tensor, values: Tensor) -> None:
    """Copy `values`, the whole or DTensors of the same rows, into `into`: each rank its rows."""
    if isinstance(into, DTensor) and not isinstance(values, DTensor):
        values = values.to(into.to_local().device)
        values = distribute_tensor(values, into.device_mesh, into.placements, src_data_rank=None)
    local_shard(into).copy_(local_shard(values))


def file_of(rank: int) -> str:
    """The name of a rank's file."""
    return f"shard-{rank + 1:05}-model-00001-of-00001.safetensors"


def write_rows(file: Path, tensors: Mapping[str, Tensor], first_rows: Mapping[str, int]) -> None:
    """Write the rows of this rank, each tensor's beginning at that row of the whole."""
    rows = {name: of.detach().cpu().contiguous() for name, of in tensors.items() if of.numel()}
    offsets = {
        name: {_OFFSETS: [first_rows.get(name, 0), *[0] * (of.ndim - 1)][: of.ndim]}
        for name, of in rows.items()
    }
    safetensors.torch.save_file(rows, file, metadata={_HEADER: json.dumps(offsets)})


class SharedGroup(Mapping[str, Tensor]):
    """The named tensors of the `files` in a folder that ranks wrote, read one at a time when asked
    for. Raises a UserError if the files are not what ranks write, or there are others."""

    def __init__(self, folder: Path, files: Set[str]) -> None:
        self.folder = folder
        if odd := {path.name for path in folder.glob("*.safetensors")} - files:
            raise UserError(f"{folder / min(odd)} does not belong to the checkpoint.")
        self._reader = _Reader(str(folder))
        try:
            found = self._reader.read_metadata().state_dict_metadata
        except Exception as error:  # torch's reader expects what its writer writes
            raise UserError(f"{folder} holds no shards of tensors: {error}.") from error
        kind = TensorStorageMetadata
        self._tensors = {name: of for name, of in found.items() if isinstance(of, kind)}

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, name: str) -> Tensor:
        """The whole of a tensor. Raises a UserError if its rows do not make a whole."""
        of = self._tensors[name]
        return self._read(name, torch.empty(of.size, dtype=of.properties.dtype))

    def like(self, name: str, like: Tensor) -> Tensor:
        """A tensor, shared out as `like` if it has the same shape; else the whole, as by `[]`."""
        if isinstance(like, DTensor) and like.shape == self._tensors[name].size:
            return self._read(name, torch.empty_like(like, device=like.to_local().device))
        return self[name]

    def _read(self, name: str, into: Tensor) -> Tensor:
        if not _is_whole(self._tensors[name]):
            raise UserError(f"{self.folder} holds only parts of '{name}', or some twice.")
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                load({name: into}, storage_reader=self._reader, no_dist=True)
        except (
            *(CheckpointException, SafetensorError, AssertionError),
            *(KeyError, IndexError, ValueError, RuntimeError, OSError),
        ) as error:
            raise UserError(f"{self.folder}: '{name}' cannot be read from its shards.") from error
        return into


def _is_whole(of: TensorStorageMetadata) -> bool:
    """Whether the parts of a tensor are rows that follow each other, from the first to the last:
    torch's reader would leave out what is missing."""
    row, widths = 0, of.size[1:]
    for part in sorted(of.chunks, key=lambda part: tuple(part.offsets)):
        place = (row, *[0] * len(widths))[: len(of.size)]
        if tuple(part.offsets) != place or part.sizes[1:] != widths:
            return False
        row += part.sizes[0] if of.size else 1
    return row == (of.size[0] if of.size else 1)


class _Reader(HuggingFaceStorageReader):
    """torch's reader, which looks at the files once and not for every tensor."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._found: Metadata | None = None

    def read_metadata(self) -> Metadata:
        if self._found is None:
            self._found = super().read_metadata()
        return self._found
