"""How much memory a run takes, before it runs."""
