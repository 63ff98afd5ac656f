"Reward models against TRL's RewardTrainer, step by step."

import copy
import math
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from trainkit.model.config import ModelConfig
from trainkit.model.transformer import Transformer
from trainkit.train.optim import OptimConfig
from trainkit.align.preference_data import PairBatches
from trainkit.align.reward_model import RewardModel, reward_objective, score_ids, score_pairs
from trainkit.tokenizer.bpe_tokenizer import BPETokenizer
from trainkit.train.config import TrainConfig
from trainkit.train.trainer import Trainer

warnings.filterwarnings("ignore")


def some_pairs(n, margin=False):
    rng = np.random.default_rng(0)

    def draw(low, high):
        return rng.integers(3, 96, int(rng.integers(low, high))).tolist()

    pairs = [dict(prompt=draw(3, 14), chosen=draw(2, 9), rejected=draw(2, 9)) for _ in range(n)]
    return [
        {
            **p,
            "length": sum(map(len, p.values())),
            **(dict(margin=float(i % 3) / 2) if margin else {}),
        }
        for i, p in enumerate(pairs)
    ]


def tiny():
    torch.manual_seed(0)
    return transformers.LlamaForSequenceClassification(
        transformers.LlamaConfig(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_labels=1,
            pad_token_id=0,
        )
    )


@pytest.mark.parametrize("center, margin", [(0.0, False), (0.01, True)])
def test_a_run_is_trls_run_step_by_step(tmp_path, center, margin):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({f"t{i}": i for i in range(96)}, unk_token="t0")),
        pad_token="t0",
        eos_token="t1",
    )
    pairs, B, steps = some_pairs(12, margin), 3, 4
    rows = [
        dict(
            chosen="",
            rejected="",
            chosen_ids=p["prompt"] + p["chosen"],
            rejected_ids=p["prompt"] + p["rejected"],
            **(dict(margin=p["margin"]) if margin else {}),
        )
        for p in pairs
    ]

    class Ready(trl.RewardTrainer):
        def _prepare_dataset(self, dataset, *args):
            return dataset

        def _get_train_sampler(self, *args):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    args = trl.RewardConfig(
        str(tmp_path),
        per_device_train_batch_size=B,
        max_steps=steps,
        logging_steps=1,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        report_to=[],
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        center_rewards_coefficient=center or None,
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    their = Ready(
        tiny(), args, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
    )
    their.train()
    logs = [r for r in their.state.log_history if "loss" in r]
    source = tiny()
    body = transformers.LlamaForCausalLM(source.config)
    body.model.load_state_dict(source.model.state_dict())
    model = RewardModel(body)
    model.score.load_state_dict(source.score.state_dict())
    optim = OptimConfig(
        learning_rate=1e-3,
        weight_decay=0.0,
        adam_beta2=0.999,
        lr_scheduler_type="constant",
        warmup_steps=0,
    )
    result = Trainer(
        model,
        reward_objective(center),
        PairBatches(pairs, B, shuffle=False),
        config=TrainConfig(max_steps=steps, logging_steps=1, progress=False),
        optim=optim,
    ).train()
    for a, b in zip(logs, result.history, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=1e-5) and b["grad_norm"] == pytest.approx(
            a["grad_norm"], rel=1e-4
        )
        assert b["rewards/margins"] == pytest.approx(a["margin"], abs=1e-5)


def test_it_learns_and_its_weights_are_saved(tmp_path):
    torch.manual_seed(0)
    model = RewardModel(
        Transformer(
            ModelConfig(vocab_size=96, d_model=32, n_heads=4, n_kv_heads=2, n_layers=1, d_ff=64)
        )
    )
    pairs = some_pairs(16)
    Trainer(
        model,
        reward_objective(),
        PairBatches(pairs, 8),
        config=TrainConfig(max_steps=40, progress=False, output_dir=str(tmp_path)),
        optim=OptimConfig(learning_rate=1e-2),
    ).train()
    assert score_pairs(model, pairs)[1] > 0.9
    from safetensors.torch import load_file

    again = copy.deepcopy(model)
    torch.nn.init.zeros_(again.score.weight)
    again.load_state_dict(load_file(tmp_path / "model" / "model.safetensors"))
    assert torch.equal(score_pairs(again, pairs)[0], score_pairs(model, pairs)[0])


def test_a_saved_reward_model_says_how_it_is_read(tmp_path):
    "The lines of its README give the scores of `score_answers`, and batches can be padded."
    from trainkit.recipes.saving import save_reward_model, score_answers
    from trainkit.tokenizer.chat import set_template

    torch.manual_seed(0)
    tokenizer = BPETokenizer.train(
        ["How are you?", "Fine."] * 5, 264, special_tokens=["<|endoftext|>"]
    )
    set_template(tokenizer, "chatml")
    shape = ModelConfig(
        vocab_size=len(tokenizer), d_model=32, n_heads=4, n_kv_heads=2, n_layers=1, d_ff=64
    )
    causal = Transformer(shape)
    model = RewardModel(causal)
    torch.nn.init.normal_(model.score.weight)
    save_reward_model(model, tokenizer, tmp_path / "rm", causal)
    lines = (tmp_path / "rm" / "README.md").read_text().split("```")[1].removeprefix("python")
    names = {}
    for prompt, answer in (("How?", "Fine."), ("How are you?", "")):
        messages = [dict(role="user", content=prompt), dict(role="assistant", content=answer)]
        names = {"FOLDER": str(tmp_path / "rm"), "messages": messages}
        exec(lines, names)
        [expected] = score_answers(model, tokenizer, [messages[:1]], [answer])
        assert names["reward"] == pytest.approx(expected, abs=1e-5)
    opened = transformers.AutoTokenizer.from_pretrained(tmp_path / "rm")
    assert opened.pad_token_id == names["model"].config.pad_token_id
    batch = opened(["a", "b c d"], padding=True, return_tensors="pt")
    assert names["model"](**batch).logits.shape == (2, 1)


def test_a_family_without_a_class_for_rewards_is_refused_before_training():
    from trainkit.recipes.saving import check_reward_class

    shape = dict(vocab_size=64, d_model=32, n_heads=4, n_layers=1, d_ff=48)
    check_reward_class(Transformer(ModelConfig(**shape)))
    with pytest.raises(ValueError, match="no class of transformers computes this"):
        check_reward_class(Transformer(ModelConfig(**shape, qk_norm=True, bias="qkv")))
    theirs = transformers.GraniteConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1
    )
    with pytest.raises(ValueError, match="family 'granite'"):
        check_reward_class(transformers.GraniteForCausalLM(theirs))


def test_scores_begin_small_and_a_tie_is_half_right(monkeypatch):
    "The standard deviation of trl's head: of a width d it is the root of 1 / (d + 1)."
    model = tiny()
    width = model.get_input_embeddings().weight.shape[1]
    torch.manual_seed(7)
    scorer = RewardModel(model)
    torch.manual_seed(7)
    torch.nn.Linear(width, 1, bias=False)  # Which draws numbers that are not used
    wanted = torch.randn(1, width) / (width + 1) ** 0.5
    assert torch.allclose(scorer.score.weight, wanted, atol=1e-6)
    sides = "chosen_input_ids", "rejected_input_ids"
    monkeypatch.setattr(
        "trainkit.align.reward_model.pair_rewards",
        lambda model, batch: [batch[side].sum(1).float() for side in sides],
    )
    answers = [([3, 4], [4, 3]), ([5], [2, 2]), ([1], [8]), ([6, 1], [7])]
    pairs = [dict(prompt=[1, 2], chosen=c, rejected=r) for c, r in answers]
    for batch_size in (1, 3, 9):
        rewards, share = score_pairs(scorer, pairs, batch_size)
        assert rewards.tolist() == [[7, 7], [5, 4], [1, 8], [7, 7]] and share == 0.5
    assert score_pairs(scorer, pairs[:2])[1] == 0.75


@pytest.mark.parametrize(("center", "margin"), [(0.0, None), (0.01, [0.5, 0.0, 1.0])])
def test_the_objective_of_a_reward_model_by_hand(center, margin, monkeypatch):
    "Rewards of 1, 2, 2 against 0, 2, 3: one pair is ahead, one is a tie, and counts half."
    chosen, rejected = torch.tensor([1.0, 2.0, 2.0]), torch.tensor([0.0, 2.0, 3.0])
    monkeypatch.setattr(
        "trainkit.align.reward_model.pair_rewards", lambda model, batch: (chosen, rejected)
    )
    batch = dict(prompt_input_ids=torch.zeros(3, 1, dtype=torch.int64))
    batch |= {} if margin is None else dict(margin=torch.tensor(margin))
    goal = reward_objective(center)
    loss = goal(tiny(), batch)
    off = [1.0, 0.0, -1.0] if margin is None else [0.5, 0.0, -2.0]  # Less the margin
    wanted = dict(reward=(sum(math.log(1 + math.exp(-x)) for x in off), 3, 1.0))
    if center:
        wanted["center"] = 1 + 16 + 25, 3, 0.01  # (r_w + r_l)²
    assert goal.counts(batch) == {name: 3 for name in wanted}
    assert {n: (pytest.approx(float(s)), k, w) for n, (s, k, w) in loss.terms.items()} == wanted
    logged = {name.split("/")[1]: (float(s), n) for name, (s, n) in loss.metrics.items()}
    assert logged == dict(
        chosen=(5, 3), rejected=(5, 3), margins=(0, 3), accuracies=(1.5, 3), ties=(1, 3)
    )


def test_without_a_padding_token_a_classifier_reads_one_text_at_a_time():
    "Ours reads several, and each text is read at its own last token."
    sizes = []

    class Classifier(torch.nn.Linear):
        config = SimpleNamespace(pad_token_id=None)

        def forward(self, ids, attention_mask):
            sizes.append(ids.shape)
            return SimpleNamespace(logits=(ids * attention_mask).sum(1, keepdim=True).float())

    texts = [torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([4, 5, 6])]
    model = Classifier(1, 1)
    assert score_ids(model, texts) == [3, 3, 15] and sizes == [(1, 2), (1, 1), (1, 3)]
    sizes.clear()
    model.config = SimpleNamespace(pad_token_id=7)
    assert score_ids(model, texts, 2) == [3, 3, 15] and sizes == [(2, 2), (1, 3)]
    ours = RewardModel(tiny())
    alone = [score_ids(ours, [text])[0] for text in texts]
    assert score_ids(ours, texts) == pytest.approx(alone, abs=1e-5)
    with pytest.raises(ValueError, match=r"gives \[3, 2\] numbers for 3 texts"):
        model.forward = lambda ids, attention_mask: torch.zeros(3, 2)
        score_ids(model, texts)
