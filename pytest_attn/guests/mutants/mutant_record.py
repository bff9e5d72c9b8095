"""What a record says of a faulty kernel."""

from typing import Annotated, Any, TypedDict

from pytest_attn.reports.strict_json import TEXT, TRUTH, or_empty


class MutantFields(TypedDict):
    """The field of the records of --attn-mutants."""

    mutant: Annotated[
        dict[str, Any],
        "with --attn-mutants, the faulty kernel that took the place of the test's: name, kind, summary, condition, killed"
        " (found), found_with (if no test found it, the change that does; else empty)",
        or_empty({**dict.fromkeys(("name", "kind", "summary", "found_with"), TEXT), "killed": TRUTH}, condition=TEXT),
    ]
