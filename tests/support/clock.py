"""Clocks that no other process moves, for tests of what is timed."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, cycle, repeat
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from fp8stack.analysis.benchmark.timing import Timing, interleaved


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def arm(self, *seconds: float, over_and_over: bool = False) -> Callable[[], None]:
        """An arm that takes these seconds in turn, the last from then on or all of them again."""
        durations = cycle(seconds) if over_and_over else chain(seconds, repeat(seconds[-1]))

        def call() -> None:
            self.now += next(durations)

        return call


def timed(arms: Mapping[str, Sequence[float]], rounds: int = 20) -> dict[str, Timing]:
    """Timings of arms that take so many seconds in their rounds, over and over."""
    clock = Clock()
    calls = {name: clock.arm(*seconds, over_and_over=True) for name, seconds in arms.items()}
    return interleaved(calls, rounds=rounds, warm_up=0, clock=clock)


class Operations(TorchDispatchMode):
    """Counts the operators that torch runs."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))
