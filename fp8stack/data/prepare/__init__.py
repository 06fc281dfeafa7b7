"""Tokenizes documents into shards; see `pipeline.prepare`. No torch."""
