"Distillation: the numbers of TRL, batches cut anywhere, caches, tokenizers, and whole runs."

import json
import os

import numpy as np
import pytest
import torch

from trainkit.align.distillation import (
    DistillBatches,
    Teacher,
    TeacherCache,
    TeacherScores,
    distill_objective,
    divergence,
    group_tail,
    learned_logits,
    row_key,
    shared_vocabulary,
    split_answer,
)
from trainkit.config import ConfigError, load_config
from trainkit.data.dataloader import collate
from trainkit.interop.hf import load_pretrained, save_pretrained
from trainkit.interop.trl import run_trl, trl_kind
from trainkit.model.config import ModelConfig
from trainkit.model.transformer import Transformer
from trainkit.recipes.config import RunConfig, method_config
from trainkit.recipes.converter import convert_config
from trainkit.recipes.memory_commands import predict_needs
from trainkit.recipes.runner import prepare, run
from trainkit.settings import DistillConfig
from trainkit.tokenizer.bpe_tokenizer import BPETokenizer
from trainkit.train.config import Control

NAMES = "zero one two three four five six seven eight nine".split()


def made(seed=0, **changes):
    torch.manual_seed(seed)
    shape = dict(vocab_size=60, d_model=16, n_heads=2, n_layers=1, d_ff=32, max_seq_len=48)
    model = Transformer(ModelConfig(**{**shape, **changes}))
    for p in model.parameters():
        p.data *= 2
    return model


def some_rows(count=6, seed=0):
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        ids = rng.integers(0, 60, 5 + 2 * i)
        labels = ids.copy()
        labels[: int(rng.integers(1, 4))] = -100
        rows.append(dict(input_ids=ids, labels=labels))
    return rows


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    "A student, a teacher, a teacher with another tokenizer, and questions."
    folder = tmp_path_factory.mktemp("distill")
    rows = [dict(prompt=f"Spell {n}.", completion=name) for n, name in enumerate(NAMES)]
    (folder / "qa.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = [dict(prompt=row["prompt"]) for row in rows]
    (folder / "asked.jsonl").write_text("\n".join(map(json.dumps, asked)))
    texts = [f"{r['prompt']} {r['completion']}" for r in rows]
    for name, words, seed in (("own", texts, 0), ("other", [t.upper() for t in texts], 1)):
        tokenizer = BPETokenizer.train(words * 3, 290, special_tokens=["<|endoftext|>"])
        for role, wide in (("student", 16), ("teacher", 32)):
            shape = dict(vocab_size=tokenizer.vocab_size, d_model=wide, d_ff=2 * wide)
            save_pretrained(made(seed, **shape), tokenizer, folder / name / role)
    return folder


def config(home, name, distill=(), changes=(), **train):
    return load_config(
        RunConfig,
        {
            "method": "distill",
            "name": name,
            "runs_dir": str(home / "runs"),
            "watch_memory": False,
            "init_from": str(home / "own/student"),
            "optim": {"learning_rate": 3e-3},
            "data": {"path": str(home / "qa.jsonl"), "eval_fraction": 0.2, "max_length": 40},
            "sft": {"template": "plain"},
            "train": {
                "max_steps": 3,
                "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": 2,
                "save_strategy": "no",
                "logging_steps": 1,
                "progress": False,
                **train,
            },
            "distill": {
                "teacher": str(home / "own/teacher"),
                "max_completion_length": 5,
                **dict(distill),
            },
            **dict(changes),
        },
    )


def logged(done):
    lines = (done.folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [r["loss"] for r in records if r.get("event") == "log" and "loss" in r]


@pytest.mark.slow  # TRL is imported; the lesson compares the formula
@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_loss_and_gradient_are_those_of_trl(beta, temperature):
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from trl.experimental.gkd import GKDTrainer

    student, teacher = made(0), made(1)
    batch = collate(some_rows())
    loss = distill_objective(Teacher(teacher, DistillConfig(beta=beta, temperature=temperature)))
    ours = loss(student, batch).total
    ours.backward()
    grads = [p.grad.clone() for p in student.parameters()]
    student.zero_grad()
    logits = [m(batch["input_ids"]).logits[:, :-1] for m in (student, teacher)]
    labels = batch["labels"]
    theirs = GKDTrainer.generalized_jsd_loss(*logits, labels[:, 1:], beta, temperature)
    theirs.backward()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    for mine, p in zip(grads, student.parameters(), strict=True):
        torch.testing.assert_close(mine, p.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("top_k", [0, 7])
def test_a_batch_may_be_cut_anywhere(top_k, monkeypatch):
    monkeypatch.setattr("trainkit.align.distillation._ROWS", 8)  # With a checkpoint for each
    student, rows = made(0), some_rows()
    loss = distill_objective(Teacher(made(1), DistillConfig(beta=0.5, top_k=top_k)))
    count = int(loss.counts(collate(rows))["loss"])

    def gradient(parts):
        student.zero_grad()
        for part in parts:
            total, n, _ = loss(student, collate(part)).terms["loss"]
            assert int(n) == loss.counts(collate(part))["loss"]
            (total / count).backward()
        return torch.cat([p.grad.flatten() for p in student.parameters()])

    whole = gradient([rows])
    for cut in ([[row] for row in rows], [rows[:1], rows[1:]], [rows[::-1]]):
        torch.testing.assert_close(gradient(cut), whole, rtol=1e-5, atol=1e-7)


def test_only_learned_tokens_reach_the_head_and_a_packed_row_is_as_its_texts():
    model, rows = made(), some_rows(2)
    batch = collate(rows)
    every = model(batch["input_ids"]).logits[:, :-1][batch["labels"][:, 1:] != -100]
    torch.testing.assert_close(learned_logits(model, batch), every)
    packed = {
        "input_ids": torch.tensor(np.concatenate([r["input_ids"] for r in rows]))[None],
        "labels": torch.tensor(np.concatenate([r["labels"] for r in rows]))[None],
        "position_ids": torch.tensor(np.concatenate([np.arange(len(r["labels"])) for r in rows])),
    }
    packed["position_ids"] = packed["position_ids"][None]
    torch.testing.assert_close(learned_logits(model, packed), every, rtol=1e-4, atol=1e-5)
    nothing = {"input_ids": batch["input_ids"], "labels": torch.full_like(batch["labels"], -100)}
    loss = distill_objective(Teacher(made(1)))(model, nothing)
    assert float(loss.terms["loss"][0]) == 0 and int(loss.terms["loss"][1]) == 0


def test_the_tail_is_exact_and_an_excluded_token_gives_no_nan():
    logits = torch.tensor([[20.0, 3.0, -4.0, -40.0]])
    grouped = group_tail(logits.log_softmax(-1), torch.tensor([[0, 1]]))
    rest = logits.double().log_softmax(-1)[0, 2:].logsumexp(-1)
    assert abs(float(grouped[0, 2] - rest)) < 1e-5  # 1 - the sum of the others would be 0
    teacher = torch.tensor([[0.0, -torch.inf]])
    student = torch.tensor([[0.5, 0.5]]).log().requires_grad_()
    for beta in (0.0, 0.5, 1.0):
        value = divergence(student, teacher, beta).sum()
        assert value.isfinite() and torch.autograd.grad(value, student)[0].isfinite().all()


def test_a_cache_is_resumed_bounded_and_kept_for_its_teacher(tmp_path, monkeypatch):
    rows, settings = some_rows(), DistillConfig(top_k=5, beta=0.0)
    teacher = Teacher(made(1), settings)
    student, batch = made(0), collate(rows)
    live = distill_objective(teacher)(student, batch).total
    monkeypatch.setattr("trainkit.align.distillation._SHARD", 600)  # Several files
    first = TeacherCache(tmp_path, teacher)
    calls, ask = [], Teacher.__call__

    def stops(self, batch):
        calls.append(len(batch["input_ids"]))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return ask(self, batch)

    monkeypatch.setattr(Teacher, "__call__", stops)
    with pytest.raises(KeyboardInterrupt):
        first.fill(rows)
    calls.clear()
    monkeypatch.setattr(Teacher, "__call__", lambda self, b: calls.append(0) or ask(self, b))
    again = TeacherCache(tmp_path, teacher)
    assert 0 < len(again) < len(rows)
    assert again.fill(rows) == len(rows) - len(TeacherCache(tmp_path, teacher).places) or calls
    assert len(again) == len(rows) and not [*again.folder.glob(".*")]
    assert TeacherCache(tmp_path, teacher).fill(rows) == 0
    again.release()
    torch.testing.assert_close(distill_objective(again)(student, batch).total, live)
    shuffled = collate([rows[i] for i in (4, 1)])
    assert isinstance(again(shuffled), TeacherScores)
    with pytest.raises(ValueError, match="the teacher was released"):
        again(collate(some_rows(1, seed=9)))
    other = TeacherCache(tmp_path, Teacher(made(2), settings))
    assert len(other) == 0 and other.folder != again.folder
    damaged = sorted(again.folder.glob("*.safetensors"))[0]
    damaged.write_bytes(damaged.read_bytes()[:50])
    assert len(TeacherCache(tmp_path, Teacher(made(1), settings))) < len(rows)
    small = Teacher(made(1), DistillConfig(top_k=6, teacher_cache_gib=1e-7))
    with pytest.raises(ValueError, match="teacher_cache_gib allows"):
        TeacherCache(tmp_path, small).fill(rows)


def test_a_row_is_known_by_what_the_teacher_reads():
    row = some_rows(1)[0]
    ids, labels = row["input_ids"], row["labels"]
    longer = np.append(ids, 0), np.append(labels, -100)  # Padding
    assert row_key(ids, labels) == row_key(*longer)
    assert row_key(ids, labels) != row_key(ids, np.where(labels > 0, labels, -100)[::-1])
    assert row_key(ids, np.full_like(labels, -100)) is None
    assert row_key(ids, labels, np.arange(len(ids))) == row_key(ids, labels)
    assert split_answer(row) == (
        ids[labels == -100].tolist(),
        ids[labels != -100].tolist(),
    )


def test_tokenizers_are_compared_token_by_token(home):
    own, other = (load_pretrained(home / n / "teacher")[1] for n in ("own", "other"))
    size = own.vocab_size
    assert shared_vocabulary(own, own, size, size + 30) == size
    with pytest.raises(ValueError, match=r"id \d+ is .* to the student and .* to the teacher"):
        shared_vocabulary(own, other, size, size)
    longer = BPETokenizer.load(home / "own/teacher")
    longer.add_special_tokens(["<|user|>"])
    assert shared_vocabulary(longer, own, size + 1, size) == size
    student, teacher = made(0, vocab_size=61), Teacher(made(1), DistillConfig(), 60)
    batch = collate(some_rows())
    distill_objective(teacher)(student, batch)
    batch["input_ids"][0, 0] = 60
    with pytest.raises(ValueError, match="token 60 is one that the teacher does not know"):
        distill_objective(teacher)(student, batch)


def test_answers_do_not_depend_on_the_cut_and_a_round_resumes():
    rows, settings = some_rows(), DistillConfig(lmbda=0.5, max_completion_length=6)
    student = made()

    def batches(size):
        return DistillBatches(student, None, rows, settings, 6, size)

    whole = next(iter(batches(6)))
    parts = batches(2)
    seen = [next(iter(parts))]
    state = parts.state_dict()
    seen += [*parts]
    later = batches(2)
    later.load_state_dict(state)
    for mine, resumed in zip(seen[1:], later, strict=True):
        assert all(torch.equal(mine[k], resumed[k]) for k in mine)
    for i in range(6):
        part, at = seen[i // 2], i % 2
        width = part["input_ids"].shape[1]
        assert torch.equal(part["input_ids"][at], whole["input_ids"][i, :width])
        assert torch.equal(part["labels"][at], whole["labels"][i, :width])
    assert 0 < whole["on_policy"].sum() < 6
    assert batches(2).largest()["input_ids"].shape[1] >= whole["input_ids"].shape[1]
    with pytest.raises(ValueError, match="row 0 has no answer"):
        DistillBatches(student, None, [dict(prompt=[1])], settings)
    with pytest.raises(ValueError, match="distill.max_completion_length takes the whole context"):
        DistillBatches(student, None, rows, DistillConfig(max_completion_length=10**6))


def test_settings_that_do_not_go_together():
    for wrong, why in (
        (dict(loss_type="sft"), "set seq_kd=true"),
        (dict(loss_type="sft", seq_kd=True), "learns nothing from its own texts"),
        (dict(teacher_cache="x"), "set top_k"),
        (dict(teacher_cache="x", top_k=3, lmbda=1.0), "every answer is new"),
    ):
        with pytest.raises(ConfigError, match=why):
            DistillConfig(**wrong)


@pytest.mark.parametrize(
    "name, distill, changes",
    [
        pytest.param("off", dict(lmbda=0.0, beta=0.0), {}, marks=pytest.mark.slow),
        ("mixed", dict(lmbda=0.5, top_k=8), {"use_lora": True, "lora": {"r": 2}}),
        pytest.param("asked", dict(lmbda=1.0, beta=1.0), {"data": 0}, marks=pytest.mark.slow),
    ],
)
def test_a_run_from_a_config(home, name, distill, changes):
    if "data" in changes:
        changes = {"data": {"path": str(home / "asked.jsonl"), "eval_fraction": 0.2}}
    done = run(config(home, name, distill, changes), verbose=False)
    assert done.steps == 3 and len(logged(done)) == 3
    assert "perplexity" not in done.metrics and done.metrics["eval_loss"] > 0
    assert load_pretrained(done.model_path)[0].config.d_model == 16


@pytest.mark.parametrize("loss, teacher", [("jsd", "own"), ("sft", "other")])
def test_the_teachers_answers_replace_those_of_the_rows(home, loss, teacher, monkeypatch):
    asked = []

    def writes(model, tokenizer, prompts, settings):
        asked.append(len(prompts))
        return ["a" * (2 + i) if i else None for i in range(len(prompts))]

    monkeypatch.setattr("trainkit.recipes.preparation.write_answers", writes)
    settings = dict(teacher=str(home / teacher / "teacher"), seq_kd=True, lmbda=0.0, loss_type=loss)
    wanted = config(home, f"texts-{loss}", settings)
    parts = prepare(wanted)
    assert {row["completion"] for row in parts.train_rows} == {"a" * n for n in range(3, 10)}
    assert {row["completion"] for row in parts.eval_rows} <= {*NAMES}  # Their own
    assert "8 written by the teacher; 1 cut off" in "\n".join(parts.plan)
    assert (parts.objective is None) == (loss == "sft")
    folder = parts.files["teacher_answers.json"].parent
    again = prepare(wanted, saved=folder)
    assert again.train_rows == parts.train_rows and asked == [8]  # Read from the file


@pytest.mark.slow
def test_a_run_resumes_to_the_same_bits(home):
    straight = run(config(home, "straight", dict(lmbda=0.6), save_strategy="steps", save_steps=1))

    class Stop:
        def on_step(self, trainer, record):
            if record["step"] == 2:
                control.stop()

    control = Control()
    wanted = config(home, "halted", dict(lmbda=0.6), save_strategy="steps", save_steps=1)
    run(wanted, callbacks=[Stop()], control=control, verbose=False)
    resumed = run(wanted, resume=True, verbose=False)
    assert resumed.steps == 3
    for a, b in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_other_tokenizers_are_refused_or_learn_texts(home):
    other = dict(teacher=str(home / "other/teacher"))
    with pytest.raises(ValueError, match="their probabilities cannot be compared"):
        prepare(config(home, "no", other | dict(lmbda=0.0)))
    with pytest.raises(ValueError, match="distill.teacher is empty"):
        prepare(config(home, "no", dict(teacher="")))
    with pytest.raises(ValueError, match="prompts without answers"):
        data = {"data": {"path": str(home / "asked.jsonl"), "eval_fraction": 0.2}}
        prepare(config(home, "no", dict(lmbda=0.5), data))
    with pytest.raises(ValueError, match="sft.packing needs rows"):
        changes = {"sft": {"packing": "best_fit", "template": "plain"}}
        prepare(config(home, "no", dict(lmbda=0.5), changes))


def test_cached_run_and_new_student(home):
    cached = dict(lmbda=0.0, top_k=8, teacher_cache=str(home / "cache"))
    parts = prepare(config(home, "cached", cached))
    assert parts.teacher.model is None and "rows asked" in "\n".join(parts.plan)
    live = prepare(config(home, "live", dict(lmbda=0.0, top_k=8)))
    batch = next(iter(parts.train_batches))
    expected = live.objective(live.model, batch).total
    torch.testing.assert_close(parts.objective(parts.model, batch).total, expected)
    new = {"init_from": "", "model": {"d_model": 16, "n_heads": 2, "n_layers": 1, "d_ff": 32}}
    parts = prepare(config(home, "new", dict(lmbda=0.0), new))
    assert parts.model.config.vocab_size == parts.tokenizer.vocab_size


def test_the_teacher_counts_in_the_memory(home):
    off = dict(lmbda=0.0)
    needs = predict_needs(config(home, "m", off))
    sft = predict_needs(config(home, "m", off, {"method": "sft"}))
    size = sum(p.numel() for p in load_pretrained(home / "own/teacher")[0].parameters())
    assert needs.peak - sft.peak == 4 * size
    bits = predict_needs(config(home, "m", off | dict(teacher_bits=4)))
    assert bits.peak - sft.peak == size // 2


@pytest.mark.slow
def test_trl_takes_the_same_steps(home):
    pytest.importorskip("peft")
    wanted = config(home, "trl", dict(lmbda=0.0, beta=0.3), {"engine": "trl"}, eval_strategy="no")
    theirs = run_trl(prepare(wanted))
    ours = run(config(home, "ours", dict(lmbda=0.0, beta=0.3), eval_strategy="no"), verbose=False)
    losses = [record["loss"] for record in theirs.history]
    torch.testing.assert_close(losses, logged(ours), rtol=1e-5, atol=1e-5)
    for wrong in (dict(lmbda=0.5), dict(lmbda=0.0, top_k=4), dict(lmbda=0.0, temperature=0.9)):
        kind, settings = trl_kind(config(home, "x", wrong))
        with pytest.raises(ValueError, match="TRL's GKDTrainer .* take engine: trainkit"):
            from trainkit.interop.trl import SETTINGS

            SETTINGS[kind](settings)
    with pytest.raises(ValueError, match="method = 'distill': LLaMA-Factory has"):
        from trainkit.interop.llamafactory import stage_of

        stage_of(config(home, "x"))


def test_words_of_trl_become_settings(tmp_path):
    words = {
        "stage": "gkd",
        "model_name_or_path": "small",
        "teacher_model_name_or_path": "big",
        "lmbda": 0.7,
        "beta": 0.2,
        "seq_kd": False,
        "temperature": 0.9,
        "max_new_tokens": 64,
        "dataset": "rows.jsonl",
    }
    file = tmp_path / "gkd.yaml"
    file.write_text(json.dumps(words))
    found, _ = convert_config(file)
    assert found.method == "distill" and found.distill.teacher == "big"
    d = found.distill
    assert (d.lmbda, d.beta, d.temperature, d.max_completion_length) == (0.7, 0.2, 0.9, 64)
    script = tmp_path / "gkd.py"
    script.write_text(
        "from trl.experimental.gkd import GKDConfig, GKDTrainer\n"
        "args = GKDConfig(output_dir='x', lmbda=0.3, beta=0.1, max_new_tokens=32)\n"
        "trainer = GKDTrainer(model='small', teacher_model='big', args=args)\n"
    )
    found, _ = convert_config(script)
    d = found.distill
    assert (found.method, d.teacher, d.lmbda, d.beta) == ("distill", "big", 0.3, 0.1)
    assert method_config({"method": "gkd", "init_from": "x"}).method == "distill"
