"""Verdicts and records, and what is made of them: terminal, JSON, HTML, Markdown. Knows no torch."""
