"""The command `fp8stack estimate`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

from fp8stack.cli import options
from fp8stack.cli.options import option
from fp8stack.common.errors import UserError
from fp8stack.common.terminal import show

if TYPE_CHECKING:
    from fp8stack.planning.duration import Duration
    from fp8stack.planning.estimate import Answer
    from fp8stack.planning.run_config import RunConfig
    from fp8stack.precision import Hardware

TOKENS = option("Also predict time, disk and loss of so many training tokens, such as 10B.")
PRICE = option("With --tokens: dollars per hour of a GPU. Example: 2.5")
RANKS = option("Number of ranks, such as GPUs. [1]", "--ranks", "--gpus", min=1)
MEMORY = option(
    "Memory in GiB for the largest batch, such as 80. [the machine's, if known]", min=2**-10
)


@options.takes_keys(
    *("model", "recipe", "batch", "context", "accumulate", "parallel", "optimizer"),
    *("activation_checkpointing", "backend"),
)
def estimate(
    flags: dict[str, Any],
    capability: Annotated[str | None, options.CAPABILITY] = None,
    gpu: Annotated[str | None, options.GPU] = None,
    te: Annotated[bool | None, options.TE] = None,
    memory: Annotated[float | None, MEMORY] = None,
    ranks: Annotated[int, RANKS] = 1,
    tokens: Annotated[str | None, TOKENS] = None,
    price: Annotated[float | None, PRICE] = None,
    phases: Annotated[str | None, options.PHASES] = None,
    config: Annotated[str | None, options.CONFIG] = None,
    set: Annotated[list[str] | None, options.SET] = None,
    json: Annotated[bool, option("Print JSON, in bytes.", "--json")] = False,
) -> None:
    """Estimate the memory of a run, part by part, and the largest batch that fits; with --tokens
    predict its time, cost, disk and loss as well."""
    flags |= {"phases": phases}
    from fp8stack.planning import duration as durations
    from fp8stack.planning import estimate as answers
    from fp8stack.planning.run_config import parse_config
    from fp8stack.precision.hardware import machine_for

    parsed = parse_config(config, flags, set or [])
    hardware = machine_for(capability, te, parsed.device, gpu)
    if price is not None and (tokens is None or not 0 < price < 1e6):
        raise UserError(f"--price {price:g}: give dollars per GPU hour, and --tokens beside.")
    work = None if tokens is None else _work(tokens, hardware)
    if work is not None and "steps" not in parsed.given:  # phases and warm-up depend on them
        flags["steps"] = _steps_of(work, parsed)
        parsed = parse_config(config, flags, set or [])
    estimated = answer(parsed, hardware, ranks, memory)
    predicted = [] if work is None else predict(parsed, estimated, ranks, work, price)
    if json:
        predictions = [durations.as_json(duration) for duration in predicted]
        more = {"predicted": predictions[0], "predictions": predictions} if predictions else {}
        options.print_json(answers.as_json(estimated) | more)
        return
    _show(estimated)
    if predicted:
        show("", *durations.sentences(predicted))


def _work(tokens: str, hardware: Hardware) -> int:
    """The number of training tokens. Raises a UserError for no number, and for a machine without a
    data sheet, whose time is not predicted."""
    from fp8stack.analysis.forecast.forecast import parse_tokens
    from fp8stack.precision.gpus import find_gpus

    count = parse_tokens(tokens)
    if hardware.device != "cuda" or not find_gpus(hardware.name):
        raise UserError(
            f"--tokens: time is predicted of known GPUs, not of {hardware}. Give --gpu."
        )
    return count


def _steps_of(tokens: int, config: RunConfig) -> int:
    """The steps of a run of so many training tokens."""
    from fp8stack.model.config import load_config
    from fp8stack.training.run_plans import context_of

    model = load_config(config.model, config.model_overrides)
    steps = max(1, math.ceil(tokens / (config.batch * context_of(config, model))))
    if steps > 2**31:
        raise UserError(f"--tokens: {tokens:,} are {steps:,} steps, more than a run can have.")
    return steps


def predict(
    config: RunConfig, estimated: Answer, ranks: int, tokens: int, price: float | None
) -> list[Duration]:
    """The duration of a run of `tokens` training tokens on `ranks` GPUs, of each kind that they may
    be, with the loss to expect. Raises a UserError as `predict_durations` does."""
    from dataclasses import replace

    from fp8stack.analysis.forecast.forecast import baseline_loss
    from fp8stack.model.config import load_config
    from fp8stack.planning.duration import predict_durations

    model = load_config(config.model, config.model_overrides)
    steps = sum(phase.steps for phase in estimated.phases)
    phases = [(phase.plan, phase.steps / steps) for phase in estimated.phases]
    settings: Any = {
        "gpus": ranks,
        "tokens": tokens,
        "steps": _steps_of(tokens, config),
        "price": price,
    }
    predicted = predict_durations(config, model, phases, **settings)
    loss = baseline_loss(model, tokens)
    return [replace(duration, loss=loss) for duration in predicted]


def answer(config: RunConfig, hardware: Hardware, ranks: int, memory_gib: float | None) -> Answer:
    """The memory of a run with this configuration on `ranks` machines like `hardware`, with the
    largest batch for `memory_gib`, by default the machine's. Raises the errors of building the
    run."""
    from fp8stack.common import presets
    from fp8stack.model.config import plan_for
    from fp8stack.planning.estimate import CHECKPOINTING, Answer, PhaseEstimate, memory_of
    from fp8stack.training.memory_check import Footprint
    from fp8stack.training.run_plans import plan_run, unwanted_backends, workload_of

    memory, whose = memory_of(hardware)
    if memory_gib is not None:
        memory, whose = round(memory_gib * 2**30), "--memory"
    planned = plan_run(config, hardware, ranks, will_train=False)
    config, trained = planned.config, planned.trained
    model, context = planned.model, planned.context
    share = config.accumulate * ranks
    sequences = config.batch // share
    footprint = Footprint(config, model, context, ranks)
    kinds = CHECKPOINTING if memory is not None else ()
    largest = {kind: share * footprint.largest(trained, kind, memory or 0) for kind in kinds}
    checkpointing, recipes = config.activation_checkpointing, {}
    work = workload_of(config, model, sequences * context, hardware)
    details: Any = {"work": work, "without": unwanted_backends(config)}
    for name in presets.training_recipes():  # with substitutions allowed
        plan = plan_for(model, name, hardware, config.backend, **details)
        (sole_phase,) = footprint.estimates([plan], checkpointing, sequences)
        recipes[name] = plan.precision, sole_phase.peak
    estimates = {kind: footprint.estimates(trained, kind, sequences) for kind in CHECKPOINTING}
    phases = tuple(
        PhaseEstimate(
            name=phase.name,
            steps=phase.last - phase.first + 1,
            plan=trained[place],
            estimates={kind: estimates[kind][place] for kind in CHECKPOINTING},
        )
        for place, phase in enumerate(planned.schedule.phases)
    )
    run: dict[str, str | int] = {"model": config.model, "parameters": model.parameters()}
    if model.experts is not None:
        run["active_parameters"] = model.active_parameters()
    run |= {
        "recipe": config.recipe,
        "batch": config.batch,
        "context": context,
        "accumulate": config.accumulate,
        "optimizer": config.optimizer,
        "activation_checkpointing": checkpointing,
    }
    if ranks > 1:
        run |= {"ranks": ranks, "parallel": config.parallel}
    return Answer(
        run=run,
        checkpointing=checkpointing,
        phases=phases,
        fp32_peak=recipes["fp32"][1],
        recipes={} if config.phases else recipes,
        memory=memory,
        memory_of=whose,
        largest=largest,
        micro_batches=footprint.fewest(trained, checkpointing, memory or 0),
    )


def _show(estimated: Answer) -> None:
    """Print tables, as Markdown unless on a terminal."""
    from fp8stack.common.screen import Screen
    from fp8stack.common.tables import markdown, rich_table
    from fp8stack.planning.estimate import sentences, tables

    console = Screen()
    show(", ".join(f"{key} {value}" for key, value in estimated.run.items()))
    show(*estimated.worst.plan.summary())
    for title, heads, rows in tables(estimated):
        show("")
        if console.is_terminal:
            console.print(rich_table(title, heads, rows))
        else:
            show(title, *markdown(heads, rows))
    show("", *sentences(estimated))
