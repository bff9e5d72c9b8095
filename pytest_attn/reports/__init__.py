"""Verdicts and records, and what is made of them: terminal, JSON, HTML, Markdown, rankings. Knows no torch."""
