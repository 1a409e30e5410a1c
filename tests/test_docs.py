"""The docs are true: commands print what stands below them, names exist, both languages agree."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from nanovllm.sampling_params import SamplingParams
from nvtrace.export.tables import TABLES
from nvtrace.recorder import record
from nvtrace.reference import type_name
from support.docs import (
    DOCS,
    ROOT,
    Command,
    Workplace,
    blocks_of,
    changes_of,
    commands_of,
    is_as_shown,
    make_change,
    outcomes_of,
    pages,
    pipeline,
    rewritten,
    traces,
)
from support.docs_names import (
    anchor,
    broken_links,
    command_exists,
    headings,
    links,
    missing_lines,
    prose_of,
    symbol_exists,
    unknown_names,
)
from support.every import every
from support.fake_runner import Settings, make_engine

PAGES = pages()
ENGLISH = pages("en")
SHARED = [
    p
    for folder in (".", "decisions", "exercises")
    for p in sorted(DOCS.joinpath(folder).glob("*.md"))
]
WRONG_USAGE = 2  # an exit code
RECORDED = {trace.name for trace in traces()}
SITE = DOCS / "site" / "mkdocs.yml"


def name_of(page: Path) -> str:
    """A page's name in a test's report."""
    return str(page.relative_to(ROOT))


# -- what the pages show ---------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_prints_what_stands_in_it(page: Path, tmp_path: Path) -> None:
    for command, outcome in outcomes_of(page, tmp_path):
        found = f"$ {command.line}\n" + "\n".join(outcome.lines)
        assert command.may_end_with(outcome.code), found
        if command.output:
            is_right = is_as_shown(command.output, outcome.lines)
            shown = "\n".join(command.output)
            assert is_right, f"`make docs-output` takes this over:\n{found}\n\nnot\n\n{shown}"


def test_pictures_show_what_is_printed(tmp_path: Path) -> None:
    path = os.pathsep.join(str(ROOT / root) for root in (".", "trace", "cli"))
    subprocess.run(
        [sys.executable, DOCS / "images" / "draw.py", tmp_path],
        env=os.environ | {"PYTHONPATH": path},
        check=True,
    )
    drawn = {file.name: file.read_text("utf-8") for file in tmp_path.iterdir()}
    assert drawn == {
        file.name: file.read_text("utf-8") for file in DOCS.joinpath("images").glob("*.svg")
    }, "`python docs/images/draw.py` takes this over"


@every("page", PAGES)
def test_an_excerpt_is_in_its_file(page: Path) -> None:
    for block in blocks_of(page.read_text("utf-8")):
        if block.kind == "py" and block not in changes_of(page.read_text("utf-8")):
            assert missing_lines(block.lines) == []


@every("page", PAGES)
def test_no_block_is_left_unnamed(page: Path) -> None:
    """A block's kind decides how it is checked: a forgotten one would be checked by nobody."""
    kinds = {block.kind for block in blocks_of(page.read_text("utf-8"))}
    assert kinds <= {"console", "python", "py", "text", "json", "toml"}


# -- what the pages name ---------------------------------------------------------------------------


@every("page", [*PAGES, *SHARED])
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


@every("page", PAGES)
def test_a_reader_is_where_the_commands_traces_are(page: Path) -> None:
    """The pages' reader goes to docs/traces once, on the first page, and reads on from there."""
    text = page.read_text("utf-8")
    place = (
        ROOT
        if page.name in {"README.md", "README.zh.md", "CONTRIBUTING.md", "index.md"}
        else DOCS / "traces"
    )
    for command in commands_of(text):
        words = pipeline(command.line)[0]
        if words[0] == "cd":
            place = (place / words[1]).resolve()
            assert place.is_dir(), command.line
        for word in words[1:]:
            assert word not in RECORDED or (place / word).is_file(), command.line
    assert place.name in {ROOT.name, "traces"} or "`cd ../traces`" in text, "there is no way back"


def test_the_page_of_traces_names_what_other_readers_of_json_stumble_on() -> None:
    types: dict[str, set[str]] = {}
    for columns in TABLES.values():
        for column in columns:
            kind = type_name(column.type).removesuffix(" | None")
            kind = "str" if kind.startswith('"') else re.sub("tuple|list", "[", kind)
            types.setdefault(column.name, set()).add(kind.partition(",")[0])
    ambiguous = {name for name, kinds in types.items() if len(kinds) > 1}
    assert ambiguous == {"model", "num_tokens", "block_ids", "hashes"}
    large: set[str] = set()

    def note(pairs: list[tuple[str, object]]) -> None:
        large.update(name for name, value in pairs if isinstance(value, int) and value > 2**53)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seeded.jsonl"
        with record(path) as recorder:
            engine = make_engine(Settings(), recorder)
            engine.add_request([1, 2], SamplingParams(seed=2**64 - 1, max_tokens=1))
            while not engine.is_finished():
                engine.step()
        for line in path.read_text("utf-8").splitlines():
            json.loads(line, object_pairs_hook=note)
    assert large == {"seed", "anchor_unix_ns"}
    for language in ("en", "zh"):
        prose = (DOCS / language / "traces.md").read_text("utf-8")
        assert {name for name in ambiguous if f"`{name}`" not in prose} == set()
        assert {name for name in large if name not in prose} == set()


@every("page", PAGES)
def test_names_of_code_exist(page: Path) -> None:
    assert unknown_names(page.read_text("utf-8")) == []


@every("page", PAGES)
def test_commands_and_their_options_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    if changes_of(text):
        return  # they are those of the changed project, in which they are run
    for command in commands_of(text):
        words = pipeline(command.line)[0]
        if words[0] == "nvtrace" and command.exit_code != WRONG_USAGE:
            assert command_exists(" ".join(words)), command.line


@every("page", ENGLISH)
def test_a_page_is_in_the_sites_navigation(page: Path) -> None:
    assert str(page.relative_to(DOCS / "en")) in SITE.read_text("utf-8")


def test_the_navigation_names_pages_that_exist() -> None:
    named = re.findall(r"^ +- ([\w/-]+\.md)$", SITE.read_text("utf-8"), re.MULTILINE)
    assert len(named) == len({*named}) > len(ENGLISH)
    assert [n for n in named if not ((DOCS / "en" / n).exists() or (DOCS / n).exists())] == []


# -- two languages ---------------------------------------------------------------------------------


def in_chinese(page: Path) -> Path:
    """The same page in Chinese."""
    return DOCS / "zh" / page.relative_to(DOCS / "en")


def test_both_languages_have_the_same_pages() -> None:
    english = [page.relative_to(DOCS / "en") for page in ENGLISH]
    assert [page.relative_to(DOCS / "zh") for page in pages("zh")] == english
    assert len(english) > 20


@every("page", ENGLISH)
def test_both_languages_have_the_same_headings(page: Path) -> None:
    levels = [level for level, _ in headings(page.read_text("utf-8"))]
    assert [level for level, _ in headings(in_chinese(page).read_text("utf-8"))] == levels


@every("page", ENGLISH)
def test_both_languages_have_the_same_blocks_and_commands(page: Path) -> None:
    def shape(text: str) -> list[tuple[str, list[str]]]:
        code = {"python", "py", "json", "toml"}
        return [
            (block.kind, _without_comments(block.lines) if block.kind in code else [])
            for block in blocks_of(text)
        ]

    english, chinese = page.read_text("utf-8"), in_chinese(page).read_text("utf-8")
    assert shape(chinese) == shape(english)
    assert [pipeline(c.line) for c in commands_of(chinese)] == [
        pipeline(c.line) for c in commands_of(english)
    ]


def _without_comments(lines: list[str]) -> list[str]:
    return [line.partition("  # ")[0] for line in lines]


@every("page", ENGLISH)
def test_the_chinese_page_is_in_chinese(page: Path) -> None:
    prose = re.sub(r"`[^`]*`|\([^)]*\)", "", prose_of(in_chinese(page).read_text("utf-8")))
    num_chinese = len(re.findall(r"[\u4e00-\u9fff]", prose))
    num_english_words = len(re.findall(r"[A-Za-z]{3,}", prose))
    assert num_chinese > num_english_words, "not translated yet"


# -- the harness itself ----------------------------------------------------------------------------

PAGE = """\
# A page

```console
$ nvtrace check a.jsonl   # exit code 1
one
two

$ make docs
```

Words with `code` and a [link](other.md#there).

```py
# nanovllm/engine/core.py
def step(self) -> list[Sequence]:
...
batch = self._schedule()
```
"""


def test_a_page_is_taken_apart() -> None:
    assert [block.kind for block in blocks_of(PAGE)] == ["console", "py"]
    first, second = commands_of(PAGE)
    assert first == Command("nvtrace check a.jsonl   # exit code 1", ["one", "two"], 4, 3)
    assert (first.exit_code, second.exit_code, second.output) == (1, 0, [])
    assert PAGE.splitlines()[first.first] == "one"
    assert pipeline("a 'b | c' | head -3  # why") == [["a", "b | c"], ["head", "-3"]]


@pytest.mark.parametrize(
    ("where", "result"),
    [
        ("at the end", "class A:|    def f(self):|        go()||end()|new"),
        ("at the end of A.f", "class A:|    def f(self):|        go()|new||end()"),
        ("below: class", "class A:|new|    def f(self):|        go()||end()"),
        ("above: go()", "class A:|    def f(self):|new|        go()||end()"),
        ("instead of: end", "class A:|    def f(self):|        go()||new"),
    ],
)
def test_a_change_is_made_once_where_it_says(where: str, result: str, tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("class A:\n    def f(self):\n        go()\n\nend()\n")
    [block] = changes_of(f"```py\n# a.py, {where}\nnew\n```")
    for _ in range(2):
        make_change(block, tmp_path)
        assert file.read_text() == result.replace("|", "\n") + "\n"


@pytest.mark.parametrize(
    "where", ["a new file", "below: stop()", "below: go", "at the end of B", "at the end of A.g"]
)
def test_a_change_without_its_place_is_found(where: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class A:\n    go()\n    go()\n")
    [block] = changes_of(f"```py\n# a.py, {where}\nnew\n```")
    with pytest.raises(ValueError, match=r"# a\.py, |there is no"):
        make_change(block, tmp_path)


def run(tmp_path: Path, *lines: str) -> list[tuple[bool, bool]]:
    """Of a page with these lines: does each command that is run end so, and print that?"""
    text = "\n".join(["```console", *lines, "```"])
    return [
        (command.may_end_with(outcome.code), is_as_shown(command.output, outcome.lines))
        for command, outcome in Workplace(tmp_path, "en").run_page(text)
    ]


def test_a_wrong_output_and_a_wrong_end_are_found(tmp_path: Path) -> None:
    assert run(
        tmp_path,
        "$ nvtrace check example.jsonl.zst",
        "1,302 events, 36 invariants: no findings",
        "$ nvtrace check example.jsonl.zst",
        "1,303 events, 36 invariants: no findings",
        "$ nvtrace check no-such-file.jsonl",
        "...",
        "$ nvtrace replay example.jsonl.zst --event 'STEP_END' | head -1   # the first",
        "step#1 prefill done in ...",
    ) == [(True, True), (True, False), (False, True), (True, False)]


def test_a_command_without_output_is_run_as_well_and_must_not_fail(tmp_path: Path) -> None:
    found = run(
        tmp_path, "$ nvtrace run --list", "$ nvtrace doctor --no-cost", "$ nvtrace replay nowhere"
    )
    assert [may_end_so for may_end_so, _ in found] == [True, True, False]


def test_make_targets_must_exist(tmp_path: Path) -> None:
    assert run(tmp_path, "$ cd /nowhere", "$ make docs PIP_ARGS=-q") == []
    another = tmp_path / "another"
    another.mkdir()
    with pytest.raises(AssertionError, match="no target tea"):
        run(another, "$ make tea")


@pytest.mark.parametrize(
    ("shown", "is_right"),
    [
        ("a b c d", True),
        ("a b ... d", True),
        ("... c d", True),
        ("a ...", True),
        ("a ... c ...", True),
        ("a ... b c d", True),
        ("a b c", False),
        ("b ...", False),
        ("... c", False),
        ("a ... c b ...", False),
        ("a b c d e", False),
    ],
)
def test_lines_left_out_may_be_any(shown: str, is_right: bool) -> None:
    assert is_as_shown(shown.split(), ["a", "b", "c", "d"]) is is_right


@pytest.mark.parametrize(
    ("shown", "result"),
    [
        ("?", "a b c d"),
        ("? 1-2, 4", "a b ... d"),
        ("? 2", "... b ..."),
        ("a x c d", "a b c d"),
        ("a x ...", "a b ..."),
        ("x ... d", "a ... d"),
        ("... cc ...", "... c ..."),
        ("", ""),
    ],
)
def test_a_rewrite_keeps_what_is_left_out(shown: str, result: str) -> None:
    lines = [" ".join(shown.split())] if shown.startswith("?") else shown.split()
    assert rewritten(lines, ["a", "b", "c", "d"]) == result.split()


def test_a_wrong_name_is_found() -> None:
    good = ["nanovllm.engine.scheduler.Scheduler.schedule", "LLM.stream", "PREEMPT", "make test"]
    assert unknown_names(" ".join(f"`{name}`" for name in good)) == []
    bad = ["Scheduler.plan", "nanovllm.engine.planner", "BLOCKS_LOSE", "nanovllm/no.py", "make tea"]
    assert unknown_names(" ".join(f"`{name}`" for name in bad)) == bad
    assert symbol_exists("nvtrace", ["events", "Preempt", "for_seq_id"])
    assert not symbol_exists("nvtrace", ["events", "Preempt", "why"])
    assert command_exists("nvtrace explain FILE --seq 1")
    assert not command_exists("nvtrace explain FILE --sequence 1")
    assert not command_exists("nvtrace ponder")


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert links(PAGE) == ["other.md#there"]
    assert broken_links(page) == ["other.md#there"]
    (tmp_path / "other.md").write_text("## There\n")
    assert broken_links(page) == []
    assert anchor("Why `len % block_size == 1`?") == "why-len-block_size-1"


def test_a_changed_excerpt_is_found() -> None:
    lines = blocks_of(PAGE)[1].lines
    assert missing_lines(lines) == []
    assert missing_lines([*lines, "batch = self.guess()"]) == ["batch = self.guess()"]
