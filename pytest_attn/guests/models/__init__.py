"""Attention where a model calls it: intercepted, judged on its own tensors, replaced by another backend's."""
