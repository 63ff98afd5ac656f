"The English of messages, docstrings and lessons stays plain."

import re

import pytest
from support import idioms


@pytest.mark.parametrize(
    "text, names",
    [
        ("The loss is no number at step 3.", {"is no number"}),
        ("Whoever opens it sees the loss beside the rate.", {"whoever", "beside"}),
        ("A model of few bits learns by heart.", {"few bits", "by heart"}),
        ("It goes on from the checkpoint.", {"go on"}),
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
