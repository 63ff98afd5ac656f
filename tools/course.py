"""The map of the course: pictures, the table in the tour, and the links at the end of each lesson.

`make map` writes them, `python tools/course.py --check` says what is not up to date. The order of the main road
and the chapters are those of README.md; the sentence of a lesson is the one under its title."""
import json
import re
import sys
from pathlib import Path

from pictures import picture

ROOT = Path(__file__).parent.parent
LESSONS = ROOT/'nbs'
ABLE = { # Lesson of the main road -> its picture, what a reader can do afterwards
    '00_tour': ('tour', 'train, tune, align, shrink and talk to a model on a laptop'),
    '08_bpe': ('bpe', 'learn a vocabulary from text and follow each merge'),
    '10_tokenizer': ('tokenizer', 'train, save and open a tokenizer that others open too'),
    '11_columns': ('columns', 'bring any file of examples into a form that trains'),
    '12_quality': ('quality', 'find spoiled rows before they spoil a model'),
    '13_chat': ('chat', 'render a conversation, and see which tokens are learned'),
    '14_attention': ('attention', 'write attention by hand, masks and all'),
    '14_model': ('model', 'build a transformer and check it against Llama'),
    '14_transformer': ('transformer', 'count what a model costs, and look inside'),
    '15_generate': ('generate', 'let a model write, hot or cold, and stop it in time'),
    '16_optim': ('optim', 'choose an optimizer, a rate and a schedule'),
    '18_train': ('train', 'train anything that has a loss, and go on after a crash'),
    '20_sft': ('sft', 'teach a model to answer, and measure that it does'),
    '21_lora': ('lora', 'tune with a hundredth of the parameters, and merge'),
    '22_adapters': ('adapters', 'keep many skills beside one model'),
    '23_nf4': ('nf4', 'store a weight in four bits, and know the error'),
    '25_memory': ('memory', 'say before a run whether it fits, and what to change'),
    '30_dpo': ('dpo', 'turn choices between two answers into training'),
    '31_rl': ('rl', 'train on a score instead of on examples'),
    '33_scores': ('scores', 'say which model is better, and how sure that is'),
    '40_hf': ('hf', 'exchange models with Hugging Face, both ways'),
    '41_gguf': ('gguf', 'hand a model to llama.cpp and Ollama'),
    '42_distributed': ('distributed', 'train on several processes with the same result'),
    '44_recipes': ('recipes', 'write a whole run down on one page, and repeat it'),
    '51_studio': ('studio', 'train with buttons and live curves in a notebook'),
    '60_your_data': ('your_data', 'get from your own files to a model that answers'),
    '61_colab': ('colab', 'tune, align and take home a real model on one free GPU'),
    '62_troubleshooting': ('troubleshooting', 'recognise fifteen famous bugs by their symptoms'),
}
LINKS, MAP = 'course-links', 'course-map' # Ids of the cells that are written here
BEGIN = {MAP: ('| | Lesson |', 'The map is written here'), LINKS: ('---\n← [', '---\n[Map](', '---\n**Begin')}


def read(path): return json.loads(path.read_text(encoding='utf-8'))


def source(cell): return ''.join(cell['source'])


def written_here(cell, *names):
    "Whether it is one of these cells, also where a tool has given it a new id."
    return cell['cell_type'] == 'markdown' and any(cell.get('id') == name or source(cell).startswith(BEGIN[name]) for name in names)


def sentence(notebook): return source(notebook['cells'][0]).split('\n> ')[1].strip()


def readme_names(text): return re.findall(r'(?m)^\| \[`(\w+)`\]', text)


def road():
    "The lessons of the main road, in order."
    return readme_names((ROOT/'README.md').read_text(encoding='utf-8').partition('**The main road**')[2].partition('Every lesson')[0])


def chapters():
    "Chapter -> its lessons, in the order of the README; those that it does not know yet are in the chapter of their neighbours."
    text = (ROOT/'README.md').read_text(encoding='utf-8')
    found = {title: readme_names(block) for title, block in re.findall(r'<details><summary><b>(.*?)</b>.*?</summary>(.*?)</details>', text, re.S)}
    known = {name: title for title, names in found.items() for name in names}
    place = next(iter(found))
    for name in sorted(p.stem for p in LESSONS.glob('*.ipynb')):
        if name in known: place = known[name]
        else: found[place].append(name)
    return {title: sorted(names, key=lambda n: (n != '00_tour', n)) for title, names in found.items()}


def minutes(notebook):
    "Reading time, computed: 180 words of prose or 20 lines of code a minute."
    prose = sum(len(source(c).split()) for c in notebook['cells'] if c['cell_type'] == 'markdown' and not written_here(c, LINKS, MAP))
    code = sum(len([line for line in source(c).splitlines() if line.strip()]) for c in notebook['cells']
               if c['cell_type'] == 'code' and not source(c).startswith('#| hide'))
    return max(5, round((prose/180 + code/20)/5)*5)


def neighbours():
    "Lesson -> (the one before it, the one after it): along the main road, and by number beside it."
    all_names, main = [p.stem for p in sorted(LESSONS.glob('*.ipynb'), key=lambda p: (p.stem != '00_tour', p.stem))], road()
    out = {}
    for i, name in enumerate(all_names):
        order, at = (main, main.index(name)) if name in main else (all_names, i)
        out[name] = (order[at - 1] if at else None, order[at + 1] if at + 1 < len(order) else None)
    return out


def links(name, around, titles):
    "The line at the end of a lesson."
    before, after = around
    words = [f'← [{titles[before]}]({before}.ipynb)'] if before else []
    words.append('[Map](00_tour.ipynb#The-map)' if name != '00_tour' else '**Begin here**')
    words += [f'[{titles[after]}]({after}.ipynb) →'] if after else []
    return '---\n' + ' · '.join(words)


def the_map(notebooks):
    "The table of the main road and the lists of the chapters, as Markdown."
    rows = [f'| ![{ABLE[n][0].replace("_", " ")}](images/{n}.svg) | [{n}]({n}.ipynb): {sentence(notebooks[n])} | {ABLE[n][1]} | {minutes(notebooks[n])} |'
            for n in road()]
    table = ['| | Lesson | Afterwards you can | Minutes |', '|---|---|---|---|', *rows]
    others = []
    for title, names in chapters().items():
        names = [n for n in names if n not in road()]
        if names: others += [f'<details><summary><b>{title}</b> ({len(names)})</summary>\n', *(
            f'- [{n}]({n}.ipynb): {sentence(notebooks[n])} ({minutes(notebooks[n])} min)' for n in names), '\n</details>\n']
    return '\n'.join([*table, '', 'The boxes that the main road leaves closed, chapter by chapter:', '', *others]).rstrip()


def with_cell(notebook, name, text):
    "The notebook with this text in the cell of this id; a new one goes to the end."
    lines = [line + '\n' for line in text.split('\n')]
    lines[-1] = lines[-1][:-1]
    old = next((c for c in notebook['cells'] if written_here(c, name)), None)
    if old is not None: old['id'] = name
    if name == LINKS and (old is None or notebook['cells'][-1] is not old):
        notebook['cells'] = [c for c in notebook['cells'] if not written_here(c, LINKS)]
        notebook['cells'].append(old := dict(cell_type='markdown', id=LINKS, metadata={}, source=[]))
    if old is not None: old['source'] = lines
    return notebook


def everything():
    "Path -> its text as it should be, for all that is written here."
    notebooks = {p.stem: read(p) for p in LESSONS.glob('*.ipynb')}
    titles = {n: source(b['cells'][0]).split('\n')[0].removeprefix('# ') for n, b in notebooks.items()}
    out = {LESSONS/'images'/f'{n}.svg': picture(kind, able) for n, (kind, able) in ABLE.items() if n in notebooks}
    text = the_map(notebooks)
    for name, around in neighbours().items():
        book = with_cell(notebooks[name], LINKS, links(name, around, titles))
        if name == '00_tour': with_cell(book, MAP, text)
        out[LESSONS/f'{name}.ipynb'] = json.dumps(book, indent=1, ensure_ascii=False) + '\n'
    return out


def stale():
    "The files that are not as they should be."
    return {path: text for path, text in everything().items() if not path.exists() or path.read_text(encoding='utf-8') != text}


if __name__ == '__main__':
    old = stale()
    for path, text in old.items():
        if '--check' in sys.argv: continue
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding='utf-8')
    print(*(f"{'not up to date' if '--check' in sys.argv else 'written'}: {path.relative_to(ROOT)}" for path in old), sep='\n')
    sys.exit('--check' in sys.argv and bool(old))
