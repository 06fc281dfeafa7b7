"""The version of fp8stack."""

__version__ = "0.1.0"
