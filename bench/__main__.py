"""`python -m bench SCENARIO`: measure, print a table and write the results.

`python -m bench check [SCENARIO...]` measures again and compares with the results that are there.
"""

from __future__ import annotations

import argparse
import os
import sys

from fp8stack.cli import SPIN_COUNT

os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # as the command does

try:
    from bench import runner
    from fp8stack.common.errors import UserError
except ModuleNotFoundError as error:
    print(
        f"python -m bench needs {error.name}. For all that is missing: python bench/gpu/wheels.py "
        "missing.",
        file=sys.stderr,
    )
    raise SystemExit(2) from None


def main() -> int:
    listing = "\n".join(
        f"  {name}: {description}" for name, description in runner.SCENARIOS.items()
    )
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=f"{__doc__}\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [*runner.SCENARIOS, "check"]
    parser.add_argument("scenario", choices=names, nargs="?", metavar="SCENARIO")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="see SCENARIO --help")
    chosen = parser.parse_args()
    if chosen.scenario is None:
        parser.print_help()
        return 0
    try:
        if chosen.scenario == "check":
            return runner.check(chosen.options)
        return runner.run(chosen.scenario, chosen.options)
    except UserError as error:
        parser.exit(2, f"{error}\n")
    except KeyboardInterrupt:
        parser.exit(130, "\nInterrupted. The same command continues after what it has saved.\n")


if __name__ == "__main__":
    raise SystemExit(main())
