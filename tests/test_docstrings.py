"""Every public object says what it takes, returns and raises, in one style."""

import builtins
import dataclasses
import functools
import inspect
import pkgutil
import re
import types
from importlib import import_module
from pathlib import Path

import pytest

import pytest_attn

PUBLIC = {name: getattr(pytest_attn, name) for name in pytest_attn.__all__}
METHODS = {
    f"{name}.{method}": getattr(PUBLIC[name], method)
    for name, methods in {
        "AttentionCase": ("check", "check_invariants", "measure", "assert_close", "assert_launched"),
        "Failure": ("check",),
        "Workload": ("replace",),
    }.items()
    for method in methods
}
FUNCTIONS = {name: one for name, one in {**PUBLIC, **METHODS}.items() if inspect.isfunction(one)}
DATA = {name: one for name, one in PUBLIC.items() if inspect.isclass(one) and dataclasses.is_dataclass(one)}


def section(described, title):
    """The entries of a section of a docstring, None where it has none."""
    found = re.search(rf"^{title}:\n((?:    .*\n?)+)", inspect.getdoc(described) or "", re.M)
    return found and re.findall(r"^    (\S.*)", found[1], re.M)


def names(entries):
    return [entry.partition(":")[0] for entry in entries or ()]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_says_what_it_takes_returns_and_raises(name):
    signature = inspect.signature(FUNCTIONS[name])
    assert names(section(FUNCTIONS[name], "Args")) == [one for one in signature.parameters if one != "self"]
    assert bool(section(FUNCTIONS[name], "Returns")) == (signature.return_annotation != "None")
    assert section(FUNCTIONS[name], "Raises")


@pytest.mark.parametrize("name", DATA)
def test_a_class_of_data_says_what_each_field_is(name):
    assert names(section(DATA[name], "Args")) == [one.name for one in dataclasses.fields(DATA[name])]


METHOD = (types.FunctionType, property, functools.cached_property, classmethod, staticmethod)


def undocumented(classes):
    """Return the public methods of which neither they nor what they override says what they do."""
    for owner in classes:
        own = {name for name, one in vars(owner).items() if isinstance(one, METHOD) and not name.startswith("_")}
        for name in sorted(own - vars(owner).get("__annotations__", {}).keys()):
            if not any(vars(one)[name].__doc__ for one in owner.__mro__ if name in vars(one)):
                yield f"{owner.__module__}.{owner.__qualname__}.{name}"


def test_a_method_says_what_it_does_unless_what_it_overrides_does():
    modules = [one.name for one in pkgutil.walk_packages(pytest_attn.__path__, "pytest_attn.") if ".suite" not in one.name]
    found = {one for name in modules for one in vars(import_module(name)).values() if inspect.isclass(one)}
    ours = [one for one in found if one.__module__.startswith("pytest_attn.") and not one.__name__.startswith("_")]
    assert len(ours) > 300
    assert list(undocumented(ours)) == []


class Told:
    def said(self):
        """Say it."""

    @property
    def known(self):
        """What is known."""


class Telling(Told):
    def said(self):
        pass

    def unsaid(self):
        pass

    @property
    def known(self):
        pass

    @property
    def unknown(self):
        pass

    @classmethod
    def made(cls):
        pass


def test_a_method_of_which_nobody_says_what_it_does_is_seen():
    assert [one.rpartition(".")[2] for one in undocumented([Told, Telling])] == ["made", "unknown", "unsaid"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_a_docstring_says_is_raised_can_be_caught(name):
    for error in names(section(FUNCTIONS[name], "Raises")):
        assert issubclass(PUBLIC.get(error) or getattr(builtins, error), Exception)


def test_our_errors_that_the_pages_name_are_exported():
    sources = "".join(path.read_text() for path in Path(pytest_attn.__file__).parent.rglob("*.py"))
    ours = set(re.findall(r"^class (\w+Error)\b", sources, re.M))
    assert {"ContractError", "StaleError"} <= ours
    pages = [path for path in (Path(__file__).parent.parent / "docs").rglob("*.md") if "_build" not in path.parts]
    for page in pages:
        for error in re.findall(r"`(?:pytest_attn\.)?([A-Z]\w+Error)`", page.read_text()):
            assert error in PUBLIC or error not in ours, f"{page}: {error} is not exported"


@pytest.mark.parametrize("method", ["check", "check_invariants", "measure"])
def test_a_judgment_says_when_it_skips(method):
    assert "Skips the test where" in inspect.getdoc(METHODS[f"AttentionCase.{method}"])


def test_check_says_when_it_expects_a_failure():
    assert "(xfail)" in inspect.getdoc(METHODS["AttentionCase.check"])
