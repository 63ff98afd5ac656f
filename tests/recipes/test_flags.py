"Flags as they are typed: what each line of `trainkit train` and `launch` means."

import json
import shlex
from types import SimpleNamespace

import pytest
from support.snapshots import answer_all
from typer.main import get_command

from trainkit.cli import app
from trainkit.recipes import commands


def parsed(question):
    "The parameters that a line sets, or the error."
    name, *words = shlex.split(question)
    command = get_command(app).commands[name]  # type: ignore
    try:
        context = command.make_context(name, words)
    except Exception as error:
        return f"{type(error).__name__}: {getattr(error, 'message', error)}"
    usual = {p.name: p.get_default(context, call=False) for p in command.params}
    found = {k: v for k, v in context.params.items() if v != usual.get(k) and v is not None}
    return json.dumps({k: v for k, v in found.items() if v != []}, default=str)


def test_each_line_keeps_its_meaning(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    answer_all(parsed, "lines.txt")


def printed(talk, line, capsys):
    commands._print_answer(talk, line)
    return capsys.readouterr().out


@pytest.mark.parametrize("comparing", [False, True])
def test_an_answer_is_printed_with_the_names_of_both_models(comparing, capsys):
    talk = SimpleNamespace(
        comparing=comparing,
        say=lambda line: [("base", "a"), ("base", line), ("model", "c")],
        again=lambda: [("model", "d")],
    )
    base, model = ("[base] ", "[model] ") if comparing else ("", "")
    assert printed(talk, "hi", capsys) == f"{base}ahi\n{model}c"
    assert printed(talk, "/retry", capsys) == f"{model}d"


@pytest.mark.parametrize(
    "error, text",
    [
        (FloatingPointError("nan"), "here: nan"),
        (ValueError("no chat template"), "here: no chat template"),
        (ValueError("here has no chat template"), "here has no chat template"),
        (ValueError("other"), "other"),
        (UnicodeError("chat template"), "chat template"),
    ],
)
def test_errors_of_a_model_name_its_folder(error, text):
    def fail(model):
        raise error

    with pytest.raises(type(error)) as raised:
        commands.with_model_name(fail)(model="here")
    assert str(raised.value) == text
