"""Other formats and trainers: Hugging Face, PEFT, GGUF, the hub, TRL and LLaMA-Factory."""

from trainkit._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
