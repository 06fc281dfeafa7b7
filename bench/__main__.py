"""`python -m bench`: run a scenario, print its table and write its JSON."""

from __future__ import annotations

import argparse
from pathlib import Path

from bench import emulation, recipes

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    scenarios = parser.add_subparsers(dest="scenario", required=True)
    for module, name in ((emulation, "emulation"), (recipes, "recipes")):
        scenario = scenarios.add_parser(name, help=(module.__doc__ or "").splitlines()[0])
        scenario.add_argument(
            "--out",
            type=Path,
            default=RESULTS,
            help="folder for the results (default: %(default)s)",
        )
        module.add_arguments(scenario)
        scenario.set_defaults(run=module.run)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    arguments.run(arguments)


main()
