"""Forecasts of what training in a recipe costs in loss."""
