"""Finished runs and this machine: report, compare, forecast, conform and benchmark."""
