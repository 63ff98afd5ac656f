"""The lessons as a web site without network or server: `make site`, then open site/index.html.

Markdown by markdown-it, code by Pygments, formulas as MathML, saved outputs as they are, and a
search that is a file of its own. Nothing is loaded from elsewhere, so the pages also work from
a disk.
"""

import html
import json
import re
import shutil
import sys
from pathlib import Path

import course
from latex2mathml.converter import convert
from markdown_it import MarkdownIt
from mdit_py_plugins.anchors import anchors_plugin
from mdit_py_plugins.dollarmath import dollarmath_plugin
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

ROOT = Path(__file__).parent.parent
PAINT = HtmlFormatter(nowrap=True)

STYLE = """
:root {
  color-scheme: light dark; --ink: light-dark(#1d2129, #dfe3ea);
  --ground: light-dark(#fff, #15181d); --soft: light-dark(#f4f5f7, #1e2229);
  --edge: light-dark(#dcdfe4, #343a44); --link: light-dark(#175a9c, #7db7ee);
  --pale: light-dark(#596170, #9aa3b0)
}
[data-look=light] { color-scheme: light }
[data-look=dark] { color-scheme: dark }
* { box-sizing: border-box }
body {
  margin: 0; color: var(--ink); background: var(--ground); font: 16px/1.6 system-ui, sans-serif
}
a { color: var(--link) }
a:focus-visible,
button:focus-visible,
input:focus-visible,
summary:focus-visible {
  outline: 2px solid #d9640f; outline-offset: 2px
}
.skip { position: absolute; left: -999px }
.skip:focus { left: 8px; top: 8px; background: var(--ground); padding: 4px 8px; z-index: 9 }
header {
  position: sticky; top: 0; z-index: 5; display: flex; gap: 12px; align-items: center;
  flex-wrap: wrap; padding: 8px 20px; background: var(--ground);
  border-bottom: 1px solid var(--edge)
}
header .name { font-weight: 700; text-decoration: none; color: var(--ink) }
header input {
  flex: 1 1 160px; max-width: 380px; margin-left: auto; padding: 6px 10px;
  border: 1px solid var(--pale); border-radius: 6px; font: inherit; background: var(--soft);
  color: inherit
}
header button {
  padding: 6px 12px; border: 1px solid var(--pale); border-radius: 6px; font: inherit;
  background: var(--soft); color: inherit; cursor: pointer
}
#found:empty { display: none }
#found {
  flex-basis: 100%; max-height: 70vh; overflow: auto; margin: 0; padding: 0; list-style: none
}
#found li { padding: 6px 0; border-top: 1px solid var(--edge) }
#found small { display: block; color: var(--pale) }
mark { background: #d9640f44; color: inherit }
.page {
  display: grid; grid-template-columns: 240px minmax(0, 1fr); max-width: 1240px; margin: 0 auto
}
nav.course { padding: 16px 8px 40px 20px; font-size: 14px; line-height: 1.4 }
nav.course ul { list-style: none; margin: 4px 0 12px; padding: 0 }
nav.course li { padding: 2px 0 }
nav.course summary { font-weight: 600; padding: 4px 0; cursor: pointer }
nav.course a { text-decoration: none }
nav.course [aria-current] { font-weight: 700; color: var(--ink) }
main { padding: 16px 24px 60px; min-width: 0 }
/* Prose in lines that the eye finds again; code and pictures have the whole page */
main > :is(p, ul, ol, blockquote, details) { max-width: 47rem }
h1, h2, h3 { line-height: 1.25 }
h1 { font-size: 32px; margin: 12px 0 }
h2 { margin-top: 40px }
blockquote {
  margin: 0 0 24px; padding: 0 0 0 14px; border-left: 3px solid #d9640f; color: var(--pale);
  font-size: 18px
}
pre, .text {
  overflow-x: auto; padding: 10px 14px; border-radius: 6px;
  font: 13px/1.5 ui-monospace, Menlo, Consolas, monospace; white-space: pre
}
pre { background: var(--soft); border: 1px solid var(--edge); margin: 12px 0 }
.text {
  margin: 0 0 12px; border-left: 3px solid var(--edge); color: var(--pale); white-space: pre-wrap;
  overflow-wrap: anywhere
}
:not(pre) > code {
  background: var(--soft); padding: 1px 4px; border-radius: 4px; font-size: 87%;
  overflow-wrap: anywhere
}
.out { overflow-x: auto; margin: 0 0 14px }
.out img, .out svg, main img { max-width: 100%; height: auto }
.out-light { background: #fff; color: #1d2129; color-scheme: light }
details { margin: 8px 0 }
table { border-collapse: collapse; display: block; overflow-x: auto; max-width: 100% }
th, td {
  border-bottom: 1px solid var(--edge); padding: 6px 10px; text-align: left;
  vertical-align: middle
}
td img { min-width: 96px }
.exported { border-left: 3px solid #2f7fc1 }
.source { color: var(--pale); font-size: 14px }
math[display=block] { overflow-x: auto; margin: 14px 0 }
@media (max-width: 860px) {
  .page { display: block }
  nav.course { padding: 8px 20px 0 }
  main { padding: 8px 20px 60px }
  header { padding: 8px 20px }
}
@media (min-width: 861px) {
  nav.course { position: sticky; top: 52px; height: calc(100vh - 52px); overflow-y: auto }
  nav.course > details > summary { display: none }
}
@media print { header, nav.course { display: none } }
"""
SCRIPT = r"""
const [look, box, list] = ['look', 'search', 'found'].map(id => document.getElementById(id))
const root = document.documentElement
const keep = (name, value) => {
  try {
    if (value !== undefined) localStorage.setItem(name, value)
    return localStorage.getItem(name)
  } catch { return null }
}
const put = name => { name ? root.dataset.look = name : delete root.dataset.look }
const is_dark = () => getComputedStyle(root).colorScheme === 'dark' ||
  (!root.dataset.look && matchMedia('(prefers-color-scheme: dark)').matches)
put(keep('look'))
look.onclick = () => put(keep('look', is_dark() ? 'light' : 'dark'))
const ENTITIES = {'&': '&amp;', '<': '&lt;', '>': '&gt;', '"': '&quot;'}
const clean = text => text.replace(/[&<>"]/g, c => ENTITIES[c])
const escaped = text => text.replace(/[.*+?^${}()|[\]\\]/g, '\\$&')
function hits_of(words) {
  const hits = []
  for (const [page, title, head, anchor, text] of INDEX) {
    const low = text.toLowerCase(), top = (title + ' ' + head).toLowerCase()
    let score = 0
    for (const word of words) {
      const begins = new RegExp('(?:^|[^a-z0-9])' + escaped(word), 'g')
      const inside = (low.match(begins) || []).length, above = begins.test(top) ? 20 : 0
      if (inside || above) score += 1000 + Math.min(inside, 10) + above
    }
    const at = Math.max(0, low.indexOf(words[0]) - 60)
    if (score) hits.push([score, page, title, head, anchor, text.slice(at, at + 180)])
  }
  hits.sort((a, b) => b[0] - a[0])
  const most = hits.length ? Math.floor(hits[0][0]/1000) : 0
  return hits.filter(hit => Math.floor(hit[0]/1000) >= most).slice(0, 20)
}
function search() {
  const words = box.value.toLowerCase().split(/\s+/).filter(Boolean)
  list.innerHTML = ''
  if (!words.length) return
  const outside_tags = word => new RegExp('(' + escaped(clean(word)) + ')(?![^<]*>)', 'gi')
  const paint = text => words.reduce(
    (painted, word) => painted.replace(outside_tags(word), '<mark>$1</mark>'), clean(text))
  const item = ([, page, title, head, anchor, text]) => {
    const name = paint(head === title ? title : title + ': ' + head)
    return `<li><a href="${ROOT}${page}#${anchor}">${name}</a><small>${paint(text)}</small></li>`
  }
  const items = hits_of(words).map(item).join('')
  list.innerHTML = items || '<li role="status">Nothing found.</li>'
}
box.oninput = search
box.onkeydown = e => {
  if (e.key === 'Escape') { box.value = ''; search() }
  if (e.key === 'Enter') list.querySelector('a')?.click()
}
document.addEventListener('keydown', e => {
  if (e.key !== '/' || /INPUT|TEXTAREA|SELECT/.test(e.target.tagName)) return
  e.preventDefault()
  box.focus()
})
if (innerWidth <= 860) document.querySelector('nav.course > details').removeAttribute('open')
"""
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} · trainkit</title><meta name="description" content="{about}">
<link rel="icon" href="data:,"><link rel="stylesheet" href="{root}style.css"></head><body>
<a class="skip" href="#main">To the lesson</a>
<header><a class="name" href="{root}index.html">trainkit</a>
<input id="search" type="search" placeholder="Search (press /)" aria-label="Search the course">
<button id="look" type="button" title="Light or dark" aria-label="Light or dark">◐</button>
<ul id="found" aria-live="polite" aria-label="Found"></ul></header>
<div class="page"><nav class="course" aria-label="Course">
<details open><summary>The course</summary>{menu}</details></nav>
<main id="main">{body}</main></div>
<script>const ROOT = '{root}'</script>
<script src="{root}search.js"></script><script src="{root}site.js"></script></body></html>
"""
CHAPTER = "<details{open}><summary>{title}</summary><ul>{entries}</ul></details>"
ENTRY = '<li><a href="{root}{name}.html"{current}>{title}</a></li>'
FIGURE = '<div class="out out-light"><img alt="{alt}" src="data:image/png;base64,{data}"></div>'


def painted(code, language="python"):
    "Source code as coloured HTML."
    try:
        return highlight(code, get_lexer_by_name(language or "text"), PAINT)
    except ClassNotFound:
        return html.escape(code)


def formula(text, options):
    "LaTeX as MathML; what cannot be converted stays as it is."
    try:
        return convert(text, display="block" if options["display_mode"] else "inline")
    except Exception:
        return f"<code>{html.escape(text)}</code>"


def slug(text):
    return re.sub(r"[^\w]+", "-", text.strip()).strip("-")


def markdown():
    make = MarkdownIt(
        "commonmark", {"highlight": lambda code, language, _: painted(code, language)}
    ).enable(["table", "strikethrough"])
    return make.use(dollarmath_plugin, renderer=formula, allow_space=False, double_inline=True).use(
        anchors_plugin, max_level=3, slug_func=slug
    )


MAKE = markdown()


def render(text):
    "Markdown as HTML; links to lessons lead to their pages."
    # Badges are pictures from elsewhere
    out = MAKE.render(re.sub(r"\[!\[([^]]*)\]\(https?:[^)]*\)\]", r"[\1]", text))
    return re.sub(
        r'href="([\w./]+?)\.(?:ipynb|md)(#[^"]*)?"',
        lambda m: f'href="{m[1].replace("README", "index")}.html{m[2] or ""}"',
        out,
    )


def joined(value):
    return "".join(value) if isinstance(value, list) else value


def output(out):
    "One saved output as HTML."
    if out["output_type"] == "stream":
        return (
            f'<div class="text">{html.escape(joined(out["text"]))}</div>'
            if out["name"] == "stdout"
            else ""
        )
    if out["output_type"] == "error":
        return f'<div class="text">{html.escape(out["ename"])}: {html.escape(out["evalue"])}</div>'
    data = out.get("data", {})
    if "text/html" in data:
        return f'<div class="out">{joined(data["text/html"])}</div>'
    if "image/svg+xml" in data:
        return f'<div class="out">{joined(data["image/svg+xml"])}</div>'
    if "image/png" in data:
        alt = html.escape(joined(data.get("text/plain", "figure")))
        return FIGURE.format(alt=alt, data=joined(data["image/png"]).strip())
    if "text/markdown" in data:
        return render(joined(data["text/markdown"]))
    return f'<div class="text">{html.escape(joined(data.get("text/plain", "")))}</div>'


def captioned(outputs):
    "The text of Axes, their caption, becomes the description of the picture that follows it."
    rest = []
    for out in outputs:
        data, before = out.get("data", {}), rest[-1].get("data", {}) if rest else {}
        if "image/png" in data and [*before] == ["text/plain"]:
            rest.pop()
            out = {**out, "data": {**data, **before}}
        rest.append(out)
    return rest


def cell(c):
    "One cell as HTML."
    text = joined(c["source"])
    if c["cell_type"] == "markdown":
        return render(text)
    if c["cell_type"] != "code" or not text.strip():
        return ""
    outs = "".join(map(output, captioned(c.get("outputs", []))))
    if text.startswith("#| hide"):
        return outs
    note = re.match(r"#\| ?(.*)\n", text)
    kind = " class=exported" if note and note[1].startswith("export") else ""
    code = painted(text[note.end() :] if note else text)
    return f"<pre{kind}><code>{code}</code></pre>{outs}"


def sections(notebook, name):
    "What the search contains: (page, title, heading, anchor, text) for each section."
    title = course.source(notebook["cells"][0]).split("\n")[0].removeprefix("# ")
    rows = [[f"{name}.html", title, title, slug(title), ""]]
    for c in notebook["cells"]:
        text = course.source(c)
        if course.written_here(c, course.LINKS, course.MAP) or text.startswith("#| hide"):
            continue
        if c["cell_type"] != "markdown":
            names = re.findall(r"(?m)^(?:def|class) (\w+)|from trainkit\.(\w+)", text)
            rows[-1][4] += " " + " ".join(
                dict.fromkeys(word for pair in names for word in pair if word)
            )
            continue
        for line in text.splitlines():
            if line.startswith("## "):
                rows.append([f"{name}.html", title, line[3:], slug(line[3:]), ""])
            elif not line.startswith("# "):
                rows[-1][4] += " " + re.sub(r"[`*>|]|<[^>]+>", "", line)
    return [[*row[:4], re.sub(r"\s+", " ", row[4]).strip()] for row in rows]


def menu(current, titles, parts, root):
    "The course at the side of each page."
    road = parts["The main road"]

    def entry(name):
        mark = " aria-current=page" if name == current else ""
        return ENTRY.format(root=root, name=name, current=mark, title=html.escape(titles[name]))

    def chapter(title, names, is_road):
        shown = [n for n in names if n in titles and (is_road or n not in road)]
        is_open = is_road or (current in names and current not in road)
        name = course.CHAPTERS[title][0] if title in course.CHAPTERS else title
        return CHAPTER.format(
            open=" open" if is_open else "",
            title=html.escape(name),
            entries="".join(map(entry, shown)),
        )

    return "".join(
        chapter(title, names, is_road=i == 0) for i, (title, names) in enumerate(parts.items())
    )


def page(title, body, current, titles, parts, about=""):
    "A whole page; `current` is its name, from which the way to the root of the site follows."
    root = "../" * current.count("/")
    return PAGE.format(
        title=html.escape(title),
        about=html.escape(about),
        root=root,
        menu=menu(current, titles, parts, root),
        body=body,
    )


def tidy(text):
    "The README's links as links between pages."
    text = re.sub(r"\((?:\.\./)?nbs/([\w/]+)\.ipynb\)", r"(\1.html)", text)
    text = re.sub(r"\(nbs/images/", "(images/", text)
    for path, name in (
        (r"nbs/README", "course"),
        (r"benchmarks/README", "benchmarks"),
        (r"docs/(\w+)", r"\1"),
        ("CONTRIBUTING", "contributing"),
        ("CHANGELOG", "changelog"),
    ):
        text = re.sub(rf"\]\((?:\.\./)?{path}\.md\)", rf"]({name}.html)", text)
    text = re.sub(r"\((?:\.\./)?nbs/(\w+)/README\.md\)", r"(\1/index.html)", text)
    return re.sub(r"\((\w+)/README\.md\)", r"(\1/index.html)", text)


def build(folder):
    "All pages; returns how many lessons there are."
    folder = Path(folder)
    books = {course.name_of(p): course.read(p) for p in course.lessons()}
    titles = {
        n: course.source(b["cells"][0]).split("\n")[0].removeprefix("# ") for n, b in books.items()
    }
    parts = {"The main road": course.road(), **course.chapters()}
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("images", *course.chapters()):
        (folder / name).mkdir(parents=True)
    for image in (course.LESSONS / "images").glob("*"):
        shutil.copyfile(image, folder / "images" / image.name)
    light, dark = (
        HtmlFormatter(style=name).get_style_defs("pre") for name in ("friendly", "github-dark")
    )
    only = "\n".join(line for line in dark.splitlines() if line.startswith("pre ."))
    base = "\n".join(line for line in light.splitlines() if line.startswith("pre ."))

    def nested(where):
        return re.sub(r"(?m)^pre ", where + " pre ", only)

    (folder / "style.css").write_text(
        f"{STYLE}{base}\n{nested('[data-look=dark]')}\n@media (prefers-color-scheme: dark) {{\n"
        f"{nested(':root:not([data-look=light])')}\n}}\n",
        encoding="utf-8",
    )
    (folder / "site.js").write_text(SCRIPT, encoding="utf-8")
    index = [s for n, b in books.items() for s in sections(b, n)]
    (folder / "search.js").write_text(
        "const INDEX = "
        + json.dumps(index, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
        + "\n",
        encoding="utf-8",
    )
    for name, book in books.items():
        about = course.sentence(book)
        body = (
            "".join(map(cell, book["cells"]))
            + f'<p class="source">This page is the notebook <code>nbs/{name}.ipynb</code>.</p>'
        )
        (folder / f"{name}.html").write_text(
            page(titles[name], body, name, titles, parts, about), encoding="utf-8"
        )
    others = {
        "index": ROOT / "README.md",
        "benchmarks": ROOT / "benchmarks" / "README.md",
        "guide": ROOT / "docs" / "guide.md",
        "comparison": ROOT / "docs" / "comparison.md",
        "contributing": ROOT / "CONTRIBUTING.md",
        "changelog": ROOT / "CHANGELOG.md",
        "course": course.LESSONS / "README.md",
        **{
            f"{chapter}/index": course.LESSONS / chapter / "README.md"
            for chapter in course.chapters()
        },
    }
    for name, path in others.items():
        text = tidy(path.read_text(encoding="utf-8"))
        if "/" in name:
            text = text.replace("](../README.md)", "](../course.html)")
        (folder / f"{name}.html").write_text(
            page(text.split("\n")[0].removeprefix("# "), render(text), name, titles, parts),
            encoding="utf-8",
        )
    return len(books)


if __name__ == "__main__":
    where = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "site")
    print(f"{build(where)} lessons: open {where}/index.html")
