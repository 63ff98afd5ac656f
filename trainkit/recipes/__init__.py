"""A whole run from one config, and the commands that do the same from a shell."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
