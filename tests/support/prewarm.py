"""Imports and look-ups that every child process needs, done once.

The forkserver imports this module, and its children inherit the result.
"""

import importlib
import sys
from contextlib import suppress
from pathlib import Path

sys.modules["rfc3987_syntax"] = None  # As in conftest.py: only jsonschema would import it
sys.dont_write_bytecode = False  # Each child imports a test's file: let one compile it for all

NEEDED = (
    "IPython",
    "IPython.core.magics",
    "accelerate",
    "bitsandbytes",
    "datasets",
    "datatrove.pipeline.tokens",
    "fastcore.test",
    "gguf",
    "ipywidgets",
    "matplotlib.backends.backend_svg",
    "matplotlib.pyplot",
    "matplotlib_inline.backend_inline",
    "nbdev.test",
    "nbformat",
    "numba",
    "peft",
    "pydantic.dataclasses",
    "pydantic.type_adapter",
    "pytest",
    "rich.console",
    "rouge_score.rouge_scorer",
    "sacrebleu",
    "torch",
    "torch._dynamo",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "trl",
    "typer",
    "wandb",
)
ROOT = Path(__file__).parents[2]
OURS = (
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "trainkit").rglob("*.py")
    if path.stem[0] != "_"
)

for name in (*NEEDED, *sorted(OURS)):
    with suppress(ImportError):
        importlib.import_module(name)
with suppress(Exception):  # Which backends there are: the metadata of all packages are read for it
    from matplotlib.backends.registry import backend_registry

    backend_registry.resolve_gui_or_backend("inline")
with suppress(Exception):  # Which names weights had in other versions
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")
with suppress(ImportError):
    from support import kernel_cache

    kernel_cache.share()
LOADED = frozenset(sys.modules)  # A child imports the rest, each time
