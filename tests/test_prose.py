"""The prose linter finds what is planted, and nothing in the pages, strings, docstrings and comments of this repository."""

import pytest
from prose.__main__ import findings, main, said_by, sentences

LONG = "This sentence has many words " + "and many more " * 9 + "so that it must be split."


def said(path, name, text):
    """Return the rules that object to a text, as if it were a file of this name."""
    written = path / name.rpartition("/")[2]
    written.write_text(text)
    return [line.rpartition(".")[2].removesuffix("]") for line in findings(written, name)]


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        (f"{LONG}\n", ["Sentences"]),
        (f"- {LONG}\n- Short.\n", ["Sentences"]),
        (f"| a | {LONG} |\n", ["Sentences"]),
        (f"{LONG.replace('and many more', 'Short. It')}\n", []),
        (f"```text\n{LONG}\n```\n", []),
        (f"<!-- {LONG} -->\n", []),
        ("Words `a b c d e f g h` " * 7 + "\n", []),
        ("Its p50 is held\nagainst the baseline.\n", ["Phrases"]),
        ("`is held against` is a phrase.\n", []),
        ("It takes grouped heads.\n", ["Terms"]),
        ("It supports grouped-query attention (GQA).\n", []),
        ("It is no multiple of 64.\n", ["Phrases"]),
        ("It is no longer supported.\n", []),
        ("The blind rows are 0.\n", ["Terms"]),
    ],
)
def test_a_planted_sentence_of_a_page_is_found(tmp_path, text, rules):
    assert said(tmp_path, "docs/howto/planted.md", text) == rules


@pytest.mark.parametrize(
    ("source", "rules"),
    [
        ('raise ValueError("this is no file of ours")\n', ["Phrases"]),
        ('raise ValueError(f"{name} is no {kind}")\n', ["Phrases"]),
        ('"""It is held against others."""\n', ["Phrases"]),
        ("# it is held\n# against others\n", ["Phrases"]),
        ("x = 1  # it is held\n\n# against others\n", []),
        ("x = 1  # noqa: E501  # likewise\n", []),
        ('def seen():\n    """Return what `is held against` others."""\n', []),
        ('class _Hidden:\n    """It takes grouped\n    heads."""\n', ["Terms"]),
        (f'"""{LONG}"""\n', []),
        ('def seen():\n    """Do it.\n\n    Example::\n\n        takes grouped heads\n    """\n', []),
        ('REASON = "reads no paged keys"\n', ["Terms"]),
        ('FEATURE = "grouped heads"\n', []),
    ],
)
def test_a_planted_string_docstring_or_comment_is_found(tmp_path, source, rules):
    assert said(tmp_path, "pytest_attn/planted.py", source) == rules


def test_dated_notes_keep_their_wording(tmp_path):
    assert said(tmp_path, "docs/results/planted.md", f"{LONG} It is held against others.\n") == []


def test_a_finding_names_file_line_and_rule(tmp_path):
    page = tmp_path / "planted.md"
    page.write_text("# Title\n\nFine.\n\nIt was in vain.\n")
    (found,) = findings(page, "planted.md")
    assert found == "planted.md:5: Say 'without success' rather than 'in vain'. [attn.Phrases]"


def test_sentences_end_at_a_full_stop_before_a_capital():
    assert sentences("It takes 0.2 ms. Then it ends. e.g. this") == ["It takes 0.2 ms.", "Then it ends. e.g. this"]


def test_a_kind_of_rule_that_is_not_read_here_is_refused():
    with pytest.raises(ValueError, match="extends 'spelling'; this reader knows occurrence"):
        list(said_by({"extends": "spelling", "message": ""}, "a text"))


@pytest.mark.slow("starts an environment")
def test_everything_that_people_read_is_clean(capsys):
    assert main([]) == 0, capsys.readouterr().out
