"Lessons run with their exercises: each check is asked about the cell as it stands and about the folded solution."
import gc
import json
import os
import warnings

from conftest import ROOT


def apart(function):
    "What `function` returns, as JSON, from a forked process: nothing that a solution changes stays changed."
    out, into = os.pipe()
    child = os.fork()
    if not child:
        gc.freeze() # Nothing that the lesson made is garbage here; to look at it would copy its pages
        try: answer = function()
        except BaseException as error: answer = [f'{type(error).__name__}: {error}']
        with os.fdopen(into, 'w') as pipe: json.dump(answer, pipe)
        os._exit(0)
    os.close(into)
    with os.fdopen(out) as pipe: answer = pipe.read()
    os.waitpid(child, 0)
    return json.loads(answer or '["the process that graded it died"]')


def run_lesson(path, flags):
    "Run a notebook as the tests do; whether it ran, and for each exercise its two verdicts or what went wrong."
    os.chdir(ROOT)
    os.environ.update(TRAINKIT_PROFILE='quick', COLUMNS='100')
    warnings.simplefilter('ignore')
    from nbdev import test
    from trainkit.exercises import Verdict, grade, read_exercises
    exercises, asked, verdicts = {e.stub: e for e in read_exercises(path)}, [], []
    def judge(exercise, names, said):
        try: return [str(verdict) for verdict in grade(exercise, names, said)]
        except Exception as error: return f'{type(error).__name__}: {error}'
    class Shell(test.CaptureShell):
        def cell(self, cell, **kwargs):
            super().cell(cell, **kwargs)
            if cell.source in exercises and not self.exc:
                asked.append((exercises[cell.source], self.user_ns, self.result if isinstance(self.result, Verdict) else None))
                if len(asked) == len(exercises): verdicts.extend(apart(lambda: [judge(*one) for one in asked])) # A fork takes its time
    before, test.CaptureShell = test.CaptureShell, Shell
    try: ok, _ = test.test_nb(path, skip_flags=['gpu', 'slow'], force_flags=flags, basepath=ROOT)
    finally: test.CaptureShell = before
    return ok, verdicts


def wrong(verdicts):
    "The exercises whose stub passes or whose solution does not, in words."
    for number, found in enumerate(verdicts, 1):
        if isinstance(found, str): yield f'exercise {number} cannot be graded: {found}'
        elif found[0] == 'right': yield f'exercise {number}: the untouched cell passes'
        elif found[1] != 'right': yield f'exercise {number}: its solution is {found[1]}'
