"""One test: `attn`, its judgments, and how each ends."""
