"""Statements that hold of every attention kernel."""
