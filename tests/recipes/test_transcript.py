"""Commands with all that they print, compared with tests/snapshots/transcript.txt and options.txt.

They are those of trainkit.cli, trainkit.recipes.commands, trainkit.recipes.data_commands,
trainkit.recipes.memory_commands and trainkit.recipes.launcher.
"""

import json
import re
import shlex
import sys

import pytest
from support.processes import call
from support.snapshots import FOLDER, compare
from typer.main import get_command

from trainkit.cli import app

WORDS = "zero one two three four five six seven eight nine ten eleven".split()
TOPICS = ("sums", "names", "rare")


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_run(folder, rate, losses):
    "A folder as a run leaves it, with the numbers given."
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        f"method: sft\noptim: {{learning_rate: {rate}}}\ntrain: {{seed: 3}}\n"
    )
    facts = dict(python="3.11", versions=dict(torch=f"2.{len(losses)}"), git=dict(commit="a1"))
    (folder / "environment.json").write_text(json.dumps(facts))
    hour = f"2026-01-0{len(str(rate))} 10:00:0"
    speed = dict(tokens_per_second=rate * 1e6, seconds=12.5)
    records = [dict(event="start", time=f"{hour}0", step=0)]
    records += [
        dict(event="log", step=i + 1, loss=loss, grad_norm=loss / 2, learning_rate=rate) | speed
        for i, loss in enumerate(losses)
    ]
    records += [dict(event="eval", step=i, eval_loss=losses[i] + 0.25) for i in (10, 20, 39)]
    records += [dict(event="end", time=f"{hour}9", step=len(losses), status="complete")]
    write_rows(folder / "metrics.jsonl", records)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("transcript")
    rows = [
        dict(prompt=f"Spell {i} + {i // 3}.", completion=f"{WORDS[i % 12]} " * (i % 5 + 1))
        | dict(task=TOPICS[i % 2 if i < 38 else 2], family=i // 4)
        for i in range(40)
    ]
    write_rows(folder / "rows.jsonl", rows)
    write_rows(folder / "more.jsonl", [dict(q=f"{i}?", a="yes" * 120) for i in range(6)])
    write_rows(
        folder / "bad.jsonl",
        [*rows[:3], *rows[:2], dict(prompt="", completion=""), {"prompt": "x"}, {"a": 1}, {"b": 1}]
        + [dict(prompt=f"{i}", completion=3) for i in range(4)],
    )
    (folder / "text.txt").write_text("\n\n".join(f"{w} and {w} again" for w in WORDS * 4))
    write_run(folder / "runs" / "slow", 1e-4, [3 - i / 50 for i in range(40)])
    write_run(folder / "runs" / "fast", 1e-3, [3 - i / 20 for i in range(40)])
    write_run(folder / "runs" / "wild", 1e-1, [3 + i / 5 + (i % 3) for i in range(40)])
    (folder / "ours.yaml").write_text("method: lora\ntrain: {seed: 5}\n")
    (folder / "shape.yaml").write_text(
        "model: {vocab_size: 500, d_model: 64, n_heads: 4, n_layers: 2, d_ff: 128}\n"
        "data: {max_length: 64}\ntrain: {per_device_train_batch_size: 4}\n"
    )
    (folder / "theirs.yaml").write_text("lora_r: 8\nlearning_rate: 1e-3\nunheard_of: 3\n")
    return folder


def outcome(line, folder):
    done = call(*shlex.split(line)[1:], cwd=folder, COLUMNS="100", NO_COLOR="1", TERM="dumb")
    text = done.stdout + "".join(f"! {x}\n" for x in done.stderr.splitlines())
    # What depends on the machine or the hour is left out
    text = "".join(x for x in text.splitlines(True) if not re.match("On this CPU|! 20", x))
    text = re.sub(
        r"(?m)[ \t]+$", "", text.replace(str(folder), "HOME").replace(sys.executable, "PYTHON")
    )
    return text.rstrip("\n") + f"\n[{done.returncode}]\n"


@pytest.mark.filterwarnings("ignore:no row with task")
def test_what_commands_print(home, monkeypatch):
    "Each line that begins with `$` is a command, and what follows is its output and exit code."
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    kept = (FOLDER / "transcript.txt").read_text(encoding="utf-8")
    lines = [line[2:] for line in kept.splitlines() if line.startswith("$ ")]
    compare("".join(f"$ {line}\n{outcome(line, home)}\n" for line in lines), "transcript.txt")


def options(command, name):
    for parameter in command.params:
        words = "/".join([*parameter.opts, *parameter.secondary_opts])
        default = "" if parameter.default is None else f" = {parameter.default}"
        limits = (getattr(parameter, "min", None), getattr(parameter, "max", None))
        default += "" if limits == (None, None) else f" {limits}"
        yield f"{name} {words}{default}{' required' * parameter.required}\n"
    for key, inner in getattr(command, "commands", {}).items():
        yield from options(inner, f"{name} {key}")


def test_the_options_of_each_command_and_their_defaults():
    compare("".join(options(get_command(app), "trainkit")), "options.txt")


def test_a_prediction_for_programs(home):
    "What depends on the machine is not looked at; the rest is what the table says."
    text = call("memory", "predict", "shape.yaml", "--json", cwd=home).stdout
    found = json.loads(text)
    assert text == json.dumps(found, indent=1, ensure_ascii=False) + "\n"
    assert [*found] == ["peak", "parts", "resident", "beside", "setup", "fits", "note"]
    assert sum(found["parts"].values()) == found["peak"] and all(found["fits"].values())
    assert found["setup"]["batch_size"] == 4 and "lora" not in found["setup"]
