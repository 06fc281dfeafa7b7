"""Set up a run: data, model, optimizer and checkpoint, up to the first step."""
