"""What records say of saved failures, and the terminal of them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypedDict

from pytest_attn.reports.lines import count
from pytest_attn.reports.records import Record
from pytest_attn.reports.verdict import Verdict

#: of these the tensors are kept
_KEPT = {Verdict.MISMATCH, Verdict.BROKEN}


class SavingFields(TypedDict):
    """The fields of a failure that --attn-save-failures was to save."""

    saved: Annotated[str, "the folder in which --attn-save-failures put the failure, else empty"]
    unsaved: Annotated[str, "why a failure could not be saved, else empty"]


def advice(records: Sequence[Record], options: Mapping[str, Any]) -> str:
    """Say how the tensors of what failed are kept; "" where nothing failed, or they are."""
    failed = {r["verdict"] for r in records if not r.get("calls")} & _KEPT  # of single calls none are kept
    is_asked = bool(options.get("save_failures"))
    return "--lf --attn-save-failures=failures keeps the tensors" if failed and not is_asked else ""


def print_unsaved(session: Any, config: Any, reporter: Any) -> None:
    """Say how many failures could not be saved, and why."""
    unsaved = (record.get("unsaved") for record in session.results.records)
    for why, number in Counter(filter(None, unsaved)).items():
        reporter.write_line(f"not saved     {count(number, 'failure')}: {why}", yellow=True)
