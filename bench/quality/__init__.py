"""The quality of training: losses, faults, and the error of few bits."""
