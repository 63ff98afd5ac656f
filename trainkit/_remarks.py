"""The comments at parameters and fields as documentation.

Functions here explain each parameter in a comment behind it or above it. `?` and Shift-Tab in a
notebook read docstrings alone, so `attach` gives an object a method that they ask first: its
docstring and what the comments tell. `help` in a plain interpreter asks no method, so there
`spell_out` puts the same into the docstring. The API reference reads the same comments."""

import ast
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from types import FunctionType

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_Comments = dict[int, tuple[str, bool]]


@cache
def parsed(
    path: Path,
) -> tuple[list[str], dict[int, _Definition], _Comments]:
    "A file's lines, its definitions by line, its comments by line: text, whether there is code too."
    text = path.read_text(encoding="utf-8")
    nodes = {
        node.lineno: node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef))
    }
    comments = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            has_code = bool(token.line[: token.start[1]].strip())
            comments[token.start[0]] = (token.string.lstrip("# ").strip(), has_code)
    return text.splitlines(), nodes, comments


def definition(
    path: Path,
    line: int,  # Where it begins, with its decorators
    name: str,
) -> _Definition:
    "The function or class of a name that begins at a line or soon after it."
    _, nodes, _ = parsed(path)
    return next(node for at, node in sorted(nodes.items()) if at >= line and node.name == name)


def _plain(text: str) -> str:
    return re.sub(r"\s*(# )?type: ignore\S*|\s*# noqa\S*", "", text).strip()


def remarks(
    path: Path,
    spans: Iterable[tuple[str, int, int]],  # Name, first and last line
    start: int,  # The line before the first
) -> tuple[dict[str, str], int]:  # Name -> comment; the last line
    "The comments of parameters or fields, which stand behind each or above it."
    _, _, comments = parsed(path)
    out, line = {}, start
    for name, first, last in spans:
        above = [
            text
            for i in range(line + 1, first)
            for text, has_code in [comments.get(i, ("", True))]
            if not has_code
        ]
        behind = [comments[i][0] for i in range(first, last + 1) if i in comments]
        if words := _plain(" ".join([*above, *behind])):
            out[name] = words
        line = last
    return out, line


def parameter_remarks(
    path: Path,
    line: int,
    name: str,
) -> dict[str, str]:  # Parameter -> comment, and 'return'
    "The comments at the parameters of a function."
    _, _, comments = parsed(path)
    node = definition(path, line, name)
    assert not isinstance(node, ast.ClassDef)
    given = node.args
    args = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
    args = [arg for arg in args if arg]
    ends = sorted(d.end_lineno or 0 for d in [*given.defaults, *given.kw_defaults] if d)
    spans = []
    for arg, following in zip(args, [*args[1:], None], strict=False):
        limit = following.lineno if following else 10**9
        last = max([arg.end_lineno or 0, *(e for e in ends if arg.lineno <= e < limit)])
        spans.append((arg.arg, arg.lineno, last))
    out, end = remarks(path, spans, node.lineno)
    body = node.body[0].lineno
    single = not args or node.lineno == body - 1 == end
    behind = [
        comments[i][0] for i in range(node.lineno if single else end + 1, body) if i in comments
    ]
    if single and args:
        out.pop(args[-1].arg, None)
    if behind:
        out["return"] = _plain(" ".join(behind))
    return out


def field_remarks(
    path: Path,
    line: int,
    name: str,
) -> dict[str, str]:  # Field -> comment
    "The comments of a class's fields."
    node = definition(path, line, name)
    spans = [
        (item.target.id, item.lineno, item.end_lineno or item.lineno)
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    ]
    return remarks(path, spans, node.body[0].lineno)[0]


def _place(thing: type | FunctionType) -> tuple[Path, int, str]:
    "The file, the line and the name of what was defined."
    path = Path(sys.modules[thing.__module__].__file__ or "")
    if isinstance(thing, FunctionType):
        return path, thing.__code__.co_firstlineno, thing.__name__
    _, nodes, _ = parsed(path)
    named = [at for at, node in sorted(nodes.items()) if node.name == thing.__name__]
    return path, named[0], thing.__name__


def _meanings(thing: type | FunctionType) -> dict[str, str]:  # Name -> meaning, and 'return'
    "What the comments tell about the parameters of a function, or of a class."
    if isinstance(thing, FunctionType):
        return parameter_remarks(*_place(inspect.unwrap(thing)))
    fields: Mapping = getattr(thing, "__dataclass_fields__", {})
    if fields:
        words = field_remarks(*_place(thing))
        words |= {name: f.metadata["doc"] for name, f in fields.items() if "doc" in f.metadata}
        return {name: words[name] for name in fields if name in words}
    begin = inspect.unwrap(vars(thing).get("__init__", object))
    return parameter_remarks(*_place(begin)) if isinstance(begin, FunctionType) else {}


def described(
    thing: type | FunctionType,
) -> str:
    "The docstring, and below it what each parameter means."
    text = inspect.getdoc(thing) or ""
    try:
        words = _meanings(thing)
    except (OSError, StopIteration, IndexError, SyntaxError, KeyError):  # No source, or another one
        return text
    returns = words.pop("return", "")
    lines = [f"    {name}: {meaning}" for name, meaning in words.items()]
    parts = [text, "Parameters\n" + "\n".join(lines) if lines else ""]
    parts.append(f"Returns\n    {returns}" if returns else "")
    return "\n\n".join(part for part in parts if part)


def attach(
    thing: object,  # Anything that a package hands out
) -> None:
    "Let `?` and Shift-Tab in a notebook show the comments at the parameters, too."
    if isinstance(thing, FunctionType):
        thing.getdoc = partial(described, thing)  # type: ignore
    elif isinstance(thing, type) and "getdoc" not in vars(thing):
        # A class made of this one has its own docstring
        thing.getdoc = classmethod(  # type: ignore
            lambda owner: described(owner) if owner is thing else inspect.getdoc(owner)
        )


_spelled_out: set[object] = set()  # A name may stand in several packages


def spell_out(
    thing: object,  # Anything that a package hands out
) -> None:
    "Let `help` show the comments at the parameters, also at those of the methods of a class."
    if not isinstance(thing, (FunctionType, type)) or thing in _spelled_out:
        return
    _spelled_out.add(thing)
    thing.__doc__ = described(thing)
    for method in vars(thing).values() if isinstance(thing, type) else ():
        method = getattr(method, "__func__", method)  # Of a classmethod
        if isinstance(method, FunctionType) and not method.__name__.startswith("_"):
            method.__doc__ = described(method)
