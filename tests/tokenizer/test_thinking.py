"Thoughts and tool calls: written as published, learned as they are generated, read back."

import hashlib
import itertools
from pathlib import Path

import pytest

from trainkit.data.tokenization import length_report, split_turns, tokenize_examples
from trainkit.tokenizer.bpe_tokenizer import BPETokenizer
from trainkit.tokenizer.chat import render, set_template
from trainkit.tokenizer.chat_template import (
    TEMPLATES,
    AnswerReader,
    find_tool_format,
    parse_tool_calls,
    render_text,
    render_texts,
    split_thought,
)

NAMES = dict(bos_token="<s>", eos_token="<|im_end|>")
BASE = BPETokenizer.train(["the quick brown fox, a thought"] * 9, 262, progress=False)


def ready(template: str):
    return set_template(BPETokenizer.from_hf(BASE.to_hf(), "python"), template)


def call(i: int, **more) -> dict:
    arguments = dict(city=f"Lima {i}", days=i, flags=[True, None, 1.5], deep=dict(a="b"), **more)
    function = dict(name="weather", arguments=arguments)
    return dict(type="function", id=f"call0000{i}", function=function)


def tool(name: str, about: str, **properties) -> dict:
    parameters = dict(type="object", properties=properties, required=[*properties][:1])
    return dict(type="function", function=dict(name=name, description=about, parameters=parameters))


TOOLS = [
    tool("weather", "Of a city", city=dict(type="string", description="Where", enum=["a", "b"])),
    tool("clock", "The time"),
    tool(
        "odd",
        "x'y",
        words=dict(type="array", items=dict(type="string", enum=["a", "b"])),
        rows=dict(type="array", items=dict(type="object", properties=dict(q=dict(type="integer")))),
        prices=dict(type="object", additionalProperties=dict(type="number"), description="D"),
        either=dict(type=["string", "integer"], nullable=True),
        shape=dict(type="object", properties=dict(w=dict(type="boolean")), required=["w"]),
        any=dict(enum=[1]),
    ),
]


def talks(said: str = "") -> list[list[dict]]:
    "Conversations with and without a system, calls, several results, thoughts in both forms."
    out = []
    for system, calls, thought, turns in itertools.product((0, 1), (0, 1, 2), (0, 1, 2), (1, 2)):
        chat = [dict(role="system", content=" Be brief.")] * system
        for k in range(turns):
            own = dict(reasoning_content=f"\nhm {k}\n") if thought == 1 else {}
            chat.append(dict(role="user", content=f"q{k} "))
            if calls:
                asked = [call(i) for i in range(calls)]
                chat.append(dict(role="assistant", content=said, tool_calls=asked, **own))
                chat += [
                    dict(role="tool", name="weather", content=f"{i}.5", tool_call_id=f"call0000{i}")
                    for i in range(calls)
                ]
            head = f"<think>\nw {k}\n</think>\n\n" if thought == 2 else ""
            chat.append(dict(role="assistant", content=f"{head}a{k}", **own))
        out.append([*chat, dict(role="user", content="more?")])
    return out


def published(name: str) -> str:
    trl = pytest.importorskip("trl")
    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [("qwen3", "qwen3", "Let me see."), ("qwen3", "qwen3", ""), ("gemma4", "gemma4_v5", "")],
)
def test_text_is_that_of_the_published_template(ours, theirs, said):
    original = published(theirs)
    switches: list[dict] = [{}, dict(enable_thinking=False), dict(enable_thinking=True)]
    chats = [
        c[:end] for c in talks(said) for end in {2, len(c) // 2 + 1, len(c) - 2, len(c) - 1, len(c)}
    ]
    for n, (ask, tools) in enumerate(itertools.product((False, True), (None, TOOLS))):
        how = [tools] * len(chats), switches[n % 3 if ask else 0]
        mine = render_texts(chats, TEMPLATES[ours].jinja, NAMES, "all", ask, *how)
        assert mine == render_texts(chats, original, NAMES, "all", ask, *how)


def test_hermes_is_written_as_it_was_published():
    "The digest is of the tool_use template of NousResearch/Hermes-3-Llama-3.1-8B on these chats."
    digest = hashlib.sha256()
    for chat in talks():
        if any("reasoning_content" in m or "<think>" in m["content"] for m in chat):
            continue
        for end in range(1, len(chat) + 1):
            for ask in (False, True):
                text, _ = render_text(
                    chat[:end], TEMPLATES["hermes"].jinja, NAMES, "all", ask, TOOLS
                )
                digest.update(text.encode())
    assert digest.hexdigest() == "6aeeb4fe684476b425715c0b6e5f474e62de53bbfac70f2e1ff59c8ac051af52"
    bare = render_text([dict(role="user", content="q")], TEMPLATES["hermes"].jinja, NAMES, "all")
    assert bare[0] == "<s><|im_start|>user\nq<|im_end|>\n"


QUESTION = dict(role="user", content="q")
THOUGHT = dict(role="assistant", content="a", reasoning_content="t")
TAGGED = dict(role="assistant", content="<think>\nt\n</think>\n\na")
PLAIN = dict(role="assistant", content="a")
# Templates whose generation prompt begins the thought, and those whose does not
OPENED = ("qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8", "qwen3_5_think_training")


def learned(messages, template, train_on="assistant", **switches) -> list[str]:
    text, spans = render_text(
        messages, template, NAMES, train_on, chat_template_kwargs=switches or None
    )
    return [text[a:b] for a, b in spans]


@pytest.mark.parametrize("name", ["chatml", "qwen3", "published", "tagged", *OPENED])
def test_nothing_is_learned_that_the_prompt_supplies(name):
    "trl#6363 and Automodel#3738: not the empty thought of an answer without one, not its opening."
    files = {"published": "qwen3", "tagged": "qwen3_training"}
    jinja = TEMPLATES[name].jinja if name in TEMPLATES else published(files.get(name, name))
    thought = "t\n</think>\n\na<|im_end|>"
    thought = thought if name in OPENED else "<think>\n" + thought
    for message, expected in ((THOUGHT, thought), (TAGGED, thought), (PLAIN, "a<|im_end|>")):
        assert learned([QUESTION, message], jinja) == [expected]
        assert learned([QUESTION, {**message, "train": "content"}], jinja) == ["a<|im_end|>"]
        assert learned([QUESTION, message], jinja, enable_thinking=True) == [expected]
    if name not in ("chatml", "tagged", "qwen3_8", "qwen3_5_think_training"):
        with pytest.raises(ValueError, match="the later ones.*sft.train_on=each"):
            learned([QUESTION, THOUGHT, QUESTION, THOUGHT], jinja)
    assert learned([QUESTION, THOUGHT, QUESTION, THOUGHT], jinja, "last") == [thought]


def test_a_template_that_reads_no_thoughts_gets_them_in_the_content():
    for name in ("llama3", "gemma", "mistral", "alpaca", "plain"):
        [text] = learned([QUESTION, THOUGHT], TEMPLATES[name].jinja)
        assert text.strip().startswith("<think>\nt\n</think>\n\na"), name
        [text] = learned([QUESTION, {**THOUGHT, "train": "content"}], TEMPLATES[name].jinja)
        assert text.startswith("a"), name


def test_switches_of_a_template_are_names_of_their_own():
    asked, jinja = [QUESTION], TEMPLATES["qwen3"].jinja
    off = render_text(asked, jinja, NAMES, "all", True, None, dict(enable_thinking=False))[0]
    assert off.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    own = "{{ reasoning_effort }}{{ messages[0].content }}"
    kwargs = dict(reasoning_effort="low")
    assert render_text(asked, own, train_on="all", chat_template_kwargs=kwargs)[0] == "lowq"
    for name in ("messages", "tools", "eos_token", "_left"):
        with pytest.raises(ValueError, match=f"'{name}', which is not a switch"):
            render_text(asked, jinja, chat_template_kwargs={name: "x"})


@pytest.mark.parametrize("name", ["qwen3", "hermes", "gemma4"])
@pytest.mark.parametrize("foreign", [False, True])
def test_nobody_else_writes_the_tags(name, foreign):
    tok = ready(name)
    tok = tok.to_hf() if foreign else tok
    tags = (*TEMPLATES[name].tokens, *TEMPLATES[name].shown)
    said = PLAIN if name == "hermes" else THOUGHT

    def counts(text: str) -> list[int]:
        asked = [call(0)] if name == "hermes" else [call(0), call(1)]
        about = [tool("weather", text, city=dict(type="string", description=text))]
        chat = [
            dict(role="system", content=text),
            dict(role="user", content=text),
            dict(role="assistant", content="", tool_calls=asked),
            dict(role="tool", name="weather", content=text, tool_call_id="call00000"),
            said,
        ]
        ids = render(chat, tok, tools=about, train_on="last")[0]
        assert text.replace('"', "") in tok.decode(ids).replace('\\"', "").replace('"', "")
        one = [tok.special_tokens[t] if not foreign else tok.convert_tokens_to_ids(t) for t in tags]
        return [ids.count(i) for i in one]

    assert counts("".join(tags)) == counts("hello")


@pytest.mark.parametrize(
    "name", ["chatml", "qwen", "qwen3", "hermes", "mistral", "llama3", "gemma4"]
)
def test_a_call_is_read_back_as_it_was_written(name):
    hard = 'O\'Brien "x" {a:[1,2]}, <b>\n'
    asked = [call(i, more=hard) for i in range(1 if name == "llama3" else 2)]
    message = dict(role="assistant", content="", tool_calls=asked)
    eos = TEMPLATES[name].eos or NAMES["eos_token"]
    names = {**NAMES, "eos_token": eos}
    text, [(start, end)] = render_text([QUESTION, message], TEMPLATES[name].jinja, names)
    calls, rest = parse_tool_calls(text[start:end].removesuffix(eos))
    assert [dict(name=c["name"], arguments=c["arguments"]) for c in calls] == [
        c["function"] for c in asked
    ]
    assert rest == ""
    texts = [
        {**c, "function": {**c["function"], "arguments": __import__("json").dumps(a)}}
        for c, a in ((c, c["function"]["arguments"]) for c in asked)
    ]
    again = render_text([QUESTION, {**message, "tool_calls": texts}], TEMPLATES[name].jinja, names)
    assert again[0] == text, "OpenAI writes the arguments as a text"


@pytest.mark.parametrize(
    ("answer", "calls", "rest"),
    [
        ("Hello {1}", [], "Hello {1}"),
        ('So: <tool_call>{"name": "f"}', [dict(name="f", arguments={})], "So:"),
        ("<think><tool_call></think>yes", [], "<think><tool_call></think>yes"),
        ('[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{}',
         [dict(name="f", arguments=dict(x=1)), dict(name="g", arguments={}, id="abc")], ""),
        ('<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"x": 2}}',
         [dict(name="f", arguments={}), dict(name="g", arguments=dict(x=2))], ""),
        ("<|tool_call>call:f{x:1,y:[]}<tool_call|>",
         [dict(name="f", arguments=dict(x=1, y=[]))], ""),
    ],
)  # fmt: skip
def test_calls_of_other_versions(answer, calls, rest):
    assert parse_tool_calls(answer) == (calls, rest)


@pytest.mark.parametrize(
    "answer",
    [
        "<tool_call>f(1)</tool_call>",
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"name": "f"} or</tool_call>',
        "[TOOL_CALLS] [f]",
        '[TOOL_CALLS] [{"name": 1}]',
        "<|tool_call>call:f{x}<tool_call|>",
        "<|tool_call>call:f{x:}<tool_call|>",
        "<|tool_call>call:f{x:y}<tool_call|>",
        "<|tool_call>call:f{x:1<tool_call|>",
        '{"name": "f", "parameters": {"x": }}',
    ],
)
def test_a_broken_call_is_an_error(answer):
    with pytest.raises(ValueError, match="the call|a call is"):
        parse_tool_calls(answer)
    with pytest.raises(ValueError, match="tool_format = 'qwen'"):
        parse_tool_calls(answer, "qwen")


@pytest.mark.parametrize("name", ["qwen3", "published", "chatml"])
def test_each_answer_is_learned_with_the_chat_that_it_meets(name):
    "The prompt of every row is the prompt of inference, and old thoughts are not in it."
    jinja = published("qwen3") if name == "published" else TEMPLATES[name].jinja
    tok = ready(name if name in TEMPLATES else "chatml")
    tok.chat_template = jinja
    chat = [
        *(QUESTION, THOUGHT),
        *(dict(role="user", content="r"), {**TAGGED, "content": "<think>\nu\n</think>\n\nb"}),
        *(dict(role="user", content="s"), dict(role="assistant", content="c")),
    ]
    thoughts = ["<think>\nt\n</think>\n\n", "<think>\nu\n</think>\n\n", ""]
    for reasoning in ("train", "read", "drop"):
        rows = tokenize_examples(
            [dict(messages=chat)], tok, train_on="each", reasoning=reasoning, template=jinja
        )
        assert rows.numbers == [0, 0, 0]
        for i, row in enumerate(rows):
            ids, labels = list(row["input_ids"]), list(row["labels"])
            words = tok.decode([x for x in labels if x != -100])
            head = thoughts[i] if reasoning == "train" else ""
            assert words == f"{head}{'abc'[i]}<|im_end|>"
            prompt = render(
                chat[: 2 * i + 1],
                tok,
                add_generation_prompt=True,
                chat_template_kwargs=dict(
                    enable_thinking=bool(thoughts[i]) and reasoning != "drop"
                ),
            )[0]
            if reasoning != "drop" or name != "chatml":
                assert ids[: len(prompt)] == prompt
            if name != "chatml":
                assert tok.decode(ids).count("<think>\n") == 1
    report = length_report([dict(messages=chat)], tok, train_on="each", template=jinja)
    assert len(report.lengths) == 3


def test_a_chat_is_split_at_the_turns_of_its_user():
    tools = [
        dict(role="assistant", content="", tool_calls=[call(0)]),
        dict(role="tool", content="1"),
    ]
    chat = [QUESTION, *tools, PLAIN, QUESTION, {**PLAIN, "train": False}, QUESTION, *tools, PLAIN]
    first, second = split_turns(chat)
    assert first == chat[:4] and len(second) == len(chat)
    assert [m.get("train", True) for m in second if m["role"] == "assistant"] == [
        False, False, False, True, True,
    ]  # fmt: skip
    assert split_turns([QUESTION]) == [[QUESTION]]


def in_pieces(answer: str, size: int, prompt: str = "", tools: bool = True):
    "What the reader makes of an answer: thought, content and calls; and how many parts it gave."
    reader = AnswerReader(prompt, tools)
    pieces = [answer[i : i + size] for i in range(0, len(answer), size)]
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
    thought, content = (
        "".join(value for own, value in parts if own == kind)
        for kind in ("reasoning_content", "content")
    )
    calls = [value for kind, value in parts if kind == "tool_call"]
    assert reader.calls == len(calls)
    return thought, content, calls, len(parts)


@pytest.mark.parametrize(
    "text", ["<think>\nhm <b\n</think>\n\nyes < no", "[THINK]x[/THINK]y", "plain <think> x"]
)
def test_an_answer_is_split_while_it_is_written(text):
    for size in (1, 3, 99):
        thought, rest = split_thought(dict(content=text))
        assert in_pieces(text, size)[:3] == (thought or "", rest, [])
    reader = AnswerReader("<|im_start|>assistant\n<think>\n")
    assert reader.push("x</think>y") == [("reasoning_content", "x"), ("content", "y")]


# Of the published templates, those that write calls in one of our formats
PUBLISHED = (
    "qwen2_5",
    "qwen3",
    "qwen3_instruct_2507",
    "gemma4",
    "gemma4_v5",
    "llama3_1",
    "llama3_2",
)
CALLERS = ("chatml", "qwen", "qwen3", "hermes", "mistral", "llama3", "gemma4")


@pytest.mark.parametrize("name", [*CALLERS, *(f"trl:{name}" for name in PUBLISHED)])
def test_calls_are_read_while_they_are_written(name):
    "From the text that a template writes, letter by letter, as from the whole."
    theirs = name.startswith("trl:")
    jinja = published(name[4:]) if theirs else TEMPLATES[name].jinja
    family = find_tool_format(jinja)
    hard = 'O\'Brien "x" {a:[1,2]}, <b>\n<tool' + ("" if family == "gemma4" else "\u00e9</")
    asked = [call(i, more=hard) for i in range(1 if family == "llama3" else 2)]
    own = dict(reasoning_content="hm\n< 3") if "reasoning_content" in jinja else {}
    message = dict(role="assistant", content="", tool_calls=asked, **own)
    more = dict(tools=TOOLS[:1], chat_template_kwargs=dict(enable_thinking=True) if own else None)
    names = {**NAMES, "eos_token": (TEMPLATES.get(name) or TEMPLATES["chatml"]).eos or "</s>"}
    prompt, _ = render_text([QUESTION], jinja, names, "all", True, **more)
    text, _ = render_text([QUESTION, message], jinja, names, "all", **more)
    answer = text.removeprefix(prompt) if text.startswith(prompt) else text[text.index("q") + 1 :]
    for end in (names["eos_token"], "<|im_end|>", "<|eot_id|>", "<|eom_id|>"):
        answer = answer.rstrip("\n").removesuffix(end)
    wanted = [c["function"] for c in asked]
    for size in (1, 2, 5, 10_000):
        thought, content, calls, parts = in_pieces(answer, size, prompt[-40:])
        found = [dict(name=c["name"], arguments=c["arguments"]) for c in calls]
        assert (found, content.strip()) == (wanted, "")
        assert thought == own.get("reasoning_content", "")
    assert parse_tool_calls(answer)[0] == calls
    # Without tools the marks are text, and nothing is lost
    assert in_pieces(answer, 3, prompt[-40:], tools=False)[2] == []


@pytest.mark.parametrize(
    "answer",
    [
        "<tool_call>f(1)</tool_call> so",
        "a [TOOL_CALLS] [f",
        "<|tool_call>call:f{x}<tool_call|>!",
        '{"name": "f", "parameters": {"x": }} and more',
        '{"name": "Ann", "age": 3}',
        "<|python_tag|>print(1)",
        "  <tool",
        "a < b <|tool_call",
    ],
)
def test_what_is_no_call_is_content(answer):
    for size in (1, 4, 99):
        assert in_pieces(answer, size)[:3] == ("", answer, [])


def test_words_leave_the_reader_at_once():
    "Only what may be the beginning of a mark is held back."
    reader = AnswerReader(tools=True)
    text = 'Hello {"name": "f"}, 1 < 2 and a[1]. '
    late = [len(text[:i]) - sum(len(v) for _, v in reader.push(text[i - 1])) for i in (1,)]
    passed = 1 - late[0]
    for i, letter in enumerate(text[1:], 2):
        passed += sum(len(value) for _, value in reader.push(letter))
        assert i - passed <= 1, text[:i]
    call = "<think>\nno\n</think>\n\nI ask.<tool_call>" + '{"name": "f", "arguments": {"x": 1}}'
    assert in_pieces(call + "</tool_call>done", 1)[:3] == (
        "no", "I ask.done", [dict(name="f", arguments=dict(x=1))],
    )  # fmt: skip
    assert in_pieces("<think><tool_call></think>yes", 1)[:3] == ("<tool_call>", "yes", [])
