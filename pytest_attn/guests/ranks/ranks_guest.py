"""The guest ranks: tests whose callables run on several processes, each with its shards."""

from pytest_attn.session.guests import Guest

GUEST = Guest(makers={"ranks": "pytest_attn.guests.ranks.ranked_case:make_ranked_case"})
