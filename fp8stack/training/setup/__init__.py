"""From a configuration to a run that can take its first step."""
