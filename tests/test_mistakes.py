"What a user of the package gets wrong at first, and the sentence that says what would be right."

from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.sketches import drawn
from torch.optim.lr_scheduler import LambdaLR, StepLR

from trainkit import BPETokenizer, LoRAConfig, ModelConfig, QuantConfig, Transformer, add_lora
from trainkit import generate, load_pretrained, quantize_model, run, save_adapter, save_pretrained
from trainkit import stream
from trainkit.align.distillation import distill_objective
from trainkit.align.dpo import dpo_objective
from trainkit.align.kto import tokenize_unpaired
from trainkit.align.preference_data import PairBatches, tokenize_pairs
from trainkit.align.reference import make_reference
from trainkit.align.rl import RLConfig
from trainkit.align.rollouts import Rollouts
from trainkit.charts import as_points
from trainkit.data.dataloader import Batches, pack
from trainkit.data.dataset import split_examples
from trainkit.data.tokenization import tokenize_examples
from trainkit.engine import BatchEngine, ChatServer, Scheduler
from trainkit.eval.evaluator import evaluate
from trainkit.eval.metrics import exact_match
from trainkit.eval.scoring import score_texts
from trainkit.memory.estimate import predict_run
from trainkit.model.generation import end_ids
from trainkit.recipes.config import RunConfig, method_config
from trainkit.recipes.evaluation import ask
from trainkit.recipes.saving import score_answers
from trainkit.tokenizer.chat import set_template
from trainkit.train.config import TrainConfig, check_callbacks
from trainkit.train.loggers import check_report_to
from trainkit.train.objectives import Loss, lm_loss, lm_objective
from trainkit.train.optim import OptimConfig, make_schedule
from trainkit.train.step import tf32
from trainkit.train.trainer import Trainer
from trainkit.widgets.chat_compare import _with_server

TEXTS = ["Say cat and dog.", "two times two is four"] * 20
ROWS = [dict(prompt=f"Say {i}.", completion="cat") for i in range(40)]


@pytest.fixture(scope="module")
def tok():
    return BPETokenizer.train(TEXTS, 272, special_tokens=["<|endoftext|>"], progress=False)


@pytest.fixture(scope="module")
def model(tok):
    torch.manual_seed(0)
    shape = dict(vocab_size=tok.vocab_size, d_model=32, n_heads=2, n_layers=1, d_ff=64)
    return Transformer(ModelConfig(**shape, max_seq_len=64))


@pytest.fixture(scope="module")
def batches(tok):
    return Batches(tokenize_examples(ROWS, tok, template="plain"), 16)


@pytest.mark.parametrize(
    "special, end",
    [
        (["<pad>", "<eos>"], "<eos>"),
        (["<|im_start|>", "<|im_end|>"], "<|im_end|>"),
        (["<|endoftext|>", "<|im_end|>"], "<|endoftext|>"),
        (["<stop>", "<go>"], "<stop>"),
    ],
)
def test_the_end_of_a_text_is_known_by_its_name(special, end):
    assert BPETokenizer.train(TEXTS, 270, special_tokens=special, progress=False).eos_token == end


def test_the_end_of_a_text_can_be_named():
    own = dict(special_tokens=["<a>", "<b>"], progress=False)
    assert BPETokenizer.train(TEXTS, 270, eos_token="<b>", **own).eos_token == "<b>"
    with pytest.raises(ValueError, match="eos_token='<c>' is none of"):
        BPETokenizer.train(TEXTS, 270, eos_token="<c>", **own)


def test_a_text_is_no_list_of_texts(tok, model):
    def reward(completions, **_):
        return [0.0] * len(completions)

    calls = [
        lambda: BPETokenizer.train(Path("text.txt"), 300),
        lambda: evaluate(model, tok, "rows.jsonl"),
        lambda: [*score_texts(model, tok, "hello")],
        lambda: exact_match("abc", ["abd"]),
        lambda: exact_match(["abc"], "abd"),
        lambda: Rollouts(model, tok, "hello", reward),
        lambda: split_examples("rows.jsonl"),
        lambda: score_answers(model, tok, "Say cat.", ["cat"]),
        lambda: run(method_config({"method": "sft"}), rows="rows.jsonl"),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="is one text or path: a list of"):
            call()
    with pytest.raises(TypeError, match="is the name of a file: give its text"):
        BPETokenizer.train(__file__, 300)
    assert len(BPETokenizer.train("two times two", 257, progress=False)) == 257


def test_a_table_is_no_list_of_rows(tok, model):
    pandas = pytest.importorskip("pandas")
    with pytest.raises(TypeError, match="to_dict\\('records'\\)"):
        evaluate(model, tok, pandas.DataFrame(ROWS))
    series = pandas.Series([3.0, 2.0, 1.0], index=[2, 4, 6])
    assert as_points(series) == [(2, 3), (4, 2), (6, 1)]


def test_what_a_trainer_does_not_take(model, batches):
    wrong = TrainConfig(num_train_epochs=1)
    wrong.max_step = 2
    once = (batch for batch in batches)
    watched = TrainConfig(max_steps=2, eval_strategy="steps", eval_steps=1)
    for args, knobs, message in (
        ((model, lm_loss, batches, TrainConfig()), {}, "the settings are config="),
        ((model, lm_loss, batches, "held.jsonl"), {}, "eval_batches is a str"),
        (("smollm2-135m", lm_loss, batches), {}, "model is a str, no Module"),
        ((model, lm_loss, batches), dict(config={"max_steps": 3}), "config is a dict"),
        ((model, lm_loss, batches), dict(optim=torch.optim.SGD), "optim is a type"),
        ((model, lm_loss, batches), dict(config=wrong), "Did you mean 'max_steps'"),
        ((model, lm_loss, batches, once, watched), {}, "can be read only once"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            Trainer(*args, **knobs)
    with pytest.warns(UserWarning, match="=32 changes nothing here: train_batches have 16 rows"):
        Trainer(model, lm_loss, batches, config=TrainConfig(per_device_train_batch_size=32))


def test_memory_is_predicted_for_the_batches_of_the_trainer(model, batches):
    trainer = Trainer(model, lm_loss, batches, config=TrainConfig(max_steps=2))
    known = predict_run(trainer, batch=batches.largest(), resident=False).peak
    assert predict_run(trainer, resident=False).peak == known
    assert predict_run(trainer, tokens=64, resident=False).peak > known
    listed = Trainer(model, lm_loss, [*batches], config=TrainConfig(max_steps=2))
    with pytest.raises(ValueError, match="give rows and tokens, or a batch"):
        predict_run(listed)


def test_names_of_number_formats_open_a_model(model, tok, tmp_path):
    save_pretrained(model, tok, tmp_path / "base")
    loaded, _ = load_pretrained(tmp_path / "base", dtype="bfloat16")
    assert loaded.lm_head.weight.dtype == torch.bfloat16
    same, _ = load_pretrained(tmp_path / "base", dtype="auto")
    assert same.lm_head.weight.dtype == torch.float32
    with pytest.raises(ValueError, match="dtype = 'int77'"):
        load_pretrained(tmp_path / "base", dtype="int77")
    save_adapter(add_lora(same, LoRAConfig(r=2)), tmp_path / "adapter")
    told = (tmp_path / "adapter" / "adapter_config.json").read_text()
    assert f'"base_model_name_or_path": "{tmp_path / "base"}"' in told
    few = quantize_model(loaded.float(), QuantConfig(bits=4))
    save_pretrained(few, tok, tmp_path / "few")
    again, ids = load_pretrained(tmp_path / "few")[0], torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        assert torch.equal(again(ids).logits, few(ids).logits)
    whole = load_pretrained(tmp_path / "base", native=False)[0]
    theirs = quantize_model(whole, QuantConfig(bits=4))
    with pytest.raises(ValueError, match="are saved in our own Transformer only"):
        save_pretrained(theirs, None, tmp_path / "theirs")


def test_padding_is_not_continued(model, tok):
    ids = torch.tensor([[0, 0, 83, 84], [83, 84, 85, 86]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    knobs = dict(max_new_tokens=3, temperature=0)
    short = generate(model, [83, 84], **knobs)
    assert generate(model, ids, attention_mask=mask, **knobs)[0].tolist() == [0, 0, *short]
    with pytest.raises(ValueError, match="attention_mask is"):
        generate(model, ids, attention_mask=mask[:, 1:])
    with pytest.raises(TypeError, match="add_generation_prompt=True"):
        generate(model, [dict(role="user", content="Hi")], tokenizer=tok)


def test_a_constraint_begins_again_with_another_text(model, tok):
    pytest.importorskip("llguidance")
    from trainkit.engine.constraints import Grammars

    either = Grammars(tok).choice(["cat", "dog"])
    knobs = dict(tokenizer=tok, temperature=0, processors=[either])
    for prompt in ("Say", "Say", "Say the word that comes after it", "Sa"):
        assert generate(model, prompt, **knobs).removeprefix(prompt) in ("cat", "dog")


def test_rows_in_memory_train_a_run_that_can_be_resumed(model, tok, tmp_path):
    save_pretrained(model, tok, tmp_path / "base")
    config = method_config(
        {
            "method": "sft",
            "name": "rows",
            "runs_dir": str(tmp_path / "runs"),
            "init_from": str(tmp_path / "base"),
            "data": dict(max_length=32),
            "train": dict(max_steps=2, progress=False),
            "watch_memory": False,
        }
    )
    with drawn():
        first = run(config, rows=ROWS, verbose=False)
        assert run(config, rows=iter(ROWS), resume=True, verbose=False).folder == first.folder
    assert len([*(tmp_path / "runs").glob("rows-*.jsonl")]) == 1
    with pytest.raises(TypeError, match="method_config\\(file or dict\\)"):
        run("my.yaml")


def test_only_ids_of_the_tokenizer_come_from_a_padded_vocabulary(tok):
    torch.manual_seed(0)
    shape = dict(vocab_size=512, d_model=32, n_heads=2, n_layers=1, d_ff=64, max_seq_len=128)
    padded = Transformer(ModelConfig(**shape))
    knobs = dict(max_new_tokens=60, temperature=2.0, seed=0, eos_token_id=())
    free = generate(padded, [83, 84], **knobs)
    assert max(free) >= len(tok) > max(generate(padded, [83, 84], tokenizer=tok, **knobs))
    assert len("".join(stream(padded, "Say", tokenizer=tok, **knobs))) > 9

    def reward(completions, **_):
        return [float(len(text)) for text in completions]

    rl = RLConfig(num_prompts=1, num_generations=4, max_completion_length=60)
    rollouts = Rollouts(padded, tok, ["Say"], reward, rl)
    for batch in rollouts:
        assert batch["input_ids"].max() < len(tok)
        break


def test_batches_and_objectives_that_do_not_belong_together(model, tok, batches):
    pairs = [dict(prompt="Say cat.", chosen="cat", rejected="dog")] * 8
    of_pairs = PairBatches(tokenize_pairs(pairs, tok), 8)
    knobs = dict(config=TrainConfig(max_steps=1, progress=False))
    for objective, given, missing in (
        (lm_loss, of_pairs, "labels"),
        (dpo_objective(make_reference(model)), batches, "prompt_input_ids"),
    ):
        with pytest.raises(ValueError, match=f"reads '{missing}', and the batches have"):
            Trainer(model, objective, given, **knobs).train()
    for wrong in ({"loss": torch.ones(())}, {"loss": (torch.ones(()), 1)}, torch.ones(())):
        with pytest.raises(TypeError, match="must return sums and counts"):
            Trainer(model, lambda model, batch, wrong=wrong: Loss(wrong), batches, **knobs).train()


@pytest.mark.parametrize(
    "cls, name, says",
    [
        (ModelConfig, "hidden_size", "ModelConfig has no 'hidden_size': here it is d_model"),
        (LoRAConfig, "lora_rank", "here it is r"),
        (LoRAConfig, "lora_alhpa", "Did you mean lora_alpha?"),
        (TrainConfig, "lr", "TrainConfig has no 'lr', but OptimConfig has learning_rate"),
        (RunConfig, "max_steps", r"write train=TrainConfig\(max_steps=…\)"),
        (QuantConfig, "colour", r"\(it has bits"),
    ],
)
def test_a_name_of_another_library_is_translated(cls, name, says):
    with pytest.raises(TypeError, match=says):
        cls(**{name: 3})


def test_a_model_is_no_teacher_no_reference_and_no_judge(model, tok):
    with pytest.raises(TypeError, match=r"a Transformer: Teacher\(model, config\)"):
        distill_objective(model)
    with pytest.raises(TypeError, match=r"a Transformer: make_reference\(model\)"):
        dpo_objective(model)
    with pytest.raises(ValueError, match="a Transformer gives .* where each text needs one reward"):
        score_answers(model, tok, ["Say cat."], ["cat"])


def test_a_schedule_of_ones_own(model, tok, tmp_path):
    "A run that was stopped goes on with it; what is no function of the step is refused."

    def triangle(optimizer, config, steps):
        return LambdaLR(optimizer, lambda step: 1 - abs(2 * step / steps - 1))

    def train(schedule, folder, resume=None, **more):
        config = TrainConfig(
            output_dir=str(folder), max_steps=8, logging_steps=1, save_steps=4, progress=False
        )
        data = Batches(tokenize_examples(ROWS, tok, template="plain"), 16)
        loop = Trainer(
            deepcopy(model), lm_loss, data, config=config, build_schedule=schedule, **more
        )
        loop.train(resume)
        return loop

    whole = train(triangle, tmp_path / "whole")
    rates = [record["learning_rate"] for record in whole.history if "learning_rate" in record]
    peak = whole.optim.learning_rate
    assert rates == pytest.approx([peak * n / 4 for n in (0, 1, 2, 3, 4, 3, 2, 1)])

    class Stop:
        def on_step(self, trainer, record):
            if record["step"] == 5:
                trainer.control.stop()

    train(triangle, tmp_path / "stopped", callbacks=[Stop()])
    again = train(triangle, tmp_path / "stopped", resume=True)
    assert again.state.step == 8
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, again.model.state_dict()[name])
    with pytest.raises(TypeError, match="a StepLR: a LambdaLR is needed"):
        train(lambda optimizer, *_: StepLR(optimizer, 3), tmp_path / "no")


def test_a_call_with_its_arguments_in_another_order(model, tok):
    with pytest.raises(TypeError, match="the prompt comes second"):
        generate(model, tok, "Say")
    with pytest.raises(TypeError, match="input_ids is a list, and must be a tensor"):
        model(tok.encode("Say"))
    with pytest.raises(TypeError, match="returned None: it must return the logits"):
        generate(model, "Say", 2, tokenizer=tok, processors=[lambda ids, logits: None])


def test_an_answer_ends_with_any_of_the_model_s_ends(model, tok):
    "As `generate` does, which asks the model's generation_config too."
    twin = deepcopy(model)
    twin.generation_config = SimpleNamespace(eos_token_id=[5, tok.eos_token_id])
    assert end_ids(twin, tok) == [5, tok.eos_token_id, tok.eos_token_id]
    with torch.no_grad():
        twin.lm_head.weight[:] = 0
        twin.lm_head.weight[5] = twin.model.norm(twin.model.embed_tokens.weight).sum(0)
    asked = [dict(ids=tok.encode("Say 1."), tokens=4)]
    [answer] = ask(twin, tok, asked)
    ids = generate(twin, tok.encode("Say 1."), 4, temperature=0, tokenizer=tok)
    assert answer.ended == (ids[-1] in (5, tok.eos_token_id))


def test_plain_text_is_no_questions(tmp_path, monkeypatch):
    "The error names what `auto` stands for, before a tokenizer is trained on it."
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="data.path = 'auto' is plain text"):
        run(method_config({"method": "sft"}, profile="quick"), verbose=False)


def test_one_model_to_chat_with_needs_no_name(model, tok):
    assert _with_server((model, tok), "") == {"model": (model, tok)}
    assert _with_server("runs/first", "") == {"model": "runs/first"}
    assert _with_server({"a": "runs/first"}, "") == {"a": "runs/first"}
    assert _with_server(None, "") == {}


def test_an_embedding_knows_its_adapters(model, tok):
    with pytest.raises(ValueError, match="there is no adapter 'typo'"):
        Scheduler(model, tok, rows=1).embed("Say", "typo")


def test_a_special_token_that_is_no_text_leaves_the_tokenizer_as_it_was(tok):
    own = deepcopy(tok)
    with pytest.raises(UnicodeEncodeError):
        own.add_special_tokens(["\ud800"])
    assert own.special_tokens == tok.special_tokens and len(own) == len(tok)


def test_callbacks_and_objectives_of_other_libraries(tmp_path):
    class Listener:
        def on_log(self, trainer, record): ...

        def on_step_end(self, trainer, record): ...

    with pytest.warns(UserWarning, match=r"on_step_end is never called. Did you mean 'on_step'"):
        check_callbacks([Listener()])
    check_callbacks([SimpleNamespace(on_health=lambda trainer, record: None)])
    model = Transformer(ModelConfig(vocab_size=64, d_model=32, n_heads=2, n_layers=1))
    batches = Batches([dict(input_ids=[1, 2, 3], labels=[1, 2, 3])] * 4, 2)
    with pytest.raises(TypeError, match=r"objective lm_objective.*cannot be called with \(model"):
        Trainer(model, lm_objective, batches)


@pytest.mark.parametrize(("name", "remedy"), [("a" * 300, "200 bytes"), ("a|b", r"contains '\|'")])
def test_names_that_no_folder_can_have(name, remedy):
    with pytest.raises(ValueError, match=remedy):
        RunConfig(name=name)
    RunConfig(name=name, train=TrainConfig(output_dir="elsewhere"))


def test_a_step_of_evaluation_alone_means_steps():
    train = method_config(dict(method="pretrain", train=dict(eval_steps=7))).train
    assert (train.eval_strategy, train.eval_steps) == ("steps", 7)
    never = dict(eval_steps=7, eval_strategy="no")
    assert method_config(dict(method="pretrain", train=never)).train.eval_strategy == "no"


def warn_of_rates(model):
    make_schedule(torch.optim.SGD(model.parameters()), OptimConfig(warmup_steps=9), 5)


def warn_of_tf32(model):
    with tf32(True):
        pass


def warn_of_rows(model):
    special = ["<|im_start|>", "<|im_end|>"]
    tok = BPETokenizer.train("abc abc", 260, special_tokens=special, progress=False)
    set_template(tok, "chatml")
    rows = [dict(prompt="a", completion=text, label=True) for text in ("b", "bcbcbc", "cacaca")]
    least = min(row["length"] for row in tokenize_unpaired(rows, tok))
    tokenize_unpaired(rows, tok, least, truncation="drop")


def warn_of_a_trainer(model):
    rows = [{"input_ids": [1, 2], "labels": [1, 2]}] * 4
    Trainer(model, lm_loss, Batches(rows, 2), config=TrainConfig(per_device_train_batch_size=3))


def warn_of_a_split(model):
    split_examples([dict(text="a")])


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (warn_of_rates, "fills the whole run of 5"),
        (warn_of_tf32, "tf32=True has no effect"),
        (warn_of_rows, r"^Of 3 rows 2 were left out \(max_length = [0-9]+\)$"),
        (warn_of_a_trainer, "=3 changes nothing here"),
        (warn_of_a_split, "to evaluate on"),
    ],
)
def test_a_warning_names_the_line_of_the_program_that_caused_it(cause, words, model):
    with pytest.warns(UserWarning, match=words) as caught:
        cause(model)
    code = cause.__code__
    assert [w.filename for w in caught] == [__file__]
    assert code.co_firstlineno < caught[0].lineno <= max(line or 0 for *_, line in code.co_lines())


def test_all_wrong_keywords_of_a_config_are_named_at_once_with_their_values():
    words = r"no 'n_layer': here it is n_layers; no 'block_size': here it is max_seq_len$"
    with pytest.raises(TypeError, match=words):
        ModelConfig(n_layer=2, block_size=8)
    with pytest.raises(TypeError, match="'bf16': here it is mixed_precision='bf16'; no 'fp16': le"):
        TrainConfig(bf16=True, fp16=False)
    with pytest.raises(TypeError, match=r"'report_to', but RunConfig .*; no 'ema' \(it has"):
        TrainConfig(report_to="wandb", ema=True)
    with pytest.raises(TypeError, match="'group_size': here it is blocksize"):
        QuantConfig(group_size=64)


def test_what_takes_the_rows_instead_is_named(tok, model):
    with pytest.raises(ValueError, match=r"token_blocks\(encode_rows\(rows, tokenizer\)"):
        pack(tokenize_examples([dict(text="two " * 99)], tok), 8)
    with pytest.raises(ValueError, match=r"trainkit\.align\.tokenize_pairs makes ids of them"):
        tokenize_examples([dict(prompt="a", chosen="b", rejected="c")], tok)
    with pytest.raises(ValueError, match=r"pass the ids of tokenizer\.encode\(text, allowed_sp"):
        generate(model, "cat<|endoftext|>", tokenizer=tok)
    with pytest.raises(ValueError, match="report_to='csv' is not known. Choose .*metrics.jsonl"):
        check_report_to("csv")


def test_an_environment_is_a_subclass(tok, model):
    class Gym:
        def reset(self, row, seed):
            return "two"

    config = RLConfig(method="grpo", max_completion_length=4)
    with pytest.raises(TypeError, match=r"gives a Gym: a subclass of trainkit\.align\.Environment"):
        Rollouts(model, tok, [{}], (), config=config, environment=Gym)


def test_an_engine_is_made_of_a_scheduler_and_a_server_of_an_engine(tok, model):
    with pytest.raises(TypeError, match=r"is a Transformer: BatchEngine\(Scheduler\(model, tok"):
        BatchEngine(model, tok)
    with pytest.raises(TypeError, match=r"is a Scheduler: ChatServer\(BatchEngine\("):
        ChatServer(Scheduler(model, tok))
