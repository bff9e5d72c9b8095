"""Options: one declaration gives the command line, the ini file, the default, the parser and the help."""

import dataclasses
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import pytest_attn
from pytest_attn.session import options as module
from pytest_attn.session.option_types import action, declared_options, option, output_file, size, switch, whole_number
from pytest_attn.session.options import LEFT, Settings, all_options
from pytest_attn.session.worker_pool import _options, worker_command


def inconsistencies(settings):
    """Say where a declaration contradicts itself, or another one."""
    found = []
    options = list(declared_options(settings))
    annotations = {one.name: str(one.type) for one in dataclasses.fields(settings)}
    for name in ("flag", "dest"):
        values = [getattr(one, name) for one in options]
        found += [f"two options have the {name} {value}" for value in sorted(set(values)) if values.count(value) > 1]
    for one in options:
        found += [f"{one.flag} has no help"] if not one.help.strip() else []
        expected = "bool" if one.is_switch else "tuple" if one.is_repeatable else "None" if one.default is None else ""
        if expected not in annotations[one.name]:
            found.append(f"{one.flag} gives {annotations[one.name]}, expected {expected}")
        if one.default is None:
            continue
        try:
            one.parse(one.default)
        except ValueError as error:
            found.append(f"{one.flag} refuses its own default: {error}")
        said = re.search(r"\(default: ([^)]*)\)", one.help)
        if said and one.default and not said[1].startswith(one.default):
            found.append(f"{one.flag} says that its default is {said[1]}, and it is {one.default}")
    return found


def test_the_declarations_are_consistent():
    assert inconsistencies(Settings) == []
    others = {one.name for one in dataclasses.fields(Settings)}.difference(one.name for one in declared_options(Settings))
    assert others == {"given", "more", "json", "report", "summary", "support"}, "all other fields are options"


@pytest.mark.parametrize(
    ("name", "type_", "planted", "words"),
    [
        ("a", "int", option("Of it (default: 3)", "4", "N", whole_number), "--attn-a says that its default is 3, and it is 4"),
        ("a", "int", option("Of it", "four", "N", whole_number), "--attn-a refuses its own default: must be a whole number"),
        ("a", "int", option("", "4", "N", whole_number), "--attn-a has no help"),
        ("a", "str", action("Of it", "N"), "--attn-a gives str, expected None"),
        ("a", "int", switch("Of it"), "--attn-a gives int, expected bool"),
        ("a", "bool", switch("Of it", "b"), "two options have the flag --attn-b"),
    ],
)
def test_a_declaration_that_contradicts_itself_is_seen(name, type_, planted, words):
    fields = [("b", "str | None", action("Of b", "N")), (name, type_, planted)]
    (found, *_) = inconsistencies(dataclasses.make_dataclass("Planted", fields))
    assert found.startswith(words)


@dataclass(frozen=True)
class Declared:
    """One option of each kind."""

    given: dict[str, str]
    tile_size: int = option("Of a tile (default: 4KiB)", "4KiB", "SIZE", size)
    quick: bool = switch("Be quick")
    renamed: bool = switch("Another word for it", "spelled-out")
    target: str | None = action("Where to", "PLACE", in_child=True)
    page: str | None = action("A page", "FILE.html", output_file)
    state: str = option("Of it (default: cold)", "cold", "STATE", is_ini_only=True)
    inner: int = field(default=0)
    more: dict = field(default_factory=dict, compare=False)

    from_config = classmethod(Settings.from_config.__func__)

    def _refuse_contradictions(self, config):
        pass


@pytest.fixture
def config_of(pytester, monkeypatch):
    """Return a function that gives pytest's configuration after these options were declared."""
    monkeypatch.setattr(module, "Settings", Declared)
    return lambda *arguments: pytester.parseconfig("-p", "no:cacheprovider", *arguments)


def test_what_is_not_given_has_its_default(config_of):
    settings = Declared.from_config(config_of())
    assert settings == Declared({}, 4096, False, False, None, None, "cold")
    assert settings.inner == 0, "a field that is no option is left alone"


def test_the_command_line_gives_values_by_the_spelling_that_is_declared(config_of, tmp_path):
    arguments = ("--attn-tile-size=2MiB", "--attn-quick", "--attn-spelled-out", "--attn-target", "there")
    settings = Declared.from_config(config_of(*arguments, f"--attn-page={tmp_path / 'a.html'}"))
    assert settings == Declared({"tile-size": "2MiB"}, 2 << 20, True, True, "there", str(tmp_path / "a.html"), "cold")


def test_an_ini_value_holds_unless_the_command_line_says_otherwise(config_of, pytester):
    pytester.makeini("[pytest]\nattn_tile_size = 1KiB\n")
    assert Declared.from_config(config_of()).tile_size == 1024
    assert Declared.from_config(config_of()).given == {"tile-size": "1KiB"}
    again = Declared.from_config(config_of("--attn-tile-size=4KiB"))
    assert (again.tile_size, again.given) == (4096, {})


@pytest.mark.parametrize(
    ("ini", "arguments", "words"),
    [
        ("", ("--attn-tile-size=big",), r"^--attn-tile-size: must be a size such as '4 GiB', got 'big'$"),
        ("attn_tile_size = big", (), r"^attn_tile_size \(tox\.ini\): must be a size such as '4 GiB', got 'big'$"),
        ("", ("--attn-page=a.txt",), r"^--attn-page: must end in \.jsonl, \.html, \.md or \.support\.md, got 'a\.txt'$"),
    ],
)
def test_what_the_parser_refuses_is_a_usage_error_that_says_where_it_stands(config_of, pytester, ini, arguments, words):
    pytester.makeini(f"[pytest]\n{ini}\n")
    with pytest.raises(pytest.UsageError, match=words):
        Declared.from_config(config_of(*arguments))


def test_an_option_that_a_message_names_is_in_the_help(pytester):
    text = pytester.runpytest_inprocess("--help").stdout.str()
    package = Path(pytest_attn.__file__).parent
    files = [path for path in package.rglob("*.py") if path.parent.name != "suite" and not path.name.startswith("option")]
    named = {flag for path in files for flag in re.findall(r"--attn-[a-z0-9-]+[a-z0-9]", path.read_text())}
    hidden = {one.flag for one in all_options() if f"  {one.flag}" not in text}
    assert hidden & named <= {"--attn-json-samples"}
    assert "--attn-threads" in hidden


def test_only_options_with_a_default_have_an_ini_value(config_of):
    config = config_of()
    assert config.getini("attn_tile_size") == "4KiB"
    for name in ("attn_quick", "attn_target", "attn_page"):
        with pytest.raises(ValueError, match="unknown configuration value"):
            config.getini(name)


def test_what_is_an_ini_value_alone_is_typed_as_one(config_of):
    config = config_of("-o", "attn_state=a b")
    settings = Declared.from_config(config)
    assert (settings.state, settings.given) == ("a b", {"state": "a b"})
    assert Settings.as_options(settings) == "-o attn_state='a b'"
    assert "--attn-state" not in config._parser.optparser.format_help()


@pytest.mark.parametrize("flag", LEFT)
def test_of_an_option_that_has_left_it_is_said_what_to_type(pytester, flag):
    with pytest.raises(pytest.UsageError) as refused:
        pytester.parseconfig("-p", "no:cacheprovider", f"{flag}=x")
    assert str(refused.value) == f"{flag}: no such option; say {LEFT[flag]}"
    typed = LEFT[flag].replace("FILE", "run").replace("SIZE", "1GiB").split()
    assert Settings.from_config(pytester.parseconfig("-p", "no:cacheprovider", *typed)) != Settings.from_config(
        pytester.parseconfig("-p", "no:cacheprovider")
    )


def test_the_help_is_the_declaration(config_of):
    text = config_of()._parser.optparser.format_help()
    said = " ".join(text.split())
    assert "--attn-tile-size=SIZE Of a tile (default: 4KiB)" in said
    assert "--attn-quick Be quick" in said
    assert "--attn-page=FILE.html A page" in said


def test_a_fresh_process_is_given_what_is_declared_for_it(tmp_path):
    options = {one.flag: one.in_child for one in all_options()}
    assert {flag for flag, in_child in options.items() if not in_child} >= {"--attn-output", "--attn-profile"}
    assert options["--attn-tune"]
    assert options["--attn-backends"]
    overridden = _options(tmp_path)
    assert not options["--attn-rank"]
    assert not options["--attn-rank-to"]
    for one in all_options():
        if not one.in_child:
            assert overridden[one.dest] == (False if one.is_switch else one.default)
        else:
            assert one.dest not in overridden or one.name == "latency"


@pytest.mark.parametrize("given", ["--attn-seed=random", "--override-ini=attn_seed=random"])
def test_all_processes_of_a_run_have_its_random_seed(pytester, tmp_path, given):
    config = pytester.parseconfig("-p", "no:cacheprovider", given)
    drawn = Settings.from_config(config)
    assert drawn.given["seed"] == str(drawn.seed)
    assert worker_command(config, tmp_path / "own", [], {}).told["options"]["attn_seed"] == str(drawn.seed)
    assert Settings.from_config(pytester.parseconfig("-p", "no:cacheprovider", given)).seed != drawn.seed


def test_the_options_of_a_run_can_be_pasted_back(pytester):
    config = pytester.parseconfig("-p", "no:cacheprovider", "--attn-seed=3", "--attn-backends=math, eager", "--attn-rank")
    text = Settings.from_config(config).as_options()
    assert text == "--attn-backends='math, eager' --attn-seed=3 --attn-rank"


#: what is given, and what is said of it; "taken" is a file, "folder" a folder
REFUSED = {
    "--attn-backend=all": "--attn-backend: no such option; did you mean --attn-backends?",
    "--attn-xyz": "--attn-xyz: no such option; pytest --help lists all",
    "--attn-device=tpu": "--attn-device: must be auto, cpu, cuda, cuda:N, xpu or mps, got 'tpu'",
    "--attn-dtypes=int4": "--attn-dtypes: unknown dtype 'int4'; known: bfloat16 (bf16)",
    "--attn-isolated --attn-profile": "--attn-profile: sees the kernels of this process; leave out --attn-isolated",
    "--attn-isolated folder": "--attn-isolated: must be MODULE:FUNCTION, got 'folder'; where a path follows, ",
    "-oattn_l2=tepid": "attn_l2: must be cold or warm, got 'tepid'",
    "--attn-latency=sometimes": "--attn-latency: must be off, auto or require, got 'sometimes'",
    "--attn-limits=loose": "--attn-limits: must be default or strict, got 'loose'",
    "--attn-lock-clocks=fast": "--attn-lock-clocks: must be max or a number of MHz",
    "--attn-max-slowdown=fast": "--attn-max-slowdown: must be a number of percent above 0",
    "--attn-max-slowdown=0": "--attn-max-slowdown: must be a number of percent above 0",
    "-oattn_memory=much": "attn_memory: must be a size such as '4 GiB', got 'much'",
    "--attn-output=run.txt": "--attn-output: must end in .jsonl, .html, .md or .support.md, got 'run.txt'",
    "--attn-output=no/run.jsonl": "--attn-output: must be a file NAME in a folder that exists, got 'no/run.jsonl'",
    "--attn-output=a.md --attn-output=b.md": "are the same kind of output; name one file of each suffix",
    "--attn-output=.": "--attn-output: must end in .jsonl, .html, .md or .support.md, got '.'",
    "--attn-mutants --attn-fuzz=5": "--attn-fuzz: draws workloads for the test's own kernels; leave out --attn-mutants",
    "--attn-rank --attn-latency=off": "--attn-rank: needs times; leave out --attn-latency=off",
    "--attn-rank --attn-mutants": "--attn-rank: needs times, and --attn-mutants takes none; leave one of them out",
    "--attn-compile-only --attn-against=self": "--attn-against: judges or times, and --attn-compile-only does neither",
    "--attn-rank-to=best --attn-latency=off": "--attn-rank-to: needs times",
    "--attn-rank-to=no/where": "--attn-rank-to: must be a name without suffix in a folder that exists, got 'no/where'",
    "--attn-rank-to=best.json": "--attn-rank-to: must be a name without suffix",
    "--attn-save-failures=taken": "--attn-save-failures: must be a folder, such as failures, got 'taken'",
    "--attn-save-failures=taken/below": "--attn-save-failures: cannot write to 'taken/below': ",
    "--attn-save-failures=/proc/nowhere": "--attn-save-failures: cannot write to '/proc/nowhere': ",
    "--attn-save-failures=": "--attn-save-failures: must be a folder, such as failures, got ''",
    "--attn-save-failures=a.py::test_b": "--attn-save-failures: must be a folder, such as failures, got 'a.py::test_b'",
    "--attn-seed=-1": "--attn-seed: must be a whole number >= 0, or random, got '-1'",
    "--attn-fuzz=0": "--attn-fuzz: must be a number of workloads to draw, as --attn-fuzz=20, got 0; leave it out",
    "--attn-threads=0": "--attn-threads: must be a number of threads to time with, as --attn-threads=1, got 0",
    "--attn-mutants --attn-latency=require": "--attn-latency=require: needs times, and --attn-mutants takes none",
    "--attn-mutants --attn-update-baselines=first": "--attn-update-baselines: needs times, and --attn-mutants takes none",
    "--attn-update-baselines": '--attn-update-baselines: must be followed by a reason, as in --attn-update-baselines="first',
    "--attn-threads=-1": "--attn-threads: must be a whole number of threads",
    "--attn-timeout=soon": "--attn-timeout: must be a number of seconds >= 0 (0 waits forever), got 'soon'",
    "--attn-tune=flex --attn-latency=off": "--attn-tune: needs times",
    "--attn-tune=flex --attn-mutants": "--attn-tune: needs times, and --attn-mutants takes none",
    "--attn-tune=flex --attn-latency=require": "--attn-tune: configurations have no baselines; say --attn-latency=auto",
    "--attn-tune=tiled,fast": "--attn-tune: must be the name of one backend, got 'tiled,fast'",
    "--attn-update-baselines=": "--attn-update-baselines: must be followed by a reason",
    "--attn-update-baselines=a.py::test_b": 'must be a reason such as "first recording", got the test',
    "--attn-update-baselines=first --attn-latency=off": "--attn-update-baselines: needs times",
    "--attn-update-baselines=first -n 2": "--attn-update-baselines: times in processes of its own, one at a time; leave out",
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("arguments", REFUSED)
def test_what_an_option_cannot_be_or_not_beside_another_is_a_usage_error(pytester, arguments):
    (pytester.path / "taken").touch()
    (pytester.path / "folder").mkdir()
    with pytest.raises(pytest.UsageError) as refused:
        Settings.from_config(pytester.parseconfig("-p", "no:cacheprovider", *arguments.split()))
    assert REFUSED[arguments] in str(refused.value)
    assert str(refused.value).startswith(("--attn-", "attn_"))


def test_0_turns_off_what_an_ini_file_has_turned_on(pytester):
    pytester.makeini("[pytest]\nattn_fuzz = 5")
    assert Settings.from_config(pytester.parseconfig("-p", "no:cacheprovider", "--attn-fuzz=0")).more["fuzz"] == 0


@pytest.mark.parametrize("arguments", [("--attn-rank",), ("--attn-rank-to=best",), ("--attn-tune=flex",)])
def test_whatever_asks_for_a_rank_ranks(pytester, arguments):
    assert Settings.from_config(pytester.parseconfig("-p", "no:cacheprovider", *arguments)).asked["closing"]
    assert not Settings.from_config(pytester.parseconfig("-p", "no:cacheprovider")).asked["closing"]
