"""An estimate of the memory of a run, before it runs."""
