"""docs/howto/kernel.md lists kernels of other shapes: each stands in the section that its link names."""

import re
from pathlib import Path

import pytest

HOWTO = Path(__file__).parent.parent / "docs" / "howto"
#: name of a function or file, page and anchor of its section
LISTED = re.findall(r"\[`(\w+)`\]\((\w+\.md)#([\w-]+)\) \|$", (HOWTO / "kernel.md").read_text(), re.M)


def slug(heading):
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def test_it_lists_more_than_ten():
    assert len(set(LISTED)) == len(LISTED) >= 10


@pytest.mark.parametrize(("name", "page", "anchor"), LISTED, ids=[name for name, *_ in LISTED])
def test_a_kernel_and_its_test_stand_where_the_table_says(name, page, anchor):
    text = (HOWTO / page).read_text()
    sections = {slug(one.partition("\n")[0]): one for one in text.split("\n## ")[1:]}
    beside = [(HOWTO / one).read_text() for one in re.findall(r"\]\((\.\./examples/\w+\.py)\)", text)]
    assert re.search(rf"^(# {name}\.py|def {name}\()", "".join([text, *beside]), re.M)
    assert re.search(rf"\b{name}\b", sections[anchor])
    assert "@pytest.mark.attention(" in sections[anchor]
