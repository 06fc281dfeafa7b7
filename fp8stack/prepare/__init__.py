"""Tokenizes documents into shards by Hugging Face `datasets`; see `run.prepare`. No torch."""
