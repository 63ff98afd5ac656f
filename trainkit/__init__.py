"""Read how a language model is trained, tuned, aligned and shrunk, and use the very same code for real.

Every module comes from one notebook of the same subject: `from trainkit.tokenizer import BPETokenizer`,
`from trainkit.model import Transformer`, `from trainkit.train import Trainer`, `from trainkit.recipes import run`.
Importing the package itself loads nothing else."""

__version__ = "0.1.0"


def __getattr__(name: str):
    if name == 'doctor':  # the first cell of every hosted notebook: trainkit.doctor()
        from .machine import doctor
        return doctor
    raise AttributeError(f"module 'trainkit' has no attribute '{name}'; its parts are modules: import trainkit.{name}")
