"""`python -m bench.gpu_code MODEL RECIPE CAPABILITY [--no-stores]`: the plan and the kernels, as
JSON, of a model on a pretended GPU."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from bench.gpu_code.pretend import pretend


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_code", description=__doc__)
    for name in ("model", "recipe", "capability"):
        parser.add_argument(name)
    parser.add_argument("--no-stores", action="store_true", help="leave the PTX out")
    arguments = parser.parse_args()
    major, minor = map(int, arguments.capability.split("."))
    pretend((major, minor))
    from bench.gpu_code.blocks import kernels_of, plan_of

    plan = plan_of(arguments.model, arguments.recipe, arguments.capability)
    kernels = kernels_of(arguments.model, plan, stores=not arguments.no_stores)
    print(json.dumps({"plan": plan.to_json(), "kernels": [asdict(one) for one in kernels]}))


main()
