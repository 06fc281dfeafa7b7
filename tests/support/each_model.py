"""Hooks on the model of a run, which is built again where its recipe changes."""

from collections.abc import Callable

from fp8stack.training.run import Run


def on_each_model(run: Run, hook: Callable[[], object]) -> None:
    """Call `hook` now, and each time that the run has built its model again."""
    use = run.use

    def use_and_hook(index: int) -> None:
        use(index)
        hook()

    vars(run)["use"] = use_and_hook
    hook()
