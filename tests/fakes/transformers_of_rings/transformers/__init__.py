"""As much of transformers as ring-flash-attn imports, for an adapter that no test calls."""
