"""What the suite says where a library of models is missing, or cannot be imported."""

import sys
from types import ModuleType

import pytest

from pytest_attn.guests.models.small_models import Library


class Lazy(ModuleType):
    """A library whose parts are imported when they are asked for, as those of transformers and diffusers are."""

    __path__ = ()

    def __getattr__(self, part):
        if part != "Model":
            raise AttributeError(part)
        try:
            raise RuntimeError("operator torchvision::nms does not exist\nand more")
        except RuntimeError as error:
            raise ModuleNotFoundError("Could not import module 'Model'") from error


def test_a_part_that_cannot_be_imported_skips_with_the_first_cause(monkeypatch):
    monkeypatch.setitem(sys.modules, "lazy_models", Lazy("lazy_models"))
    library = Library("lazy_models")
    assert not hasattr(library, "Other")
    with pytest.raises(pytest.skip.Exception, match=r"lazy_models cannot be imported: RuntimeError: .*nms does not exist$"):
        _ = library.Model


def test_a_library_that_is_missing_says_what_to_install():
    with pytest.raises(pytest.skip.Exception, match="no_such_models is not installed; pip install no_such_models"):
        Library("no_such_models")


def test_a_library_that_lacks_another_one_names_that(monkeypatch, tmp_path):
    (tmp_path / "half_models.py").write_text("import no_such_vision\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(pytest.skip.Exception, match=r"half_models cannot be imported: .*No module named 'no_such_vision'"):
        Library("half_models")
