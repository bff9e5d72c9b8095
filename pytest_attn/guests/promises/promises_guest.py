"""The guest promises: tests that say under which changes of a call their kernel keeps its bits."""

from pytest_attn.seam import Guest

_HERE = "pytest_attn.guests.promises"
PROMISES = ("batch", "chunks", "decode", "prefix", "rerun", "process")
#: what is asked where it is promised, and what is only looked at where it is not
ASKED, SEEN = "bits-", "seen-"
GUEST = Guest(
    items={"bitwise": f"{_HERE}.promised_items:PromisedItems"},
    invariants={f"{kind}{name}": f"{_HERE}.equal_bits:invariant_named" for name in PROMISES for kind in (ASKED, SEEN)},
    tables=f"{_HERE}.promised_items:table_of_promises",
)
