"Where each check of the rows begins to warn: numbers on both sides of every bound."

from string import ascii_letters, digits

from support.snapshots import compare

from trainkit.data import quality
from trainkit.data.quality_report import Case, Evidence, Finding, QualityReport, RowView, excerpt
from trainkit.data.text_checks import loops

SENTENCES = [f"This is the {n} answer, and it tells what there is to say." for n in range(60)]


def pairs(longer, shorter, equal):
    sizes = [(9, 5)] * longer + [(5, 9)] * shorter + [(7, 7)] * equal
    return [dict(prompt="p", chosen="x" * a, rejected="y" * b) for a, b in sizes]


def answers(texts):
    return [dict(prompt=f"Question {i}?", completion=text) for i, text in enumerate(texts)]


def labelled(kind, *counts):
    return [
        dict(prompt=f"p{i}", completion="c", label=bool(place))
        if kind == "label"
        else dict(prompt=f"p{i}", completion=f"c{i % 30} " * 8, task=f"t{place}")
        if kind == "task"
        else dict(prompt=f"p{i}", completion=f"class {place}")
        for place, count in enumerate(counts)
        for i in range(count)
    ]


class Words:
    "A tokenizer whose tokens are words."

    chat_template = None

    def encode(self, text, **_):
        return text.split()


def numbers():
    "Name, check, and case: amounts, lengths and pairs."
    for counts in [
        (0, 0, 5),
        (15, 0, 0),
        (16, 0, 0),
        (0, 16, 4),
        (259, 141, 0),
        (261, 139, 9),
        (139, 261, 0),
    ]:
        yield f"length_bias {counts}", quality.length_bias, Case(RowView(pairs(*counts)))
    for n, method in [(0, "dpo"), (99, "sft"), (100, "sft"), (999, "sft"), (1000, "sft")]:
        rows = RowView(answers([f"a{i}" for i in range(n)]), "prompt_completion")
        yield f"amount {method} {n}", quality.check_amount, Case(rows, method=method)
    for n in (99_999, 100_000, 999_999, 1_000_000):
        case = Case(RowView([dict(text="x" * n)] * 2), method="pretrain")
        yield f"amount pretrain {n}", quality.check_amount, case
    for n in (1, 19, 20):
        case = Case(RowView(answers(SENTENCES)), RowView(answers(SENTENCES[:n]), name="eval"))
        yield f"evaluation {n}", quality.check_amount, case
    for sizes in [
        [40] * 18 + [410],
        [40] * 19 + [409],
        [40] * 19 + [410],
        [40] * 19 + [4],
        [40] * 19 + [3],
    ]:
        case = Case(RowView([dict(text="x" * size) for size in sizes]))
        yield f"lengths {sizes[-1]} of {len(sizes)}", quality.lengths, case
    for top in (760, 761):
        case = Case(RowView([dict(text="x" * size) for size in [40] * 19 + [top]]))
        yield f"lengths with {top}", quality.lengths, case


def texts_alike():
    "Answers, openings and classes."
    for same in (4, 5, 6):
        texts = [f"answer {i}" for i in range(50 - same)] + ["I cannot."] * same
        yield f"same answer {same}", quality.diversity, Case(RowView(answers(texts)))
    for same in (15, 16, 18):
        begun = [f"Of course I can tell you what number {i} is." for i in range(same)]
        texts = begun + [
            f"{i} is what begins this answer of eight or more words." for i in range(34)
        ]
        yield f"same opening {same}", quality.diversity, Case(RowView(answers(texts)))
    for n, number in [(19, 19), (21, 21), (100, 20), (99, 20)]:
        texts = [f"answer {min(i, number - 1) if i < number else 0}" for i in range(n)]
        yield f"answers {n} of {number}", quality.diversity, Case(RowView(answers(texts)))
    for kind, *counts in [
        ("label", 45, 4),
        ("label", 46, 5),
        ("label", 5, 49),
        ("label", 5, 50),
        ("answer", 49, 5),
        ("answer", 50, 5),
        ("task", 99, 2),
        ("task", 100, 2),
    ]:
        case = Case(RowView(labelled(kind, *counts)))
        yield f"classes {kind} {counts}", quality.classes, case


def texts_damaged():
    "Splits cleaned in two ways, scripts, and ends that were cut."
    for n, upper in [(4, 4), (5, 5), (60, 18), (60, 19), (60, 25)]:
        texts = SENTENCES[:n]
        case = Case(
            RowView(answers(SENTENCES)),
            RowView(answers([x.upper() for x in texts[:upper]] + texts[upper:]), name="eval"),
        )
        yield f"cleaning {upper} of {n}", quality.split_cleaning, case
    for n, other in [(19, 0), (19, 1), (38, 2), (37, 2), (38, 3)]:
        texts = SENTENCES[:n] + ["Это ответ"] * other
        case = Case(RowView([dict(text=text) for text in texts]))
        yield f"scripts {other} next to {n}", quality.scripts, case
    for whole, cut in [(18, 1), (19, 1), (40, 10), (40, 11), (198, 1), (199, 1)]:
        texts = [SENTENCES[i % 60] for i in range(whole)] + [
            "It ends in the middle of what it"
        ] * cut
        yield f"cut {cut} next to {whole}", quality.cut_answers, Case(RowView(answers(texts)))
    for size, many in [(99, 5), (100, 4), (100, 5)]:
        rows = answers([f"{i:02d}" + "x" * (size - 2) for i in range(many)] + ["short"] * 20)
        yield f"{many} of length {size}", quality.cut_answers, Case(RowView(rows))
    for limit in (12, 13, 14):
        case = Case(RowView([dict(text=SENTENCES[0])]), tokenizer=Words(), max_length=limit)
        yield f"too long {limit}", quality.too_long, case


def told(finding):
    lines = [f"  {finding.name} {finding.severity}: {finding.counted()}; {finding.says}"]
    lines += [f"    {finding.effect}"] * bool(finding.effect)
    lines += [f"    {place.where}: {str(place)!r}" for place in finding.examples]
    return "\n".join(lines)


def test_each_check_begins_to_warn_at_the_same_number():
    every = [*numbers(), *texts_alike(), *texts_damaged()]
    lines = ["\n".join([name, *map(told, check(case))]).rstrip() for name, check, case in every]
    compare("\n".join(lines) + "\n", "findings.txt")


def test_a_loop_is_found_where_it_begins_and_ends():
    "The place and the length, for pieces of every size around the least."
    texts = [f"So {'ab' * n}." for n in range(9, 14)]
    texts += [f"{'word ' * n}and an end that is long enough." for n in (3, 4, 5, 9, 10)]
    texts += ["x" * 24 + ascii_letters[:n] for n in (0, 4)]
    texts += ["x" * 24 + (ascii_letters + digits)[:n] for n in (55, 56, 57)]
    texts += [
        f"{'0123 ' * 8}abc",
        f"{'again and again, ' * 3}once",
        f"{'again and again, ' * 4}once",
    ]
    texts += ["a" * 200 + "b", ("z" * 199 + "q") * 4, ("z" * 200 + "q") * 4, "abc" * 8, "abc" * 7]
    compare("".join(f"{text[:40]!r} {len(text)}: {loops(text)}\n" for text in texts), "loops.txt")


def test_an_excerpt_shows_the_bad_part_and_what_stands_around_it():
    "Near both ends, longer than there is room for, and with a secret next to it or in it."
    text = f"{ascii_letters}\n{digits}" * 3
    lines = []
    for start, end in [(0, 0), (0, 3), (3, 6), (90, 95), (185, 189), (10, 180)]:
        for width in (24, 60):
            lines.append(
                f"{start}-{end} of {width}: {excerpt('here', text, (start, end), width)}\n"
            )
    key = (
        "mail ann.lee@firm-mail.org or +49 30 1234 5678 now, and more words than there is room for"
    )
    for start, end in [(0, 4), (5, 26), (10, 12), (27, 29), (50, 53)]:
        lines.append(f"{start}-{end}: {excerpt('here', key, (start, end), 60)}\n")
    compare("".join(lines), "excerpts.txt")


def test_a_report_fits_into_80_columns_and_fills_them():
    "Words of one letter break where the column is, whichever parity the line before them has."
    words = "a " * 120
    for shift in ("", "b"):
        example = Evidence("row 1", f"{shift}{words}", "", "")
        found = Finding(f"n{shift} {words}", "error", 1, 9, *[f"{shift} {words}"] * 3, [example])
        lines = str(QualityReport([found], 9, "text")).splitlines()
        assert max(map(len, lines)) <= 80
        full = [len(line) for line in lines if len(line) > 68]
        assert len(full) > 12 and {*full} <= {71, 72, 79, 80} and max(full) >= 79
    for length in (69, 70):
        example = Evidence("row 1", "x" * length, "", "")
        last = str(QualityReport([Finding("n", "note", 1, 9, "s", examples=[example])], 9, "text"))
        assert (last.splitlines()[-1] == f"    row 1: {'x' * length}") is (length == 69)
