"""Which precision runs where: recipes (asked), hardware (there), plan (what runs), rules (why).

It knows no module and no tensor; the backends build from its plan.
"""

from fp8stack.precision.hardware import Hardware, assumed, probe
from fp8stack.precision.plan import LayerPlan, Plan
from fp8stack.precision.recipe import Recipe, load_recipe, recipe_from_json
from fp8stack.precision.rules import auto_recipe, resolve

__all__ = [
    "Hardware",
    "LayerPlan",
    "Plan",
    "Recipe",
    "assumed",
    "auto_recipe",
    "load_recipe",
    "probe",
    "recipe_from_json",
    "resolve",
]
