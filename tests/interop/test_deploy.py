"4-bit exports: mixes of K-quants, importance matrices, and folders that transformers opens."

import ast
import json
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from trainkit.interop.deploy import (
    SymmetricGrid,
    collect_importance,
    export_compressed,
    fold_awq,
    pack_int4,
    read_imatrix,
    write_imatrix,
)
from trainkit.interop.gguf import QUANT_TYPES, block_kind, export_gguf
from trainkit.interop.hf import load_pretrained, save_pretrained, unpack_compressed
from trainkit.model.config import ModelConfig
from trainkit.model.transformer import Transformer
from trainkit.quant.calibration import collect_inputs, round_to_nearest
from trainkit.quant.quantize import QuantConfig
from trainkit.tokenizer.bpe_tokenizer import BPETokenizer

IDS = torch.randint(0, 300, (4, 32), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tokenizer = BPETokenizer.train(
        [Path(ast.__file__).read_text()], 320, special_tokens=("<|endoftext|>",)
    )
    torch.manual_seed(1)
    config = ModelConfig(
        vocab_size=320, d_model=256, n_heads=4, n_kv_heads=2, n_layers=2, d_ff=320, max_seq_len=64
    )
    model = Transformer(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn_like(p))
    return save_pretrained(model.eval(), tokenizer, tmp_path_factory.mktemp("deploy") / "m")


def test_a_mix_opens_in_transformers(folder, tmp_path):
    "Kinds as llama.cpp chooses them: rows of 256 are K-quants, the others fall back."
    report = export_gguf(folder, tmp_path / "m.gguf", "q4_k_m", progress=False)
    tensors = {t.name: t for t in gguf.GGUFReader(report["path"]).tensors}
    kinds = {name: t.tensor_type.name for name, t in tensors.items()}
    assert kinds["token_embd.weight"] == kinds["blk.1.attn_v.weight"] == "Q6_K"
    assert kinds["blk.0.attn_v.weight"] == kinds["blk.0.ffn_up.weight"] == "Q4_K"
    assert (kinds["blk.0.ffn_down.weight"], kinds["blk.1.ffn_down.weight"]) == ("Q5_0", "Q8_0")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    ours = load_pretrained(tmp_path / "m.gguf")[0]
    with torch.no_grad():
        torch.testing.assert_close(theirs(IDS).logits, ours(IDS).logits, atol=1e-5, rtol=1e-5)


def test_the_layers_with_more_bits(folder):
    "Of 32 layers: the first four, the last four, and every third between them."
    config = ModelConfig(vocab_size=64, d_model=256, n_heads=4, n_layers=32, d_ff=512)
    kinds = [block_kind(f"blk.{i}.attn_v.weight", (256, 256), "q4_k_m", config) for i in range(32)]
    more = [i for i, kind in enumerate(kinds) if kind == "Q6_K"]
    assert more == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    for kind, wanted in (("q5_k_m", "Q5_K"), ("q6_k", "Q6_K"), ("q4_0", "Q4_0"), ("f16", "F16")):
        assert block_kind("blk.4.attn_q.weight", (256, 256), kind, config) == wanted
    untied = ModelConfig(vocab_size=64, d_model=256, n_heads=4, n_layers=2, d_ff=512)
    untied.tie_embeddings = False
    assert block_kind("token_embd.weight", (64, 256), "q4_k_m", untied) == "Q4_K"
    assert block_kind("output.weight", (64, 256), "q4_k_m", untied) == "Q6_K"
    assert all(block_kind("output.weight", (64, 80), k, untied) != "" for k in QUANT_TYPES)


def test_an_importance_matrix_there_and_back(folder, tmp_path):
    importance = collect_importance(folder, IDS, progress=False)
    assert len(importance) == 14 and not {"output.weight", "token_embd.weight"} & set(importance)
    model, _ = load_pretrained(folder)
    inputs = collect_inputs(model, [IDS])["model.layers.1.self_attn.o_proj"]
    wanted = inputs.gram.diagonal().numpy()
    np.testing.assert_allclose(importance["blk.1.attn_output.weight"], wanted, rtol=1e-4)
    path = write_imatrix(tmp_path / "i.gguf", importance, IDS.numel(), 32, "text.txt")
    back = read_imatrix(path)
    assert back.keys() == importance.keys()
    for name, row in importance.items():
        np.testing.assert_allclose(back[name], row, rtol=1e-6)
    reader = gguf.GGUFReader(path)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    assert facts["general.type"] == "imatrix" and facts["imatrix.datasets"] == ["text.txt"]
    assert (facts["imatrix.chunk_count"], facts["imatrix.chunk_size"]) == (4, 32)
    assert [*map(int, reader.tensors[1].shape)] == [256, 1] or reader.tensors[0].name
    exported = export_gguf(
        folder, tmp_path / "m.gguf", "q4_0", progress=False, importance=importance
    )
    assert exported["wide"] == []
    wrong = {"blk.0.attn_q.weight": np.ones(3, np.float32)}
    with pytest.raises(ValueError, match="another model"):
        export_gguf(folder, tmp_path / "x.gguf", "q4_k_m", progress=False, importance=wrong)


def test_codes_have_the_layout_of_the_format():
    "Eight codes in a number, the first one in the lowest bits; -8 is stored as 0."
    codes = torch.randint(-8, 8, (3, 32), generator=torch.Generator().manual_seed(0))
    codes[:, 0] = -8
    scales = torch.tensor([[0.5, 2.0]] * 3)
    rounded = codes * scales.repeat_interleave(16, 1)
    packed = pack_int4(rounded, scales, 16)
    numbers = (codes + 8).view(3, 4, 8).tolist()
    wanted = [[sum(c << 4 * i for i, c in enumerate(n)) for n in row] for row in numbers]
    assert (packed.long() & 0xFFFFFFFF).tolist() == wanted
    assert torch.equal(unpack_compressed(packed, scales), rounded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_uses_the_scale_as_it_is_stored(dtype):
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    weight[0] = 0
    grid = SymmetricGrid(dtype)
    rounded = round_to_nearest(weight, bits=4, group=32, grid=grid)
    back = unpack_compressed(pack_int4(rounded, grid.scales, 32), grid.scales.float())
    assert torch.equal(back, rounded) and grid.scales.dtype == dtype


def test_folding_changes_no_output(folder):
    model, _ = load_pretrained(folder, native=False)
    inputs = collect_inputs(model, [IDS])
    with torch.no_grad():
        before = model(IDS).logits
        fold_awq(model, inputs, 64, torch.float32)
        torch.testing.assert_close(model(IDS).logits, before, atol=1e-4, rtol=1e-4)
    again = collect_inputs(model, [IDS])
    for name, stats in again.items():
        torch.testing.assert_close(inputs[name].gram, stats.gram, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", ["nearest", "gptq", "awq"])
def test_a_folder_is_what_the_loader_expects(folder, tmp_path, method):
    "transformers' own loader, where compressed-tensors is installed; the file's names elsewhere."
    report = export_compressed(folder, tmp_path / "c", method, IDS, progress=False)
    assert report["layers"] == 14 and report["group"] == 64
    stored = load_file(tmp_path / "c" / "model.safetensors")
    layer = "model.layers.0.mlp.down_proj.weight"
    assert stored[f"{layer}_packed"].shape == (256, 40) and layer not in stored
    assert stored[f"{layer}_scale"].shape == (256, 5)
    assert stored[f"{layer}_shape"].tolist() == [256, 320]
    config = json.loads((tmp_path / "c" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "pack-quantized" and (tmp_path / "c" / "tokenizer.json").is_file()
    weights = {name: w for name, w in stored.items() if ".weight_" not in name}
    for name in stored:
        if name.endswith("_packed"):
            name = name.removesuffix("_packed")
            weights[name] = unpack_compressed(stored[f"{name}_packed"], stored[f"{name}_scale"])
    ours, _ = load_pretrained(folder, native=False)
    ours.load_state_dict(weights, strict=False)
    own, tokenizer = load_pretrained(tmp_path / "c")
    with torch.no_grad():
        torch.testing.assert_close(own(IDS).logits, ours(IDS).logits, atol=1e-3, rtol=1e-3)
    assert type(own).__name__ == "Transformer" and tokenizer is not None
    with pytest.raises(ValueError, match="4 bits already: load it without quant"):
        load_pretrained(tmp_path / "c", quant=QuantConfig())
    if find_spec("compressed_tensors") is None:
        pytest.skip("compressed-tensors is not installed: its loader is not tested")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "c")
    with torch.no_grad():
        torch.testing.assert_close(theirs(IDS).logits, ours(IDS).logits, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    "knobs, message",
    [
        (dict(method="hqq"), "none of nearest, awq, gptq"),
        (dict(method="gptq"), "give input_ids"),
        (dict(method="nearest", group=128), "down_proj has rows of 320 numbers"),
    ],
)
def test_what_cannot_be_packed_is_refused(folder, tmp_path, knobs, message):
    with pytest.raises(ValueError, match=message):
        export_compressed(folder, tmp_path / "c", progress=False, **knobs)
    assert not [*tmp_path.iterdir()]


def test_a_model_without_linear_layers_is_refused(tmp_path):
    "GPT-2's layers are transposed matrices of a class of their own."
    sizes = dict(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=16)
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match="gpt2 has no linear layer that can be packed"):
        export_compressed(tmp_path / "gpt2", tmp_path / "out", "nearest")
    assert not (tmp_path / "out").exists()
