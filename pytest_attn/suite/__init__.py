"""The bundled tests: `pytest --pyargs pytest_attn.suite --attn-backends=all`."""
