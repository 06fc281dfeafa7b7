"""`fp8stack estimate`: it parses, calls and prints; what it calculates is in `estimate/`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from fp8stack.cli_options import option

if TYPE_CHECKING:
    from fp8stack.estimate import Estimate
    from fp8stack.estimate.answer import Answer
    from fp8stack.model import GPTConfig, Recompute
    from fp8stack.precision import Hardware, Plan
    from fp8stack.training.config import RunConfig


def estimate(
    model: Annotated[str | None, option("Model preset or TOML file. [gpt-nano]")] = None,
    recipe: Annotated[str | None, option("Precision recipe or TOML file. [auto]")] = None,
    batch: Annotated[int | None, option("Sequences per step, globally. [8]")] = None,
    context: Annotated[int | None, option("Tokens per sequence. [the model's]")] = None,
    accumulate: Annotated[int | None, option("Micro-batches per step. [1]")] = None,
    capability: Annotated[
        str | None,
        option("For a GPU of this compute capability (9.0), or a CPU (none). [this machine]"),
    ] = None,
    te: Annotated[
        bool | None,
        option("With --capability: is Transformer Engine installed there? [yes]", "--te/--no-te"),
    ] = None,
    memory: Annotated[
        float | None, option("GiB of memory, for the largest batch. [the machine's, if known]")
    ] = None,
    ranks: Annotated[int, option("How many ranks train together. [1]", min=1)] = 1,
    parallel: Annotated[str | None, option("Several ranks: ddp or fsdp. [ddp]")] = None,
    optimizer: Annotated[
        str | None, option("adamw, sgd, muon, adamw8bit or adamwfp8. [adamw]")
    ] = None,
    activation_checkpointing: Annotated[
        str | None, option("What runs again in backward: none, selective, block. [none]")
    ] = None,
    phases: Annotated[
        str | None, option("Recipes by phase: conservative, default or aggressive.")
    ] = None,
    backend: Annotated[
        str | None, option("Who computes: auto, te, torch, emulate, reference. [auto]")
    ] = None,
    config: Annotated[str | None, option("Run file (TOML) with the same keys; flags win.")] = None,
    set: Annotated[
        list[str] | None, option("Any other key of a run: --set key=value, as often as needed.")
    ] = None,
    json: Annotated[bool, option("Print JSON, in bytes.", "--json")] = False,
) -> None:
    """How much memory a run would take, part by part, and the largest batch that fits."""
    flags: dict[str, Any] = {"model": model, "recipe": recipe, "batch": batch, "context": context}
    flags |= {"accumulate": accumulate, "parallel": parallel, "optimizer": optimizer}
    flags |= {"activation_checkpointing": activation_checkpointing, "phases": phases}
    flags |= {"backend": backend}
    from fp8stack.estimate import answer as answers
    from fp8stack.precision.hardware import machine_for
    from fp8stack.training.config import parse_config

    parsed = parse_config(config, flags, set or [])
    hardware = machine_for(capability, te, parsed.device)
    made = answer(parsed, hardware, ranks, memory)
    if json:
        import json as encoder

        print(encoder.dumps(answers.as_json(made), indent=2))
    else:
        _show(made)


def answer(config: RunConfig, hardware: Hardware, ranks: int, memory_gib: float | None) -> Answer:
    """What a run with this configuration takes on `ranks` machines like `hardware`.

    Raises:
        UserError: what building the run would raise; a memory that is not above 0.
    """
    from fp8stack import presets
    from fp8stack.estimate import largest_batch
    from fp8stack.estimate.answer import CHECKPOINTING, Answer, PhaseEstimate
    from fp8stack.estimate.machine import memory_of
    from fp8stack.head import chunk_rows
    from fp8stack.model import load_config
    from fp8stack.training.building import context_of
    from fp8stack.training.compiler import require_compilable
    from fp8stack.training.optimizer import require_optimizer
    from fp8stack.training.parallel import require_divisible, require_tested
    from fp8stack.training.variants import Decided, plan_phases

    memory = memory_of(hardware) if memory_gib is None else _given(memory_gib)
    model = load_config(config.model, config.model_overrides)
    context = context_of(config, model)
    require_divisible(config, ranks)
    share = config.accumulate * ranks
    sequences = config.batch // share
    asked = _Asked(config, model, context, ranks)
    require_optimizer(config, hardware, ranks)
    if config.compile:
        require_compilable(config.activation_checkpointing)
    plans, schedule = plan_phases(config, model, hardware, Decided(), sequences * context)
    for plan in plans:
        require_tested(plan, config, ranks)
    trained = [plans[place] for place in schedule.variants]
    largest = {}
    if memory is not None:
        turn = chunk_rows(model.vocabulary) // context
        for kind in CHECKPOINTING:
            peak_of = partial(asked.peak, trained, kind)
            largest[kind] = share * largest_batch(peak_of, memory[0], turn)
    own = config.activation_checkpointing
    recipes = {}
    for name in presets.names("recipes"):
        plan = _plan_of(config, name, model, hardware, sequences * context)
        recipes[name] = plan.precision, asked.estimates([plan], own, sequences)[0]
    made = {kind: asked.estimates(trained, kind, sequences) for kind in CHECKPOINTING}
    phases = tuple(
        PhaseEstimate(
            name=phase.name,
            steps=phase.last - phase.first + 1,
            plan=trained[place],
            estimates={kind: made[kind][place] for kind in CHECKPOINTING},
        )
        for place, phase in enumerate(schedule.phases)
    )
    return Answer(
        asked=asked.words(),
        checkpointing=own,
        phases=phases,
        reference=recipes["fp32"][1],
        recipes={} if config.phases else {n: (r, e.peak) for n, (r, e) in recipes.items()},
        memory=None if memory is None else memory[0],
        memory_of="" if memory is None else memory[1],
        largest=largest,
    )


def _given(memory_gib: float) -> tuple[int, str]:
    from fp8stack.errors import UserError

    if not 0 < memory_gib < 1e9:
        raise UserError(f"--memory {memory_gib:g} is no memory. Give GiB, such as --memory 80.")
    return round(memory_gib * 2**30), "--memory"


@dataclass(frozen=True)
class _Asked:
    """The run that is asked about."""

    config: RunConfig
    model: GPTConfig
    context: int
    ranks: int

    def estimates(self, plans: list[Plan], kind: Recompute, sequences: int) -> list[Estimate]:
        """The estimates of phases that run `plans`, in order. A plan's FP8 weights and amax history
        stay while a later one trains."""
        from fp8stack.estimate import Setting, estimate

        made: list[Estimate] = []
        lasting: dict[int, Estimate] = {}  # of the plans met so far
        for plan in plans:
            setting = Setting(
                config=self.model,
                plan=plan,
                sequences=sequences,
                context=self.context,
                micro_batches=self.config.accumulate,
                optimizer=self.config.optimizer,
                momentum=self.config.momentum,
                checkpointing=kind,
                save_fp8=self.config.save_fp8,
                ranks=self.ranks,
                parallel=self.config.parallel,
            )
            own = lasting[id(plan)] = estimate(setting)
            weights = sum(one.fp8_weights for one in lasting.values())
            buffers = sum(one.buffers for one in lasting.values())
            made.append(replace(own, fp8_weights=weights, buffers=buffers))
        return made

    def peak(self, plans: list[Plan], kind: Recompute, sequences: int) -> int:
        """That of the worst phase."""
        return max(one.peak for one in self.estimates(plans, kind, sequences))

    def words(self) -> dict[str, str | int]:
        """The run in words and numbers."""
        config = self.config
        asked: dict[str, str | int] = {
            "model": config.model,
            "parameters": self.model.parameters(),
            "recipe": config.recipe,
            "batch": config.batch,
            "context": self.context,
            "accumulate": config.accumulate,
            "optimizer": config.optimizer,
            "activation_checkpointing": config.activation_checkpointing,
        }
        return asked | (
            {"ranks": self.ranks, "parallel": config.parallel} if self.ranks > 1 else {}
        )


def _plan_of(
    config: RunConfig, name: str, model: GPTConfig, hardware: Hardware, tokens: int
) -> Plan:
    """The plan of another recipe, whatever is substituted for it."""
    from fp8stack.model import plan_for

    return plan_for(model, name, hardware, config.backend, tokens=tokens)


def _show(made: Answer) -> None:
    """A table on a terminal, Markdown's where it is piped."""
    from rich.console import Console
    from rich.table import Table

    from fp8stack.estimate.answer import head, sentences, tables

    console = Console()
    print(head(made))
    print(*made.worst.plan.summary(), sep="\n")
    for title, heads, rows in tables(made):
        print()
        if console.is_terminal:
            table = Table(title=title, title_justify="left")
            for name in heads:
                table.add_column(name)
            for row in rows:
                table.add_row(*row)
            console.print(table)
            continue
        print(title)
        print(f"| {' | '.join(heads)} |")
        print("|---" * len(heads) + "|")
        for row in rows:
            print(f"| {' | '.join(row)} |")
    print()
    print(*sentences(made), sep="\n")
