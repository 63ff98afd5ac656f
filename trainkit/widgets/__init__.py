"""Widgets for notebooks: the training panel, explorers, chat comparison, labeling and the run browser."""

from trainkit._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
