"""Episodes: environments, tools, log-probabilities at sampling, and training on several turns."""

import importlib.util
import json
import os
import random
import signal
import sys
import types
from dataclasses import replace

import pytest
import torch
from support.processes import FORK, serve

from trainkit import BPETokenizer, ModelConfig, OptimConfig, RLConfig, Rollouts, SamplingConfig
from trainkit import TrainConfig, Trainer, Transformer, rl_objective
from trainkit.align import ActorCritic, Calculator, Environment, GuessNumber, Reply, batch_invariant
from trainkit.align import environments, pack_episodes, play_episodes, token_scores
from trainkit.align.environments import ReasoningGym, TextArena, call_tool, parse_tool_calls
from trainkit.align.environments import tool_schema
from trainkit.align.episodes import Answer, Episode, continuation_ids, sample_answers
from trainkit.align.rl import discount, gae
from trainkit.engine.scheduler import Scheduler
from trainkit.model import generation
from trainkit.train.checkpoint import find_checkpoints
from trainkit.tokenizer.chat import answer_ends, render, set_template
from trainkit.tokenizer.chat_template import TEMPLATES


class Echo(Environment):
    "Ids, no tokenizer: pays 1 for each 3 in an answer, for `turns` answers."

    eos_token_id = 7

    def __init__(self, turns=3):
        self.turns = turns

    def reset(self, row, seed):
        self.left = self.turns
        self.word = random.Random(seed).randint(8, 11)
        return [row.get("first", 1), self.word]

    def step(self, answer):
        assert 7 not in answer
        self.left -= 1
        return Reply([2, self.word], float(answer.count(3)), self.left == 0)


def tiny(seed=0, vocab=12, length=48):
    torch.manual_seed(seed)
    return Transformer(
        ModelConfig(
            vocab_size=vocab, d_model=32, n_heads=4, n_layers=2, d_ff=64, max_seq_len=length
        )
    ).eval()


@pytest.fixture(scope="module")
def tokenizer():
    words = ["Guess my number, 1 to 9, in 3 guesses. higher lower user assistant 4 5 6 7 8 " * 9]
    tok = BPETokenizer.train(words, 290, special_tokens=["<|im_end|>", "<|im_start|>"])
    tok.chat_template = TEMPLATES["chatml"].jinja
    return tok


def written(batch, row):
    labels = batch["labels"][row]
    return labels[labels != -100].tolist()


@pytest.mark.parametrize("knobs", [{}, dict(top_k=4), dict(top_p=0.6), dict(temperature=0.7)])
def test_log_probs_of_the_sampler_are_those_of_the_trainer(knobs):
    model, games = tiny(), [Echo() for _ in range(24)]
    sampling = SamplingConfig(max_new_tokens=30, seed=1, **knobs)
    episodes = play_episodes(model, None, games, [{}] * 24, range(24), sampling)
    batch = pack_episodes(episodes)
    scores = token_scores(model, batch, knobs.get("temperature", 1.0))
    assert (scores.log_probs - batch["sampling_log_probs"]).abs().max() < 1e-5
    assert ("kept" in batch) == bool({"top_k", "top_p"} & {*knobs})
    for row, episode in enumerate(episodes):
        ids = [i for i, own in zip(episode.ids, episode.written, strict=True) if own]
        assert written(batch, row) == ids
        place = len(episode.prompt) + len(episode.ids)
        assert batch["input_ids"][row, :place].tolist() == episode.prompt + episode.ids
        turns = sum(i == 7 for i in ids)
        # The last answer of a cut-off episode may have ended, with no room for another
        assert episode.turns - turns in ((0, 1) if episode.truncated else (0,))
        assert episode.reward == sum(i == 3 for i in ids[: _last_end(ids)])


def _last_end(ids):
    "Where the last finished answer ends: a cut-off one is paid nothing."
    return max((n + 1 for n, i in enumerate(ids) if i == 7), default=0)


def test_a_short_context_is_not_cut_where_a_long_one_is():
    model = tiny(length=24)
    contexts = [[1] * 20, [1, 2]]
    answers = sample_answers(model, contexts, [4, 20], SamplingConfig(seed=0))
    assert [len(a.ids) for a in answers] == [4, 20]
    row = contexts[1] + answers[1].ids
    batch = dict(input_ids=torch.tensor([row]), labels=torch.tensor([[-100] * 2 + row[2:]]))
    again = token_scores(model, batch).log_probs[0, 2:]
    assert (again - torch.tensor(answers[1].log_probs)).abs().max() < 1e-5


@pytest.mark.parametrize("weights", [None, "packed", "q4_0"])
def test_rows_that_end_leave_the_batch_and_change_no_other(weights, monkeypatch):
    "Ids, log-probabilities and kept tokens, of contexts of different lengths."
    model = tiny(vocab=32)
    contexts = [[1] * (1 + i % 3) for i in range(12)]
    sampling = SamplingConfig(seed=0, top_p=0.95)

    def ask():
        return sample_answers(
            model, contexts, [4 + i for i in range(12)], sampling, [3, 7], weights
        )

    sizes = []
    leave = generation._leave_out

    def listen(*args):
        sizes.append(len(left := leave(*args)))
        return left

    monkeypatch.setattr(generation, "_leave_out", listen)
    left = ask()
    assert sizes[0] == 12 and 2 <= sizes[-1] < 9 and sizes == sorted(sizes, reverse=True)
    monkeypatch.setattr(generation, "_leave_out", lambda plan, left, alive: left)
    for a, b in zip(left, ask(), strict=True):
        assert a.ids == b.ids
        assert a.log_probs == pytest.approx(b.log_probs, abs=1e-5)
        assert all((x == y).all() for x, y in zip(a.kept, b.kept, strict=True))


@pytest.mark.parametrize("name", [*TEMPLATES])
def test_an_episode_reads_as_its_template_writes_it(name):
    "Prompt + answer + continuation = the whole chat, rendered at once."
    tok = BPETokenizer.train(["higher lower guess user assistant model " * 9], 275)
    set_template(tok, name, None)
    question, reply = dict(role="user", content="guess"), dict(role="assistant", content="lower")
    observed = dict(role="user", content="higher")
    prompt = render([question], tok, add_generation_prompt=True)[0]
    ids, learned = render([question, reply], tok)
    answer = [token for token, mark in zip(ids, learned, strict=True) if mark]
    assert answer[-1] == tok.eos_token_id
    whole = render([question, reply, observed], tok, add_generation_prompt=True)[0]
    assert prompt + answer + continuation_ids([observed], tok) == whole


def test_tools_answer_in_the_episode(tokenizer):
    game = Calculator()
    prompt = game.reset({}, 1)
    question = prompt[0]["content"].removeprefix("What is ").rstrip("?")
    call = f'<tool_call>{{"name": "calculate", "arguments": {{"expression": "{question}"}}}}'
    step = game.step(call + "</tool_call>")
    assert (step.reward, step.done) == (0.0, False)
    [message] = step.observation
    assert message["role"] == "tool" and int(message["content"]) == eval(question)
    ids = continuation_ids(step.observation, tokenizer)
    assert message["content"] in tokenizer.decode(ids)
    assert game.step(f"That is {message['content']}.") == Reply([], 1.0, True)
    wrong = game.step("<tool_call>calculate(1)</tool_call>")
    assert "is not JSON" in wrong.observation[0]["content"] and not wrong.done


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "expression: Missing required argument"),
        (dict(expression=3), "expression: Input should be a valid string"),
        (dict(expression="1", more=2), "more: Unexpected keyword argument"),
        (dict(expression="1 +"), "SyntaxError"),
        (dict(expression="2 ** 9"), "whole number"),
        (dict(expression="1 // 0"), "ZeroDivisionError"),
        ([1], "must be an object"),
    ],
)
def test_a_wrong_call_becomes_a_message(arguments, message):
    result = call_tool(Calculator.tools, "calculate", arguments)
    assert result.startswith("error: ") and message in result


def test_calls_are_read_from_an_answer():
    two = (
        'So: <tool_call>{"name": "a"}</tool_call>\n<tool_call>{"name": "b", "arguments": {"x": 1}}'
    )
    calls, words = parse_tool_calls(two)
    assert calls == [dict(name="a", arguments={}), dict(name="b", arguments=dict(x=1))]
    assert words == "So:"
    with pytest.raises(ValueError, match="a call is"):
        parse_tool_calls("<tool_call>[1]</tool_call>")


@pytest.mark.parametrize("answer", ["", "x", "0", "99", "١", "1 2", "\x1e4\x00", "9" * 30])
def test_guesses_that_are_no_numbers_end_the_game(answer):
    game = GuessNumber(1, 9, 3)
    game.reset(dict(number=5), 0)
    assert game.step(answer) == Reply("not a number in the range", 0.0, True)


@pytest.mark.parametrize("method", ["grpo", "rloo", "reinforce", "ppo"])
def test_every_method_learns_from_episodes(method):
    base = tiny()
    model = ActorCritic(base) if method == "ppo" else base
    sizes = dict(num_prompts=4, num_generations=4, max_completion_length=30, max_turns=3)
    config = RLConfig(method, **sizes)
    rollouts = Rollouts(model, None, [dict(first=1)] * 8, config=config, environment=Echo)
    batch = rollouts.collect([0, 1, 2, 3], 5)
    assert rollouts.samples[0]["reward"] == batch["reward"][0]
    loss = rl_objective(config)(model, batch)
    assert loss.metrics["turns"][0] / loss.metrics["turns"][1] <= 3
    ratio, tokens = loss.metrics["ratio"]
    assert abs(ratio / tokens - 1) < 1e-5
    total = sum(weight * term / max(1, count) for term, count, weight in loss.terms.values())
    total.backward()
    assert sum(p.grad.abs().sum() for p in model.parameters() if p.grad is not None) > 0
    again = Rollouts(model, None, [dict(first=1)] * 8, config=config, environment=Echo)
    for name, column in again.collect([0, 1, 2, 3], 5).items():
        assert torch.equal(column, batch[name]), name


def test_episodes_of_a_group_are_the_same_game():
    seen = []

    class Noted(Echo):
        def reset(self, row, seed):
            seen.append(seed)
            return super().reset(row, seed)

    config = RLConfig(num_prompts=2, num_generations=3, max_completion_length=20)
    rollouts = Rollouts(tiny(), None, [{}, {}], config=config, environment=Noted)
    seen.clear()
    rollouts.collect([0, 1], 9)
    assert len({*seen[:3]}) == len({*seen[3:]}) == 1 and seen[0] != seen[3]


def test_an_environment_is_reset_when_it_is_needed():
    "Once to learn of mistakes early; for all prompts only where one asks, and for equal rows once."
    seen = []

    class Noted(Echo):
        def reset(self, row, seed):
            seen.append(row.get("first"))
            return super().reset(row, seed)[:1] * row.get("length", 1)

    rows = [dict(first=i % 3) for i in range(300)]
    config = RLConfig(num_prompts=2, num_generations=2, max_completion_length=8)

    def rollouts(rows):
        seen.clear()
        return Rollouts(tiny(), None, rows, config=config, environment=Noted)

    batches = rollouts(rows)
    state = batches.state_dict()
    assert seen == [0]
    assert batches.prompt_ids == [[i % 3] for i in range(300)] and seen == [0, 0, 1, 2]
    rollouts(rows).load_state_dict(state)
    with pytest.raises(ValueError, match="not the rollouts.*prompts"):
        rollouts([*rows[:-1], {}]).load_state_dict(state)
    with pytest.raises(ValueError, match="prompt 0 has 41 tokens.* room for 40"):
        rollouts([dict(length=41)])
    late = rollouts([{}, dict(length=48)])
    with pytest.raises(ValueError, match="prompt 1 has 48 tokens"):
        _ = late.prompt_ids
    with pytest.raises(ValueError, match="episode 2 has 48 tokens.* reads at most 48"):
        late.collect([0, 1], 0)


def test_ppo_pays_each_answer_where_it_ends():
    "Rewards of a step belong to its answer, and credit crosses what the environment wrote."
    rewards = torch.tensor([[0.0, 0, 1, 0, 0, 0, 2]])
    mask = torch.tensor([[0.0, 1, 1, 0, 0, 1, 1]])
    values = torch.zeros_like(rewards)
    returns = discount(rewards, mask, 1.0)
    assert returns.tolist() == [[0, 3, 3, 0, 0, 2, 2]]
    advantages, targets = gae(rewards, values, mask, 1.0, 1.0)
    assert torch.equal(advantages, returns) and torch.equal(targets, returns)


def test_dynamic_sampling_replaces_prompts_that_teach_nothing():
    def equal_for_even(prompts, completion_ids, **columns):
        return [
            0.0 if p[0] % 2 == 0 else float(n)
            for n, (p, _) in enumerate(zip(prompts, completion_ids, strict=True))
        ]

    prompts = [[n, 5] for n in range(8)]
    sizes = dict(num_prompts=4, num_generations=2, max_completion_length=3)
    plain = Rollouts(tiny(), None, prompts, equal_for_even, RLConfig(**sizes))
    assert plain.collect([0, 2, 4, 1], 3)["frac_reward_zero_std"].mean() == 0.75
    config = RLConfig(**sizes, dynamic_sampling=4)
    batch = Rollouts(tiny(), None, prompts, equal_for_even, config).collect([0, 2, 4, 1], 3)
    assert batch["frac_reward_zero_std"].sum() == 0
    assert {*batch["input_ids"][:, 0].tolist()} == {1, 3, 5, 7}
    # Where there is nothing else, the prompts stay
    few = Rollouts(tiny(), None, prompts[:3:2], equal_for_even, config)
    assert few.collect([0, 1], 3)["frac_reward_zero_std"].sum() == 4


def test_cispo_limits_the_weight_and_keeps_the_gradient():
    "TRL's formula: the ratio is cut off and not differentiated, each token has its gradient."
    config = RLConfig(loss_type="cispo", epsilon_high=1.5, max_completion_length=4)
    model = tiny()
    batch = dict(
        input_ids=torch.tensor([[1, 2, 3, 4], [1, 5, 6, 8]]),
        labels=torch.tensor([[-100, 2, 3, 4], [-100, 5, 6, -100]]),
        advantages=torch.tensor([1.0, -2.0]),
    )
    now = token_scores(model, batch).log_probs
    shift = torch.tensor([[0, 1.0, -1.0, 0.1], [0, 2.0, 0.2, 0]])
    batch["old_log_probs"] = (now - shift).detach()
    (total, count, weight) = rl_objective(config)(model, batch).terms["policy_loss"]
    mask = batch["labels"] != -100
    expected = -(shift.exp().clamp(max=1.5) * batch["advantages"][:, None] * now)[mask].sum()
    assert (count, weight) == (5, 1.0)
    assert torch.allclose(total, expected, atol=1e-5)
    [got] = torch.autograd.grad(total, [model.get_output_embeddings().weight], retain_graph=True)
    [want] = torch.autograd.grad(expected, [model.get_output_embeddings().weight])
    assert torch.allclose(got, want, atol=1e-5)


def test_a_coarser_sampler_is_corrected_for():
    sizes = dict(num_prompts=2, num_generations=4, max_completion_length=12)
    prompts = [[1, 2], [3, 4]]

    def reward(completion_ids, **columns):
        return [float(len({*ids})) for ids in completion_ids]

    model = tiny(vocab=64)
    plain = Rollouts(model, None, prompts, reward, RLConfig(**sizes)).collect([0, 1], 1)
    assert "sampling_log_probs" not in plain and "old_log_probs" not in plain
    config = RLConfig(**sizes, sampler_weights="bfloat16")
    batch = Rollouts(model, None, prompts, reward, config).collect([0, 1], 1)
    gap = (batch["old_log_probs"] - batch["sampling_log_probs"]).abs().max()
    assert 0 < gap < 0.1
    weights = (batch["old_log_probs"] - batch["sampling_log_probs"]).exp()
    batch["sampling_log_probs"] -= 3  # Much likelier in training: the cap holds
    loss, count, _ = rl_objective(config)(model, batch).terms["policy_loss"]
    without = {k: v for k, v in batch.items() if k != "sampling_log_probs"}
    base, _, _ = rl_objective(RLConfig(**sizes))(model, without).terms["policy_loss"]
    assert torch.allclose(loss, 2 * base, atol=1e-5) and count == 8
    assert weights.max() < 1.1


def test_recorded_log_probs_save_a_pass_and_are_close():
    sizes = dict(num_prompts=2, num_generations=4, max_completion_length=12, num_iterations=2)
    prompts = [[1, 2], [3, 4]]

    def reward(completion_ids, **columns):
        return [float(len({*ids})) for ids in completion_ids]

    computed = Rollouts(tiny(), None, prompts, reward, RLConfig(**sizes)).collect([0, 1], 1)
    config = RLConfig(**sizes, old_log_probs="sampler")
    recorded = Rollouts(tiny(), None, prompts, reward, config).collect([0, 1], 1)
    gap = (computed["old_log_probs"] - recorded["old_log_probs"]).abs().max()
    assert gap < 1e-5
    assert torch.equal(computed["input_ids"], recorded["input_ids"])


def test_cut_off_episodes_can_be_left_out():
    episodes = [Episode([1]), Episode([1])]
    for episode in episodes:
        episode.ids, episode.written = [2, 3], [True, True]
        episode.log_probs, episode.rewards, episode.kept = [-1.0] * 2, [0.0] * 2, [None] * 2
    episodes[0].truncated = True
    assert [written(pack_episodes(episodes), row) for row in (0, 1)] == [[2, 3], [2, 3]]
    batch = pack_episodes(episodes, learn_truncated=False)
    assert [written(batch, row) for row in (0, 1)] == [[], [2, 3]]


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        (dict(importance_sampling_cap=3.0), "without sampler_weights"),
        (dict(sampler_weights="int8", old_log_probs="sampler"), "must be trainer"),
        (dict(method="ppo", dynamic_sampling=1), "only grpo, rloo read it"),
    ],
)
def test_knobs_that_would_be_ignored_are_refused(knobs, message):
    with pytest.raises(ValueError, match=message):
        RLConfig(**knobs)


class Talk(Echo):
    "Prompts and observations of different lengths."

    def reset(self, row, seed):
        self.rng = random.Random(seed)
        return super().reset(row, seed) + self.rng.choices(range(8, 12), k=self.rng.randint(1, 8))

    def step(self, answer):
        words = self.rng.choices(range(8, 12), k=self.rng.randint(1, 5))
        return super().step(answer)._replace(observation=words)


def test_blocks_of_one_size_make_sampler_and_trainer_equal():
    "Not close: equal. So the ratio of probabilities is exactly 1 before the first update."
    model = ActorCritic(tiny())
    sizes = dict(num_prompts=3, num_generations=2, max_completion_length=16, max_turns=2)
    config = RLConfig(
        "ppo", **sizes, batch_invariant=True, old_log_probs="sampler", top_p=0.9, temperature=0.7
    )
    rollouts = Rollouts(model, None, [{}] * 8, config=config, environment=Talk, batch_size=5)
    batch = rollouts.collect([0, 1, 2], 5)
    assert len({*batch["attention_mask"].sum(1).tolist()}) > 2
    with batch_invariant():
        scores = token_scores(model, batch, 0.7)
    assert torch.equal(scores.log_probs, batch["old_log_probs"])
    ratio, tokens = rl_objective(config)(model, batch).metrics["ratio"]
    assert ratio == tokens
    assert not torch.equal(token_scores(model, batch, 0.7).log_probs, batch["old_log_probs"])


def test_a_row_does_not_depend_on_its_batch():
    "Sizes that no vector register divides."
    torch.manual_seed(0)
    shape = dict(vocab_size=301, d_model=48, n_heads=6, n_kv_heads=2, n_layers=2, d_ff=100)
    model = Transformer(ModelConfig(**shape, max_seq_len=160, tie_embeddings=True)).eval()
    ids = torch.randint(0, 301, (7, 150))
    mask = torch.ones_like(ids)
    mask[3:, 70:] = 0
    with torch.no_grad(), batch_invariant():
        whole = model(ids).logits
        for rows, length in [(1, 2), (2, 33), (5, 65)]:
            assert torch.equal(model(ids[:rows, :length]).logits, whole[:rows, :length])
        assert torch.equal(model(ids, attention_mask=mask).logits[3:, :70], whole[3:, :70])
        cache = model(ids[:3, :60], use_cache=True).past_key_values
        for at in range(60, 70):
            step = model(ids[:3, at : at + 1], past_key_values=cache, use_cache=True)
            assert torch.equal(step.logits[:, 0], whole[:3, at])
    with torch.no_grad():
        assert (model(ids).logits - whole).abs().max() < 1e-5


def test_batch_invariance_says_what_it_cannot_do():
    with pytest.raises(ValueError, match="needs float32 on a CPU"):
        config = RLConfig(batch_invariant=True, max_completion_length=9)
        Rollouts(tiny().bfloat16(), None, [[1]], len, config)
    with pytest.raises(ValueError, match="must be False with sampler_weights"):
        RLConfig(batch_invariant=True, sampler_weights="int8")
    with batch_invariant(), pytest.raises(NotImplementedError, match="attention is 'sdpa'"):
        torch.ones(2, 3, 3) @ torch.ones(2, 3, 3)


@pytest.mark.slow
def test_ten_thousand_episodes():
    "No id differs, log-probabilities are within 1e-5, and equal with blocks of one size."
    model = tiny(vocab=40, length=128)
    for exact in (False, True):
        wrong, gap = 0, 0.0
        for seed in range(0, 10_000, 2_500):
            seeds = range(seed, seed + 2_500)
            sampling = SamplingConfig(max_new_tokens=60, seed=seed)
            games = [Talk() for _ in seeds]
            episodes = play_episodes(
                model, None, games, [{}] * 2_500, seeds, sampling, batch_invariant=exact
            )
            batch = pack_episodes(episodes)
            with torch.no_grad(), batch_invariant(exact):
                scores = token_scores(model, batch)
            gap = max(gap, (scores.log_probs - batch["sampling_log_probs"]).abs().max().item())
            for row, episode in enumerate(episodes):
                own = zip(episode.ids, episode.written, strict=True)
                wrong += written(batch, row) != [i for i, mine in own if mine]
        print(f"batch-invariant {exact}: {wrong} episodes with other ids, gap {gap:.1e}")
        assert wrong == 0 and gap < (1e-9 if exact else 1e-5)


TURNS, STARTS = [], []  # Answers of the last run of `play`; how many there were before a round


class Noted(Talk):
    "Notes each answer, and stops the run at one of them."

    last, stop = 0, None

    def reset(self, row, seed):
        if len(TURNS) > (STARTS[-1] if STARTS else -1):
            STARTS.append(len(TURNS))
        return super().reset(row, seed)

    def step(self, answer):
        TURNS.append(tuple(answer))
        if len(TURNS) == self.last:
            self.stop()
        return super().step(answer)


def interrupt():
    raise KeyboardInterrupt


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def play(folder, last=0, stop=None, resume=None, async_save=None):
    "A run of three rounds that saves after each; the state of its model."
    TURNS.clear(), STARTS.clear()
    game = type("Game", (Noted,), dict(last=last, stop=staticmethod(stop)))
    config = RLConfig(num_prompts=2, num_generations=4, max_completion_length=24, max_turns=3)
    model = tiny()
    rollouts = Rollouts(model, None, [{}] * 6, config=config, environment=game, batch_size=4)
    plan = TrainConfig(
        output_dir=str(folder),
        max_steps=6,
        progress=False,
        save_steps=2,
        save_strategy="steps",
        async_save=async_save,
    )
    trainer = Trainer(
        model,
        rl_objective(config),
        rollouts,
        config=plan,
        optim=OptimConfig(learning_rate=1e-2),
        save_model=lambda model, folder: None,
    )
    trainer.train(resume)
    return model.state_dict()


def test_a_run_that_is_interrupted_within_an_episode_resumes_to_the_same_bits(tmp_path):
    "Between two turns, in the third round: its episodes are played again from their seeds."
    whole, played = play(tmp_path / "whole"), [*TURNS]
    with pytest.raises(KeyboardInterrupt):
        play(tmp_path / "again", len(played) - 3, interrupt)
    before = len(TURNS)
    again, rest = play(tmp_path / "again", resume=True), [*TURNS]
    assert 0 < len(rest) < len(played) < before + len(rest)  # Some turns were played twice
    assert rest == played[-len(rest) :]
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def _play_in_child(folder, last, async_save):
    torch.set_num_threads(1)
    play(folder, last, kill, async_save=async_save)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
@pytest.mark.parametrize("async_save", [True, False])
def test_a_process_that_is_killed_within_an_episode_resumes_to_the_same_bits(tmp_path, async_save):
    "SIGKILL, which nobody can catch; without async_save every checkpoint that was due is there."
    serve()
    whole, played, starts = play(tmp_path / "whole"), [*TURNS], [*STARTS]
    for last in random.Random(0).sample(range(1, len(played) + 1), 4):
        folder = tmp_path / f"killed-{last}"
        process = FORK.Process(target=_play_in_child, args=(folder, last, async_save))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        left = [*find_checkpoints(folder / "checkpoints")]
        again, rest = play(folder, resume="auto"), [*TURNS]
        assert rest == played[len(played) - len(rest) :]
        assert all(torch.equal(whole[name], again[name]) for name in whole)
        if not async_save:
            assert len(left) == sum(start < last for start in starts[1:])


def test_the_memory_of_the_largest_batch_is_that_of_the_batches():
    "Same columns of the same types and sizes, so a prediction from it covers `kept`, too."
    config = RLConfig(num_prompts=2, num_generations=4, max_completion_length=30, top_p=0.5)
    rollouts = Rollouts(tiny(vocab=72), None, [{}] * 4, config=config, environment=Echo)
    largest, batch = rollouts.largest(), rollouts.collect([0, 1], 1)
    for name in ("input_ids", "labels", "kept", "advantages"):
        assert largest[name].dtype == batch[name].dtype
        assert largest[name].shape[2:] == batch[name].shape[2:]
        assert largest[name].numel() >= batch[name].numel()


TASKS = (
    "chain_sum basic_arithmetic gcd lcm leg_counting number_sorting word_sorting spell_backward "
    "simple_equations syllogism letter_counting base_conversion "
    "acre gsm_symbolic list_functions word_ladder prime_factorization"  # These list all questions
).split()


def test_a_dozen_tasks_of_reasoning_gym():
    pytest.importorskip("reasoning_gym")
    game = ReasoningGym()
    for seed, task in enumerate(TASKS, 2**31 - 3):
        [message] = game.reset(dict(task=task), seed)
        assert message == dict(role="user", content=game.entry["question"])
        right = game.entry["answer"]
        assert game.step(f"So: <answer>\n{right}</answer>") == Reply([], 1.0, True), task
        assert game.step(right).reward == 1
        assert game.step("<answer>¿?</answer>").reward < 0.5
        environments._ASKED.clear()
        assert game.reset(dict(task=task), seed) == [message]
    assert ReasoningGym("gcd", chat=False).reset({}, 3).endswith("\n")


def test_a_game_of_textarena():
    pytest.importorskip("textarena")
    game = TextArena()
    for seed in range(3):
        [message] = game.reset({}, seed)
        assert "between 1 and 20" in message["content"]
        low, high, seen = 1, 20, []
        while True:
            guess = (low + high) // 2
            reply = game.step(f"[{guess}]")
            if reply.done:
                break
            seen.append(reply.observation)
            assert "between 1 and 20" not in reply.observation  # Only what is new
            if "higher" in reply.observation:
                low = guess + 1
            else:
                high = guess - 1
        assert reply == Reply([], 1.0, True) and len(seen) < 5


class Sums:
    "Stands in for a dataset of reasoning-gym, with what is awkward about some of them."

    def __init__(self, size, seed, most=9):
        if size > 20_000:
            raise ValueError("Dataset size too large")
        self.questions = [
            random.Random(seed + i).randint(1, most) for i in range(size)
        ]  # All at once

    def __getitem__(self, place):
        noise = random.randint(0, 9)  # From the random numbers of the whole process
        return dict(question=f"{self.questions[place]} + {noise}?", answer="7")

    def score_answer(self, answer, entry):
        return float(int(answer) == int(entry["answer"]))


@pytest.fixture
def gym(monkeypatch):
    "The packages of the extra `gym`, as far as the environments use them."

    class Game:
        def __init__(self, players):
            self.players = players

        def reset(self, num_players, seed):
            assert num_players == self.players, f"The number of players has to be {self.players}"

        def get_observation(self):
            return 0, "Your move"

    players = {"Solo-v0": 1, "Chess-v0": 2}
    parts = {
        "reasoning_gym": dict(create_dataset=lambda task, **settings: Sums(**settings)),
        "reasoning_gym.factory": dict(DATASETS=dict(sums=Sums, gcd=Sums)),
        "textarena": dict(make=lambda name: Game(players[name])),
        "textarena.envs": {},
        "textarena.envs.registration": dict(ENV_REGISTRY=players),
    }
    for name, names in parts.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.util.spec_from_loader(name, None)
        module.__dict__.update(names)
        monkeypatch.setitem(sys.modules, name, module)
    environments._ASKED.clear()
    yield
    environments._ASKED.clear()


def test_a_question_depends_on_its_seed_alone(gym):
    "Whatever a task does with its size, or with the random numbers of the process."
    seeds = [0, 1, 2, 2**32 - 1]
    asked = [ReasoningGym("sums", most=99).reset({}, seed) for seed in seeds]
    environments._ASKED.clear()
    random.seed(5)
    state = random.getstate()
    game = ReasoningGym("gcd", most=99)
    assert [game.reset(dict(task="sums"), seed) for seed in seeds] == asked
    assert random.getstate() == state and len({str(question) for question in asked}) == 4
    assert len(environments._ASKED) == 4
    assert [game.step(text).reward for text in ("7", "<answer> 7</answer>", "8")] == [1, 1, 0]
    assert game.step("seven") == Reply([], 0.0, True)  # The checker cannot read it, and raises


def test_names_that_other_packages_do_not_know(gym):
    with pytest.raises(ValueError, match="no task of reasoning-gym 'sum': take .* such as sums"):
        ReasoningGym("sum")
    with pytest.raises(ValueError, match="no task of reasoning-gym 'x'"):
        ReasoningGym("sums").reset(dict(task="x"), 0)
    with pytest.raises(ValueError, match="no game of textarena 'Solo': take .* such as Solo-v0"):
        TextArena("Solo")
    [message] = TextArena("Solo-v0").reset({}, 0)
    assert message == dict(role="user", content="Your move")
    with pytest.raises(ValueError, match="Chess-v0 does not begin with one player.* be 2"):
        TextArena("Chess-v0").reset({}, 0)


@pytest.mark.parametrize("maker", [ReasoningGym, TextArena])
def test_a_missing_package_is_named(maker, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="trainkit-llm.gym"):
        maker()


@pytest.fixture(scope="module")
def thinker():
    tok = BPETokenizer.train(["left right north 1 2 3 4 guess user assistant " * 9], 280)
    return set_template(tok, "qwen3")


def _thoughts(episode, tok, budget):
    "The forced tokens of an episode that begins inside a thought, and how many came before them."
    forced = [i for i, own in zip(episode.ids, episode.written, strict=True) if not own]
    if forced:
        ending = tok.encode("\n</think>\n\n", "all")
        assert forced[: len(ending)] == ending
        assert episode.written[:budget] == [True] * budget
        assert not any(episode.written[budget : budget + len(ending)])
    return forced


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        dict(top_p=0.9),
        pytest.param(dict(batch_invariant=True), marks=pytest.mark.slow),
    ],
)
def test_what_a_thinking_budget_writes_is_not_learned(thinker, knobs):
    model = tiny(vocab=len(thinker), length=64)
    prompts = [dict(prompt=thinker.encode("guess " * n + "<think>\n", "all")) for n in range(4)]
    seen = []

    def reward(completions, contents, completion_ids, **columns):
        seen.append((completions, contents))
        return [float(len(set(ids))) for ids in completion_ids]

    exact = "batch_invariant" in knobs
    config = RLConfig(
        num_prompts=4,
        num_generations=2 if exact else 4,
        max_completion_length=10 if exact else 24,
        thinking_budget=5,
        **knobs,
    )
    rollouts = Rollouts(model, thinker, prompts, reward, config)
    episodes = rollouts._play([n for n in range(4) for _ in range(config.num_generations)], 3)
    cut = [bool(_thoughts(episode, thinker, 5)) for episode in episodes]
    assert sum(cut) > len(cut) / 2 and [e.cut_thoughts for e in episodes] == [int(c) for c in cut]
    batch = pack_episodes(episodes)
    with batch_invariant(config.batch_invariant):
        scores = token_scores(model, batch)
    gap = (scores.log_probs - batch["sampling_log_probs"]).abs().max()
    assert gap == 0 if config.batch_invariant else gap < 1e-5
    whole = rollouts.collect([0, 1, 2, 3], 3)
    assert whole["truncated_thoughts"].tolist() == [float(c) for c in cut]
    for n, (text, content) in enumerate(zip(*seen[-1], strict=True)):
        if cut[n]:  # The answer is what follows the thought
            assert content == text.partition("</think>")[2].lstrip("\n") != text


def test_a_thought_keeps_its_budget_where_a_long_context_ends():
    "The answer is continued in a second pass, and the thought is counted through."
    words = BPETokenizer.train(["left right north 1 2 3 4 guess user assistant " * 9], 280)
    tok, sampling = set_template(words, "qwen3"), SamplingConfig(seed=0, thinking_budget=9)
    head = tok.encode("guess <think>", "all")
    model = tiny(vocab=len(tok), length=48)
    for fill in (40, 36, 34, 30):  # The first pass ends before, at and after the budget
        long, short = sample_answers(
            model, [[5] * fill, head], [48 - fill, 30], sampling, tokenizer=tok
        )
        place = short.forced.index(True)
        assert place == 9 and sum(short.forced) == len(tok.encode("\n</think>\n\n", "all"))
        assert not any(long.forced)
    with pytest.raises(ValueError, match="thinking_budget = 9 needs a tokenizer"):
        sample_answers(model, [[1]], [4], sampling)


def test_an_environment_hears_what_follows_the_thought(thinker):
    heard = []

    class Listen(Environment):
        def reset(self, row, seed):
            return thinker.encode("guess <think>", "all")

        def step(self, answer):
            heard.append(answer)
            return Reply("", 0.0, True)

    model = tiny(vocab=len(thinker), length=96)
    sampling = SamplingConfig(max_new_tokens=80, seed=4, thinking_budget=3)
    episodes = play_episodes(
        model, thinker, [Listen() for _ in range(48)], [{}] * 48, range(48), sampling
    )
    ended = [e for e in episodes if not e.truncated]
    assert len(heard) == len(ended) > 0
    for episode, answer in zip(ended, heard, strict=True):
        text = thinker.decode(episode.ids[:-1], skip_special_tokens=False)
        assert answer == text.partition("</think>")[2].lstrip("\n")


def test_knobs_of_sampling_hold_in_answers():
    model, contexts = tiny(), [[1, 2], [3, 4]]
    plain = SamplingConfig(seed=0)
    few = replace(plain, min_p=0.99)
    answers = sample_answers(model, contexts, [12, 12], few)
    assert answers != sample_answers(model, contexts, [12, 12], plain) and answers[0].kept
    row = torch.tensor([[1, 2, *answers[0].ids]])
    likeliest = model(row).logits.argmax(-1)[0, 1:-1]
    assert answers[0].ids == likeliest.tolist()  # min_p leaves nothing else
    fresh = sample_answers(model, contexts, [12, 12], replace(plain, repetition_penalty=9.0))
    assert fresh != sample_answers(model, contexts, [12, 12], plain)
    late = sample_answers(
        model, contexts, [12, 12], replace(plain, min_new_tokens=10), [*range(11)]
    )
    assert all(len(a.ids) >= 10 and {*a.ids[:9]} == {11} for a in late)


def test_a_call_of_gemma_4_ends_an_answer():
    "Its tool turns end with a token of their own, and the tool's result follows it."
    tok = BPETokenizer.train(["What is 3 4 5 calculate expression user model " * 9], 280)
    set_template(tok, "gemma4")
    call_end = tok.special_tokens["<|tool_response>"]
    assert answer_ends(tok) == (tok.eos_token_id, call_end)
    # Also in the server, where no client names it
    scheduler = Scheduler(tiny(vocab=len(tok)), tok, rows=1)
    assert scheduler.add([1]).eos == [tok.eos_token_id, call_end]
    assert scheduler.add([1], eos_token_id=3).eos == [3]
    game = Calculator(9)
    prompt = game.reset({}, 1)
    tools = [tool_schema(tool) for tool in game.tools]
    call = dict(name="calculate", arguments=dict(expression="3 * 4"))
    turn = dict(role="assistant", content="", tool_calls=[dict(type="function", function=call)])
    ids, learned = render([*prompt, turn], tok, tools=tools)
    said = [i for i, own in zip(ids, learned, strict=True) if own]
    assert said[-1] == call_end
    final = tok.encode("12", "all") + [tok.eos_token_id]
    scripted = iter([said, final])

    def script(policy, contexts, budgets, sampling, eos, *_):
        answer = next(scripted)
        assert answer[-1] in eos
        return [Answer(answer, [0.0] * len(answer), [])]

    model = tiny(vocab=len(tok), length=512)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainkit.align.episodes.sample_answers", script)
        [episode] = play_episodes(model, tok, [game], [{}], [1], SamplingConfig(max_new_tokens=400))
    assert episode.turns == 2 and not episode.truncated
    result = dict(role="tool", name="calculate", content="12", tool_call_id="trainkit0")
    reply = dict(role="assistant", content="12")
    whole = render([*prompt, turn, result, reply], tok, tools=tools)[0]
    assert episode.prompt + episode.ids == whole[: len(episode.prompt + episode.ids)]


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (("more", 1.0, True), "Broken.step returned tuple: it must return a Reply"),
        (None, "Broken.step returned NoneType"),
        ("async", "Broken.step returned coroutine: .* cannot be async"),
    ],
)
def test_an_environment_that_replies_with_something_else_is_named(reply, words):
    async def later():
        return Reply([], 1.0, True)

    coroutine = later()

    class Broken(Echo):
        def step(self, answer):
            return coroutine if reply == "async" else reply

    with pytest.raises(TypeError, match=words):
        for seed in range(8):  # Some answers end
            play_episodes(tiny(), None, [Broken()], [{}], [seed], SamplingConfig(seed=seed))
    coroutine.close()


def test_an_environment_without_a_prompt_is_named():
    class Silent(Echo):
        def reset(self, row, seed):
            return []

    with pytest.raises(ValueError, match=r"Silent.reset returned no prompt: \[\]"):
        play_episodes(tiny(), None, [Silent()], [{}], [0])


def test_tools_may_be_async_and_describe_their_arguments_over_lines():
    async def lookup(city: str, unit: str = "C") -> dict:
        """The weather.

        Args:
            city: A city,
                as people write it: Zürich
            unit (str): C or F

        Returns:
            city: The same name
        """
        return dict(city=city)

    assert call_tool([lookup], "lookup", dict(city="Zürich")) == '{"city": "Zürich"}'
    fields = tool_schema(lookup)["function"]["parameters"]["properties"]
    assert [field["description"] for field in fields.values()] == [
        "A city, as people write it: Zürich",
        "C or F",
    ]


def test_rows_may_bring_tools_to_the_prompt(tokenizer):
    set_template(tokenizer, "qwen3")
    tools = [tool_schema(lambda a=1: a)]
    prompt = [dict(role="user", content="4 5 6")]
    plain, listed, text = (
        Rollouts(tiny(vocab=len(tokenizer), length=4096), tokenizer, [row], [], RLConfig())
        for row in (
            dict(prompt=prompt),
            dict(prompt=prompt, tools=tools),
            dict(prompt=prompt, tools=json.dumps(tools)),
        )
    )
    assert listed.prompt_ids == text.prompt_ids
    assert "<lambda>" in tokenizer.decode(listed.prompt_ids[0])
    assert "<lambda>" not in tokenizer.decode(plain.prompt_ids[0])
