"""Fewer bits: NF4, int8, GGML blocks, quantized layers, calibration."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
