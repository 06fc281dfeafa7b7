"""Tokenizes documents into shards; see `run.prepare`. No torch."""
