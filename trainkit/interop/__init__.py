"""Other formats and other loops: Hugging Face, PEFT, GGUF, the hub, TRL, LLaMA-Factory."""

from trainkit._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
