"""Documents become shards of tokens: text, JSON lines, parquet and datasets, in parallel.

`run.prepare` does it. It must not know models or training. No torch here.
"""
