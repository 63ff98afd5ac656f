"Audits: trainers of a user's own, exit codes, pages, and adapters that leave something out."

import ast
import builtins
import os

import pytest
import torch
from support.processes import program
from typer.testing import CliRunner

from trainkit.audit import PlainLoop, Subject, run_audit, write_audit_page
from trainkit.audit.invariants import INVARIANTS, distance, expected_loss, in_processes
from trainkit.audit.invariants import random_rows
from trainkit.audit.report import check_one, find_subject, reproduction
from trainkit.cli import app

MINE = """
from trainkit.audit import PlainLoop

class Mine(PlainLoop):
    name = "mine"

    def denominator(self, batch, window):
        return max(1, self.count(batch)) * len(window)
"""


def test_a_loop_of_a_users_file_is_audited_from_the_shell(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    page = tmp_path / "page.html"
    words = ["audit", f"{tmp_path}/mine.py:Mine", "loop", "--only", "loss", "--page", str(page)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1, done.output
    assert "✗ accumulation_changes_no_gradient" in done.output
    text = page.read_text()
    assert "def accumulation_changes_no_gradient" in text and "def model_is_causal" not in text
    fine = CliRunner().invoke(app, ["audit", "loop", "--only", "model_is_causal"])
    assert fine.exit_code == 0 and "1 holds" in fine.output


def test_what_a_trainer_lacks_or_raises_is_a_finding():
    class Silent(Subject):
        pass

    class Fragile(PlainLoop):
        def fit(self, *_, **__):
            raise RuntimeError("no data\nat all")

    causal = INVARIANTS["model_is_causal"]
    assert check_one(Silent(), causal).status == "not offered"
    finding = check_one(Fragile(), INVARIANTS["packed_is_alone"])
    assert (finding.status, finding.text) == ("failed", "RuntimeError: no data")

    class Leaving(PlainLoop):
        def fit(self, *_, **__):
            raise SystemExit(3)

    finding = check_one(Leaving(), INVARIANTS["packed_is_alone"])
    assert (finding.status, finding.text) == ("failed", "SystemExit: 3")
    audit = run_audit(Fragile(), ["packed_is_alone"])
    assert not audit.passed and "! packed_is_alone" in str(audit)


def test_what_a_process_raised_is_told_and_not_its_note():
    def fails():
        error = ValueError("the reason")
        error.add_note("(at step 1 of 1)")
        raise error

    with pytest.raises(RuntimeError, match="^ValueError: the reason$"):
        in_processes(1, fails)


def test_a_torch_that_trains_in_no_forked_process_is_no_fault_of_the_trainer():
    parent = os.getpid()

    class Forked(PlainLoop):
        def fit(self, *args, **kwargs):
            if os.getpid() != parent:  # As torch says it where its backward pass has threads
                raise RuntimeError(
                    "Unable to handle autograd's threading in combination with fork-based "
                    "multiprocessing. See https://github.com/pytorch/pytorch/wiki/Autograd-and-Fork"
                )
            return super().fit(*args, **kwargs)

    audit = run_audit(Forked(), ["processes_change_no_gradient"])
    [finding] = audit.findings
    assert (finding.status, audit.passed) == ("not offered", True)
    assert finding.text == "torch computes no gradient in a forked process here"


def test_an_audit_leaves_the_random_numbers_as_they_were(tmp_path):
    torch.manual_seed(3)
    state = torch.get_rng_state()
    audit = run_audit(PlainLoop(), ["seeds_differ"])
    assert audit.passed and torch.equal(torch.get_rng_state(), state)
    assert "<script" not in write_audit_page([audit], tmp_path / "a.html").read_text()


def test_the_expected_loss_and_the_distance():
    loop = PlainLoop()
    model = loop.model()
    rows = random_rows(3)
    batch = loop.collate(rows)
    with torch.no_grad():
        ours = float(loop.summed_loss(model.eval(), batch)) / loop.count(batch)
    assert abs(expected_loss(loop, model, rows) - ours) < 1e-5
    a = dict(x=torch.tensor([1.0, 2.0]))
    assert distance(a, a) == 0 and distance({}, a) == 1 and distance(dict(x=a["x"] * 2), a) == 1
    assert distance(dict(x=torch.tensor([float("nan"), 0])), a) == float("inf")


def test_what_is_violated_comes_with_a_program_that_repeats_it(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    subject = find_subject(f"{tmp_path}/mine.py:Mine")
    finding = check_one(subject, INVARIANTS["accumulation_changes_no_gradient"])
    done = program(finding.program, tmp_path)
    assert done.returncode == 1
    assert f"AssertionError: {finding.text}, at most" in done.stderr
    fixed = finding.program.replace("from mine import Mine", "from trainkit.audit import PlainLoop")
    done = program(fixed.replace("Mine()", "PlainLoop()"), tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", INVARIANTS)
def test_every_check_can_be_repeated_from_its_program(name):
    "Each name in it is imported, defined or Python's own."
    code = reproduction(INVARIANTS[name], PlainLoop())
    known = {*vars(builtins)}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom | ast.Import):
            exec(ast.unparse(node), world := {})
            known |= world.keys()
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            known.add(node.name)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            known.add(node.id)
        elif isinstance(node, ast.arg):
            known.add(node.arg)
    used = {n.id for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Name)}
    assert used <= known, used - known
