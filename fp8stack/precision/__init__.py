"""Precision decisions: `resolve` turns a `Recipe` and a `Hardware` into a `Plan`.

This package handles no modules and no tensors; the backends build layers from the plan.
"""

from fp8stack.precision.hardware import Hardware, assumed, probe
from fp8stack.precision.plan import LayerPlan, Plan
from fp8stack.precision.recipe import Recipe
from fp8stack.precision.recipe_file import load_recipe, recipe_from_json
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
