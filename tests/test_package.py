"Facts about the whole package: it is what the notebooks say, imports point down, and it stays light."
import ast
import configparser
import json
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from conftest import ROOT, in_child

PACKAGE = ROOT/'trainkit'
NOTEBOOKS = sorted((ROOT/'nbs').glob('*.ipynb'))
CHECKED_BY_HAND = {'__init__', '__main__', '_modidx'}

# Who may import whom. A module imports only what stands in its line; a new line or word here is a decision.
MAY_IMPORT = {
    'exercises': '',
    'files': '',
    'knobs': '',
    'config': 'files knobs',
    'canvas': '',
    'diagram': 'canvas knobs',
    'charts': 'canvas',
    'facts': '',
    'machine': 'facts',
    'clock': '',
    'progress': 'canvas clock files',
    'heap': '',
    'kernels': '',
    'patterns': '',
    'words': 'kernels patterns progress',
    'bpe': 'kernels progress',
    'encoder': 'kernels patterns',
    'formats': 'files patterns',
    'tokenizer': 'bpe config encoder files formats patterns words',
    'archives': '',
    'columns': 'knobs',
    'containers': 'archives files',
    'corpora': '',
    'parallel': '',
    'sources': 'archives containers corpora knobs',
    'loading': 'columns sources parallel knobs',
    'splits': 'columns',
    'cleaning': 'columns parallel',
    'dataset': 'archives columns containers corpora loading sources splits cleaning knobs',
    'memo': 'files',
    'mixture': 'columns',
    'templates': '',
    'defects': '',
    'duplicates': '',
    'findings': 'defects canvas charts columns',
    'proportions': 'defects findings',
    'mismatch': 'findings templates',
    'quality': 'defects columns duplicates findings knobs mismatch proportions',
    'chat': 'patterns templates tokenizer',
    'memmap': 'files',
    'shards': 'columns containers corpora knobs memmap parallel patterns progress tokenizer',
    'curriculum': 'knobs',
    'dataloader': 'curriculum packing',
    'packing': '',
    'lengths': 'canvas charts chat columns parallel memo',
    'masks': 'canvas chat lengths',
    'rope': '',
    'architecture': 'rope knobs',
    'attention': 'rope',
    'cache': '',
    'layers': '',
    'loss': 'layers',
    'model': 'rope architecture attention cache layers loss',
    'sampling': 'config',
    'characters': '',
    'decode': 'cache',
    'fixed': 'cache decode',
    'generate': 'cache characters decode fixed model sampling',
    'speculative': 'cache decode generate model sampling',
    'backward': '',
    'muon': '',
    'adamw8bit': 'kernels',
    'optim': 'adamw8bit config knobs muon',
    'tensors': '',
    'checkpoint': 'config tensors',
    'identity': '',
    'lock': 'retention',
    'retention': 'checkpoint',
    'writer': 'checkpoint facts retention',
    'objective': 'loss',
    'plan': 'canvas config',
    'compiled': '',
    'sharded': '',
    'zero': 'sharded',
    'processes': '',
    'precision': 'config sharded',
    'step': 'backward objective precision',
    'faults': 'step',
    'checks': 'optim plan retention',
    'resume': 'checkpoint checks config identity optim plan retention',
    'rescue': 'checks faults plan step',
    'keeper': 'checkpoint config plan progress sharded step writer',
    'train': 'checkpoint checks compiled config faults files heap keeper lock objective optim plan precision progress rescue resume sharded step writer zero',
    'remote': 'config files knobs progress',
    'monitor': 'architecture',
    'symptoms': 'canvas',
    'health': 'canvas files symptoms',
    'reading': 'canvas',
    'runs': 'config files reading',
    'index': 'canvas config runs',
    'summary': 'canvas charts config runs',
    'compare': 'canvas charts index runs summary',
    'track': 'canvas compare files index progress runs summary',
    'ggml': 'files',
    'nf4': '',
    'int8': '',
    'fused': 'nf4',
    'qlinear': 'fused int8 layers nf4',
    'quant': 'files knobs nf4 qlinear',
    'calibrated': '',
    'intervals': '',
    'overlap': '',
    'bertscore': 'files overlap',
    'metrics': 'overlap',
    'scores': 'evaluate generate intervals layers model objective progress step',
    'modelfile': 'files gguf templates',
    'gguf': 'families files formats hf model patterns progress rope',
    'report': 'canvas chat columns files generate intervals metrics progress scores',
    'sidebyside': 'canvas files generate objective',
    'harness': 'generate scores',
    'sandbox': 'progress',
    'offload': '',
    'ledger': 'canvas charts files',
    'memory': 'adamw8bit backward facts heap layers ledger nf4 objective optim',
    'forecast': 'heap ledger memory',
    'planner': 'canvas knobs ledger lora memory model offload optim quant',
    'evaluate': '',
    'advantages': '',
    'rewards': '',
    'policy': 'layers model objective',
    'rl': 'config objective policy',
    'rollouts': 'advantages chat decode generate lora policy precision reference rewards rl sampling step',
    'game': 'policy',
    'targets': 'knobs',
    'variants': '',
    'lowrank': 'layers targets variants',
    'lora': 'lowrank targets',
    'ranks': 'lora lowrank variants',
    'switch': 'knobs lora lowrank targets',
    'adapters': 'config files knobs lora lowrank switch targets variants',
    'merge': 'adapters files lora lowrank progress targets',
    'preferences': 'canvas columns lengths pairs',
    'pairs': 'dataloader',
    'margins': 'knobs',
    'likelihood': 'objective pairs step',
    'reference': 'files likelihood objective pairs progress step switch',
    'dpo': 'likelihood margins objective reference',
    'unpaired': 'columns dataloader lengths likelihood margins objective reference',
    'reward': 'likelihood objective pairs step',
    'families': 'architecture config files model',
    'hub': 'knobs',
    'hf': 'architecture config families files ggml hub model quant tokenizer',
    'twin': 'adapters families files lora model reward tokenizer',
    'llamafactory': 'columns config dataset files optim progress templates',
    'engines': 'llamafactory trl_words',
    'trl_words': 'dataloader plan rewards',
    'with_trl': 'config engines files objective optim plan precision progress step train trl_words twin',
    'judge': 'canvas charts chat dataset evaluate generate runs sampling summary',
    'presets': 'config knobs',
    'foreign': 'config knobs',
    'method': 'config curriculum dataset hub knobs margins model optim plan presets quant rl sampling spelling targets',
    'spelling': 'config knobs targets',
    'verdict': 'canvas charts chat dataset evaluate judge likelihood pairs parts reward rewards runs step unpaired',
    'align': 'chat config dataset dpo files generate judge knobs method pairs parts policy preferences reference reward rewards rl rollouts sandbox saving unpaired',
    'saving': 'adapters config files generate hf lengths lora model reward step tokenizer',
    'vocabulary': 'config knobs method templates',
    'translate': 'canvas config foreign index knobs method rl spelling strategy vocabulary',
    'parts': 'chat config dataloader dataset generate judge lengths lora memmap method model packing plan qlinear quant tokenizer',
    'story': 'charts clock',
    'view': 'canvas charts clock story',
    'form': 'config knobs',
    'preview': 'canvas chat config dataset knobs ledger masks needs tokenizer',
    'studio': 'canvas config form preview recipes session story view',
    'page': 'form view',
    'voices': 'characters chat generate hf',
    'chat_compare': 'canvas form masks page voices',
    'labels': 'chat files generate intervals knobs',
    'labeler': 'canvas form labels page reference view',
    'run_browser': 'canvas charts compare form index knobs page runs',
    'session': 'config hf plan recipes remote runs story',
    'explore': 'canvas form knobs view',
    'explorers': 'data_explorers explore lora_explorer memory_explorer model_explorers quant_explorer text_explorers training_explorers',
    'model_explorers': 'canvas chat charts explore knobs sampling',
    'data_explorers': 'canvas charts curriculum dataloader explore knobs packing',
    'training_explorers': 'canvas charts dpo explore knobs optim view',
    'memory_explorer': 'architecture canvas explore families knobs ledger planner',
    'lora_explorer': 'adapters canvas charts explore int8 knobs ledger lora lowrank nf4 ranks targets',
    'quant_explorer': 'canvas explore int8 knobs ledger lora_explorer nf4',
    'text_explorers': 'canvas chat explore knobs lengths masks patterns templates tokenizer',
    'recipes': 'align config dataset engines families files forecast health hf hub judge lock lora machine method monitor objective offload optim parts plan progress remote report rl runs saving tokenizer track train verdict with_trl',
    'needs': 'architecture facts files hf knobs ledger method model offload planner templates',
    'rehearsal': 'engines files forecast method plan recipes',
    'talk': 'chat generate knobs',
    'strategy': 'config sharded',
    'launch': 'config files progress runs sharded strategy',
    'distributed': '',
    'shell': 'chat containers dataset files knobs lengths mixture packing quality shards templates tokenizer',
    'history': 'compare files health index knobs runs summary',
    'tools': 'bertscore config dataset files gguf hf knobs merge method modelfile presets report shell talk tokenizer translate vocabulary',
    'demo': 'canvas charts chat config dataloader dataset evaluate hf intervals judge method progress quant recipes report runs sidebyside step',
    'course': 'files machine',
    'cli': 'checks config course demo files generate hf history knobs launch machine method needs progress recipes rehearsal shell spelling strategy tools',
}


@cache
def rooms() -> dict[str, str]:
    "Module -> the notebook that it comes from."
    found = {}
    for path in NOTEBOOKS:
        if module := json.loads(path.read_text(encoding='utf-8'))['metadata'].get('nbdev', {}).get('default_exp'):
            assert module not in found, f'{path.name} and {found[module]} write the same module'
            found[module] = path.stem
    return found


def imported(path: Path) -> set[str]:
    "Rooms that a module imports, at its top or inside a function, for running or for type checks."
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if isinstance(node, ast.ImportFrom):
            if node.level == 1 and node.module: found.add(node.module.split('.')[0])
            elif node.level == 1 or node.module == 'trainkit': found |= {a.name for a in node.names}
            elif node.module and node.module.startswith('trainkit.'): found.add(node.module.split('.')[1])
        elif isinstance(node, ast.Import):
            found |= {a.name.split('.')[1] for a in node.names if a.name.startswith('trainkit.')}
    return found - {'__version__'}


def test_modules_are_what_the_notebooks_say(tmp_path):
    code = ('import sys, warnings; warnings.simplefilter("ignore")\nfrom nbdev.export import nb_export\n'
            'for p in sys.argv[2:]: nb_export(p, sys.argv[1])')
    (tmp_path/'trainkit').mkdir()
    subprocess.run([sys.executable, '-c', code, str(tmp_path/'trainkit'), *map(str, NOTEBOOKS)], check=True, cwd=ROOT)
    here = re.compile(r'[^\s"\']*nbs/')
    for module in rooms():
        new, old = ((d/f'{module}.py').read_text(encoding='utf-8') for d in (tmp_path/'trainkit', PACKAGE))
        assert here.sub('nbs/', new) == here.sub('nbs/', old), f'trainkit/{module}.py is stale: run `make export`'
    by_hand = {p.stem for p in PACKAGE.glob('*.py')} - set(rooms())
    assert by_hand <= CHECKED_BY_HAND, f'{by_hand - CHECKED_BY_HAND} come from no notebook'


def test_models_of_transformers_are_opened_one_at_a_time():
    "`from_pretrained` exchanges parts of transformers and of torch while it runs, so two threads in it break every later call."
    for module in rooms():
        text = (PACKAGE/f'{module}.py').read_text(encoding='utf-8')
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute) and node.attr in ('from_pretrained', 'from_config')]
        alone = 0 if module == 'files' else sum('with alone' in line for line in text.splitlines() if '.from_config(' in line)
        assert len(calls) - alone == (module == 'files'), f'{module}: open_with and alone of trainkit.files are for this'


def test_imports_point_down():
    order = {module: int(name.split('_')[0]) for module, name in rooms().items()}
    graph = {module: imported(PACKAGE/f'{module}.py') for module in rooms()}
    for module, below in graph.items():
        assert module in MAY_IMPORT, f'{module} is a new room: give it a line in MAY_IMPORT'
        assert below <= set(MAY_IMPORT[module].split()), f'{module} may not import {below - set(MAY_IMPORT[module].split())}'
        for other in below: # rooms that share a number are one lesson in parts
            assert order[other] <= order[module], f'{rooms()[module]} imports {rooms()[other]}'
    def depth(module, above=()):
        assert module not in above, f'{" imports ".join([*above, module])}: a circle'
        return max((known[m] if m in known else depth(m, (*above, module)) for m in graph[module]), default=0) + 1
    known = {}
    for module in sorted(graph, key=lambda m: rooms()[m]): known[module] = depth(module)
    deepest = max(known, key=known.get)
    assert known[deepest] <= 11, f'{deepest} stands on {known[deepest]} layers'


@pytest.mark.parametrize('module', sorted(rooms()))
def test_modules_stand_alone(module):
    "A module may use no name of an unexported cell, no development tool, and no heavy library at its top."
    tree = ast.parse((PACKAGE/f'{module}.py').read_text(encoding='utf-8'))
    top = {n.module.split('.')[0] if isinstance(n, ast.ImportFrom) and n.module else a.name.split('.')[0]
           for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom)) for a in n.names}
    heavy = {'peft', 'trl', 'bitsandbytes', 'ipywidgets', 'wandb', 'trackio', 'matplotlib', 'numba', 'datasets', 'tiktoken'}
    if module not in ('hf', 'engines'): heavy.add('transformers')
    assert not top & heavy, f'{module} imports {top & heavy} at its top'
    everywhere = {(n.module or '') if isinstance(n, ast.ImportFrom) else a.name
                  for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom)) for a in n.names}
    assert not {m.split('.')[0] for m in everywhere} & {'fastcore', 'nbdev', 'execnb'}
    assert ast.get_docstring(tree), f'{module} does not say what it is for'


def test_ruff_finds_nothing():
    done = subprocess.run([sys.executable, '-m', 'ruff', 'check', 'trainkit', 'tests', 'benchmarks'], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def fresh(code: str) -> str:
    return subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()


def test_import_needs_no_torch():
    heavy = "{'torch', 'numpy', 'transformers', 'accelerate', 'pydantic', 'yaml'}"
    assert fresh(f'import sys, trainkit; print(sorted({heavy} & set(sys.modules)))') == '[]'


def test_a_class_of_another_system_is_answered_with_ours():
    import importlib

    import trainkit
    for name, said in trainkit._ELSEWHERE.items():
        with pytest.raises(ImportError, match=f'{name} is a class of another system. Here trainkit'): exec(f'from trainkit import {name}')
        for module, attribute in re.findall(r'trainkit\.(\w+)\.(\w+)', said): assert hasattr(importlib.import_module(f'trainkit.{module}'), attribute), said
    assert not hasattr(trainkit, 'Anything')


def test_help_needs_no_torch():
    code = ("import sys; sys.argv = ['trainkit', '--help']\nfrom trainkit.cli import main\n"
            "try: main()\nexcept SystemExit: pass\nprint('torch' in sys.modules, 'transformers' in sys.modules)")
    assert fresh(code).splitlines()[-1] == 'False False'


def test_profiles_are_the_same_in_the_package():
    assert (ROOT/'settings.ini').read_text() == (PACKAGE/'settings.ini').read_text(), 'run `make export`'
    ini = configparser.ConfigParser()
    ini.read(ROOT/'settings.ini')
    assert {s.split('.')[0] for s in ini.sections()} == {'quick', 'full'}


def test_readme_lists_every_lesson():
    "The course map of the README has each lesson, with the sentence under its title."
    readme = (ROOT/'README.md').read_text(encoding='utf-8')
    for path in NOTEBOOKS:
        sentence = ''.join(json.loads(path.read_text(encoding='utf-8'))['cells'][0]['source']).split('\n> ')[1].strip()
        assert f'| [`{path.stem}`](nbs/{path.name}) | {sentence} |' in readme, path.stem


def test_readme_counts_the_lessons_of_each_chapter():
    readme = (ROOT/'README.md').read_text(encoding='utf-8')
    chapters = re.findall(r'<summary><b>(.*?)</b> \((\d+)\)</summary>(.*?)</details>', readme, re.S)
    assert {title: int(said) for title, said, _ in chapters} == {title: rows.count('\n| [`') for title, _, rows in chapters}


def test_readme_figures_are_in_the_benchmarks():
    "Each figure of the table of measurements stands in a table, or in a sentence, of benchmarks/README.md."
    readme, benchmarks = (path.read_text(encoding='utf-8') for path in (ROOT/'README.md', ROOT/'benchmarks'/'README.md'))
    rows = re.findall(r'(?m)^\| .* \|$', readme.split('## What is measured')[1].split('\n## ')[0])[2:]
    figures = {row: re.findall(r'\d[\d,]*(?:\.\d+)?', row.split('|')[-2]) for row in rows}
    cells = {cell.strip() for line in benchmarks.splitlines() if line.startswith('|') for cell in re.split(r'[|(]', line)}
    assert rows and all(figures[row] or 'bit' in row for row in rows)
    missing = {row: [f for f in found if not any(re.fullmatch(rf'{re.escape(f)}0?', cell) for cell in cells)] for row, found in figures.items()}
    assert not any(missing.values()), {row: found for row, found in missing.items() if found}
    panel = re.search(r'\| speed with a panel / without \| ([\d.]+) \|', benchmarks)[1] # in another table stands the same number
    assert f'| {panel} of the speed |' in readme


def run_code(code, folder):
    os.chdir(folder)
    exec(compile(code, 'README.md', 'exec'), {'__name__': '__main__'})


def test_readme_code_runs(tmp_path):
    "The Python of the README, run as it stands, in the order in which it stands there."
    blocks = re.findall(r'```python\n(.*?)```', (ROOT/'README.md').read_text(encoding='utf-8'), re.S)
    code = '\n'.join(blocks).replace("name='mine')", "name='mine')\nconfig.train.max_steps = 2\nconfig.data.max_chars = 100_000\nconfig.tokenizer.vocab_size = 400")
    done = in_child(run_code, code, tmp_path, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert 'import ' in done.stdout and (tmp_path/'runs'/'mine'/'model'/'model.safetensors').exists()


def test_readme_commands_exist():
    "Each `make` target and `trainkit` command that the README names is there."
    readme, makefile = (ROOT/'README.md').read_text(encoding='utf-8'), (ROOT/'Makefile').read_text(encoding='utf-8')
    targets = set(re.findall(r'^([a-z-]+):', makefile, re.M))
    assert set(re.findall(r'(?m)^make ([a-z-]+)', readme)) | set(re.findall(r'`make ([a-z-]+)', readme)) <= targets
    from typer.main import get_command
    from trainkit.cli import app
    shell = '\n'.join(re.findall(r'```sh\n(.*?)```', readme, re.S))
    for first, second in set(re.findall(r'(?m)^trainkit ([a-z]+)(?: ([a-z]+)\b)?', shell)):
        command = get_command(app).commands.get(first) # type: ignore
        assert command, first
        assert not hasattr(command, 'commands') or second in command.commands, f'{first} {second}'


def test_repository_is_named_in_one_place():
    project = tomllib.loads((ROOT/'pyproject.toml').read_text())['project']
    url = project['urls']['Repository']
    assert project['name'] == 'trainkit-llm'
    texts = [*NOTEBOOKS, *PACKAGE.glob('*.py'), ROOT/'README.md', ROOT/'Makefile']
    for path in texts:
        text = path.read_text(encoding='utf-8')
        assert not re.search(r'pip install (-\S+ )*["\']?trainkit\b(?!-llm)', text), f'{path.name}: the bare name belongs to somebody else'
        if path.suffix == '.py' and path.name != '_modidx.py': assert url not in text, f'{path.name} repeats the repository URL'


def test_expected_failures_are_really_run():
    "fastcore's `expect_fail` is a context manager: what stands in a lambda inside of its brackets is never called."
    for path in (*(ROOT/'nbs').glob('*.ipynb'), *(ROOT/'tests').glob('*.py')):
        assert f'expect_fail({"lambda"}' not in path.read_text(encoding='utf-8'), path.name


def test_no_machine_is_named():
    for path in [*NOTEBOOKS, *ROOT.glob('*.md'), *ROOT.glob('benchmarks/*')]:
        if path.is_file():
            assert not re.search(r'(?<![\w.])/(work|farm|root|home)/', path.read_text(encoding='utf-8')), path


@pytest.mark.parametrize('profile', ['quick', 'full'])
def test_profiles_make_a_whole_run_config(profile):
    "Every section of settings.ini fits its class, and a run can be planned from it."
    from trainkit.config import from_profile
    from trainkit.recipes import RunConfig
    config = from_profile(RunConfig, profile)
    assert config.train.max_steps > 0 and config.data.max_length <= config.model.max_seq_len


def test_a_run_refuses_what_was_written_to_no_knob(tmp_path):
    "Python lets anybody write any attribute; a learning rate in the wrong group must not be left out in silence."
    from trainkit.config import ConfigError, from_profile
    from trainkit.recipes import RunConfig, run
    def said(change):
        config = from_profile(RunConfig, 'quick', runs_dir=str(tmp_path), name='mine')
        change(config)
        with pytest.raises(ConfigError) as error: run(config)
        return str(error.value)
    assert 'train.learning_rate = 0.1: is optim.learning_rate' in said(lambda c: setattr(c.train, 'learning_rate', 0.1))
    assert "data.max_lenght: unknown key. Did you mean 'max_length'?" in said(lambda c: setattr(c.data, 'max_lenght', 64))
    assert 'report_to of the run itself' in said(lambda c: setattr(c.train, 'report_to', ['wandb']))
    assert 'must be one of' in said(lambda c: setattr(c.optim, 'optim', 'adamw_bnb_8bit'))
    assert 'train.max_steps' in said(lambda c: setattr(c.train, 'max_steps', 'ten'))
    assert 'lr' in said(lambda c: setattr(c, 'lr', 1e-3))
    assert not [*tmp_path.iterdir()]


def test_every_error_reaches_another_process_as_it_was_said(tmp_path):
    import builtins
    import copy
    import importlib
    import pickle
    from trainkit.knobs import Problem
    log = tmp_path/'stderr.log'
    log.write_text('CUDA is gone')
    words = {'ConfigError': ([Problem('cups', 0, 'must be ≥ 1')], 'Shop'), 'TrainingError': ('loss is nan', 7, 'checkpoint-6'),
             'ProcessFailed': (1, 'it fell', 'Traceback'), 'WorkerDied': (2, -9, log, 1), 'NothingToLearn': (), 'StepTooBig': ('too big',), '_Gone': ('ended',), '_Unknown': ()}
    raised = lambda name: isinstance(kind := vars(builtins).get(name), type) and issubclass(kind, BaseException)
    classes = [getattr(importlib.import_module(f'trainkit.{path.stem}'), node.name) for path in PACKAGE.glob('*.py')
               for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))) if isinstance(node, ast.ClassDef)
               and any(isinstance(base, ast.Name) and (raised(base.id) or base.id in words) for base in node.bases)]
    assert {kind.__name__ for kind in classes} == set(words)
    errors = [kind(*words[kind.__name__]) for kind in classes]
    log.unlink()
    for error in errors:
        error.add_note('(at step 7)')
        for other in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
            assert (type(other), str(other), vars(other)) == (type(error), str(error), vars(error))
            assert other.__notes__ == ['(at step 7)']
