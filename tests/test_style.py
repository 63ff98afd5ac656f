"The English of messages, docstrings and lessons stays plain."

import ast
import re

import pytest
from support import idioms
from support.processes import ROOT


@pytest.mark.parametrize(
    "text, names",
    [
        ("The loss is no number at step 3.", {"is no number"}),
        ("Whoever opens it sees the loss beside the rate.", {"whoever", "beside"}),
        ("A model of few bits learns by heart.", {"few bits", "by heart"}),
        ("It goes on from the checkpoint.", {"go on"}),
        ("What became of one's own rows is counted anew.", {"what became of", "one's own", "anew"}),
        ("A renewed mask becomes often smaller.", set()),
        ("Besides, what is gone only matters once.", set()),
    ],
)
def test_an_idiom_is_recognized(text, names):
    patterns = {name: pattern for name, (pattern, _) in idioms.IDIOMS.items()}
    assert {n for n, pattern in patterns.items() if re.search(pattern, text, re.I)} == names


def test_no_idiom_comes_back():
    "Each group of files has at most as many as tests/support/idioms.json allows."
    allowed, places = idioms.allowed(), list(idioms.places())
    for group, numbers in idioms.counts(places).items():
        for idiom, number in numbers.items():
            limit, advice = allowed.get(group, {}).get(idiom, 0), idioms.IDIOMS[idiom][1]
            lines = [
                f"{path}: … {words} …" for *key, path, words in places if key == [group, idiom]
            ]
            assert number <= limit, "\n".join(
                [f"{number} × '{idiom}' in {group}, {limit} allowed; write '{advice}':", *lines]
            )


def test_all_json_of_commands_is_indented_alike():
    "By one blank, so that two outputs can be compared line by line."
    calls = [
        (path.name, keyword.value)
        for path in sorted((ROOT / "trainkit").rglob("*.py"))
        if "to_json(" in (text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "to_json"
        for keyword in node.keywords
        if keyword.arg == "indent"
    ]
    assert len(calls) > 8
    assert {ast.literal_eval(value) for _, value in calls} == {1}


def test_all_json_is_indented_by_one_or_two():
    "Also that of files: a level is one blank wide, or two where another library writes it so."
    widths = [
        keyword.value.value
        for path in sorted((ROOT / "trainkit").rglob("*.py"))
        if "dumps(" in (text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "dumps"
        for keyword in node.keywords
        if keyword.arg == "indent" and isinstance(keyword.value, ast.Constant)
    ]
    assert len(widths) > 15 and {*widths} == {1, 2}
