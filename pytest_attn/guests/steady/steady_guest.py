"""The guest steady: `attn.check_steady`."""

from pytest_attn.seam import Guest

_HERE = "pytest_attn.guests.steady"
GUEST = Guest(methods={"check_steady": f"{_HERE}.steady_case:check_steady"})
