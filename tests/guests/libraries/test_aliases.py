import pytest

from pytest_attn.backends.registry import Registry
from pytest_attn.guests.libraries import diffusers, transformers
from pytest_attn.guests.libraries.libraries_guest import ALIASES


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_an_alias_is_another_backends_name(alias, name):
    registry = Registry()
    registry.require(alias)
    assert name not in ALIASES
    assert registry.canonical(alias) == name
    assert registry.canonical(f"{alias}+compile") == f"{name}+compile"
    assert registry[alias].name == name


@pytest.mark.parametrize("alias", ALIASES)
def test_nobody_can_take_an_alias_as_a_name(alias):
    with pytest.raises(ValueError, match=r"is an alias of|must consist of"):
        Registry().add_function(alias, lambda q, k, v, workload: v)


@pytest.mark.parametrize("names", [diffusers._NAMES, transformers._NAMES], ids=["diffusers", "transformers"])
def test_an_alias_names_the_kernel_that_the_dispatcher_hands_on_to(names):
    # flex_attention as diffusers calls it is not compiled: another kernel under the same name
    known = {name: entry.kernel for name, entry in names.items() if name in ALIASES}
    assert known == {name: ALIASES[name] for name in known}


def test_a_dispatcher_is_no_alias_of_what_it_calls():
    registry = Registry()
    assert registry["diffusers:native"].name == "diffusers:native"
    assert registry["transformers:sdpa"].name == "transformers:sdpa"


def test_an_alias_may_be_configured_and_a_revision_is_no_configuration():
    registry = Registry()
    assert registry.canonical("flash@num_splits=4+graph") == "flash2@num_splits=4+graph"
    assert registry.canonical("flash_4_hub") == "hub:kernels-community/flash-attn4@v0"
    registry.require("hub:org/repo@v1+compile")
