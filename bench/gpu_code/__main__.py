"""`python -m bench.gpu_code MODEL RECIPE CAPABILITY [--no-stores] [--whole | --host | --gemms |
--execute FIELDS]`: print, as JSON, the plan and the kernels of a model on a pretended GPU, compiled
block by block or whole, the host's time in a step, the scaled GEMMs in each of several recipes,
`A,B`, or the comparison of a step of a `Case` with these fields."""

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
    parser.add_argument("--whole", action="store_true", help="compile the model as one graph")
    parser.add_argument("--host", action="store_true", help="the host's time instead")
    parser.add_argument("--gemms", action="store_true", help="the scaled GEMMs of each recipe")
    parser.add_argument("--execute", metavar="FIELDS", help="run a `Case`, given as JSON")
    arguments = parser.parse_args()
    major, minor = map(int, arguments.capability.split("."))
    pretend((major, minor))
    target = arguments.model, arguments.recipe, arguments.capability
    if arguments.host:
        from bench.gpu_code.host import host_times

        print(json.dumps([asdict(record) for record in host_times(*target)]))
        return
    if arguments.execute:
        from bench.gpu_code.execute import executed
        from bench.gpu_code.executed import Case

        print(json.dumps(executed(Case(**json.loads(arguments.execute)))))
        return
    from bench.gpu_code.blocks import kernels_of, plan_of, scaled_gemms_of

    if arguments.gemms:
        gemms = {
            recipe: scaled_gemms_of(
                arguments.model, plan_of(arguments.model, recipe, arguments.capability)
            )
            for recipe in arguments.recipe.split(",")
        }
        print(json.dumps({recipe: [asdict(gemm) for gemm in gemms[recipe]] for recipe in gemms}))
        return
    plan = plan_of(*target)
    stores = not arguments.no_stores
    kernels = kernels_of(arguments.model, plan, stores=stores, as_one_graph=arguments.whole)
    print(json.dumps({"plan": plan.to_json(), "kernels": [asdict(record) for record in kernels]}))


main()
