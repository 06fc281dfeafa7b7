"""The amaxes that ranks which train one model share: each update takes their maximum over ranks.

Ranks make their collectives in the same order, so they must know which updates all of them make.
Under DistributedDataParallel, a pass whose backward pass sums gradients is matched by one of every
other rank; passes within `no_sync` need not be. So each rank tells, by the store, what kind of pass
it begins; the update after a pass within `no_sync` is made if all ranks have one. Else what was
recorded is kept for the next update. (Outside of DDP, ranks are taken to make the same passes.)
"""

from __future__ import annotations

import itertools
import weakref
import zlib
from collections import Counter, deque
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.parallel import DistributedDataParallel

from fp8stack.common.errors import UserError

Group = dist.ProcessGroup | Literal["world"] | None
"""The ranks that share a history: all, or none but this one if None."""

_MODELS: Counter[str] = Counter()  # how many models told their slots, by group
_KEYS = itertools.count()
_SHARING: weakref.WeakValueDictionary[str, SharedAmaxes] = weakref.WeakValueDictionary()
# Words in the store that a rank leaves there: its host is ahead of others' by far fewer passes.
_LEFT = 4096


def several_ranks() -> bool:
    """Whether this process trains with others."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class SharedAmaxes:
    """Reduces the amaxes of one model over the ranks of `group`.

    Attributes:
        slots: their names, which all ranks must have alike.
        key: names it to compiled code.
    """

    def __init__(self) -> None:
        self.group: Group = "world"
        self.slots: list[str] = []
        self._begin()

    def __getstate__(self) -> dict[str, Any]:
        return {"group": self.group, "slots": self.slots}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.group, self.slots = state["group"], state["slots"]
        self._begin()

    def _begin(self) -> None:
        self.key = str(next(_KEYS))
        _SHARING[self.key] = self
        self._prefix: str | None = None  # of this model in the store
        self._compared = False  # whether all ranks have the same slots
        self._pass: Literal["all", "no_sync", "join"] = "all"  # who makes the pass under way
        # Passes are counted from each that all make to the next.
        self._round = self._number = 0
        self._apart = False  # whether ranks are known to make other passes in this round
        self._checked = 0  # the pass of this round that all ranks are known to make
        self._told: deque[str] = deque()
        self._kept: Tensor | None = None

    @property
    def active(self) -> bool:
        """Whether there are ranks to share with."""
        return self.group is not None and several_ranks()

    def begin_pass(self) -> None:
        """Note that a pass begins that trains, after the update that was due."""
        if not self.active:
            return
        if self._prefix is None:
            self._announce()
        ddp: Any = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
        if ddp is None:
            self._pass = "all"
            return
        if ddp._join_config.enable:
            self._pass = "join"
            return
        if self._pass != "no_sync":
            self._round, self._number, self._checked = self._round + 1, 0, 0
            self._apart = False
        self._number += 1
        self._pass = "all" if ddp.require_backward_grad_sync else "no_sync"
        store, key = _get_default_store(), self._key(dist.get_rank())
        store.set(key, self._pass)
        self._told.append(key)
        if len(self._told) > _LEFT:
            store.delete_key(self._told.popleft())

    def reduce(self, recorded: Tensor) -> Tensor:
        """The maximum of `recorded`, float32 [slots], over ranks: of this update and those before
        it that ranks kept to themselves; zeros, if this is one of those.

        Raises:
            UserError: the ranks that share the history have not the same layers.
        """
        mine = recorded.clone() if self._kept is None else torch.maximum(recorded, self._kept)
        if self._pass == "no_sync" and not self._all_go_on():
            self._kept = mine
            return torch.zeros_like(recorded)
        self._kept = None
        if self._pass != "join":
            self._require_same_slots()
            dist.all_reduce(mine, dist.ReduceOp.MAX, group=self._ranks())
        return mine

    def agree(self, flag: Tensor) -> Tensor:
        """Whether `flag`, bool and 0-dim, is true on any of the ranks, which all call this."""
        if not self.active:
            return flag
        largest = flag.to(torch.int32)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._ranks())
        return largest.bool()

    def _all_go_on(self) -> bool:
        """Whether the pass with this number in its round is one within `no_sync` on all ranks."""
        if not self._apart and self._checked < self._number:
            kinds = self._kinds()
            self._apart, self._checked = b"all" in kinds, self._number
        return not self._apart

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{self._round}/{self._number}/{rank}"

    def _kinds(self) -> list[bytes]:
        """The kind of every rank's pass with this number."""
        ranks = dist.get_process_group_ranks(self._ranks())
        kinds: list[bytes] = _get_default_store().multi_get([self._key(rank) for rank in ranks])
        return kinds

    def _ranks(self) -> dist.ProcessGroup:
        group = dist.group.WORLD if self.group == "world" else self.group
        assert isinstance(group, dist.ProcessGroup)
        return group

    def _announce(self) -> None:
        """Tell the other ranks, before the first pass that trains, which slots are here. By the
        store and in no collective: stages of a pipeline wait for each other's passes."""
        name = self._ranks().group_name
        self._prefix = f"fp8stack/{name}/{_MODELS[name]}"
        _MODELS[name] += 1
        slots = zlib.crc32("\n".join(self.slots).encode())
        _get_default_store().set(f"{self._prefix}/{dist.get_rank()}", str(slots))

    def _require_same_slots(self) -> None:
        """Once, before the first collective: else different ranks would wait for ever."""
        if self._compared or self._prefix is None:
            return
        ranks = dist.get_process_group_ranks(self._ranks())
        slots = _get_default_store().multi_get([f"{self._prefix}/{rank}" for rank in ranks])
        self._compared = True
        if len(set(slots)) > 1:
            raise UserError(
                "Delayed scaling: the ranks that are to share amaxes have different layers, as in "
                "pipeline parallelism. Pass convert the group of the ranks that train the same "
                "layers as `amax_group`, such as mesh.get_group('dp'), or None if there is one."
            )


# An operator of its own, so that torch.compile leaves the collective where it is.
@torch.library.custom_op("fp8stack::reduce_amaxes", mutates_args=())
def _reduce_amaxes(recorded: Tensor, key: str) -> Tensor:
    """`SharedAmaxes.reduce` of the one with this `key`."""
    return _SHARING[key].reduce(recorded)


_reduce_amaxes.register_fake(lambda recorded, key: torch.empty_like(recorded))


def begin_pass(key: str) -> None:
    """`SharedAmaxes.begin_pass` of the one with this `key`."""
    _SHARING[key].begin_pass()
