"""Audit: invariants that every trainer has, adapters for six trainers, and planted bugs."""

from trainkit._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
