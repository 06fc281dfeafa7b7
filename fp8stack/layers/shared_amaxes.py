"""Reduce the amaxes of ranks that train one model: each update takes the maximum over ranks.

All ranks make the same training passes, so they call the collectives in the same order. Within
`DDP.join` some ranks make more passes: there, each rank keeps its own amaxes.
"""

from __future__ import annotations

import itertools
import weakref
import zlib
from collections import Counter
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.parallel import DistributedDataParallel

from fp8stack.common.errors import UserError

Group = dist.ProcessGroup | Literal["world"] | None
"""The ranks that share a history; None: this rank shares it with no other."""

_MODEL_COUNTS: Counter[str] = Counter()  # the number of models that published their slots, by group
_NEXT_KEY = itertools.count()
_BY_KEY: weakref.WeakValueDictionary[str, SharedAmaxes] = weakref.WeakValueDictionary()


def several_ranks() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class SharedAmaxes:
    """Reduces the amaxes of one model over the ranks of `group`.

    Attributes:
        slots: the names of the slots, which must be the same on all ranks.
        key: identifies this object in compiled code.
    """

    def __init__(self) -> None:
        self.group: Group = "world"
        self.slots: list[str] = []
        self._reset()

    def __getstate__(self) -> dict[str, Any]:
        return {"group": self.group, "slots": self.slots}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.group, self.slots = state["group"], state["slots"]
        self._reset()

    def _reset(self) -> None:
        self.key = str(next(_NEXT_KEY))
        _BY_KEY[self.key] = self
        self._prefix: str | None = None  # of this model's keys in torch's store
        self._compared = False  # whether all ranks have the same slots

    @property
    def active(self) -> bool:
        """Whether there are ranks to share with."""
        return self.group is not None and several_ranks()

    def publish_slots(self) -> None:
        """Publish a hash of the slots' names once, when the first training pass begins. Uses the
        store and no collective, because the stages of a pipeline wait for each other's passes."""
        if self._prefix is None and self.active:
            name = self._process_group().group_name
            self._prefix = f"fp8stack/{name}/{_MODEL_COUNTS[name]}"
            _MODEL_COUNTS[name] += 1
            slots_hash = zlib.crc32("\n".join(self.slots).encode())
            _get_default_store().set(f"{self._prefix}/{dist.get_rank()}", str(slots_hash))

    def reduce(self, recorded: Tensor) -> Tensor:
        """The maximum over ranks of `recorded`, float32 [slots].

        Raises:
            UserError: the ranks that share the history do not have the same layers.
        """
        maximum = recorded.clone()
        ddp: Any = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
        if ddp is None or not ddp._join_config.enable:
            self.publish_slots()
            self._require_same_slots()
            dist.all_reduce(maximum, dist.ReduceOp.MAX, group=self._process_group())
        return maximum

    def any_rank(self, flag: Tensor) -> Tensor:
        """Whether `flag`, bool and 0-dim, is true on any rank. All ranks must call this."""
        if not self.active:
            return flag
        maximum = flag.to(torch.int32)
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group=self._process_group())
        return maximum.bool()

    def _process_group(self) -> dist.ProcessGroup:
        group = dist.group.WORLD if self.group == "world" else self.group
        assert isinstance(group, dist.ProcessGroup)
        return group

    def _require_same_slots(self) -> None:
        """Check, before the first collective, that all ranks have the same slots: otherwise the
        collective would hang."""
        if self._compared:
            return
        ranks = dist.get_process_group_ranks(self._process_group())
        hashes = _get_default_store().multi_get([f"{self._prefix}/{rank}" for rank in ranks])
        self._compared = True
        if len(set(hashes)) > 1:
            raise UserError(
                "Delayed scaling: the ranks that are to share amaxes have different layers, as in "
                "pipeline parallelism. Pass convert the group of the ranks that train the same "
                "layers as `amax_group`, such as mesh.get_group('dp'), or None if there is one."
            )


# A custom operator, so that torch.compile does not move the collective.
@torch.library.custom_op("fp8stack::reduce_amaxes", mutates_args=())
def reduce_amaxes(recorded: Tensor, key: str) -> Tensor:
    """Call `reduce` of the `SharedAmaxes` with this `key`."""
    return _BY_KEY[key].reduce(recorded)


reduce_amaxes.register_fake(lambda recorded, key: torch.empty_like(recorded))
