"Configs from scripts, cron jobs or strangers: each mistake is one sentence; nothing hangs."

import configparser
import dataclasses
import importlib
import json
import pkgutil
import re
from pathlib import Path

import pytest
import yaml
from support.processes import call

import trainkit
from trainkit.config import ConfigError, from_profile, load_config, parse_config
from trainkit.data.dataset import DataConfig
from trainkit.quant.quantize import QuantConfig
from trainkit.config import knob, knobs
from trainkit.recipes.config import METHODS, RunConfig, method_config
from trainkit.train.objectives import lm_loss
from trainkit.recipes.runner import run
from trainkit.train.runs import read_run
from trainkit.recipes.methods import ALIGNED

ODD = {  # what stands in the file -> what the message says
    "an alias of itself": (
        "train: &t\n  max_steps: 3\n  x: *t\n",
        "an alias refers to itself",
    ),
    "a list as a key": ("name: a\n? [a, b]\n: 1\n", "line 2"),
    "aliases of aliases": (
        "a0: &a0 [x, x]\n"
        + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)),
        "aliases make more than 100,000 values",
    ),
    "brackets": ("a: " + "[" * 3000, "nested too deep"),
    "a variable that is not set": (
        "train:\n  max_steps: ${NOBODY_SET_THIS}\n  save_steps: 3\n",
        "train.max_steps = '${NOBODY_SET_THIS}' (line 2)",
    ),
    "no name": ('name: ""\n', "names the folder of the run"),
    "a name that leads out": ("name: ../../elsewhere\n", "names the folder of the run"),
    "a name that is the folder above": ("name: ..\n", "names the folder of the run"),
}


@pytest.mark.parametrize("case", ODD)
def test_an_odd_file_is_one_sentence(case, tmp_path):
    text, hint = ODD[case]
    (tmp_path / "odd.yaml").write_text(text)
    for words in (["config", "show", "odd.yaml"], ["config", "convert", "odd.yaml"])[
        : 1 + ("name" not in case and "set" not in case)
    ]:
        done = call(*words, cwd=tmp_path)
        assert done.returncode == 1 and hint in done.stderr and "Traceback" not in done.stderr, (
            done.stderr
        )


@pytest.mark.parametrize("name", ["2026-01-31", "0012345", "12e4567", "12:30", "true", "1234567"])
def test_a_date_or_a_commit_names_a_run(name, tmp_path):
    "As in `name=$(date +%F)` and `name=$(git rev-parse --short HEAD)`."
    assert method_config(None, [f"name={name}"]).folder.name == name
    (tmp_path / "c.yaml").write_text(f'name: "{name}"\n')
    assert method_config(tmp_path / "c.yaml").name == name
    if name not in ("12e4567", "true"):
        assert (
            method_config(
                (tmp_path / "c.yaml").write_text(f"name: {name}\n") and tmp_path / "c.yaml"
            ).name
            == name
        )
    shown = call("config", "show", f"name={name}", cwd=tmp_path)
    assert yaml.safe_load(shown.stdout)["name"] == name, "what is written, others read alike"


def test_an_empty_variable_is_no_default(tmp_path):
    '`--dataset "$DATA"` with DATA unset must not read the folder, nor `-m` start from nothing.'
    (tmp_path / "secret.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    for option in ("--dataset", "--model", "--resume", "--method"):
        done = call("train", option, "", cwd=tmp_path)
        assert done.returncode == 2 and option in done.stderr and "empty" in done.stderr, (
            done.stderr
        )
    for words in (
        ["data", "show", ""],
        ["data", "check", ""],
        ["train", "--method", "sft", "-m", "x", "data.path=", "train.max_steps=1"],
    ):
        done = call(*words, cwd=tmp_path)
        assert done.returncode == 1 and "secret" not in done.stdout and "rows" not in done.stdout, (
            words,
            done.stdout,
        )
    assert method_config(None, ["data.eval_file="]).data.eval_file == ""


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    "No shell expands `data.path=~/rows.jsonl`, and a run must not make a folder named `~`."
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    config = method_config(
        None, ["data.path=~/rows.jsonl", "data.eval_file=~/rows.jsonl", "runs_dir=~/runs", "name=a"]
    )
    assert (config.data.path, config.data.eval_file, config.folder) == (
        f"{tmp_path}/rows.jsonl",
        f"{tmp_path}/rows.jsonl",
        tmp_path / "runs" / "a",
    )
    assert method_config(None, ["train.output_dir=~/b"]).folder == tmp_path / "b"
    assert call("data", "show", "~/rows.jsonl", cwd="/").returncode == 0


def test_a_settings_file_of_another_program_is_left_alone(tmp_path):
    "nbdev and decouple keep a settings.ini, too."
    (tmp_path / "settings.ini").write_text(
        "[DEFAULT]\nlib_name = mine\nversion = 1\n[settings]\nDEBUG = on\n"
    )
    shown = call("config", "show", "--json", cwd=tmp_path)
    assert shown.returncode == 0 and json.loads(shown.stdout)["name"] == "run", shown.stderr
    answer = call("train", "--dry-run", "--method", "stf", cwd=tmp_path)
    assert "Did you mean 'sft'" in answer.stderr, answer.stderr
    (tmp_path / "settings.ini").write_text("DEBUG = on\n")
    done = call("train", "--profile", "quick", "train.max_steps=0", cwd=tmp_path)
    assert (
        done.returncode == 1
        and "settings.ini" in done.stderr
        and "TRAINKIT_SETTINGS" in done.stderr
    ), done.stderr


def test_two_trackers_may_be_switched_on():
    with pytest.warns(UserWarning, match="name from another library"):
        for flags, trackers in (
            ({"use_wandb": True, "use_tensorboard": True}, ["wandb", "tensorboard"]),
            ({"use_tensorboard": True, "report_to": ["wandb"]}, ["wandb", "tensorboard"]),
            ({"use_wandb": True, "report_to": "wandb"}, ["wandb"]),
            ({"use_wandb": False, "use_tensorboard": True}, ["tensorboard"]),
        ):
            assert load_config(RunConfig, flags).report_to == trackers
    with pytest.raises(ConfigError, match="unknown key"):
        load_config(DataConfig, {"use_wandb": True})


# Defaults come from one place: a value that no profile names is the default of the class, or of
# the field that holds a group


def config_classes() -> list[type]:
    "Every config class of the package: RunConfig, its groups, and the small ones next to it."
    classes = {}
    for info in pkgutil.walk_packages(trainkit.__path__, "trainkit."):
        if info.name.rpartition(".")[2].startswith("_") or "lessons" in info.name:
            continue
        for kind in vars(importlib.import_module(info.name)).values():
            if (
                isinstance(kind, type)
                and kind.__name__.endswith("Config")
                and kind.__module__.startswith("trainkit")
                and dataclasses.is_dataclass(kind)
            ):
                classes[kind.__name__] = kind
    return list(classes.values())


def strayed(
    config, plain, ini: configparser.ConfigParser, profile: str, path: str = ""
) -> list[str]:
    "Knobs that differ from the plain default although the profile does not name them."
    section, out = f"{profile}.{type(plain).__name__}", []
    named = set(ini[section]) if ini.has_section(section) else set()
    for field in dataclasses.fields(plain):
        mine, default = getattr(config, field.name), getattr(plain, field.name)
        if dataclasses.is_dataclass(default):
            out += strayed(mine, default, ini, profile, f"{path}{field.name}.")
        elif field.name not in named and mine != default:
            out.append(f"{path}{field.name}: {mine!r}, not {default!r}")
    return out


@pytest.mark.parametrize("profile", ["quick", "full"])
def test_a_knob_that_the_profile_does_not_name_has_its_plain_default(profile, monkeypatch):
    ini = configparser.ConfigParser(interpolation=None, default_section="")
    ini.optionxform = str
    ini.read(Path(trainkit.__file__).with_name("settings.ini"), encoding="utf-8")
    monkeypatch.setenv("TRAINKIT_SETTINGS", str(Path(trainkit.__file__).with_name("settings.ini")))
    classes = config_classes()
    assert {"RunConfig", "TrainConfig", "CurriculumConfig", "DemoConfig"} <= {
        c.__name__ for c in classes
    }
    for kind in classes:
        if any(k.value is ... for k in knobs(kind)):
            continue  # somebody must give it
        assert strayed(from_profile(kind, profile), kind(), ini, profile) == [], kind.__name__


def test_no_curriculum_but_where_one_is_named():
    assert all(from_profile(RunConfig, p).curriculum.strategy == "none" for p in ("quick", "full"))
    roads = {
        "nothing": method_config(),
        "sft": method_config(None, ["method=sft"]),
        "override": method_config(None, ["curriculum.steps=9"]),
        "file": method_config({"curriculum": {"steps": 9}}),
        "file and profile": method_config({"curriculum": {"steps": 9}}, profile="quick"),
    }
    assert {k: c.curriculum.strategy for k, c in roads.items()} == {
        "nothing": "none",
        "sft": "none",
        "override": "length_based",
        "file": "length_based",
        "file and profile": "length_based",
    }


def test_a_profile_lays_its_values_over_the_defaults_of_the_field(tmp_path, monkeypatch):
    @dataclasses.dataclass
    class InnerConfig:
        size: int = knob(1, "A size", aliases=("width",))
        speed: int = knob(2, "A speed")

    @dataclasses.dataclass
    class OuterConfig:
        inner: InnerConfig = dataclasses.field(
            default_factory=lambda: InnerConfig(10, 20), metadata=knob(InnerConfig, "Both").metadata
        )

    settings = tmp_path / "settings.ini"
    settings.write_text("[quick.InnerConfig]\nwidth = 7\n")
    monkeypatch.setenv("TRAINKIT_SETTINGS", str(settings))
    assert from_profile(OuterConfig, "quick").inner == InnerConfig(7, 20)
    assert from_profile(OuterConfig, "quick", inner=InnerConfig(3)).inner == InnerConfig(3, 2)


@pytest.mark.parametrize("profile", ["quick", "full"])
def test_a_run_trains_on_as_many_tokens_as_it_announces(profile, tmp_path):
    "Counted at the loss: a curriculum that nobody named once left less than half of them."
    small = [
        f"runs_dir={tmp_path}",
        "data.path=stdlib",
        "data.max_chars=60000",
        "data.max_length=160",
        "tokenizer.vocab_size=400",
        "model.d_model=16",
        "model.n_heads=2",
        "model.n_layers=1",
        "model.d_ff=32",
        "train.max_steps=12",
        "train.per_device_train_batch_size=2",
        "train.eval_steps=12",
        "train.sample_steps=0",
        "sampling.max_new_tokens=2",
        "watch_memory=false",
        "train.progress=false",
    ]
    seen = []

    def counted(model, batch):
        if model.training:
            seen.append(batch["input_ids"].numel())
        return lm_loss(model, batch)

    result = run(method_config(None, small, profile), objective=counted, verbose=False)
    plan = (result.folder / "log.txt").read_text()
    steps, rows, tokens = map(
        int, re.search(r"(\d+) steps? of .* = (\d+) rows? of (\d+) tokens,", plan).groups()
    )
    assert (steps, rows, tokens) == (12, 2, 160)
    assert (len(seen), sum(seen)) == (steps, steps * rows * tokens)
    assert (
        read_run(result.folder).final()["tokens"] == steps * rows * tokens
    )  # and what the run says of itself


@pytest.mark.parametrize("profile", ["quick", "full"])
def test_the_optimizer_of_a_profile_is_for_pretraining_only(profile, tmp_path, monkeypatch):
    "Tuning uses AdamW with the rates of its method, whatever the profile pre-trains with."
    settings = tmp_path / "settings.ini"
    settings.write_text(
        f"[{profile}.OptimConfig]\noptim = muon\nmuon_learning_rate = 0.5\nmuon_ns_steps = 3\n"
    )
    monkeypatch.setenv("TRAINKIT_SETTINGS", str(settings))
    assert method_config(profile=profile).optim.optim == "muon"
    for method in [m for m in METHODS if m != "pretrain"]:
        words = {
            "method": method,
            "init_from": "x",
            **({"use_lora": False} if method in ALIGNED else {}),
        }
        changes = [f"{name}={value}" for name, value in words.items()]
        plain = method_config(words).optim
        assert plain.optim == "adamw_torch_fused"
        assert method_config(None, changes, profile).optim == plain, method
        assert from_profile(RunConfig, profile, **words).optim == plain, method
        asked = method_config(None, [*changes, "optim.optim=muon"], profile).optim
        assert asked == dataclasses.replace(plain, optim="muon"), method


NESTED = {  # a list as somebody types it -> its parts
    "[right_length(20, 5)]": ["right_length(20, 5)"],
    "[right_answer, right_length(20, 5), right_format]": [
        "right_answer",
        "right_length(20, 5)",
        "right_format",
    ],
    "[right_length(target=20, spread=5)]": ["right_length(target=20, spread=5)"],
    "[right_format('a, (b', [1, 2]), x]": ["right_format('a, (b', [1, 2])", "x"],
    '[right_format({"a": [1, (2, 3)]}) , x ]': ['right_format({"a": [1, (2, 3)]})', "x"],
    '["right_length(20, 5)", x]': ["right_length(20, 5)", "x"],
    "right_answer, right_length(20, (5, 6))": ["right_answer", "right_length(20, (5, 6))"],
    "right_length(20, 5)": ["right_length(20, 5)"],
    "[]": [],
}


@pytest.mark.parametrize("text", NESTED)
def test_a_list_is_not_cut_inside_of_brackets(text, tmp_path):
    "In a change, in a file, and in a field of the panel."
    from trainkit.widgets.form import read_value

    assert (
        method_config({"method": "grpo", "init_from": "x"}, [f"rl.rewards={text}"]).rl.rewards
        == NESTED[text]
    )
    (tmp_path / "c.yaml").write_text(f"method: grpo\ninit_from: x\nrl:\n  rewards: {text}\n")
    if not text.startswith('["'):
        assert method_config(tmp_path / "c.yaml").rl.rewards == NESTED[text]
    assert read_value(text, list[str]) == NESTED[text]


def test_other_lists_are_read_as_yaml_reads_them():
    for text in (
        "[a, b c, 1, 2.5, true, null]",
        "[a(b), c]",
        "{a: [1, 2], b: {c: d}}",
        '["a (b, c)", d]',
        "[it's, so (it) is]",
        "[[1, 2], [3]]",
        "[a (b, c]",
        "[a) , b]",
        "[:(, x]",
        "[a: (b), c]",
        "[a # (x, y)\n, b]",
        "- a (b, c)\n- d",
        "a (b, c)",
    ):
        try:
            wanted = yaml.safe_load(
                f"it:\n  {text}" if not text.startswith("-") else f"it:\n{text}"
            )
        except yaml.YAMLError:
            with pytest.raises(ConfigError):
                parse_config(f"it: {text}")
        else:
            assert (
                parse_config(f"it:\n  {text}" if not text.startswith("-") else f"it:\n{text}")[0]
                == wanted
            ), text
    assert parse_config("dpo: {loss_type: [sigmoid, sft]}")[0] == {
        "dpo": {"loss_type": ["sigmoid", "sft"]}
    }


@pytest.mark.parametrize(
    ("typo", "hint"),
    [
        ("learning_rte=1", "'optim.learning_rate'"),
        ("optim.learnig_rate=1", "'learning_rate'"),
        ("lora_rnk=3", "'lora.r'"),
        ("per_device_train_batchsize=2", "'train.per_device_train_batch_size'"),
        ("max_step=3", "'train.max_steps'"),
        ("optm.learning_rate=1", "'optim.learning_rate'"),
        ("optm.nothing=1", "'optim'"),
        ("modl_name=3", "'model_name'"),
        ("templte=chatml", "'sft.template'"),
    ],
)
def test_a_typo_is_said_with_the_knob_that_is_near(typo, hint):
    with pytest.raises(ConfigError, match=f"Did you mean {hint}"):
        method_config({"method": "sft", "init_from": "x"}, [typo])


def test_an_error_names_both_spellings(tmp_path):
    (tmp_path / "pairs.jsonl").write_text(
        "\n".join(json.dumps(dict(prompt=f"a {i}", chosen="b", rejected="c")) for i in range(30))
    )
    done = call("train", "--method", "dpo", "--dataset", "pairs.jsonl", cwd=tmp_path)
    assert done.returncode == 1 and "init_from" in done.stderr and "--model" in done.stderr, (
        done.stderr
    )


def test_aliases_may_make_a_hundred_thousand_values():
    "The mapping, its lists and their items are counted, each alias as what it stands for."
    few = ", ".join(["0"] * 998)  # A list and its items: 999 values
    many = ", ".join(["*few"] * 99)  # A list of 99 such lists
    left = 100_000 - 1 - 999 - (1 + 99 * 999) - 1
    for count in (left, left + 1):
        rest = ", ".join(["0"] * count)
        text = f"few: &few [{few}]\nmany: [{many}]\nrest: [{rest}]\n"
        if count == left:
            assert len(parse_config(text)[0]["rest"]) == left
            continue
        with pytest.raises(ConfigError, match="more than 100,000 values"):
            parse_config(text)


@pytest.mark.parametrize(
    "text, line",
    [("a: [", 1), ("a: 1\nb: [1\n", 3), ("a: 1\nb: 2\nc: }", 3), ("a: b: c", 1), ("a: \x00", None)],
)
def test_the_line_where_a_file_is_broken(text, line):
    with pytest.raises(ConfigError) as error:
        parse_config(text)
    (problem,) = error.value.problems
    assert problem.line == line


def test_whether_an_adapter_is_trained_follows_from_the_method():
    def choice(**knobs):
        config = RunConfig(**knobs)
        return config.method, config.use_lora

    assert choice(method="sft", use_lora=True) == ("lora", None)
    assert choice(method="sft", use_lora=False) == ("sft", None)
    assert choice(method="lora", use_lora=True) == ("lora", None)
    assert choice(method="dpo") == ("dpo", False)
    assert choice(method="dpo", use_lora=True) == ("dpo", True)
    assert choice(method="dpo", quant=QuantConfig(bits=4)) == ("dpo", True)
    assert choice(method="pretrain", use_lora=True) == ("pretrain", True)
    assert choice(method="pretrain") == choice(method="pretrain", use_lora=False)
    with pytest.raises(ConfigError, match="trains no adapter"):
        RunConfig(method="freeze", use_lora=True)


@pytest.mark.parametrize("method", ["pretrain", "grpo"])
def test_every_knob_of_a_run_is_explained_in_a_file_that_can_be_read(method, tmp_path):
    shown = call("config", "show", "--explain", f"method={method}", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    plain = call("config", "show", f"method={method}", cwd=tmp_path)
    assert yaml.safe_load(shown.stdout) == yaml.safe_load(plain.stdout)
    lines = shown.stdout.splitlines()
    assert all(len(line) <= 100 for line in lines if line.lstrip().startswith("#"))
    bare = [
        line
        for above, line in zip(["", *lines], lines, strict=False)
        if re.match(r" *[a-z_0-9]+:", line) and not above.lstrip().startswith("#")
    ]
    assert not bare, "these have no word of explanation"


TYPED = {  # What somebody types -> the values of name, data.path, data.kind, data.datasets
    "data.path=notes #2.txt": ("run", "notes #2.txt", None, []),
    "name=try #2": ("try #2", "auto", None, []),
    "name=&a b": ("&a b", "auto", None, []),
    "name=@a": ("@a", "auto", None, []),
    "name=null": ("null", "auto", None, []),
    "data.path=a\nb": ("run", "a\nb", None, []),
    "data.path=[x].txt": ("run", "[x].txt", None, []),
    "data.path={x}/a.txt": ("run", "{x}/a.txt", None, []),
    "path=[x].txt": ("run", "[x].txt", None, []),
    "data.path = a: b ": ("run", "a: b", None, []),
    "name='it''s #1'": ("it's #1", "auto", None, []),
    'data.path="a\\tb\nc"': ("run", "a\tb\nc", None, []),
    "name='a' or 'b'": ("'a' or 'b'", "auto", None, []),
    'name="\\ud83d\\ude00"': ("😀", "auto", None, []),
    "name=12e4567": ("12e4567", "auto", None, []),
    "data.kind=null": ("run", "auto", None, []),
    "data.kind=": ("run", "auto", None, []),
    "data.kind=text": ("run", "auto", "text", []),
    "data.path=${HERE}/x": ("run", "/here/x", None, []),
    "data.datasets=a.jsonl,b.jsonl": ("run", "auto", None, ["a.jsonl", "b.jsonl"]),
    "data.datasets=[a #1.jsonl, {path: b.jsonl}]": (
        "run",
        "auto",
        None,
        ["a #1.jsonl", {"path": "b.jsonl"}],
    ),
}


@pytest.mark.parametrize("typed", TYPED)
def test_a_word_of_a_shell_is_taken_as_it_is_typed(typed, monkeypatch):
    "YAML would see a comment, an anchor or a list in it."
    monkeypatch.setenv("HERE", "/here")
    config = method_config({}, [typed])
    data = config.data
    assert (config.name, data.path, data.kind, data.datasets) == TYPED[typed]


def test_a_number_has_no_comment_behind_it():
    with pytest.raises(ConfigError, match="'3 # three'"):
        method_config({}, ["train.max_steps=3 # three"])
    with pytest.raises(ConfigError, match="is not YAML"):
        method_config({}, ['name="\\y"'])
