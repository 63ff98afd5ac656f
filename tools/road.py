"""The road of a run: which modules `trainkit train` passes before its first optimizer step.

    python tools/road.py            # three figures
    python tools/road.py --list     # also every module, climb and call from one module to another

A small model is trained in a temporary folder, and `trainkit train method=lora` then tunes it
on questions, in this process under `sys.setprofile`, from the command to the first call of the
optimizer. A reader who follows it reads each function once, when the run first enters it; so
only the first call of each function counts, and what modules do while they are imported does
not. A function that stands inside another one is read with it, wherever it is called later (a
lambda that a caller passes on is no module that a reader goes back to), and the backward pass of
an operation, which torch calls, with its forward pass. It prints

- modules: modules of trainkit that are entered, apart from those outside packages (files, ...),
- returns: calls into a module that was entered before; going back to the caller is no return,
- climbs: calls from a package into one above it (`LAYERS` in tests/test_package.py is the order).
"""

import argparse
import ast
import contextlib
import io
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "trainkit"


class Road(NamedTuple):
    "What a run passed."

    modules: list[str]  # In the order in which they are first entered
    visits: list[str]  # The module of every call from another one
    calls: list[tuple[str, str]]  # The function that calls and the one that is called, alike
    climbs: Counter  # (from, to) -> how often
    returns: Counter  # Module -> how often it was called again from another one

    def figures(self) -> dict[str, int]:
        return dict(
            modules=len(self.modules), returns=self.returns.total(), climbs=self.climbs.total()
        )


def read_with(name: str) -> str:  # Qualified, or ''
    "The function that contains this one, or the `forward` of a `backward`."
    outer, inside, _ = name.rpartition(".<locals>.")
    owner, _, last = name.rpartition(".")
    return outer if inside else f"{owner}.forward" * (last == "backward")


class FirstStep(BaseException):
    "Ends the run; no `except Exception` of the package stops it."


def levels() -> dict[str, int]:
    "Package -> its height in `LAYERS`."
    tree = ast.parse((ROOT / "tests" / "test_package.py").read_text(encoding="utf-8"))
    layers = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "LAYERS"
    )
    return {name: height for height, name in enumerate(layers)}


class Tracer:
    "A profile function that writes down each entered module of a package."

    def __init__(self):
        self.visits: list[str] = []
        self.calls: list[tuple[str, str]] = []
        self.climbs: Counter = Counter()
        self.returns: Counter = Counter()
        self.heights = levels()
        self.names: dict[str, str | None] = {}
        self.read: set = set()  # The code of each function that was entered
        self.texts: set[tuple[str, str]] = set()  # File and name of each of them
        self.importing = 0

    def module(self, filename: str) -> str | None:
        "`.../trainkit/lora/merge.py` -> `lora.merge`; None for other files and for root helpers."
        if filename not in self.names:
            path = Path(filename)
            inside = path.is_relative_to(PACKAGE) and not path.name.startswith("_")
            parts = path.relative_to(PACKAGE).with_suffix("").parts if inside else ()
            self.names[filename] = ".".join(parts) if parts and parts[0] in self.heights else None
        return self.names[filename]

    def caller(self, frame: Any) -> tuple[str | None, str]:
        "The nearest module of a package below this frame on the stack, and its function."
        while frame is not None:
            if name := self.module(frame.f_code.co_filename):
                return name, f"{name}.{frame.f_code.co_qualname}"
            frame = frame.f_back
        return None, "cli"

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        code = frame.f_code
        if code.co_name == "<module>" and event in ("call", "return"):
            self.importing += 1 if event == "call" else -1
        if event != "call" or self.importing or code in self.read:
            return
        # The schedule has a `step` too, which its constructor calls
        file = code.co_filename.rpartition("/torch/optim/")[2]
        if code.co_name == "step" and file not in (code.co_filename, "lr_scheduler.py"):
            raise FirstStep
        name = self.module(code.co_filename)
        if name is None:
            return
        self.read.add(code)
        self.texts.add((code.co_filename, code.co_qualname))
        if (code.co_filename, read_with(code.co_qualname)) in self.texts:
            return
        above, function = self.caller(frame.f_back)
        if above == name:
            return
        self.returns[name] += name in self.visits
        self.visits.append(name)
        self.calls.append((function, f"{name}.{code.co_qualname}"))
        if above and self.heights[name.split(".")[0]] > self.heights[above.split(".")[0]]:
            self.climbs[above, name] += 1

    def road(self) -> Road:
        return Road(
            list(dict.fromkeys(self.visits)),
            self.visits,
            self.calls,
            self.climbs,
            +self.returns,
        )


def command(method: str, source: str, *changes: str) -> list[str]:
    "The words of a `trainkit train`, as tests/golden/compare.py runs it, for one step."
    from compare import TEXT, TINY

    rows = ["init_from=runs/base/model", f"data.path={source}.jsonl"] if source else TEXT
    words = ["train", f"method={method}", *TINY, *rows, "data.max_length=64", *changes]
    return [*words, "train.max_steps=1", "train.per_device_train_batch_size=4"]


def trace(method: str = "lora", source: str = "questions") -> Road:
    "Run `trainkit train method=METHOD` on a small model until the optimizer is called."
    from compare import python, write_rows

    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        write_rows(Path(place))
        python(ROOT, Path(place), "-m", "trainkit", *command("pretrain", "", "name=base"))
        from trainkit.cli import main

        sys.argv = ["trainkit", *command(method, source, "name=road")]
        tracer, printed, failure = Tracer(), io.StringIO(), None
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            sys.setprofile(tracer)
            try:
                main()
            except FirstStep:
                return tracer.road()
            except BaseException as error:
                failure = error
            finally:
                sys.setprofile(None)
        raise RuntimeError(f"the run took no step:\n{printed.getvalue()}") from failure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", default="lora")
    parser.add_argument("--rows", default="questions", help="questions, pairs, thumbs or answers")
    parser.add_argument("--list", action="store_true", help="every module, return and climb")
    options = parser.parse_args()
    os.environ.update(
        OMP_NUM_THREADS="1",
        ACCELERATE_USE_CPU="true",
        HF_HUB_OFFLINE="1",
        TRAINKIT_PROFILE="quick",
        TRAINKIT_SETTINGS=str(ROOT / "settings.ini"),
    )
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "golden")]
    road = trace(options.method, options.rows)
    for name, figure in road.figures().items():
        print(f"{name:8} {figure}")
    if options.list:
        print("\nin order:", " ".join(road.modules))
        print(
            "\nreturns:", ", ".join(f"{name} {count}" for name, count in road.returns.most_common())
        )
        print("\nclimbs:", ", ".join(f"{a} -> {b} {n}" for (a, b), n in road.climbs.most_common()))
        print("\nvisits:")
        seen: set[str] = set()
        for (function, called), name in zip(road.calls, road.visits, strict=True):
            print("  return" if name in seen else "  new   ", function, "->", called)
            seen.add(name)


if __name__ == "__main__":
    main()
