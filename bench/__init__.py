"""Benchmarks with peers: `python -m bench SCENARIO`. Results are committed under bench/results."""
