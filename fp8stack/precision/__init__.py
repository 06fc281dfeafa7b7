"""Which precision runs where: recipes (what is asked), hardware (what there is), plan (what runs).

It knows no module and no tensor; the backends build from its plan.
"""

from fp8stack.precision.hardware import Hardware, assumed, probe
from fp8stack.precision.plan import LayerPlan, Plan, auto_recipe, resolve
from fp8stack.precision.recipe import Recipe, load_recipe

__all__ = [
    "Hardware",
    "LayerPlan",
    "Plan",
    "Recipe",
    "assumed",
    "auto_recipe",
    "load_recipe",
    "probe",
    "resolve",
]
