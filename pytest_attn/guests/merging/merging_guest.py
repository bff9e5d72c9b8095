"""The guest merging: `attn.check_merge`."""

from pytest_attn.seam import Guest

_HERE = "pytest_attn.guests.merging.merge_case"
GUEST = Guest(methods={"check_merge": f"{_HERE}:check_merge"}, faults=f"{_HERE}:FAULTS_OF_MERGES")
