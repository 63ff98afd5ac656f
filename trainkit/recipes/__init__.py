"""Whole runs from one config, and the shell commands that do the same."""

from trainkit._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
