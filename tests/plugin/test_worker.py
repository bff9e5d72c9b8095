"""A worker takes the arguments of the pytest that started it as they are, and does only what it was told."""

import pytest

from pytest_attn.processes import worker
from pytest_attn.processes.channel import Channel
from pytest_attn.processes.worker import OVERRIDES, Worker

TESTS = """
import pytest

@pytest.mark.parametrize("number", range(4))
def test_it(number, request):
    print("ran", number)
    assert number != 1

def test_options(request):
    print("options", vars(request.config.option))
"""


@pytest.fixture
def work(pytester, monkeypatch):
    """Return a function that runs pytest as a worker that was told to run some tests, with these arguments."""
    pytester.makepyfile(TESTS)

    def run(*arguments, tests=("1", "2", "3"), **options):
        mine, theirs = Channel.pair()
        names = [f"{pytester.path / next(pytester.path.glob('test_*.py')).name}::test_it[{number}]" for number in tests]
        mine.send(tests=names, options=options, waiting=[])
        monkeypatch.setattr(worker, "_this", Worker(theirs))
        return pytester.runpytest_inprocess("-p", "pytest_attn.processes.worker", "-rP", *arguments)

    return run


def ran(result):
    return sorted(line.split()[1] for line in result.outlines if line.startswith("ran "))


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("-n", "2", "--dist", "loadfile"),
        ("-n2", "--maxprocesses=1"),
        ("-x",),
        ("--maxfail", "1"),
        ("--lf",),
        ("--stepwise",),
        ("--pdb",),
        ("--co",),
        ("--splits", "2", "--group", "2"),
        ("--benchmark-only",),
        ("--junitxml", "report.xml"),
        ("--benchmark-json", "report.json", "--benchmark-save=x", "--benchmark-autosave"),
        ("--attn-output=report.jsonl", "--attn-update-baselines", "why"),
        ("-k", "it"),
        ("{file}::test_options",),
        ("--", "{file}::test_options"),
        ("@names",),
    ],
    ids=" ".join,
)
def test_the_command_line_of_another_pytest_changes_nothing_of_what_a_worker_runs(work, pytester, arguments):
    (file,) = pytester.path.glob("test_*.py")
    (pytester.path / "names").write_text(f"{file.name}::test_options\n")
    pytester.makeini("[pytest]\ncache_dir = kept\n")
    (pytester.path / "kept" / "v" / "cache").mkdir(parents=True)
    (pytester.path / "kept" / "v" / "cache" / "lastfailed").write_text(f'{{"{file.name}::test_it[2]": true}}')
    given = [one.format(file=file.name) for one in arguments]
    before = {path.name for path in pytester.path.iterdir()} | {".benchmarks"}
    result = work(*given, attn_update_baselines=None, attn_outputs=None)
    result.assert_outcomes(passed=2, failed=1)
    assert ran(result) == ["1", "2", "3"]
    assert not [path for path in pytester.path.iterdir() if path.suffix in (".xml", ".json") and path.name not in before]


def test_what_a_worker_overrides_are_options_of_this_pytest_and_these_plugins(pytester):
    """Those of plugins that are not installed here, and of pytest 8.4, are few, and known."""
    config = pytester.parseconfig()
    elsewhere = {"report_log", "htmlpath", "num_shards", "shard_id", "stepwise_reset"}
    assert {name for name in OVERRIDES if not hasattr(config.option, name)} <= elsewhere


def test_what_narrows_the_tests_still_does(work):
    assert ran(work("-k", "not 3")) == ["1", "2"]
