"""What callers do with a model on a GPU and data on the CPU: every function moves the data.

The GPU is pretended, see `fake_cuda.py`.
"""

from copy import deepcopy
from types import SimpleNamespace

import os

import numpy as np
import pytest
import torch
from support.processes import in_child
from support.fake_cuda import pretend_gpu
from test_rl import Signs

from trainkit.eval.metrics import bert_score
from trainkit.align.dpo import LOSSES, DPOConfig, dpo_objective
from trainkit.align.game import TokenGame
from trainkit.eval.lm_eval import HarnessBackend
from trainkit.eval.stats import compare
from trainkit.align.logprobs import pair_log_probs, sequence_log_probs, shares_prompts
from trainkit.lora.inject import add_lora
from trainkit.eval.metrics import Running, calibration_error, stop_rate
from trainkit.model.config import ModelConfig
from trainkit.model.transformer import Transformer
from trainkit.train.objectives import to_model_device, lm_loss
from trainkit.train.optim import OptimConfig
from trainkit.align.policy import ActorCritic, token_scores
from trainkit.align.preference_data import PairBatches, collate_pairs
from trainkit.align.reference import AdapterDisabledReference, make_reference, precompute_reference
from trainkit.align.reward_model import RewardModel, pair_rewards, reward_objective, score_pairs
from trainkit.align.rl import RLConfig, rl_objective
from trainkit.align.rollouts import Rollouts
from trainkit.eval.scoring import NORMS, multiple_choice, score_texts
from trainkit.eval.evaluator import next_log_probs
from trainkit.lora.inject import LoRAConfig
from trainkit.tokenizer.bpe_tokenizer import BPETokenizer
from trainkit.train.config import TrainConfig
from trainkit.train.trainer import Trainer
from trainkit.align.kto import UnpairedBatches, collate_unpaired, kto_objective


@pytest.fixture
def there(tmp_path):
    "Run a function of this file in a process with a GPU."

    def run(function, *args):
        result = in_child(with_gpu, tmp_path, function, *args, folder=tmp_path)
        assert result.returncode == 0, result.stderr[-3000:]

    return run


def with_gpu(folder, function, *args):
    os.chdir(folder)
    pretend_gpu()
    function(*args)


def small(device="cuda", vocab_size=40):
    torch.manual_seed(0)
    return Transformer(
        ModelConfig(
            vocab_size=vocab_size,
            d_model=32,
            n_heads=4,
            n_kv_heads=2,
            n_layers=2,
            d_ff=64,
            max_seq_len=64,
        )
    ).to(device)


def some_pairs(n=12):
    draw = np.random.default_rng(0)

    def ids():
        return draw.integers(3, 40, draw.integers(2, 7))

    return [
        dict(prompt=ids(), chosen=ids(), rejected=ids(), length=20, margin=1.0) for _ in range(n)
    ]


def close(a, b, eps=1e-5):
    assert np.allclose(
        *(x.detach().cpu().numpy() if isinstance(x, torch.Tensor) else x for x in (a, b)), eps, eps
    ), (a, b)


def preferences():
    far, near, pairs = small(), small("cpu"), some_pairs()
    batch = collate_pairs(pairs)
    assert {v.device.type for v in to_model_device(far, batch).values()} == {
        "cuda"
    } and to_model_device(near, batch)["margin"] is batch["margin"]
    for share in (True, False):
        close(pair_log_probs(far, batch, share).chosen, pair_log_probs(near, batch, share).chosen)
    assert shares_prompts(far)
    texts = collate_unpaired(
        [
            dict(p, completion=p["chosen"], labels=p["chosen"], label=i % 2 == 0)
            for i, p in enumerate(pairs)
        ]
    )
    close(sequence_log_probs(far, texts)[0], sequence_log_probs(near, texts)[0])
    close(lm_loss(far, texts).total, lm_loss(near, texts).total)
    reference, twin = make_reference(near), make_reference(near)  # A copy follows the model
    for names in (list(LOSSES), ["sft"]):
        mixed = len(names) > 1  # sft alone compares nothing, so it takes neither of them
        config = DPOConfig(loss_type=names, label_smoothing=0.01 * mixed, exact_kl=mixed)
        loss_there = dpo_objective(reference, config)(far, batch)
        loss_there.total.backward()
        close(loss_there.total, dpo_objective(twin, config)(near, batch).total)
    close(kto_objective(reference)(far, texts).total.item(), 0.5)
    written = precompute_reference(far, pairs, "numbers.npz")
    close(dpo_objective(written)(far, collate_pairs(pairs)).total.item(), float(np.log(2)))
    tuned = add_lora(small(), LoRAConfig(r=2))
    reference = make_reference(tuned)
    assert isinstance(reference, AdapterDisabledReference)
    close(dpo_objective(reference)(tuned, batch).total.item(), float(np.log(2)))
    precompute_reference(tuned, pairs, None, reference)
    judge, twin = RewardModel(far), RewardModel(near)
    twin.load_state_dict(judge.state_dict())
    close(pair_rewards(judge, batch)[0], pair_rewards(twin, batch)[0])
    close(reward_objective(0.01)(judge, batch).total, reward_objective(0.01)(twin, batch).total)
    close(score_pairs(judge, pairs)[0], score_pairs(twin, pairs)[0])


def test_preferences(there):
    there(preferences)


def rl(method):
    def on_gpu(completion_ids, **columns):
        return torch.tensor([float(len(set(ids))) for ids in completion_ids], device="cuda")

    def by_numpy(completions, **columns):
        return np.array([len(text) / 8 for text in completions])

    known = dict(
        num_prompts=2,
        num_generations=4,
        max_completion_length=6,
        temperature=1.3,
        beta=0.1,
        num_iterations=2,
    )
    model = small(vocab_size=13)
    actor = ActorCritic(model) if method == "ppo" else model
    tuned = add_lora(small(vocab_size=13), LoRAConfig(r=2))
    for policy, reference in ((actor, "copy"), *([] if method == "ppo" else [(tuned, "adapter")])):
        config = RLConfig(method, **known)
        rounds = Rollouts(
            policy, Signs(), ["1+2", "3+4"], [on_gpu, by_numpy], config, reference=reference
        )
        batch = next(iter(rounds))
        assert {v.device.type for v in batch.values()} == {"cpu"}  # They wait where there is room
        loss_there = rl_objective(config)(policy, batch)
        loss_there.total.backward()
        assert all(torch.isfinite(torch.as_tensor(s)).all() for s, _ in loss_there.metrics.values())
        close(loss_there.metrics["ratio"][0] / loss_there.metrics["ratio"][1], 1.0)
        state = rounds.state_dict()
        again = Rollouts(
            policy, Signs(), ["1+2", "3+4"], [on_gpu, by_numpy], config, reference=reference
        )
        again.load_state_dict(state)
        next(iter(again))
    close(token_scores(model, batch).log_probs, token_scores(small("cpu", 13), batch).log_probs)
    game = TokenGame(13, 2, lambda answer: float(answer[0] == 1))
    close(game.log_probs(model), game.log_probs(small("cpu", 13)))
    (
        game.leashed(game.log_probs(model), 0.1),
        game.expected(model),
        game.earned(model, game.log_probs(model), 0.1),
    )


@pytest.mark.parametrize("method", ["grpo", "rloo", "ppo", "reinforce"])
def test_rl(there, method):
    there(rl, method)


def trained(precision):
    "Runs as they begin on a GPU, by hand: the model is on the CPU, and on the GPU afterwards."
    steps = 6 if precision == "fp16" else 2  # While it looks for its scale, steps are skipped
    plan, rate = (
        TrainConfig(max_steps=steps, progress=False, mixed_precision=precision, logging_steps=1),
        OptimConfig(learning_rate=1e-3),
    )

    def run(model, goal, batches, held=None):
        result = Trainer(model, goal, batches, held, plan, optim=rate).train()
        assert result.steps == steps and all(
            np.isfinite(r["loss"]) for r in result.history if "loss" in r
        )
        assert next(model.parameters()).device.type == "cuda"
        return model

    pairs = some_pairs()
    model = small("cpu")
    reference = make_reference(model)
    run(model, dpo_objective(reference), PairBatches(pairs, 4), PairBatches(pairs, 4))
    with torch.no_grad():
        (
            pair_log_probs(model, collate_pairs(pairs)).chosen
            - pair_log_probs(reference.model, collate_pairs(pairs)).chosen
        ).mean().item()
    model = small("cpu")
    run(
        model,
        kto_objective(make_reference(model)),
        UnpairedBatches(
            [
                dict(p, completion=p["chosen"], labels=p["chosen"], label=i % 2 == 0)
                for i, p in enumerate(pairs)
            ],
            4,
        ),
    )
    score_pairs(run(RewardModel(small("cpu")), reward_objective(), PairBatches(pairs, 4)), pairs)
    for method in ("grpo", "ppo"):
        model = ActorCritic(small("cpu", 13)) if method == "ppo" else small("cpu", 13)
        config = RLConfig(
            method, num_prompts=2, num_generations=4, max_completion_length=6, beta=0.1
        )
        run(
            model,
            rl_objective(config),
            Rollouts(
                model,
                Signs(),
                ["1+2", "3+4"],
                lambda completions, **columns: [float(len(c)) for c in completions],
                config,
            ),
        )


def narrow_run(precision):
    pretend_gpu(
        (8, 9) if precision == "bf16" else (7, 5), narrow=True
    )  # Autocast computes in 16 bits, as on a real one
    trained(precision)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_runs_in_16_bits(tmp_path, precision):
    result = in_child(narrow_run, precision, folder=tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]


def evaluation():
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

    tokenizer = BPETokenizer.train(["abc"], 257, special_tokens=["<|endoftext|>"])
    torch.manual_seed(0)
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=257,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            max_position_embeddings=64,
        )
    )
    bert = BertModel(
        BertConfig(
            vocab_size=257,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=64,
        )
    ).eval()
    rows = [
        dict(question="1+1 is", choices=[" two", " three"], answer=0),
        dict(question="", choices=[" a", " bbb"], answer=1),
    ]
    asked = [SimpleNamespace(args=("one ", "two")), SimpleNamespace(args=("", "x"))]
    for near in (small("cpu", 257), llama):
        far = deepcopy(near).to("cuda")
        close(
            *(
                sum(
                    score.nats
                    for score in score_texts(
                        model, tokenizer, ["hello world", "on and on " * 20, "x"]
                    )
                )
                for model in (far, near)
            ),
            1e-4,
        )
        for norm in NORMS:
            assert multiple_choice(far, tokenizer, rows, norm) == multiple_choice(
                near, tokenizer, rows, norm
            )
        close(
            *(
                np.array(HarnessBackend(model, tokenizer).loglikelihood(asked))
                for model in (far, near)
            ),
            1e-4,
        )
        HarnessBackend(far, tokenizer).generate_until(
            [SimpleNamespace(args=("one", dict(until=["."], max_gen_toks=4, do_sample=True)))]
        )
        close(next_log_probs(far, [1, 2, 3], 1), next_log_probs(near, [1, 2, 3], 1))
    words = SimpleNamespace(encode=lambda text, **_: tokenizer.encode(text))
    pairs = ["a cat", "b"], ["the cat", ["b", "c"]]
    near = bert_score(*pairs, (bert, words), idf=True)
    close(
        *(
            scores["bertscore_f1"]
            for scores in (bert_score(*pairs, (bert.to("cuda"), words), idf=True), near)
        )
    )
    sure, right = (
        torch.tensor([0.1, 0.9, 0.8], device="cuda"),
        torch.tensor([0.0, 1.0, 1.0], device="cuda"),
    )
    close(calibration_error(sure, right), 0.4 / 3)
    assert (
        compare(sure, right).difference.value > 0
        and stop_rate(torch.tensor([[1, 2]], device="cuda"), 2) == 1
    )
    running = Running()
    running.update(dict(loss=sure.mean(), right=right))
    assert [type(value) for value in running.compute().values()] == [float, float]


def test_evaluation(there):
    there(evaluation)
