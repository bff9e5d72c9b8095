"""Every code block of README.md and docs/ runs, in the order of its page, in an empty folder, as a reader would type it.

python      `# NAME.py` on its first line saves it under that name; a block that defines tests is run by pytest, by the
            console block that follows or, where none does, here, and must then pass; any other block is executed.
console     what follows `$ ` is run; the lines shown below it must be printed, in this order, numbers, times and folders
            aside. A command that fails must be shown to fail.
toml, yaml  must parse; `# NAME` on the first line saves it.

A block of any other language, or one that cannot run here, says why in a comment directly above: `<!-- not run: REASON -->`.
One that takes a minute says `<!-- slow: REASON -->`, and runs where ATTN_DOCS_SLOW is set.
"""

import contextlib
import inspect
import io
import itertools
import os
import pkgutil
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import textwrap
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import left_out
import pytest
import yaml

import pytest_attn
from pytest_attn import hooks, plugin
from pytest_attn.latency import disturbance, protocol
from pytest_attn.session.marks import arguments_of_attention

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = None

DOCS = Path(__file__).parent.parent / "docs"
README = DOCS.parent / "README.md"
#: below which a page names a file
ROOTS = (DOCS.parent, DOCS.parent / "pytest_attn", DOCS / "_ext")
PAGES = [README, *sorted(path for path in DOCS.rglob("*.md") if path.relative_to(DOCS).parts[0] not in ("_build", "examples"))]
#: of README.md and all of docs/; a page that grows has another shrink
MOST_WORDS = 45_000
#: tables of certificates, which grow with what others contribute, and are not prose
CERTIFIED = re.compile(r"<!-- generated: certificates -->.*?^<!-- end -->", re.DOTALL | re.MULTILINE)
#: MyST directives, whose content is Sphinx's; a directive that shows code would hide it from this test
DIRECTIVES = ("{toctree}", "{eval-rst}")
RUNNABLE = ("python", "console", "toml", "yaml")
#: what a page types behind a command to show its exit code
ECHO = '; echo "exit $?"'
SLOW_TOO = bool(os.environ.get("ATTN_DOCS_SLOW"))


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    text: str
    marker: str  # "not run", "slow" or ""
    reason: str

    @property
    def runs(self):
        return self.language in RUNNABLE and (not self.marker or (self.marker == "slow" and SLOW_TOO))

    @property
    def file(self):
        """The name under which a reader saves it, "" where none is given."""
        named = re.match(r"# ([\w./-]+\.(?:py|toml|ini|yml|yaml))\n", self.text)
        if named:
            return named[1]
        return f"test_line_{self.line}.py" if self.language == "python" and re.search(r"^def test_", self.text, re.M) else ""

    def __str__(self):
        return f"{self.page.relative_to(DOCS.parent)}:{self.line}"


def blocks_of(page):
    lines = page.read_text().splitlines()
    found, start = [], None
    for number, line in enumerate(lines):
        fence = re.match(r"\s*(`{3,}|~{3,}|:{3,})\s*(\S*)", line)
        if start is None and fence:
            start, ticks, language = number, fence[1], fence[2]
            above = re.fullmatch(r"\s*<!-- (not run|slow): (.+) -->", lines[number - 1] if number else "")
            indent = len(line) - len(line.lstrip())
        elif start is not None and line.strip() == ticks:
            text = "".join(f"{inner[indent:]}\n" for inner in lines[start + 1 : number])
            found.append(Block(page, start + 1, language, text, above[1] if above else "", above[2] if above else ""))
            start = None
    assert start is None, f"{page}: the block of line {start + 1} does not end"
    return [block for block in found if block.language not in DIRECTIVES]


BLOCKS = {page: blocks_of(page) for page in PAGES}


class Reader:
    """Someone who types the blocks of one page into an empty folder."""

    def __init__(self, pytester):
        self.pytester, self.folder, self.names = pytester, pytester.path, {"__name__": "page"}

    def types(self, block, is_followed_by_console):
        getattr(self, f"types_{block.language}")(block)
        if Path(block.file).name.startswith("test_") and not is_followed_by_console:
            result = self.pytest(block.file)
            assert result.ret == 0, f"{block}: its tests fail"

    def types_python(self, block):
        code = compile("\n" * block.line + block.text, str(block), "exec")
        if block.file:
            self.saves(block)
        else:
            exec(code, self.names)

    def types_toml(self, block):
        if tomllib:
            tomllib.loads(block.text)
        self.saves(block)

    def types_yaml(self, block):
        for job in (yaml.safe_load(block.text) or {}).get("jobs", {}).values():
            assert job["runs-on"], f"{block}: a job runs nowhere"
            assert all("run" in step or "uses" in step for step in job["steps"]), f"{block}: a step does nothing"
        self.saves(block)

    def types_console(self, block):
        for part in re.split(r"^\$ ", block.text, flags=re.M)[1:]:
            command, _, shown = part.partition("\n")
            status, printed = self.run(command)
            lines = iter([masked(line, self.folder) for line in printed.splitlines()])
            for line in shown.splitlines():
                if line.strip() not in ("", "..."):
                    wanted = masked(line, self.folder)
                    begins = wanted.removesuffix(" ...") if wanted.endswith(" ...") else None
                    is_there = wanted in lines if begins is None else any(found.startswith(begins) for found in lines)
                    assert is_there, f"{block}: `{command}` does not print {line!r} there\n{printed}"
            is_shown_to_fail = re.search(r"fail|error|no tests ran|not recorded", shown, re.I)
            assert status == 0 or is_shown_to_fail, f"{block}: `{command}` exits with {status}\n{printed}"

    def run(self, command):
        """Return the exit status of a command and what it prints."""
        if command.endswith(ECHO):
            status, printed = self.run(command.removesuffix(ECHO))
            return 0, f"{printed}\nexit {status}"
        words = [] if re.search(r"[;|&<>$]", command) else shlex.split(command)
        if words[:1] == ["pytest"] and "-n" not in words:
            result = self.pytest(*words[1:])
            return int(result.ret), f"{result.stdout}\n{result.stderr}"
        if words[:1] == ["python"] and len(words) == 2:
            with contextlib.redirect_stdout(io.StringIO()) as printed, beside(self.folder):
                self.names |= runpy.run_path(str(self.folder / words[1]), run_name="__main__")
            return 0, printed.getvalue()
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        done = subprocess.run(
            command, shell=True, cwd=self.folder, env={**os.environ, "PATH": path}, capture_output=True, text=True
        )
        return done.returncode, done.stdout + done.stderr

    def pytest(self, *arguments):
        return self.pytester.runpytest_inprocess("-p", "no:cacheprovider", "--attn-device=cpu", *arguments)

    def saves(self, block):
        if block.file:
            path = self.folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)


@contextlib.contextmanager
def beside(folder):
    """Let a script import the files of its folder, as python does; they are forgotten afterwards."""
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            if (folder / f"{name}.py").is_file():
                del sys.modules[name]


def masked(line, folder):
    """A line without what differs from run to run: figures, their units, folders, the width of rules and columns."""
    line = re.sub(r"(?<![\w/])(\.\.)?/[\w./-]+/", "/", line.replace(str(folder), "/folder"))
    line = re.sub(r"-?\d[\d,.e+-]*", "N", line)
    line = re.sub(r"(?<=N) (us|ms|s)\b", " s", re.sub(r"\+N", "N", line))
    line = re.sub(r"N CPU threads?|N threads?", "N threads", line)
    return " ".join(re.sub(r"([=_-])\1{2,}", r"\1", line).split())


@pytest.fixture(scope="module")
def _loaded():
    """Load the package: runs in this process forget what they import, and a second Workload class is not the first."""
    for module in pkgutil.walk_packages(pytest_attn.__path__, "pytest_attn."):
        if ".suite." not in module.name:
            import_module(module.name)


def with_slow_ones_marked(pages):
    names = [(page, page.relative_to(DOCS.parent).as_posix()) for page in pages]
    return [
        pytest.param(page, id=name, marks=[pytest.mark.slow] * (name.removeprefix("docs/") in left_out.PAGES))
        for page, name in names
    ]


@pytest.mark.usefixtures("_loaded", "no_worker")
@pytest.mark.parametrize("page", with_slow_ones_marked(page for page in PAGES if BLOCKS[page]))
def test_the_blocks_of_a_page_run(page, pytester, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a file may be saved twice within a second
    monkeypatch.setitem(protocol.SECONDS, "cpu", 0.1)  # no page tells how well it timed
    monkeypatch.setattr(disturbance, "_MOST_LOST_SECONDS", 0.1)
    for name in re.findall(r"\]\(\.\./examples/(\w+\.py)\)", page.read_text()):
        shutil.copy(DOCS / "examples" / name, pytester.path)  # as a reader puts it beside what the page has
    reader = Reader(pytester)
    runnable = [block for block in BLOCKS[page] if block.runs]
    for block, following in itertools.pairwise([*runnable, None]):
        reader.types(block, following is not None and following.language == "console")


def test_a_block_that_does_not_run_says_why(capsys):
    every = [block for page in PAGES for block in BLOCKS[page]]
    silent = [f"{block} ({block.language or 'no language'})" for block in every if not block.runs and not block.reason]
    assert not silent, f"blocks that neither run nor say why not: {', '.join(silent)}"
    ran = sum(block.runs for block in every)
    with capsys.disabled():
        print(f" {ran} of {len(every)} blocks run, {len(every) - ran} say why not ", end="")


def dead_links(page):
    """Yield the relative links of a page that lead to no file, to no heading of it, or from the site to a page beside it."""
    prose = re.sub(r"^ *```.*?^ *```|(`+)[^`]*?\1", "", page.read_text(), flags=re.S | re.M)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        name, _, heading = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        there = page.parent / name if name else page
        is_beside = page in PAGES[1:] and there.suffix == ".md" and there.resolve() not in PAGES[1:]
        if not there.is_file() or is_beside or (heading and heading not in anchors(there)):
            yield target


def anchors(page):
    """Return the names by which a code host links the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_pages_have_no_more_words_than_were_agreed():
    texts = {page: page.read_text() for page in {*PAGES, *DOCS.glob("examples/**/*.md")}}
    words = {page: len(CERTIFIED.sub("", text).split()) for page, text in texts.items()}
    longest = sorted(words, key=words.get, reverse=True)[:5]
    longest = ", ".join(f"{page.relative_to(DOCS.parent)} {words[page]:,}" for page in longest)
    assert sum(words.values()) <= MOST_WORDS, f"{sum(words.values()):,} words; the longest pages: {longest}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS.parent)))
def test_links_lead_somewhere(page):
    assert list(dead_links(page)) == []


def test_a_dead_link_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A title, here\n[a](page.md#a-title-here) [b](gone.md) [c](#gone) [d](http://a.org) `[e](no.md)`\n")
    assert list(dead_links(page)) == ["gone.md", "#gone"]


def test_the_files_that_the_pages_name_are_there():
    prose = {page: re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.S | re.M) for page in PAGES}
    a_path = r"`((?:[\w.-]+/)+[a-z_]+\.py|(?:pytest_attn|tests|benchmarks|docs)/[\w/]+)`"
    named = {(page, name) for page, text in prose.items() for name in re.findall(a_path, text)}
    assert [f"{page}: {name}" for page, name in sorted(named) if not any((root / name).exists() for root in ROOTS)] == []


def test_the_pages_that_the_code_names_are_there():
    named = {
        (name, path)
        for folder in ("pytest_attn", "tests", "benchmarks")
        for path in (DOCS.parent / folder).rglob("*.py")
        for name in re.findall(r"\bdocs/[\w/-]+\.(?:md|svg)\b", path.read_text())
    }
    missing = [f"{path}: {name}" for name, path in sorted(named) if not (DOCS.parent / name).is_file()]
    assert [line for line in missing if not line.endswith("/planted.md")] == []


@pytest.mark.parametrize("picture", sorted(DOCS.rglob("*.svg")), ids=lambda picture: picture.stem)
def test_a_picture_loads_nothing_and_is_shown(picture):
    text = picture.read_text()
    assert not re.search(r"(?:href|src|url)\W*=?\W*https?:", text)
    is_badge = picture.parent.name == "certificates"  # for the README of whoever uses the kernel
    assert is_badge or any(f"{picture.name})" in page.read_text() for page in PAGES)


def test_every_option_in_the_pages_is_one(pytestconfig):
    known = {option for group in pytestconfig._parser._groups for one in group.options for option in one.names()}
    for page in PAGES:
        for option in re.findall(r"--(?:attn|benchmark)-[a-z0-9-]+", page.read_text()):
            assert option in known, f"{page}: {option} is no option"


def test_the_table_of_arguments_is_that_of_the_marker():
    arguments = (DOCS / "reference" / "markers.md").read_text().partition("## attention\n")[2].partition("## ")[0]
    listed = re.findall(r"^\| `(\w+)` \|", arguments, re.M)
    assert sorted(listed) == sorted(one.name for one in arguments_of_attention())


#: what the examples in docstrings take for granted
GIVEN = """
import pytest
from pytest_attn import Backend, Workload

def my_attention(q, k, v, **options):
    return q

class MyBackend(Backend):
    name = "given"

    def prepare(self, inputs, backward=False):
        return my_attention
"""


def example_of(documented):
    """The code that a docstring shows behind `::`."""
    lines = inspect.getdoc(documented).partition("::\n\n")[2].splitlines()
    return GIVEN + textwrap.dedent("\n".join(itertools.takewhile(lambda line: not line or line.startswith(" "), lines)))


@pytest.mark.usefixtures("_loaded")
def test_the_examples_of_fixtures_are_collected(pytester):
    fixtures = [value for value in vars(plugin).values() if type(value).__name__ == "FixtureFunctionDefinition"]
    shown = [value for value in fixtures if "::\n" in (value.__doc__ or "")]
    assert len(shown) >= 4
    for number, fixture in enumerate(shown):
        pytester.makepyfile(**{f"test_{number}": example_of(fixture)})
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--collect-only", "-q", "--attn-backends=math")
    assert result.ret == 0
    assert all(f"test_{number}.py" in str(result.stdout) for number in range(len(shown)))


@pytest.mark.usefixtures("_loaded")
def test_the_examples_of_hooks_register(pytester):
    examples = [example_of(hooks.pytest_attn_backends), example_of(hooks.pytest_attn_workloads).removeprefix(GIVEN)]
    pytester.makeconftest("\n".join(examples))
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--attn-list")
    result.stdout.fnmatch_lines(["mine *available", "given *available", "*ours-1536*"])


def test_the_index_of_results_has_the_dates_of_each_page():
    date, pages = r"\d{4}-\d\d-\d\d", DOCS / "results"
    index = (pages / "index.md").read_text(encoding="utf-8")
    rows = re.findall(rf"^\| \[.+?\]\((\S+?\.md)\).*? \| ({date})(?: to (\d\d))? \|", index, re.MULTILINE)
    assert len(rows) == len(list(pages.glob("*.md"))) - 1
    for page, first, last in rows:
        dates = sorted(re.findall(date, (pages / page).read_text(encoding="utf-8")))
        assert (first, last or first[-2:]) == (dates[0], dates[-1][-2:]), page


#: what a section of results says of its tables; a script that has left is named as git shows it
OF_A_TABLE = {
    "command": r"benchmarks/\w+\.py|pytest |make |tests/\w",
    "date": r"\b20\d\d-\d\d-\d\d\b",
    "commit": r"\b(?=[a-f]*\d)[0-9a-f]{8}\b",
}


def unsaid(page):
    """Yield each section with a table, and what it does not say of it."""
    for section in re.split(r"^(?=## )", page, flags=re.MULTILINE):
        tables = re.sub(r"^```(?!text)[a-z]+\n.*?^```", "", section, flags=re.M | re.S)
        if re.search(r"^\| :?---|^```", tables, re.MULTILINE):
            lacks = [what for what, pattern in OF_A_TABLE.items() if not re.search(pattern, section)]
            if lacks:
                yield section.splitlines()[0], lacks


@pytest.mark.parametrize(
    "page", sorted({*(DOCS / "results").glob("*.md")} - {DOCS / "results" / "index.md"}), ids=lambda page: page.name
)
def test_each_table_of_results_has_its_command_commit_and_date(page):
    assert [*unsaid(page.read_text(encoding="utf-8"))] == []


def test_a_table_without_a_commit_is_seen():
    said = "## Cost\n\n`pytest tests`, 2026-11-29{}\n\n```text\n1 2\n```\n"
    assert [*unsaid(said.format(", commit 1a2b3c4d"))] == []
    assert [*unsaid(said.format(""))] == [("## Cost", ["commit"])]
    assert [*unsaid("## Cost\n\n| a |\n| --- |\n")] == [("## Cost", ["command", "date", "commit"])]
    assert [*unsaid("## A call\n\n```python\nprint()\n```\n")] == []
