"""Tests that need a GPU: `python -m pytest tests/gpu`. Elsewhere these tests are skipped.

A package, so that its conftest.py is not the one that the neighbouring tests import.
"""
