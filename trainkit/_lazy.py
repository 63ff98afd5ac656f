"Lazy imports: a name is imported when it is first asked for. A package's `__init__.pyi` lists its names, also for type checkers."

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path


def attach_stub(
    package: str, # `__name__` of the package
    file: str, # Its `__file__`, beside which the stub lies
) -> tuple[Callable, Callable, list[str]]: # `__getattr__`, `__dir__`, `__all__`
    "What a package's `__init__.py` needs to hand out the names of its stub lazily."
    home: dict[str, str] = {} # name -> the module that has it; '' for a module of the package
    for node in ast.parse(Path(file).with_suffix('.pyi').read_text(encoding='utf-8')).body:
        if isinstance(node, ast.ImportFrom):
            home |= {alias.name: node.module or '' for alias in node.names}

    def find(name: str):
        if name not in home:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        found = import_module(f'{package}.{home[name] or name}')
        if home[name]:
            found = getattr(found, name)
            if 'IPython' in sys.modules:  # Where `?` shows what its parameters mean
                import_module('trainkit._remarks').attach(found)
            elif 'pydoc' in sys.modules or hasattr(sys, 'ps1'):  # Where `help` does
                import_module('trainkit._remarks').spell_out(found)
        setattr(sys.modules[package], name, found)
        return found

    return find, lambda: sorted({*home, *vars(sys.modules[package])}), sorted(home)
