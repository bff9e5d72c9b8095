"""One test: `attn` and `attn_model`, their judgments, and how each ends."""
