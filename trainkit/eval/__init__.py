"""Is it better? Metrics with confidence intervals, scores, reports, code evaluation."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
