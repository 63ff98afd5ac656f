"""The API reference as pages for Sphinx: the public names, read from the source, never imported.

A name is public where a package's `__init__.pyi` lists it, or where it stands in `__all__` of a
module without a package (`trainkit.config`). Griffe finds the names and what their annotations
mean; the comment behind a parameter and the text of a knob become tables, as in the lessons.
"""

import ast
import re
import sys
from functools import cache
from pathlib import Path

import course
import griffe

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from trainkit._remarks import field_remarks, parameter_remarks, parsed  # noqa: E402

PACKAGE = "trainkit"
PAGE = "# {title}\n\n{about}\n\n{body}\n"
DIRECTIVE = "{fence}{{py:{kind}}} {signature}\n{options}\n{body}\n{fence}\n"
INTRODUCTION = """Every public name. What practitioners type can be imported from `trainkit`
directly; everything else from its package. A package imports what it needs only when a name is
asked for, so `import trainkit` is quick.
"""
COMMANDS = """`trainkit COMMAND --help` shows the same in a shell. Fields of a config stand behind a
command as `group.field=value`; the classes whose names end in `Config` list them.
"""
KNOBS = "\nFields, which a config file and the command line call by the same names:\n\n"


def anchor(heading):
    "Jupyter's anchor of a heading: its text, without the marks of code, hyphens for spaces."
    return heading.strip().replace("`", "").replace(" ", "-")


def cell_text(text):
    "Text for a cell of a Markdown table."
    return re.sub(r"\s+", " ", str(text)).replace("|", "\\|").strip()


def table(heads, rows):
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    return "\n".join(lines + [f"| {' | '.join(map(cell_text, row))} |" for row in rows]) + "\n"


def code(value):
    "A value as code, also in a table."
    return f"`{value}`" if str(value) else ""


def parameters_of(target):
    return parameter_remarks(target.filepath, target.lineno, target.name)


def fields_of(target):
    return field_remarks(target.filepath, target.lineno, target.name)


def command_line():
    "The page of the commands: what each does, and its arguments and options."
    import typer

    from trainkit.cli import app

    text = ["# Command line\n\n" + COMMANDS]

    def walk(command, name, parent):
        context = command.make_context(name, [], parent=parent, resilient_parsing=True)
        if hasattr(command, "list_commands"):
            for sub in command.list_commands(context):
                walk(command.get_command(context, sub), f"{name} {sub}", context)
            return
        rows = []
        for option in command.params:
            if option.name == "help" or getattr(option, "hidden", False):
                continue
            names = option.opts if option.param_type_name == "option" else [option.name.upper()]
            default = option.default
            is_plain = isinstance(default, (int, float, str)) and not isinstance(default, bool)
            about = cell_text(getattr(option, "help", "") or "")
            about += f" Default: {code(default)}." if is_plain and str(default) else ""
            rows.append((", ".join(map(code, names)), about))
        about = re.sub(r"\s*\n\s*", " ", command.help or "").strip()
        text.append(f"## {name}\n\n{about}\n\n" + table(["Argument or option", "Meaning"], rows))

    walk(typer.main.get_command(app), PACKAGE, None)
    return "\n".join(text)


def final(member):
    "What an alias stands for in the end."
    return member.final_target if member.is_alias else member


class Reference:
    "The public names of the package, and their pages."

    def __init__(self, lessons):  # Lesson's name -> path; links lead only to these
        self.lessons = lessons
        self.root = griffe.load(PACKAGE, search_paths=[ROOT], resolve_aliases=True)
        self.pages = {}  # Page's module -> module -> its public names
        self.public = {}  # Where a name is defined -> where it is documented
        self.names = {}  # Name alone -> where it is documented
        self.here = PACKAGE  # The module whose page is written
        self.top = {}  # Name in `trainkit` -> where it is defined
        for name in self.stub_names(ROOT / PACKAGE / "__init__.pyi"):
            member = self.root[name]
            if name.islower() and (ROOT / PACKAGE / name).is_dir():
                self.add_package(name)
            elif name == "cli":
                continue  # Its commands have a page of their own
            elif name.islower() and (ROOT / PACKAGE / f"{name}.py").exists():
                self.add_module(name)
            else:
                self.top[name] = final(member).path
        self.drop_twins()
        for public in self.public.values():
            self.names[public.rpartition(".")[2]] = public

    @staticmethod
    def stub_names(path):
        return [
            alias.name
            for node in ast.parse(path.read_text(encoding="utf-8")).body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        ]

    def add_package(self, name):
        page = self.pages[f"{PACKAGE}.{name}"] = {}
        package = self.root[name]
        for member in self.stub_names(ROOT / PACKAGE / name / "__init__.pyi"):
            target = final(package[member])
            if target.kind is griffe.Kind.MODULE:
                page.setdefault(target.path, [])
                continue
            page.setdefault(target.module.path, []).append(target)
            self.public[target.path] = f"{PACKAGE}.{name}.{member}"

    def add_module(self, name):
        module = final(self.root[name])
        targets = [final(module[str(n)]) for n in module.exports or [] if str(n) in module.members]
        targets = [
            t
            for t in targets
            if t.module.path == module.path
            and not str(getattr(t, "value", "")).startswith("TypeVar")
        ]
        self.pages[module.path] = {module.path: targets}
        for target in targets:
            self.public.setdefault(target.path, target.path)

    def drop_twins(self):
        "A name stands on one page: that of the package which exports it, not of a root module."
        for page, modules in self.pages.items():
            for path, targets in modules.items():
                modules[path] = [
                    t for t in targets if self.public[t.path].rpartition(".")[0] == page
                ]

    def linked(self, text, seen=None):
        """Markdown with public names in backticks as links; each once, given the names `seen`.

        A plain word, such as `train`, is only taken for a name of the package that the page is on.
        """

        def link(match):
            home = self.names.get(match[1], "")
            is_plain = match[1].islower() and "_" not in match[1]
            if not home or is_plain and home.rpartition(".")[0] != self.here:
                return match[0]
            if seen is not None:
                if home in seen:
                    return match[0]
                seen.add(home)
            return f"{{py:obj}}`{match[1]} <{home}>`"

        parts = re.split(r"((?s:```.*?```)|(?m:^#.*$)|\[[^]]*\]\()", text)
        parts[::2] = [re.sub(r"(?<![`}])`(\w+)`(?!`)", link, part) for part in parts[::2]]
        return "".join(parts)

    def annotation(self, expression):
        "An annotation in which our public names stand with their whole path."
        if expression is None:
            return ""
        if isinstance(expression, str):
            return expression
        parts = []
        for part in expression.iterate(flat=True):
            if isinstance(part, griffe.ExprName):
                parts.append(self.public.get(part.canonical_path, part.name))
            else:
                parts.append(str(part))
        return "".join(parts)

    def signature(self, target, skip_self=False):
        parts, star = [], False
        for p in list(target.parameters)[int(skip_self) :]:
            kind = p.kind.value if p.kind else ""
            if kind == "keyword-only" and not star:
                parts.append("*")
                star = True
            prefix = {"variadic positional": "*", "variadic keyword": "**"}.get(kind, "")
            star = star or prefix == "*"
            text = prefix + p.name
            if p.annotation is not None:
                text += f": {self.annotation(p.annotation)}"
            if p.default is not None and not prefix:
                text += (" = " if p.annotation is not None else "=") + str(p.default)
            parts.append(text)
        return f"({', '.join(parts)})"

    def lesson_of(self, target):
        "The lesson and the section that define a name, as a link."
        lines, _, _ = parsed(target.filepath)
        for line in reversed(lines[: target.lineno]):
            if note := re.match(r"# %% (?:\.\./)+nbs/(\S+)\.ipynb #(\S+)", line):
                return self.lesson_link(*note.groups())
        return ""

    def lesson_link(self, name, cell_id):
        if name not in self.lessons:
            return ""
        title, sections = sections_of(self.lessons[name])
        heading = sections.get(cell_id, "")
        place = f"#{anchor(heading)}" if heading else ""
        words = f"{title}: {heading}" if heading else title
        words = re.sub(r"([\[\]])", r"\\\1", words)
        return f"Lesson: [{words}](<../nbs/{name}.ipynb{place}>)"

    def parameters(self, target, names):
        words = parameters_of(target)
        rows = [(code(n), self.linked(words[n])) for n in names if n in words]
        if words.get("return"):
            rows.append(("**returns**", self.linked(words["return"])))
        return "\n" + table(["Parameter", "Meaning"], rows) if rows else ""

    def function(self, target, path, kind="function", skip_self=False):
        is_property = "property" in target.labels
        signature = path
        options = ":canonical: " + target.path if kind == "function" else ""
        if is_property:
            kind = "property"
            options = f":type: {self.annotation(target.returns)}" if target.returns else ""
        else:
            signature += self.signature(target, skip_self)
            if target.returns is not None:
                signature += f" -> {self.annotation(target.returns)}"
        names = [p.name for p in target.parameters][int(skip_self) :]
        body = self.docstring(target) + self.parameters(target, names)
        if kind == "function":
            body += "\n" + self.lesson_of(target) + "\n"
        return self.directive(kind, signature, options, body)

    @staticmethod
    def directive(kind, signature, options, body):
        fence = "`" * (1 + max([2, *map(len, re.findall(r"`{3,}", body))]))
        return DIRECTIVE.format(
            fence=fence, kind=kind, signature=signature, options=options, body=body
        )

    def docstring(self, target):
        return self.linked(target.docstring.value.strip()) + "\n" if target.docstring else ""

    def fields(self, target):
        "Knobs, or the fields of a dataclass, as a table."
        own = [
            m
            for m in target.members.values()
            if m.kind is griffe.Kind.ATTRIBUTE
            and m.annotation is not None
            and not m.name.startswith("_")
            and "instance-attribute" not in m.labels - {"class-attribute", "instance-attribute"}
            and "property" not in m.labels
        ]
        knobs, plain, words = [], [], fields_of(target)
        for m in own:
            value = m.value
            if isinstance(value, griffe.ExprCall) and str(value.function) == "knob":
                knobs.append(self.knob(m))
            elif m.lineno and m.name in words or "dataclass" in target.labels:
                plain.append((code(m.name), code(m.annotation), self.linked(words.get(m.name, ""))))
        out = ""
        if knobs:
            out += KNOBS + table(["Field", "Type", "Default", "Meaning"], knobs)
        if plain:
            out += "\n" + table(["Field", "Type", "Meaning"], plain)
        return out

    @staticmethod
    def value_of(node, member):
        "What an expression in a knob comes to, given the constants of its module."
        names = {}
        for name in {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}:
            attribute = member.module.members.get(name)
            value = ast.parse(str(attribute.value), mode="eval").body if attribute else None
            if isinstance(value, ast.Dict):  # Of its values only the program knows
                names[name] = [ast.literal_eval(key) for key in value.keys if key is not None]
            elif value is not None:
                names[name] = ast.literal_eval(value)
        builtin = {"__builtins__": {"tuple": tuple, "list": list, "sorted": sorted}}
        return eval(compile(ast.Expression(node), "knob", "eval"), builtin, names)

    def knob(self, member):
        call = ast.parse(str(member.value), mode="eval").body
        args, extra = call.args, {k.arg: k.value for k in call.keywords}
        given = dict(
            zip(("default", "doc", "choices", "low", "high", "aliases"), args, strict=False)
        )
        given |= extra

        def known(name):
            try:
                return self.value_of(given[name], member)
            except (KeyError, ValueError, NameError, TypeError, AttributeError):
                return None

        notes, low, high = [], known("low"), known("high")
        if choices := known("choices"):
            notes.append("one of " + ", ".join(code(repr(choice)) for choice in choices))
        if low is not None and high is not None:
            notes.append(f"{low} to {high}")
        elif low is not None or high is not None:
            notes.append(f"at least {low}" if high is None else f"at most {high}")
        if aliases := known("aliases"):
            notes.append("also " + ", ".join(map(code, aliases)))
        words = known("doc") or ast.unparse(given["doc"])
        text = self.linked(words) + (f" ({'; '.join(notes)})" if notes else "")
        default = ast.unparse(given["default"])
        default = "required" if default == "..." else self.linked(code(default))
        return code(member.name), code(member.annotation), default, text

    def klass(self, target, path):
        signature, body = path, self.docstring(target)
        init = target.members.get("__init__")  # Griffe writes one for a dataclass, too
        if init is not None and "dataclass" not in target.labels and not init.is_alias:
            signature += self.signature(init, skip_self=True)
            names = [p.name for p in init.parameters][1:]
            body += self.parameters(init, names)
        if bases := [b for b in map(self.annotation, target.bases) if b not in ("Protocol",)]:
            links = (f"{{py:obj}}`{b}`" if b.startswith(PACKAGE) else code(b) for b in bases)
            body += f"\nBases: {', '.join(links)}\n"
        body += self.fields(target)
        body += "\n" + self.lesson_of(target) + "\n"
        for member in target.members.values():
            if member.name.startswith("_") or member.is_alias:
                continue
            if member.kind is griffe.Kind.FUNCTION or "property" in member.labels:
                kind = "method"
                is_static = "staticmethod" in member.labels
                body += "\n" + self.method(member, kind, is_static)
        return self.directive("class", signature, ":canonical: " + target.path, body)

    def method(self, member, kind, is_static):
        if member.kind is not griffe.Kind.FUNCTION:  # A property
            options = f":type: {self.annotation(member.annotation)}" if member.annotation else ""
            return self.directive("property", member.name, options, self.docstring(member))
        text = self.function(member, member.name, kind, skip_self=not is_static)
        mark = next((m for m in ("classmethod", "staticmethod") if m in member.labels), "")
        return text.replace("\n", f"\n:{mark}:\n", 1) if mark else text

    def entry(self, target):
        path = self.public[target.path]
        if target.kind is griffe.Kind.FUNCTION:
            return self.function(target, path)
        if target.kind is griffe.Kind.CLASS:
            return self.klass(target, path)
        value = str(target.value or "")
        options = f":canonical: {target.path}"
        if target.annotation is not None:
            options += f"\n:type: {self.annotation(target.annotation)}"
        if len(value) < 60:
            options += f"\n:value: {value}"
        return self.directive("data", path, options, self.lesson_of(target))

    def page(self, name, modules):
        self.here = name
        module = self.root[name.removeprefix(PACKAGE + ".")]
        about = self.docstring(final(module))
        body = ""
        for path, targets in modules.items():
            targets = sorted(targets, key=lambda t: t.lineno or 0)
            if path != name:
                part = final(self.root[path.removeprefix(PACKAGE + ".")])
                body += f"\n## {path}\n\n{self.docstring(part)}\n"
            body += "\n".join(map(self.entry, targets))
        return PAGE.format(title=name, about=about, body=body)

    def written(self):
        "File -> Markdown of the reference."
        pages = {f"{name}.md": self.page(name, parts) for name, parts in self.pages.items()}
        return {"index.md": self.index(), "commands.md": command_line(), **pages}

    def index(self):
        self.here = PACKAGE
        rows = []
        for name in self.pages:
            module = final(self.root[name.removeprefix(PACKAGE + ".")])
            first = module.docstring.value.split("\n")[0] if module.docstring else ""
            rows.append((f"[{name}]({name}.md)", self.linked(first)))
        packages = [
            row for row in rows if (ROOT / row[0][1:].split("]")[0].replace(".", "/")).is_dir()
        ]
        others = [row for row in rows if row not in packages]
        top = []
        for name, path in self.top.items():
            target = self.root[path.removeprefix(PACKAGE + ".")]
            words = target.docstring.value.split("\n")[0] if target.docstring else ""
            home = self.public.get(path)
            link = f"{{py:obj}}`{name} <{home}>`" if home else code(name)
            top.append((link, self.linked(words)))
        heads = ["Module", "Contents"]
        return (
            f"# API reference\n\n{INTRODUCTION}\n## Packages\n\n{table(heads, packages)}\n"
            f"## From trainkit import …\n\n{table(['Name', 'What it is'], top)}\n"
            f"## Other modules\n\n{table(heads, others)}\n"
            "The commands of the shell: [trainkit on the command line](commands.md).\n\n"
            "```{toctree}\n:hidden:\ncommands\n" + "\n".join(self.pages) + "\n```\n"
        )


@cache
def sections_of(path):
    "A lesson's title, and the section in which each of its cells stands."
    book, section, out = course.read(path), "", {}
    for cell in book["cells"]:
        if cell["cell_type"] == "markdown":
            for line in course.source(cell).splitlines():
                section = line[3:].strip() if line.startswith("## ") else section
        out[cell.get("id", "")] = section
    return course.title(book), out
