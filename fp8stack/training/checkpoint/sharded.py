"""Tensors that ranks shard by rows: the rows of a rank, and the files of the shards.

A sharded group of a checkpoint is a folder with one file per rank, in the layout of
torch.distributed.checkpoint's safetensors storage. torch's reader reads any rows from these files,
so a run may resume with another number of ranks. Nothing is pickled. (torch's writer is not used:
it cannot leave out the rows that pad a vocabulary, nor write copies of a GPU's rows in the
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

from fp8stack.common.errors import UserError
from fp8stack.layers.fsdp import local_shard

# The metadata keys of torch 2.13's writer.
_HEADER, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"


def first_row(tensor: Tensor) -> int:
    """The index, in the full tensor, of this rank's first row."""
    if not isinstance(tensor, DTensor) or not tensor.ndim:
        return 0
    shape, mesh = tensor.shape, tensor.device_mesh
    _, offsets = compute_local_shape_and_global_offset(shape, mesh, tensor.placements)
    return offsets[0]


def copy_into(into: Tensor, values: Tensor) -> None:
    """Copy `values`, a full tensor or a DTensor sharded as `into`, into `into`; every rank copies
    its own rows."""
    if isinstance(into, DTensor) and not isinstance(values, DTensor):
        values = values.to(into.to_local().device)
        values = distribute_tensor(values, into.device_mesh, into.placements, src_data_rank=None)
    local_shard(into).copy_(local_shard(values))


def file_of(rank: int) -> str:
    """The name of the file of a rank."""
    return f"shard-{rank + 1:05}-model-00001-of-00001.safetensors"


def write_rows(file: Path, tensors: Mapping[str, Tensor], first_rows: Mapping[str, int]) -> None:
    """Write this rank's rows of `tensors`; `first_rows` has the index of the first row of each, in
    the full tensor."""
    rows = {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in tensors.items()
        if tensor.numel()
    }
    offsets = {
        name: {_OFFSETS: [first_rows.get(name, 0), *[0] * (tensor.ndim - 1)][: tensor.ndim]}
        for name, tensor in rows.items()
    }
    safetensors.torch.save_file(rows, file, metadata={_HEADER: json.dumps(offsets)})


class SharedGroup(Mapping[str, Tensor]):
    """The named tensors in the shard `files` of a folder, each read on access. Raises a UserError
    if the files are not shards, or if the folder holds other safetensors files."""

    def __init__(self, folder: Path, files: Set[str]) -> None:
        self.folder, self.files = folder, files
        if odd := {path.name for path in folder.glob("*.safetensors")} - files:
            raise UserError(f"{folder / min(odd)} does not belong to the checkpoint.")
        self._reader = _Reader(str(folder))
        try:
            metadata = self._reader.read_metadata().state_dict_metadata
        except Exception as error:  # torch's reader does not check what it reads
            raise UserError(f"{folder} holds no shards of tensors: {error}.") from error
        kind = TensorStorageMetadata
        self._tensors = {
            name: tensor for name, tensor in metadata.items() if isinstance(tensor, kind)
        }

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, name: str) -> Tensor:
        """The full tensor. Raises a UserError if rows are missing or stored twice."""
        metadata = self._tensors[name]
        return self._read(name, torch.empty(metadata.size, dtype=metadata.properties.dtype))

    def like(self, name: str, like: Tensor) -> Tensor:
        """The tensor `name`, sharded as `like` if the shapes are equal; else the full tensor."""
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


def _is_whole(tensor: TensorStorageMetadata) -> bool:
    """Whether the chunks of a tensor hold consecutive rows, from the first to the last: torch's
    reader does not notice missing rows."""
    row, widths = 0, tensor.size[1:]
    for chunk in sorted(tensor.chunks, key=lambda chunk: tuple(chunk.offsets)):
        place = (row, *[0] * len(widths))[: len(tensor.size)]
        if tuple(chunk.offsets) != place or chunk.sizes[1:] != widths:
            return False
        row += chunk.sizes[0] if tensor.size else 1
    return row == (tensor.size[0] if tensor.size else 1)


class _Reader(HuggingFaceStorageReader):
    """torch's reader, but it reads the metadata once and not for every tensor."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata()
        return self._metadata
