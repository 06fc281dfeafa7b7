"""Metrics of a run: measure, write and show them."""
