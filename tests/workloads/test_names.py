"""Names as one printable line, and as a word of a shell."""

import os
import subprocess

import pytest
from hostile import NAMES, unsafe

from pytest_attn.workloads.functions import LONGEST, printable, shell_word


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_name_becomes_one_printable_line(name):
    shown = printable(name)
    assert shown.isprintable()
    assert unsafe(shown, LONGEST) == []
    assert printable(shown) == shown


@pytest.mark.parametrize("name", ["Attention.forward[causal=True]", "it's a 'name'", "café | ::", "at::native::sdpa"])
def test_a_name_of_printable_characters_stays(name):
    assert printable(name) == name


def test_long_names_that_differ_at_their_end_stay_different():
    assert printable("n" * 10_000 + "a") != printable("n" * 10_000 + "b")


@pytest.mark.skipif(not os.path.exists("/bin/bash"), reason="no bash")
@pytest.mark.parametrize("name", [*NAMES.values(), "test_a.py::test_b[x y]"], ids=[*NAMES, "plain"])
def test_a_word_of_a_shell_is_the_name_again(name):
    word = shell_word(name)
    assert word.isprintable()
    if "\0" not in name and "\ud800" not in name:  # which no command line can have
        said = subprocess.run(["/bin/bash", "-c", f"printf %s {word}"], capture_output=True, check=True).stdout
        assert os.fsdecode(said) == name
