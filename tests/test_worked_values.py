"Formulas and bounds of the whole package, held by the values that they have today."

import dataclasses
import importlib
import math
from collections.abc import Iterator

import numpy as np
import torch
from support.processes import ROOT
from support.snapshots import answer_all, compare

MODULES = (
    "align.distillation",
    "align.dpo",
    "align.rl",
    "data.tokenization",
    "eval.metrics",
    "eval.stats",
    "lora.merge",
    "quant.calibration",
    "quant.int8",
    "quant.nf4",
    "settings",
    "train.optim",
)
PROBES = (-1, 0, 1e-9, 0.5, 1, 1.5, 2, 3, 4096)


def rounded(value):
    "Tensors and other collections as text, of four digits, which any processor gives."
    if isinstance(value, torch.Tensor):
        return rounded(value.detach().double().tolist())
    if isinstance(value, np.ndarray):
        return rounded(value.tolist())
    if dataclasses.is_dataclass(value):
        return rounded([getattr(value, field.name) for field in dataclasses.fields(value)])
    if isinstance(value, (list, tuple)):
        return "[" + " ".join(map(rounded, value)) + "]"
    return f"{round(value, 6) + 0.0:.4g}" if isinstance(value, float) else str(value)


def test_formulas_have_the_same_values():
    names = dict(math=math, np=np, torch=torch)
    for module in MODULES:
        names |= vars(importlib.import_module(f"trainkit.{module}"))
    names["line"] = lambda n: torch.linspace(-1, 1, n) ** 3 + 0.1
    names["table"] = lambda n, m: torch.sin(torch.arange(n * m) * 1.7).view(n, m)
    with torch.random.fork_rng():
        answer_all(lambda question: rounded(eval(question, names)), "formulas.txt")


def configs() -> Iterator[type]:
    "The dataclasses of the package that check their fields, and need none."
    for path in sorted((ROOT / "trainkit").rglob("*.py")):
        if path.stem.startswith("_") or "widgets" in path.parts:
            continue
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = importlib.import_module(".".join(parts))
        for name in getattr(module, "__all__", ()):
            cls = vars(module).get(name)
            if not isinstance(cls, type) or not dataclasses.is_dataclass(cls):
                continue
            if cls.__module__ != module.__name__:
                continue
            needed = [
                field
                for field in dataclasses.fields(cls)
                if field.init and field.default is field.default_factory is dataclasses.MISSING
            ]
            if not needed and any("__post_init__" in vars(c) for c in cls.__mro__):
                yield cls


def verdict(cls, name, value):
    "`+` where a field takes the value, `-` where it does not."
    try:
        cls(**{name: value})
    except Exception:
        return "-"
    return "+"


def test_both_sides_of_each_bound():
    "Which of a few numbers each field takes; fields that take all or none of them are left out."
    lines = [f"numbers {' '.join(map(str, PROBES))}\n"]
    for cls in configs():
        for field in dataclasses.fields(cls):
            if not field.init:
                continue
            marks = "".join(verdict(cls, field.name, value) for value in PROBES)
            if len({*marks}) > 1:
                lines.append(f"{cls.__name__}.{field.name} {marks}\n")
    compare("".join(lines), "bounds.txt")
