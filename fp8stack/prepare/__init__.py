"""Tokenizes documents into shards: text, JSON lines, parquet and datasets, in parallel; see
`run.prepare`. No torch here."""
