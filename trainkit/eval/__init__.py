"""Evaluation: metrics with confidence intervals, likelihood scores, reports and code evaluation."""

from trainkit._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
