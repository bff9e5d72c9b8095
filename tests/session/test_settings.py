"""Options: one declaration gives the command line, the ini file, the default, the parser and the help."""

import dataclasses
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import pytest_attn
from pytest_attn.session import options as module
from pytest_attn.session.option_types import action, declared_options, option, output, size, switch, whole_number
from pytest_attn.session.options import Settings
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
    assert len(list(declared_options(Settings))) == len(dataclasses.fields(Settings)) - 1, "all fields but `given` are options"


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
    page: str | None = output("A page", ".html")
    inner: int = field(default=0)

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
    assert settings == Declared({}, 4096, False, False, None, None)
    assert settings.inner == 0, "a field that is no option is left alone"


def test_the_command_line_gives_values_by_the_spelling_that_is_declared(config_of, tmp_path):
    arguments = ("--attn-tile-size=2MiB", "--attn-quick", "--attn-spelled-out", "--attn-target", "there")
    settings = Declared.from_config(config_of(*arguments, f"--attn-page={tmp_path / 'a.html'}"))
    assert settings == Declared({"tile-size": "2MiB"}, 2 << 20, True, True, "there", str(tmp_path / "a.html"))


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
        ("", ("--attn-page=a.txt",), r"^--attn-page: must be a file NAME\.html in a folder that exists, got 'a\.txt'$"),
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
    hidden = {one.flag for one in declared_options(Settings) if f"  {one.flag}" not in text}
    assert hidden & named <= {"--attn-json", "--attn-report", "--attn-summary", "--attn-support", "--attn-json-samples"}
    assert "--attn-l2" in hidden


def test_only_options_with_a_default_have_an_ini_value(config_of):
    config = config_of()
    assert config.getini("attn_tile_size") == "4KiB"
    for name in ("attn_quick", "attn_target", "attn_page"):
        with pytest.raises(ValueError, match="unknown configuration value"):
            config.getini(name)


def test_the_help_is_the_declaration(config_of):
    text = config_of()._parser.optparser.format_help()
    said = " ".join(text.split())
    assert "--attn-tile-size=SIZE Of a tile (default: 4KiB)" in said
    assert "--attn-quick Be quick" in said
    assert "--attn-page=FILE.html A page" in said


def test_a_fresh_process_is_given_what_is_declared_for_it(tmp_path):
    options = {one.flag: one.in_child for one in declared_options(Settings)}
    assert {flag for flag, in_child in options.items() if not in_child} >= {"--attn-json", "--attn-report", "--attn-profile"}
    assert options["--attn-tune"]
    assert options["--attn-backends"]
    overridden = _options(tmp_path)
    assert not options["--attn-rank"]
    assert not options["--attn-rank-to"]
    for one in declared_options(Settings):
        if not one.in_child:
            assert overridden[one.dest] is (False if one.is_switch else None)
        else:
            assert one.dest not in overridden or one.name in ("latency", "fuzz")


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--attn-update-baselines=first", "--attn-latency=off"), "--attn-update-baselines: needs times"),
        (("--attn-update-baselines=first", "-n", "2"), "--attn-update-baselines: records in processes of its own"),
        (("--attn-rank-to=best", "--attn-latency=off"), "--attn-rank-to: needs times"),
        (("--attn-tune=flex", "--attn-mutants"), "--attn-tune: needs times, and --attn-mutants takes none"),
        (("--attn-tune=flex", "--attn-latency=require"), "--attn-tune: configurations have no baselines"),
        (("--attn-tune=flex", "--attn-backends=math"), "--attn-tune: chooses the backends itself"),
    ],
)
def test_options_that_do_not_go_together_are_refused(pytester, arguments, words):
    config = pytester.parseconfig("-p", "no:cacheprovider", *arguments)
    with pytest.raises(pytest.UsageError, match=f"^{words}"):
        Settings.from_config(config)


@pytest.mark.parametrize("arguments", [("--attn-rank",), ("--attn-rank-to=best",), ("--attn-tune=flex",)])
def test_whatever_asks_for_a_rank_ranks(pytester, arguments):
    assert Settings.from_config(pytester.parseconfig("-p", "no:cacheprovider", *arguments)).is_ranked
    assert not Settings.from_config(pytester.parseconfig("-p", "no:cacheprovider")).is_ranked
