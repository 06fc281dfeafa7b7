"""The work of the runs of a comparison, and the time that it takes."""

from collections.abc import Mapping

from fp8stack.analysis.compare.gaps import about
from fp8stack.analysis.compare.settings import Comparison
from fp8stack.common.tables import counted
from fp8stack.model.config import load_config
from fp8stack.precision import probe
from fp8stack.training.metrics.throughput import peak_rate
from fp8stack.training.run_plans import context_of


def workload(comparison: Comparison, runs: Mapping[str, int], seconds: Mapping[str, float]) -> str:
    """A line on the cost of training `runs`, a number by recipe: their tokens and FLOPs, those of
    evaluations included, and their time. It is known if a run of each recipe took `seconds`; else
    it is at least the time at this machine's peak rates."""
    config = comparison.config
    model = load_config(config.model, config.model_overrides)
    context = context_of(config, model)
    windows = (config.steps - 1) // config.eval_every * config.eval_windows
    windows += config.last_eval_windows
    tokens = config.steps * config.batch * context
    # A forward pass is a third of a step.
    tflop = model.flops_per_token(context) * (tokens + windows * context / 3) / 1e12
    if runs.keys() <= seconds.keys():
        run_s = seconds
        time = "about {}, as earlier runs took"
    else:
        hardware = probe(config.device)
        rates = {name: peak_rate(hardware, comparison.plans[name]).tflops for name in runs}
        run_s = {name: tflop / rate for name, rate in rates.items() if rate}
        time = "{} or more, at the peak rates of this machine"
    total_s = sum(count * run_s.get(name, 0.0) for name, count in runs.items())
    count = sum(runs.values())
    return (
        f"{counted(count, 'run')} of {counted(config.steps, 'step')}: "
        f"{counted(count * tokens, 'token')}, {count * tflop:,.2g} TFLOP"
        + f"; {time.format(about(total_s))}"
        * (total_s > 0)
    )
