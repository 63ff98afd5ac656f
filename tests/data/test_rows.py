"What happens to a row, whatever its columns are called and whatever is wrong with it."

import json

import pytest
from support.snapshots import answer_all

from trainkit.data.dataset import count_characters, load_examples
from trainkit.data.schema import as_conversation, as_example, example_kind, map_texts
from trainkit.data.schema import as_messages, split_prompt, to_messages


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


@pytest.mark.parametrize("name", ["answer", "completion"])
def test_a_null_is_named_by_its_own_column(name):
    with pytest.raises(
        ValueError, match=rf"^column '{name}' is empty \(null\), and kind prompt_comp"
    ):
        as_example({"question": "Null?", name: None}, "prompt_completion")


def test_a_bad_row_says_how_it_is_left_out(tmp_path):
    rows = [dict(prompt="a", completion="b"), dict(prompt="c", completion="")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match=r"line 2: completion is empty .*data\.on_bad=skip"):
        load_examples(tmp_path / "rows.jsonl")


def test_pairs_are_no_conversation_and_have_a_method():
    row = dict(prompt="a", chosen="b", rejected="c")
    with pytest.raises(ValueError, match="pairs train with method=dpo"):
        to_messages(as_example(row, "preference"), "preference")


def test_rows_that_share_a_line_are_counted(tmp_path):
    rows = [dict(prompt="a", completion="b"), dict(prompt="c", completion="d"), dict(prompt="e")]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    with pytest.raises(ValueError, match="rows.json, line 1, row 3: "):
        load_examples(tmp_path / "rows.json")
    (tmp_path / "rows.json").write_text(json.dumps(rows, indent=1))
    with pytest.raises(ValueError, match="rows.json, line 10: "):
        load_examples(tmp_path / "rows.json")


@pytest.mark.parametrize(
    "row, kind, kept",
    [
        (dict(prompt="q", completion="a", id=1, group="g"), None, dict(id=1, group="g")),
        (dict(instruction="q", input="", output="a", category="x"), None, dict(category="x")),
        (dict(question="q", reasoning="r", answer="a", source="s"), None, dict(source="s")),
        (dict(query="q", response="a", input="unused"), "prompt_completion", dict(input="unused")),
        (dict(messages=[dict(role="user", content="q")], tools=[{}]), None, dict(tools=[{}])),
        # What would fit another kind as well
        (dict(prompt="q", completion="a", text="q a", n=2), "prompt_completion", dict(n=2)),
        (dict(messages=[dict(role="user", content="q")], prompt="q"), "messages", {}),
    ],
)
def test_a_conversation_keeps_the_other_columns_of_its_row(row, kind, kept):
    turns = to_messages(row, kind=kind)
    made = as_conversation(row, kind)
    assert made == dict(messages=turns, **kept) and example_kind(made) == "messages"


CALL = dict(name="weather", arguments=dict(city="Rome"))


@pytest.mark.parametrize(
    "text, before",
    [
        (json.dumps(CALL), ""),
        (json.dumps([CALL]), ""),
        (json.dumps(dict(CALL, arguments=json.dumps(CALL["arguments"]))), ""),
        (json.dumps(dict(type="function", function=CALL)), ""),
        ("<think>Where?</think>" + json.dumps(CALL), "<think>Where?</think>"),
    ],
)
def test_a_turn_that_calls_a_tool(text, before):
    "LLaMA-Factory's turn becomes OpenAI's, as the chat templates take it."
    turns = [
        {"from": "human", "value": "Warm?"},
        {"from": "function_call", "value": text},
        {"from": "observation", "value": "20"},
        {"from": "gpt", "value": "Yes."},
    ]
    row = as_example(dict(conversations=turns))
    expected = dict(role="assistant", content=before)
    assert row["messages"][1] == expected | dict(tool_calls=[dict(type="function", function=CALL)])
    assert row["messages"][2] == dict(role="tool", content="20")
    assert as_messages(row["messages"]) == row["messages"]


@pytest.mark.parametrize(
    "text", ["weather in Rome", "[]", "3", '{"name": "w"}', '{"name": "w", "arguments": "Rome"}']
)
def test_a_call_that_is_none_is_named_with_its_line(tmp_path, text):
    turns = [{"from": "human", "value": "Warm?"}, {"from": "function_call", "value": text}]
    (tmp_path / "rows.jsonl").write_text(json.dumps(dict(conversations=turns)))
    with pytest.raises(ValueError, match=r"line 1: messages\[1\]: a function_call .*arguments"):
        load_examples(tmp_path / "rows.jsonl")


def test_the_label_of_llamafactory():
    turns = [{"from": "human", "value": "Warm?"}, {"from": "gpt", "value": "Yes."}]
    pairs = ("preference", "unpaired")
    flat = dict(instruction="Warm?", input="", output="Yes.", kto_tag=False)
    (row,) = load_examples([flat], preferred=pairs)
    assert (row["prompt"], row["completion"], row["label"]) == ("Warm?", "Yes.", False)
    (row,) = load_examples([dict(conversations=turns, kto_tag=True)], preferred=pairs)
    assert row["prompt"] == [dict(role="user", content="Warm?")] and row["label"] is True
    assert row["completion"] == [dict(role="assistant", content="Yes.")]
    (row,) = load_examples([dict(conversations=turns, kto_tag=True)], preferred=("messages",))
    assert len(row["messages"]) == 2
