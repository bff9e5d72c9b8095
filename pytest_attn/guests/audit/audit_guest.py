"""The guest audit: the command `audit` of `python -m pytest_attn`."""

from pytest_attn.seam import Guest

GUEST = Guest(commands=("pytest_attn.guests.audit.audit_command:add_audit",))
