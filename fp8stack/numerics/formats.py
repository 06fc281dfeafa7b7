"""The number formats, for the numerics; they are data, and `fp8stack.formats` needs no torch."""

from fp8stack.formats import FORMATS, AmaxAlgorithm, Format, Fp8Name, ScaleRounding, fp8_format

__all__ = ["FORMATS", "AmaxAlgorithm", "Format", "Fp8Name", "ScaleRounding", "fp8_format"]
