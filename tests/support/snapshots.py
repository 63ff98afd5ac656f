"""Whole outputs kept as files in tests/snapshots: a test compares what it got with them.

A file of lines `question -> answer` contains its own questions.

SNAPSHOTS=write writes them again; read the difference before it is committed.
"""

import difflib
import os

from support.processes import ROOT

FOLDER = ROOT / "tests" / "snapshots"


def compare(text, name):
    "Fail with the lines that differ, unless `text` is the snapshot `name`."
    path = FOLDER / name
    if os.environ.get("SNAPSHOTS") == "write":
        path.write_text(text, encoding="utf-8")
    kept = path.read_text(encoding="utf-8")
    changes = difflib.unified_diff(kept.splitlines(), text.splitlines(), name, "now", n=0)
    assert text == kept, "\n".join(changes)


def answer_all(answer, name):
    "The snapshot `name`, of lines `question -> answer`, is what `answer` makes of its questions."
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    questions = [line.partition(" -> ")[0] for line in lines]
    compare("".join(f"{question} -> {answer(question)}\n" for question in questions), name)
