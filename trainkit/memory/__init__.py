"""Memory: predicting it, measuring it, offloading, and a planner that makes a step fit."""

from trainkit._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
