"""Documents become shards of tokens: text, JSON lines, parquet and datasets, in parallel.
`run.prepare` does it. No torch here."""
