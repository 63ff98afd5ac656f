"What happens to a row, whatever its columns are called and whatever is wrong with it."

import json

from support.snapshots import answer_all

from trainkit.data.dataset import count_characters
from trainkit.data.schema import as_example, map_texts, split_prompt, to_messages


def outcome(function, *args):
    try:
        return json.dumps(function(*args), ensure_ascii=False)
    except (ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__} {error}"


def example(question):
    "For `ROW as KIND`: the example, its messages, its capitals, its characters."
    text, _, kind = question.partition(" as ")
    row = json.loads(text)
    found = outcome(as_example, row, kind or None)
    if not found.startswith("{"):
        return found
    usual = json.loads(found)
    plain = all(isinstance(value, str) for value in row.values())  # Under any names
    messages = outcome(to_messages, row if plain else usual, "x" not in row, kind or None)
    capitals = outcome(map_texts, usual, str.upper, kind or None)
    return f"{found} | {messages} | {capitals} | {outcome(count_characters, usual, kind or None)}"


def test_each_row_keeps_its_meaning():
    answer_all(example, "rows.txt")


def test_each_pair_is_split_at_the_same_place():
    answer_all(lambda question: outcome(split_prompt, *json.loads(question)), "pairs.txt")
