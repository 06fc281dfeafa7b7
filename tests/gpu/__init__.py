"""What only a GPU can answer: `python -m pytest tests/gpu`. Elsewhere these tests are skipped.

A package, so that its conftest.py is not the one that the tests beside it import.
"""
