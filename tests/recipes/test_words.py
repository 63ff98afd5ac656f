"The dictionary of the converter: what each word means, and the whole report on a config."

import json
from pathlib import Path

import pytest
from support.processes import ROOT
from support.snapshots import answer_all, compare

from trainkit.config import ConfigError, load_config
from trainkit.recipes.config import RunConfig, choose_method, read_method
from trainkit.recipes.config_files import Computed
from trainkit.recipes.foreign_words import Implied, Refused
from trainkit.recipes.config_files import read_python
from trainkit.recipes.converter import convert_config
from trainkit.recipes.foreign_settings import explain_word, flag_changes, look_up

CONFIGS = ROOT / "tests" / "fixtures" / "configs"


def meaning(question):
    "For `group.word VALUE with SIBLINGS`, the values in JSON."
    word, _, value = question.partition(" ")
    value, _, siblings = value.partition(" with ")
    group, _, word = word.rpartition(".")
    found = look_up(word, json.loads(value), (group,) * bool(group), json.loads(siblings or "{}"))
    if isinstance(found, (Refused, Implied)):
        return f"{type(found).__name__.lower()}: {found}"
    return json.dumps(found)


def test_each_word_keeps_its_meaning():
    answer_all(meaning, "meanings.txt")


def flags(question):
    words = [part.partition(" ") for part in question[2:].split(" --")]
    try:
        changes, notes = flag_changes([(word, text or None) for word, _, text in words])
    except ValueError as error:
        return f"ValueError {error}"
    return " ".join(changes) + "".join(f"; note {note}" for note in notes)


def test_each_flag_keeps_its_meaning():
    answer_all(flags, "flags.txt")


RUNS = {
    "scored answers": {
        "method": "grpo",
        "temperature": 0.5,
        "max_new_tokens": 33,
        "generation": {"temperature": 0.9, "max_new_tokens": 44},
        "grpo": {"num_generations": 4, "top_k": 7, "min_p": 0.1},
        "evaluation": {"generation": {"top_p": 0.5}},
    },
    "several groups": {
        "method": "lora",
        "training": {"batch_size": 3, "lora": {"lr": 1e-4}, "dpo": {"lr": 2e-4}},
        "optimization": {"cpu": {"batch_size": 5}, "cuda": {"batch_size": 7}},
        "warmup_ratio": 0.1,
        "warmup_steps": 4,
        "num_train_epochs": 2,
        "max_steps": 9,
        "eval_steps": 3,
        "learning_rate": "fast",
    },
    "two trackers and a launch": {
        "stage": "sft",
        "finetuning_type": "lora",
        "use_wandb": True,
        "use_tensorboard": True,
        "fp16": True,
        "num_processes": 2,
        "num_nodes": 3,
        "deepspeed": {
            "zero_optimization": {"stage": 2, "overlap_comm": True},
            "gradient_clipping": 0.5,
            "wall_clock_breakdown": True,
        },
    },
    "counted by its batch": {
        "stage": "sft",
        "deepspeed": {
            "train_batch_size": 32,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": 1},
        },
    },
    "one process": {
        "stage": "sft",
        "deepspeed": {
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        },
    },
    "a batch that does not divide": {
        "stage": "sft",
        "deepspeed": {"train_batch_size": 9, "train_micro_batch_size_per_gpu": 4},
    },
    "a word beats DeepSpeed's": {
        "stage": "sft",
        "num_processes": 2,
        "max_grad_norm": 0.25,
        "deepspeed": {"gradient_clipping": 0.5, "zero_optimization": {"stage": 1}},
    },
    "the device beats the method": {
        "method": "lora",
        "train": {"lora": {"batch_size": 2}, "batch_size": 3},
        "optimization": {"cpu": {"batch_size": 5}},
    },
    "two parts for methods": {"train": {"lora": {"lr": 1e-4}, "dpo": {"lr": 2e-4}}},
    "one part for a method": {"train": {"dpo": {"lr": 2e-4}}},
    "fsdp": {"stage": "dpo", "fsdp": "full_shard", "world_size": 4, "warmup_ratio": 0.2},
    "steps of warmup beat their ratio": {"method": "sft", "warmup_steps": 0, "warmup_ratio": 0.2},
    "an adapter for a method without": {"method": "pretrain", "use_lora": True},
    "two that disagree": {"method": "sft", "lr": 1e-4, "learning_rate": 2e-4},
    "two methods": {"method": "sft", "finetuning_type": "lora"},
    "one process of accelerate": {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "num_processes": 1,
        "deepspeed_config": {"zero_stage": 2},
    },
    "two machines of accelerate": {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "num_machines": 2,
        "num_processes": 6,
        "mixed_precision": "fp16",
        "deepspeed_config": {"zero_stage": 3, "offload_param_device": "cpu"},
    },
    "switches that are off": {
        "method": "lora",
        "model_name_or_path": "x",
        "use_deepspeed": False,
        "distributed": False,
        "offload_optimizer": False,
    },
    "a switch that is on elsewhere": {
        "method": "lora",
        "model_name_or_path": "x",
        "use_deepspeed": False,
        "launch": {"use_deepspeed": True, "num_processes": 2},
    },
    "two numbers of processes": {
        "method": "lora",
        "num_processes": 2,
        "launch": {"num_processes": 3},
    },
    "nothing": {},
}


def account(source):
    try:
        config, translation = convert_config(source, device="cpu")
    except ConfigError as error:
        return str(error)
    given = json.dumps(translation.given, default=str)
    return f"{translation}\n{given}"


def test_the_whole_report_on_a_config(monkeypatch):
    monkeypatch.chdir(CONFIGS)
    sources = {path.name: Path(path.name) for path in sorted(CONFIGS.iterdir())} | RUNS
    compare(
        "\n\n".join(f"# {name}\n{account(source)}" for name, source in sources.items()) + "\n",
        "conversions.txt",
    )


def run_method(question):
    "For `WORDS [under METHOD]`, the words in JSON: the settings of that method."
    words, _, under = question.partition(" under ")
    try:
        return json.dumps(read_method(json.loads(words), under or None))
    except ConfigError as error:
        return f"ConfigError {error}"


def chosen_method(question):
    return choose_method(*json.loads(question))


def test_each_name_of_a_method_keeps_its_meaning():
    answer_all(run_method, "methods.txt")
    answer_all(chosen_method, "chosen_methods.txt")


def expression(text):
    settings = [s for s in read_python(f"TrainConfig(x={text})") if s.name != "TrainConfig"]
    values = ["computed" if isinstance(s.value, Computed) else repr(s.value) for s in settings]
    names = [s.name.removeprefix("TrainConfig.x").lstrip(".") for s in settings]
    return ", ".join(
        f"{name}={value}".lstrip("=") for name, value in zip(names, values, strict=True)
    )


def test_each_expression_of_a_script_keeps_its_value():
    answer_all(expression, "expressions.txt")


@pytest.mark.parametrize("word", ["dynamic_rank", "lora.dynamic_rank", "target_r"])
def test_a_rank_that_changes_is_a_callback(word):
    assert "trainkit.lora.GrowRank({100: 8, 200: 16})" in explain_word(word, 8)


@pytest.mark.parametrize("name", ["init_from", "model_name_or_path", "model"])
def test_from_scratch_takes_no_trained_model(name):
    changes, _ = flag_changes([("training_type", "from_scratch"), ("model_name_or_path", "x")])
    for words in ([f"{name}=x", "method=from_scratch"], changes):
        with pytest.raises(ConfigError, match="makes new weights, but .* = 'x' names a trained"):
            load_config(RunConfig, {}, words)
    config = load_config(RunConfig, {"init_from": "x"}, ["method=from_scratch"])
    assert (config.method, config.init_from) == ("pretrain", "")
    assert load_config(RunConfig, {"init_from": "x", "method": "pretrain"}).init_from == "x"


def test_what_a_script_sets_outside_a_call(tmp_path):
    "Attributes of a config and tables with such a name; nothing of other objects."
    script = """
args.learning_rate = 1e-3
config.lora.r = 8
other.max_steps = 3
cfg.seed = training_args.max_steps = 9
peft_config = {"lora_alpha": 7}
words = {"r": 5}
QUANT_CONFIG, more = {"bits": 4}, 1
"""
    settings = {".".join(s.path): s.value for s in read_python(script)}
    assert settings == {"learning_rate": 1e-3, "lora.r": 8, "peft_config.lora_alpha": 7}


def test_the_fields_of_a_config_class_in_a_script():
    "With their defaults, except for those that a call sets again; other classes say nothing."
    script = """
class TrainingConfig:
    learning_rate: float = 1e-3
    seed = 7
    r: int
    max_steps: int = 5
    lora: LoraConfig = LoraConfig(r=4)
class Other:
    seed = 9
c = TrainingConfig(max_steps=9)
"""
    settings = {".".join(s.path): s.value for s in read_python(script)}
    lora = settings.pop("TrainingConfig.lora", None)
    assert lora is None or isinstance(lora, Computed)
    assert settings == {
        "TrainingConfig.learning_rate": 1e-3,
        "TrainingConfig.seed": 7,
        "TrainingConfig.max_steps": 9,
        "LoraConfig.r": 4,
    }
