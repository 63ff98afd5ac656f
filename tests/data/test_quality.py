"The data doctor finds every kind of planted defect, and nothing in clean rows."

import json
import random
import string
from functools import cache
from itertools import islice
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainkit.data.text_checks import DEFECTS, mask_personal, repair
from trainkit.data.sources import CORPORA
from trainkit.data.dataset import clean_examples
from trainkit.data.dedup import (
    choose_bands,
    content_key,
    drop_duplicates,
    exact_groups,
    find_leaks,
    jaccard,
    join_groups,
    near_pairs,
    pieces,
    shingles,
    signatures,
)
from trainkit.data.quality_report import Case, Finding, QualityReport, RowView
from trainkit.data.quality import CHECKS, check_examples
from trainkit.tokenizer.chat_template import TEMPLATES, render_text
from trainkit.tokenizer.bpe_tokenizer import BPETokenizer


@cache
def corpus(name, most=600):
    "The first rows of a corpus; read once, and never changed."
    try:
        return list(islice(CORPORA[name](), most))
    except FileNotFoundError:
        return pytest.skip(f"{name} is not installed")


@cache
def facts():
    "240 questions, at most one per country and field, with sentences as answers; 60 held out."
    rows, seen = [], set()
    for row in corpus("factbook-questions", 3000):
        if (row["field"], row["country"]) in seen:
            continue
        seen.add((row["field"], row["country"]))
        rows.append(
            dict(
                prompt=row["prompt"],
                completion=row["completion"],
                source="facts.jsonl",
                line=len(rows) + 1,
            )
        )
    random.Random(5).shuffle(rows)
    return rows[:240], rows[240:300]


@cache
def talks():
    return [
        dict(
            messages=[
                dict(role="system", content="Answer briefly."),
                dict(role="user", content=r["prompt"]),
                dict(role="assistant", content=r["completion"]),
            ]
        )
        for r in facts()[0]
    ]


@cache
def prose():
    "Answers of whole sentences."
    rows = []
    for chapter in corpus("bible")[:200]:
        text = " ".join(chapter["text"].split()[:40])
        if "." in text[100:]:
            rows.append(
                dict(
                    prompt=f"Go on from “{chapter['text'][:30]}”.",
                    completion=text[: text.rindex(".") + 1],
                )
            )
    return rows


@cache
def pairs():
    rng = random.Random(1)
    return [
        dict(
            prompt=r["prompt"],
            chosen=r["completion"],
            rejected=rng.choice(facts()[0])["completion"] + "!",
        )
        for r in facts()[0]
    ]


def put(rows, where, **how):
    "A copy of `rows` in which columns of the rows `where` are changed by functions."
    return [
        {**r, **{c: f(r[c]) for c, f in how.items()}} if i in where else dict(r)
        for i, r in enumerate(rows)
    ]


some, every = range(100, 112), range(240)


def junk(n, letters=string.ascii_letters + string.digits):
    return "".join(random.Random(n).choices(letters, k=n))


def mojibake(t):
    return (t + " – café").encode().decode("cp1252")


def turns(*roles):
    return dict(
        messages=[dict(role=r, content=f"{r} speaks of {junk(9 + k)}") for k, r in enumerate(roles)]
    )


@cache
def defects():
    return [*_defects()]


def _defects():
    "Name of the defect -> (name of the finding, rows, rows to evaluate on)."
    good, held = facts()

    def c(f, where=some):
        return (put(good, where, completion=f), held)

    def q(f, where=some):
        return (put(good, where, prompt=f), held)

    secret = {
        "GitHub": "ghp_" + junk(36),
        "AWS": "AKIA" + junk(16, string.ascii_uppercase + string.digits),
        "Google": "AIza" + junk(35),
        "Hugging Face": "hf_" + junk(34),
        "Slack": "xoxb-" + junk(24),
        "OpenAI": "sk-proj-" + junk(40),
        "Stripe": "sk_live_" + junk(24),
        "key file": f"-----BEGIN PRIVATE KEY-----\n{junk(64)}\n-----END PRIVATE KEY-----",
        "password": 'password = "tR5vq9mWx2Zk"',
        "URL": "postgres://ada:tr5vqm2x@db.acme.org/x",
        "JWT": f"eyJ{junk(20)}.eyJ{junk(40)}.{junk(30)}",
    }
    for name, text in secret.items():
        yield f"secret of {name}", "secrets", *c(lambda t, text=text: f"{t} {text} end", [7])
    for name, text in {
        "mail": "ada@acme.org",
        "phone": "+44 20 7946 0958",
        "US phone": "(202) 555-0143",
        "card": "4539 5787 6362 1486",
        "account": "DE89 3704 0044 0532 0130 00",
    }.items():
        yield f"personal {name}", "personal", *c(lambda t, text=text: f"{t} {text}", [7])
    yield "mojibake", "mojibake", *c(mojibake)
    yield "mojibake of Latin-1", "mojibake", *c(lambda t: (t + " Größe").encode().decode("latin-1"))
    yield (
        "mojibake of Mac Roman",
        "mojibake",
        *c(lambda t: (t + " café’s").encode().decode("mac-roman")),
    )
    yield "Cyrillic mojibake", "mojibake", *c(lambda t: "Привет мир".encode().decode("cp1251"))
    yield "Chinese mojibake", "mojibake", *c(lambda t: "你好世界".encode().decode("latin-1"))
    yield "replacement characters", "control", *c(lambda t: t + " caf\ufffd")
    yield "control characters", "control", *c(lambda t: t + "\x00")
    yield "terminal colours", "control", *c(lambda t: f"\x1b[31m{t}\x1b[0m")
    for code in ("feff", "200b", "2060", "ad", "202e", "200d", "e0041"):
        yield f"U+{code}", "invisible", *c(lambda t, code=code: f"o{chr(int(code, 16))}dd {t}")
    yield "homoglyphs", "homoglyphs", *c(lambda t: "the pаypal site")
    yield "HTML", "markup", *c(lambda t: f"<p>{t}</p>")
    yield "entities", "markup", *c(lambda t: t + " &amp;&nbsp;more")
    for mark in (
        "<|im_start|>user\n",
        "[INST] ",
        "<start_of_turn>",
        "### Response:\n",
        "<|eot_id|>",
        "<｜begin▁of▁sentence｜>",
        "<s>[INST]",
    ):
        yield f"template {mark!r}", "special_tokens", *q(lambda t, mark=mark: mark + t)
    yield "roles in text", "role_words", *q(lambda t: f"Human: {t}\n\nAssistant:")
    yield "a loop", "loops", *c(lambda t: t + " and then it was so" * 20)
    yield "a Chinese loop", "loops", *c(lambda t: t + "我不知道。" * 40)
    yield "empty answers", "empty", *c(lambda t: "")
    yield "blank questions", "empty", *q(lambda t: " \n")
    yield "placeholders", "placeholders", *c(lambda t: "NaN")
    yield (
        "answer is question",
        "answer_is_question",
        put([{**r, "completion": r["prompt"]} if i in some else r for i, r in enumerate(good)], []),
        held,
    )
    yield (
        "answer begins with question",
        "question_in_answer",
        [
            {**r, "completion": f"{r['prompt']} {r['completion']}"} if i in some else r
            for i, r in enumerate(good)
        ],
        held,
    )
    yield "copies", "exact_duplicates", [*good, *good[:9]], held
    long = prose()
    yield (
        "near copies",
        "near_duplicates",
        [
            *long,
            *put(long[:9], range(9), completion=lambda t: t.replace(" the ", " that ", 1).upper()),
        ],
        None,
    )
    yield "leak", "leak", good, [*held, *good[:3]]
    yield (
        "leak in capitals",
        "leak",
        good,
        [*held, *put(good[:3], range(3), prompt=str.upper, completion=str.lower)],
    )
    yield (
        "near leak",
        "near_leak",
        long[9:],
        [
            *put(long[9:19], range(10), completion=lambda t: t.replace(" the ", " that ", 1)),
            *long[:9],
        ],
    )
    yield (
        "question leak",
        "question_leak",
        good,
        [*held, *put(good[:4], range(4), completion=lambda t: "Nobody knows, they say here.")],
    )
    yield "a giant", "long_rows", *c(lambda t: " ".join(r["completion"] for r in good), [5])
    yield (
        "giants",
        "unbalanced_lengths",
        *c(lambda t: " ".join(r["completion"] for r in good), range(5)),
    )
    yield (
        "a crumb",
        "short_rows",
        put(long, [3], completion=lambda t: "x", prompt=lambda t: "y"),
        None,
    )
    yield (
        "same opening",
        "same_opening",
        *c(lambda t: f"Certainly! Here is what you asked for: {t}", range(120)),
    )
    yield (
        "same answer",
        "same_answer",
        *c(lambda t: "I'm sorry, but I can't help with that.", range(60)),
    )
    yield "too few", "amount", good[:30], held
    yield "too few different", "amount", good[:30] * 20, held
    yield "small evaluation", "small_evaluation", good, held[:5]
    yield (
        "rare class",
        "unbalanced_classes",
        [{**r, "completion": "yes" if i % 50 else "no"} for i, r in enumerate(good)],
        None,
    )
    yield (
        "rare source",
        "unbalanced_sources",
        [{**r, "source": "wiki" if i else "web", "line": None} for i, r in enumerate(good)],
        None,
    )
    yield (
        "stripped here only",
        "split_cleaning",
        good,
        put(held, range(60), prompt=lambda t: t + " "),
    )
    yield (
        "lower case here only",
        "split_cleaning",
        put(good, every, completion=str.lower, prompt=str.lower),
        held,
    )
    yield (
        "HTML here only",
        "split_cleaning",
        good,
        put(held, range(60), completion=lambda t: f"<b>{t}</b>"),
    )
    yield (
        "accents in pieces",
        "split_cleaning",
        put(good, every, completion=lambda t: t + " é"),
        put(held, range(60), completion=lambda t: t + " e\u0301"),
    )
    yield (
        "another script",
        "scripts",
        put(
            good,
            [5, 6],
            completion=lambda t: "Это столица большой страны на севере",
            prompt=lambda t: "Где это?",
        ),
        held,
    )
    yield (
        "cut answers",
        "cut_answers",
        put(long, range(0, 60, 3), completion=lambda t: t[:-15]),
        None,
    )
    yield (
        "a length limit",
        "same_length",
        put(long, range(len(long)), completion=lambda t: t[:120]),
        None,
    )
    yield (
        "same pair",
        "same_pair",
        put(pairs(), [3], chosen=lambda t: "Yes.", rejected=lambda t: "yes."),
        None,
    )
    yield (
        "longer is chosen",
        "length_bias",
        put(
            pairs(),
            every,
            chosen=lambda t: t + " And that is all there is to be said of it, at length, today.",
            rejected=lambda t: t[:40],
        ),
        None,
    )
    yield (
        "shorter is chosen",
        "length_bias",
        put(
            pairs(),
            every,
            rejected=lambda t: t + " And that is all there is to be said of it, at length, today.",
            chosen=lambda t: t[:40],
        ),
        None,
    )
    p = pairs()
    yield (
        "contradiction",
        "contradictions",
        [*p, dict(prompt=p[0]["prompt"], chosen=p[0]["rejected"], rejected=p[0]["chosen"])],
        None,
    )
    votes = [
        dict(prompt=r["prompt"], completion=r["completion"], label=i % 2 == 0)
        for i, r in enumerate(good)
    ]
    yield "contradicting votes", "contradictions", [*votes, {**votes[0], "label": False}], None
    yield (
        "rare label",
        "unbalanced_classes",
        [{**r, "label": i % 60 != 0} for i, r in enumerate(votes)],
        None,
    )
    chats = talks()
    for order in (
        ("user", "user", "assistant"),
        ("assistant", "user", "assistant"),
        ("user", "system", "assistant"),
        ("user", "assistant", "user"),
        ("user", "narrator", "assistant"),
        ("system", "user"),
        ("user", "tool", "assistant"),
        ("user", "assistant", "assistant"),
    ):
        yield f"roles {order}", "roles", [*chats, turns(*order)], None
    yield "no example", "malformed", [*good, dict(prompt="Why?")], held
    yield "a number for a text", "malformed", [*good, dict(prompt="Why?", completion=7)], held
    yield "no dict", "malformed", [*good, ["Why?"]], held


SEARCHES = {
    "duplicates": {"exact_duplicates", "near_duplicates", "contradictions"},
    "leaks": {"leak", "near_leak", "question_leak"},
}


def test_every_seeded_defect_is_found():
    missed, seen = [], set()
    for (
        defect,
        name,
        rows,
        held,
    ) in defects():  # The two slow searches only where it is theirs to find
        report = check_examples(
            rows, held, checks=[c for c in CHECKS if name in SEARCHES.get(c, {name})]
        )
        if name not in report:
            missed.append((defect, [f.name for f in report.findings]))
        seen.add(name)
    assert not missed, missed
    assert len(seen) >= 32


@cache
def tokenizer(template="chatml", eos=None, tokens=True):
    "A small tokenizer with a chat format, and with flaws on request."
    form = TEMPLATES[template]
    marks = [t for t in (*form.tokens, form.eos, form.bos) if t] if tokens else []
    tok = BPETokenizer.train(
        ["what is it " * 9],
        262,
        special_tokens=["<|endoftext|>", *dict.fromkeys(marks)],
        progress=False,
    )
    tok.chat_template, tok.eos_token = form.jinja, eos or form.eos or "<|endoftext|>"
    if form.bos and tokens:
        tok.bos_token = form.bos
    return tok


FORMATS = ["chatml", "smollm2", "qwen", "llama2", "mistral", "llama3", "gemma", "alpaca"]


def test_a_template_that_does_not_fit_is_found():
    good, held, chats = facts()[0][:40], facts()[1], talks()[:40]

    def findings(rows, held=None, **more):
        return {
            f.name: f
            for f in check_examples(rows, held, checks=["template_mismatch"], **more).findings
        }

    for name in FORMATS:
        tok, bare = tokenizer(name), [dict(messages=r["messages"][1:]) for r in chats]
        for rows in (
            good,
            bare,
            pairs()[:40],
            [dict(prompt=r["prompt"]) for r in good],
            [dict(text=r["completion"]) for r in good],
        ):
            assert not findings(rows, tokenizer=tok) and not findings(
                rows, tokenizer=tok.to_hf()
            ), name
            assert not findings(rows, tokenizer=tok, template=name) and not findings(rows)
        text = render_text(
            bare[3]["messages"], TEMPLATES[name].jinja, dict(bos_token="<s>", eos_token="</s>")
        )[0]
        answers = [dict(text=r["completion"]) for r in good]
        for key, plain in (("prompt", good), ("text", answers)):
            rows = put(plain, [7, 9], **{key: lambda old, text=text: text})
            seen = findings(rows, held, tokenizer=tok)["template_in_rows"]
            assert seen.count == 2 and name in seen.says or "chatml" in seen.says, name
        assert ("template_refuses" in findings(chats, tokenizer=tok)) == (name == "gemma")
        alternate = findings([*bare, turns("user", "user", "assistant")], tokenizer=tok)
        assert ("template_refuses" in alternate) == (
            name in ("llama2", "mistral", "gemma", "alpaca")
        )
        if name in ("llama2", "mistral", "alpaca"):
            continue  # These end with whatever the tokenizer says
        for tok in (tokenizer(name, "<|endoftext|>"), tokenizer(name, "<|endoftext|>").to_hf()):
            assert findings(good, tokenizer=tok)["template_end"].severity == "error"
        assert findings(good, tokenizer=tokenizer(name, tokens=False))["template_tokens"].count >= 2
    for one in FORMATS:
        for other in FORMATS:
            if one == other:
                continue
            report = findings([*bare[:9], *chats[:9]], tokenizer=tokenizer(one), template=other)
            assert report["template_differs"].severity == "warning", (one, other)
    assert (
        "no chat template, line 2" in findings(good, template="\n{% for")["template_refuses"].says
    )
    assert check_examples(good, tokenizer=tokenizer(eos="<|endoftext|>")).exit_code == 1


def test_defects_are_not_there_before():
    "What the test above finds is what was put in: the same rows without it have no such finding."
    (good, held), put_in = facts(), {name for _, name, _, _ in defects()}
    for rows, other in ((good, held), (talks(), None), (prose(), None), (pairs(), None)):
        names = {f.name for f in check_examples(rows, other).findings if f.severity != "note"}
        assert not names & put_in, names & put_in
    assert check_examples(good, held).findings == []


WORLD = {
    "French": "Ça, c’est « déjà vu » – “naïve”, dit-elle à CÔTÉ de l’Île no {}.",
    "German": "Größe und Straße, Fuß Nr. {}: schön „grün“.",
    "Vietnamese": "Ở đây có ngôi nhà thứ {} và những người vui vẻ.",
    "Russian": "Это предложение номер {} о чём-то хорошем — «Привет»!",
    "Greek": "Αυτή είναι η πρόταση {} για την Ελλάδα.",
    "Chinese": "这是关于第{}个城市的句子，天气很好。",
    "Japanese": "これは{}番目の文です。東京は大きい。",
    "Korean": "이것은 {}번째 문장입니다. 서울은 큽니다.",
    "Arabic": "هذه هي الجملة رقم {} عن المدينة الجميلة.",
    "Persian": "این جمله‌ی {} درباره‌ی کتاب‌هاست و می‌خواهم بخوانم.",
    "Hebrew": "זה המשפט מספר {} על העיר (Tel Aviv)\u200f.",
    "Hindi": "यह वाक्य संख्या {} है। क्\u200dष और र्\u200d भी ठीक है।",
    "Thai": "นี่คือ\u200bประโยค\u200bที่ {} เกี่ยวกับเมือง",
    "emoji": (
        "Number {} 👩🏽‍🚀 🏳️‍🌈 👨‍👩‍👧 ❤️ "
        "\U0001f3f4\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f is fun."
    ),
    "maths": "x² + y² ≤ {} µm, ΔT = 5 °C ± 2 %, ½ × √2.",
}


@pytest.mark.parametrize("language", WORLD)
def test_clean_text_of_the_world_is_clean(language):
    words = list(
        dict.fromkeys(c for row in corpus("code") for c in row["output"].split() if c.isalpha())
    )
    rows = [
        dict(
            prompt=f"{junk(6)} {i} {words[i]}?",
            completion=f"{words[3 * i]} {words[5 * i]} {i * i}: " + WORLD[language].format(i),
        )
        for i in range(150)
    ]
    report = check_examples(rows[:130], rows[130:])
    assert not [f for f in report.findings if f.name in DEFECTS or f.severity != "note"], report
    for name, find in DEFECTS.items():
        assert not any(find(r["completion"]) for r in rows), name


CLEAN = {
    "bible": 200,
    "stdlib": 60,
    "factbook-questions": 600,
    "factbook-preferences": 600,
    "code": 600,
    "arithmetic": 600,
}


@pytest.mark.parametrize(
    "name, most",
    [*CLEAN.items(), *(pytest.param(name, 3000, marks=pytest.mark.slow) for name in CLEAN)],
)
def test_clean_data_raises_no_alarm(name, most):
    rows = corpus(name, most)
    report = check_examples(rows[len(rows) // 20 :], None)
    assert not [f for f in report.findings if f.severity != "note"], report
    assert report.exit_code == 0


def test_a_long_instruction_makes_no_duplicates_and_no_leaks():
    form = (
        "You are a careful geographer who answers in one short sentence and never guesses, "
        "whatever is asked of you. " * 2
    )
    good, held = (put(rows, range(len(rows)), prompt=lambda t: form + t) for rows in facts())
    assert not {"near_duplicates", "near_leak", "question_leak", "leak"} & {
        f.name for f in check_examples(good, held).findings
    }


def test_cleaned_rows_stay_clean():
    cleaned, _ = clean_examples(
        [*facts()[0], *put(facts()[0][:5], range(5), completion=lambda t: t + "\u200b\x00")]
    )
    assert not {"invisible", "control", "exact_duplicates"} & {
        f.name for f in check_examples(cleaned).findings
    }


def test_secrets_are_never_shown():
    "Whatever the finding, and wherever the secret is in the row."
    good, held = facts()
    secret, address = "ghp_" + junk(36), "ada.lovelace@acme.org"
    rows = put(
        good,
        every,
        completion=lambda t: (
            f"{secret} <p>{t} {mojibake(address)} caf\ufffd {address}</p> {secret}" * 2
        ),
        prompt=lambda t: f"[INST] {secret} {t} {address}",
    )
    report = check_examples(
        [*rows, *rows[:50], dict(prompt=secret), dict(prompt=f"{secret} x", completion="")],
        rows[:20],
    )
    assert len(report.findings) > 8
    for text in (str(report), report.html, json.dumps(report.to_dict())):
        assert secret[:12] not in text and "lovelace" not in text and junk(36)[:8] not in text
    assert mask_personal(f"a {secret} b") == "a [GitHub token] b"


def test_report_in_every_form():
    good, held = facts()
    report = check_examples(put(good, some, completion=mojibake), held, strict=True)
    assert report.exit_code == 1 and report["mojibake"].count == 12
    assert report["mojibake"].examples[0].where == f"facts.jsonl:{good[100]['line']} assistant"
    assert "Ã©" in report["mojibake"].examples[0].bad or "â€“" in report["mojibake"].examples[0].bad
    plain = json.loads(json.dumps(report.to_dict()))
    assert (
        plain["findings"][0]["examples"][0]["excerpt"]
        and plain["exit_code"] == 1
        and plain["checks"] == [*CHECKS]
    )
    assert max(map(len, str(report).splitlines())) <= 80
    assert (
        ElementTree.fromstring(report.html.replace("<details open>", "<details>")).find(".//mark")
        is not None
    )


def test_rows_may_be_a_stream_of_any_kind():
    stream = (r for r in corpus("arithmetic"))
    assert check_examples(stream).kind == "reasoning"
    assert check_examples([]).rows == 0
    assert check_examples([], []).exit_code == 1  # nothing to train on
    assert check_examples([{"nothing": 1}])["malformed"].count == 1
    assert check_examples([dict(prompt=f"Write {i}") for i in range(99)]).kind == "prompt"
    share = [
        {
            "conversations": [
                {"from": "human", "value": f"Hi {i}"},
                {"from": "gpt", "value": f"Hello {i}"},
            ]
        }
        for i in range(150)
    ]
    assert not check_examples(share).of("error")
    parts = [
        dict(
            messages=[
                dict(role="user", content=[dict(type="text", text=f"Hi {i}")]),
                dict(role="assistant", content=None, tool_calls=[1]),
                dict(role="tool", content="5"),
                dict(role="assistant", content=f"It is {i}"),
            ]
        )
        for i in range(150)
    ]
    assert not check_examples(parts).of("error")


TURN = st.dictionaries(
    st.sampled_from(["role", "content", "from", "value"]), st.one_of(st.text(), st.none())
)
VALUE = st.one_of(
    st.text(), st.none(), st.integers(), st.booleans(), st.lists(st.one_of(st.text(), TURN))
)
COLUMN = st.sampled_from(
    ["prompt", "completion", "messages", "text", "label", "chosen", "rejected", "source", "line"]
)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.dictionaries(COLUMN, VALUE), max_size=8))
@example([dict(prompt="", completion="", label=0), dict(prompt="", completion="", label=[])])
def test_nothing_breaks_the_doctor(rows):
    report = check_examples(rows, rows)
    assert "check_failed" not in report, report
    assert str(report) and report.html and json.dumps(report.to_dict())


LETTERS = "".join(
    chr(c)
    for a, b in (
        (0x390, 0x3CE),
        (0x410, 0x450),
        (0x5D0, 0x5EB),
        (0x620, 0x64B),
        (0x905, 0x93A),
        (0x3041, 0x3097),
        (0x4E00, 0x5000),
        (0xAC00, 0xAD00),
        (0x1F600, 0x1F640),
    )
    for c in range(a, b)
    if chr(c).isprintable()
)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=LETTERS, min_size=2), st.sampled_from([1, 2]), st.booleans())
def test_mojibake_is_seen_and_can_be_undone(text, times, windows):
    "Any text in any of these scripts comes back, also if it was broken twice."
    assert not DEFECTS["mojibake"](text)
    table = (
        {0x80 + i: c for i, c in enumerate("€\x81‚ƒ„…†‡ˆ‰Š‹Œ\x8dŽ\x8f\x90‘’“”•–—˜™š›œ\x9džŸ")}
        if windows
        else {}
    )
    broken = text
    for _ in range(times):
        broken = broken.encode().decode("latin-1").translate(table)
    assert DEFECTS["mojibake"](broken) and repair(broken) == text


def brute(texts, threshold):
    bags = [shingles(t) for t in texts]
    return {
        (i, j)
        for j in range(len(texts))
        for i in range(j)
        if texts[i] != texts[j] and jaccard(bags[i], bags[j]) >= threshold
    }


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.8, 0.9])
def test_near_pairs_are_those_of_brute_force(threshold):
    rng, words = (
        random.Random(2),
        " ".join(r["text"] for r in corpus("code") if "text" in r)
        or " ".join(r["output"] for r in corpus("code")),
    )
    words = words.split()
    texts = [" ".join(words[k : k + 60]) for k in range(0, 3600, 60)]
    for text in texts[:60]:
        for rate in (0.01, 0.03, 0.06):
            texts.append(
                " ".join(w if rng.random() > rate else rng.choice(words) for w in text.split())
            )
    texts = list(dict.fromkeys(texts))
    wanted, ours = brute(texts, threshold), {(i, j): s for i, j, s in near_pairs(texts, threshold)}
    assert ours.keys() <= wanted
    assert len(wanted) > 50 and len(wanted - ours.keys()) <= 0.02 * len(wanted)
    for (i, j), s in ours.items():
        assert s == jaccard(shingles(texts[i]), shingles(texts[j]))
    half = len(texts) // 2
    across = {(i, j - half) for i, j in wanted if i < half <= j}
    leaked = {i for i, _, _ in find_leaks(texts[:half], texts[half:], threshold)}
    assert leaked <= {i for i, _ in across} | {i for i in range(half) if texts[i] in texts[half:]}
    assert len({i for i, _ in across} - leaked) <= 0.02 * len(across) + 1


def test_signatures_estimate_without_bias():
    rng = np.random.default_rng(0)
    words = [f"w{i}" for i in range(3000)]
    pairs, true = [], []
    for _ in range(400):
        a = rng.choice(words, 80)
        b = np.where(rng.random(80) < rng.random() ** 2, rng.choice(words, 80), a)
        pairs += [" ".join(a), " ".join(b)]
        true.append(jaccard(shingles(pairs[-2]), shingles(pairs[-1])))
    sign, true = signatures(pairs, 256), np.array(true)
    error = (sign[::2] == sign[1::2]).mean(1) - true
    assert abs(error.mean()) < 4 * (true * (1 - true) / 256).mean() ** 0.5 / 20
    assert (np.abs(error) < 4.5 * np.sqrt(true * (1 - true) / 256) + 3 / 256).all()


def test_edges_of_the_search():
    assert (
        jaccard(shingles(""), shingles("  ")) == 1
        and jaccard(shingles("one two"), shingles("One\ttwo")) == 1
    )
    assert len(shingles("one")) == 1 and jaccard(shingles("one two"), shingles("two one")) == 0
    texts = [r["output"] for r in corpus("code")[:200]]
    words = {tuple(p[i : i + 3]) for p in map(pieces, texts) for i in range(len(p) - 2)}
    assert (
        0 <= len(words) - len(set(np.concatenate([shingles(t) for t in texts]).tolist())) <= 2
    )  # hardly two share a number
    assert signatures([]).shape == (0, 128) and signatures(["a", "", "a b c d e"]).shape == (3, 128)
    assert (
        np.concatenate([signatures(texts[:7]), signatures(texts[7:])]) == signatures(texts)
    ).all()  # blocks don't matter
    assert (signatures(texts, seed=1) == signatures(texts)).mean() < 0.01
    assert near_pairs([]) == near_pairs(["a"]) == near_pairs(["a", "a"]) == []
    assert near_pairs(["One two three four.", "one two  three four."]) == [(0, 1, 1.0)]
    letter = (
        "Dear customer, we are glad to tell you that your order has been sent today and will "
        "arrive within a week. "
    )
    many = [
        letter * 2 + f"Yours, number {i}" for i in range(300)
    ]  # a run longer than the reach of the search
    assert join_groups(near_pairs(many)) == [list(range(300))]
    assert find_leaks([], texts) == find_leaks(texts[:3], []) == []
    with pytest.raises(ValueError, match="more num_hashes"):
        choose_bands(0.01)


def test_hashes_are_the_same_on_every_machine():
    "What was dropped yesterday is dropped today."
    assert content_key("trainkit") == int.from_bytes(
        __import__("hashlib").blake2b(b"trainkit", digest_size=8).digest(), "little"
    )
    assert shingles("The cat sat on the mat").tolist() == [SHINGLES[i] for i in range(4)]
    assert signatures(["The cat sat on the mat"], 4).tolist() == [SIGNATURE]
    assert choose_bands(0.8) == (21, 6)


SHINGLES = [1337078619, 88205653, 4271623443, 2344534527]
SIGNATURE = [861496409, 68046142, 247818002, 1223351395]


def test_groups_and_drops():
    assert exact_groups(iter(["a", "b", "a"])) == [[0, 2]]
    assert join_groups([(0, 1), (2, 3), (1, 2)]) == [[0, 1, 2, 3]]
    rows = [
        dict(text=t)
        for t in ("one two three four five", "One  two three four FIVE", "six seven", "six seven")
    ]
    assert drop_duplicates(rows) == ([rows[0], rows[2]], [1, 3])
    assert drop_duplicates(rows, threshold=None) == (rows[:3], [3])
    assert not near_pairs(["3 + 4 = 7", "3 - 4 = 7"], 0.9)


def test_only_what_is_like_a_row_that_stays_is_dropped():
    "In a chain of texts, the ends of which have little in common, and in a long run of letters."
    words = [f"w{i}" for i in range(60)]
    chain = [" ".join(words[a:b]) for a, b in ((0, 50), (9, 59), (4, 55), (0, 50))]
    assert drop_duplicates([dict(text=text) for text in chain])[1] == [2, 3]
    letter = "we are glad to tell you that your order has been sent today " * 3
    letters = [dict(text=letter + f"Yours, number {i}") for i in range(40)]
    rng = random.Random(1)
    others = [dict(text=" ".join(rng.choices(words, k=9))) for _ in range(2600)]
    assert drop_duplicates(letters + others)[1] == list(range(1, 40))
    texts = [" ".join(words[a : a + rng.randint(20, 40)]) for a in range(20) for _ in range(5)]
    kept, dropped = drop_duplicates([dict(text=text) for text in texts], threshold=0.7)
    assert len(kept) + len(dropped) == 100 and 20 < len(dropped) < 99
    for j in dropped:
        before = (i for i in range(j) if i not in dropped)
        assert any(jaccard(shingles(texts[i]), shingles(texts[j])) >= 0.7 for i in before)


def test_a_check_of_ones_own(monkeypatch):
    monkeypatch.setitem(
        CHECKS,
        "mine",
        lambda case: iter([Finding("mine", "warning", len(case.train), len(case.train), "x")]),
    )
    report = check_examples(facts()[0][:7], checks=["mine"], strict=True)
    assert isinstance(report, QualityReport) and report["mine"].count == 7 and report.exit_code == 1
    assert Case(RowView([])).splits


@pytest.mark.parametrize("n", [2000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_many_rows_in_bounded_memory(n):
    "What the doctor needs beyond the rows is about 2 kB a row."
    import tracemalloc

    rng, words = random.Random(0), [junk(k % 9 + 3) + str(k) for k in range(5000)]
    rows = [
        dict(
            prompt=f"{' '.join(rng.choices(words, k=8))}?",
            completion=" ".join(rng.choices(words, k=12)) + ".",
        )
        for _ in range(n)
    ]
    tracemalloc.start()
    report = check_examples(
        rows[: n * 19 // 20],
        rows[n * 19 // 20 :],
        checks=[n for n in CHECKS if n not in ("texts", "cut_answers")],
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert not report.of("error") and peak < 3000 * n, peak


def test_what_is_no_list_of_rows_or_no_method_is_an_error_and_no_rows_fail():
    for bad in ("rows.jsonl", dict(prompt="a", completion="b")):
        with pytest.raises(ValueError, match="a list of rows is needed"):
            check_examples(bad)
    with pytest.raises(ValueError, match="Did you mean 'lora'"):
        check_examples([dict(text="a")], method="lorra")
    assert check_examples([]).exit_code == 1


REPEATED = (
    "[INST]",
    "<s>[INST] a ",
    "### Instruction:\n",
    "\n### Instruction:\n",
    "\nUSER: ",
    "\n\n",
    " \n",
    "a.",
    "1-",
    "+1",
    "a+",
    "<|im_start|> ",
    "</s> ",
    ";",
    "& <",
)


@pytest.mark.parametrize("piece", REPEATED)
def test_what_is_repeated_ten_times_as_often_takes_no_hundred_times_as_long(piece):
    "60,000 times in a text took from half a minute to an hour; and now less than a second."
    from time import process_time

    from trainkit.data.text_checks import looks_like_code
    from trainkit.data.quality import find_chat_format

    text, start = piece * 60_000 + " :@<&##;1234 sk-", process_time()
    find_chat_format(text), looks_like_code(text), mask_personal(text)
    for find in DEFECTS.values():
        find(text)
    assert process_time() - start < 25


def test_a_rendered_chat_is_found_as_one_slow_expression_would_find_it():
    import re
    from trainkit.data.quality import find_chat_format

    slow = {
        "llama2 or mistral": r"\[INST\][\s\S]*?\[/INST\]",
        "vicuna": r"(?m)^USER: [\s\S]*?\bASSISTANT:",
        "alpaca": r"(?m)(?:^|(?<=>))### Instruction:\s*\n[\s\S]*?^### Response:",
    }
    rng, count = random.Random(0), 0
    parts = [
        "[INST]",
        "[/INST]",
        "a ",
        "\n",
        "### Instruction:\n",
        "### Instruction: \n",
        "### Response:",
        "</s>",
        "USER: ",
        "\nUSER: ",
        "ASSISTANT:",
        "x",
    ]
    for _ in range(3000):
        text = "".join(rng.choices(parts, k=rng.randint(1, 9)))
        hits = [
            (m.start(), name, m.span())
            for name, form in slow.items()
            if (m := re.search(form, text))
        ]
        assert find_chat_format(text) == (min(hits)[1:] if hits else None), text
        count += bool(hits)
    assert 300 < count < 2900
    assert DEFECTS["role_words"]("\n\n  Human: hi\nAssistant: yes") == [(2, 10), (14, 24)]
    assert mask_personal("to " + "a." * 20 + "b@firm.org, please") == "to [e-mail address], please"


def test_a_template_that_leaves_out_tools_refuses_their_rows():
    "As the run would, and only then."
    tool = dict(type="function", function=dict(name="now", parameters=dict(type="object")))
    plain = [dict(messages=row["messages"][1:]) for row in talks()[:8]]
    tools = [
        dict(row, tools=json.dumps([tool]) if i % 2 else [tool]) for i, row in enumerate(plain)
    ]

    def refused(rows, template):
        report = check_examples(rows, checks=["template_mismatch"], template=template)
        return [f for f in report.findings if f.name == "template_refuses"]

    [finding] = refused(tools, "smollm2")
    assert "no way to write tools" in finding.says and finding.count == len(tools)
    assert not refused(tools, "chatml") and not refused(plain, "smollm2")
