"""The prose linter of `make lint`: rules in vale's format, read from styles/, over pages and user-visible strings."""
