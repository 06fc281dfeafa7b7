"""Benchmarks of fp8stack and its peers: `python -m bench SCENARIO`. Results are committed under
bench/results."""
