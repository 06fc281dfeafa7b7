"""`python -m bench SCENARIO`: measure, print a table and write the results."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
SCENARIOS = {
    "emulation": "the cost of emulated FP8 on a CPU, as a ratio to fp32, with torchao beside",
    "golden": "what Transformer Engine computes on this GPU, as a file for tests/test_golden.py",
    "gpu": "this GPU held to the CPU's bytes, to Transformer Engine and to float64; losses, speed",
    "recipes": "final validation losses of every recipe on the same data, weights and order",
}


def main() -> None:
    listing = "\n".join(f"  {name}: {what}" for name, what in SCENARIOS.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=f"{__doc__}\n\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("options", nargs=argparse.REMAINDER, help="see SCENARIO --help")
    chosen = parser.parse_args()
    # Imported by name: one scenario's peers need not be installed for another to run.
    scenario = import_module(f"bench.{chosen.scenario}")
    options = argparse.ArgumentParser(
        prog=f"python -m bench {chosen.scenario}", description=SCENARIOS[chosen.scenario]
    )
    options.add_argument("--out", type=Path, default=RESULTS, help="folder (default: %(default)s)")
    scenario.add_arguments(options)
    arguments = options.parse_args(chosen.options)
    arguments.out.mkdir(parents=True, exist_ok=True)
    scenario.run(arguments)


main()
