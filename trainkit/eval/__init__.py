"""Is it better? Metrics with confidence intervals, scores, reports, code evaluation."""

from trainkit._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
