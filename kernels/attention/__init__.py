"""Causal softmax attention over documents."""
