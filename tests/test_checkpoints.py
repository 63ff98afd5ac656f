"""A checkpoint names what is wrong with an answer that looks right: only the mistake is changed.

test_lessons runs the right answers.
"""

import ast
import json
import os
import re
from dataclasses import replace

import pytest
from support.processes import ROOT, in_child


def imports_of(source):
    "The import statements of a cell, without the rest of it."
    body = [s for s in ast.parse(source).body if isinstance(s, (ast.Import, ast.ImportFrom))]
    return "\n".join(map(ast.unparse, body))


def verdict(lesson, changes):
    "What the check says about the lesson's solution in which some places are changed."
    os.environ.update(TRAINKIT_PROFILE="quick")
    from trainkit.course import grade, read_exercises

    path = ROOT / f"nbs/{lesson}.ipynb"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = {c["id"]: "".join(c["source"]) for c in cells if c["cell_type"] == "code"}
    names = {}
    for name, source in code.items():
        if name == "checkpoint-data":
            exec(source, names)
            break
        if name != "install":
            exec(imports_of(source), names)
    exercise = read_exercises(path)[-1]
    solution = exercise.solution
    for old, new in changes:
        assert len(re.findall(old, solution)) == 1, f"the solution has another {old!r}"
        solution = re.sub(old, new, solution)
    print(grade(replace(exercise, solution=solution), names)[1])


def mistake(lesson, tmp_path, *changes):
    done = in_child(verdict, lesson, changes, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize(
    "place, wrong, message",
    [
        (r"rotate\(k, \*angles\)", "k", "all keys are equal: rotate the keys as well"),
        (r"rotate\(q, \*angles\)", "q", "all queries are equal: rotate the queries as well"),
        (r"\*angles\), v\)\)", "*angles), rotate(v, *angles)))", "rotate only the queries and the"),
        (r"rotate\(k, \*angles\)", "rotate(k, angles[0], -angles[1])", "on the distance between"),
        (r"v, mask\)", "v, mask, implementation='eager')", "right"),
    ],
)
def test_a_model_of_the_third_chapter_rotates_queries_and_keys(tmp_path, place, wrong, message):
    assert message in mistake("03_model/10_generation", tmp_path, (place, wrong))


@pytest.mark.slow
def test_answers_of_the_eighth_chapter_are_learned_from_pairs(tmp_path):
    "Fine-tuning on the chosen answers makes them likelier too, without any preference."
    sft = (
        "lm_loss,\n        Batches(tokenize_examples([dict(prompt=p['prompt'], "
        "completion=p['chosen']) for p in pairs], question_tokenizer), 16, seed=0),"
    )
    place = r"dpo_objective\(make_reference\(model\)\),\n +PairBatches\(.*\),"
    said = mistake("08_align/11_rl", tmp_path, (place, sft))
    assert "the loss of DPO compares each chosen answer with its rejected one" in said
