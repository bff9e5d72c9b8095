"""Merging: partial results put together by their lse, held against float64."""
