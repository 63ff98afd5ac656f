"""Quantization: NF4, int8, GGML blocks, quantized layers and calibration."""

from trainkit._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
