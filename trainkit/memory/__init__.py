"""Fewer bytes, known in advance: estimates, a tracker, offloading and a planner."""

from trainkit._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
