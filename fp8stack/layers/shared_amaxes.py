"""Reduce the amaxes of ranks that train one model: each update takes the maximum over ranks.

Ranks must call their collectives in the same order, so they need to know which updates all of them
make. Under DistributedDataParallel, a pass whose backward pass reduces gradients runs on every
rank; a pass within `no_sync` may run on some ranks only. So each rank publishes in torch's store
what kind of pass it begins. After a pass within `no_sync`, amaxes are reduced if all ranks are in
such a pass, else they are kept for the next update. (Without DDP, all ranks are assumed to run the
same passes.)
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
"""The ranks that share a history; None if this rank shares it with no other."""

_MODELS: Counter[str] = Counter()  # the number of models that published their slots, by group
_KEYS = itertools.count()
_SHARING: weakref.WeakValueDictionary[str, SharedAmaxes] = weakref.WeakValueDictionary()
# A rank deletes its older keys in the store. Ranks differ by far fewer passes than this.
_MAX_KEYS = 4096


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
        self.key = str(next(_KEYS))
        _SHARING[self.key] = self
        self._prefix: str | None = None  # of this model's keys in the store
        self._compared = False  # whether all ranks have the same slots
        self._pass: Literal["all", "no_sync", "join"] = "all"  # the running pass
        # A round ends with a pass that all ranks run. Passes are numbered within their round.
        self._round = self._number = 0
        self._diverged = False  # whether some rank's passes in this round are known to differ
        self._matched_number = 0  # the last pass of this round whose kinds were compared
        self._published_keys: deque[str] = deque()
        self._unreduced: Tensor | None = None  # amaxes that wait for the next reduction

    @property
    def active(self) -> bool:
        """Whether there are ranks to share with."""
        return self.group is not None and several_ranks()

    def begin_pass(self) -> None:
        """Called when a training pass begins, after the pending update."""
        if not self.active:
            return
        if self._prefix is None:
            self._publish_slots()
        ddp: Any = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
        if ddp is None:
            self._pass = "all"
            return
        if ddp._join_config.enable:
            self._pass = "join"
            return
        if self._pass != "no_sync":
            self._round, self._number, self._matched_number = self._round + 1, 0, 0
            self._diverged = False
        self._number += 1
        self._pass = "all" if ddp.require_backward_grad_sync else "no_sync"
        store, key = _get_default_store(), self._key(dist.get_rank())
        store.set(key, self._pass)
        self._published_keys.append(key)
        if len(self._published_keys) > _MAX_KEYS:
            store.delete_key(self._published_keys.popleft())

    def reduce(self, recorded: Tensor) -> Tensor:
        """The maximum over ranks of `recorded`, float32 [slots], and of earlier amaxes that were
        not reduced. Zeros if ranks differ in their passes: then `recorded` is kept for the next
        call.

        Raises:
            UserError: the ranks that share the history do not have the same layers.
        """
        mine = (
            recorded.clone()
            if self._unreduced is None
            else torch.maximum(recorded, self._unreduced)
        )
        if self._pass == "no_sync" and not self._all_in_no_sync():
            self._unreduced = mine
            return torch.zeros_like(recorded)
        self._unreduced = None
        if self._pass != "join":
            self._require_same_slots()
            dist.all_reduce(mine, dist.ReduceOp.MAX, group=self._ranks())
        return mine

    def any_rank(self, flag: Tensor) -> Tensor:
        """Whether `flag`, bool and 0-dim, is true on any rank. All ranks must call this."""
        if not self.active:
            return flag
        largest = flag.to(torch.int32)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._ranks())
        return largest.bool()

    def _all_in_no_sync(self) -> bool:
        """Whether the current pass is within `no_sync` on all ranks."""
        if not self._diverged and self._matched_number < self._number:
            kinds = self._kinds()
            self._diverged, self._matched_number = b"all" in kinds, self._number
        return not self._diverged

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{self._round}/{self._number}/{rank}"

    def _kinds(self) -> list[bytes]:
        """The kind of each rank's pass with the current number."""
        ranks = dist.get_process_group_ranks(self._ranks())
        kinds: list[bytes] = _get_default_store().multi_get([self._key(rank) for rank in ranks])
        return kinds

    def _ranks(self) -> dist.ProcessGroup:
        group = dist.group.WORLD if self.group == "world" else self.group
        assert isinstance(group, dist.ProcessGroup)
        return group

    def _publish_slots(self) -> None:
        """Publish a hash of the slot names before the first training pass. In the store and not by
        a collective, because the stages of a pipeline wait for each other's passes."""
        name = self._ranks().group_name
        self._prefix = f"fp8stack/{name}/{_MODELS[name]}"
        _MODELS[name] += 1
        slots = zlib.crc32("\n".join(self.slots).encode())
        _get_default_store().set(f"{self._prefix}/{dist.get_rank()}", str(slots))

    def _require_same_slots(self) -> None:
        """Check, before the first collective, that all ranks have the same slots: else it would
        hang."""
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


# A custom operator, so that torch.compile does not move the collective.
@torch.library.custom_op("fp8stack::reduce_amaxes", mutates_args=())
def _reduce_amaxes(recorded: Tensor, key: str) -> Tensor:
    """Call `reduce` of the `SharedAmaxes` with this `key`."""
    return _SHARING[key].reduce(recorded)


_reduce_amaxes.register_fake(lambda recorded, key: torch.empty_like(recorded))


def begin_pass(key: str) -> None:
    """Call `begin_pass` of the `SharedAmaxes` with this `key`."""
    _SHARING[key].begin_pass()
