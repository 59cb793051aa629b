"""Tokens to hidden states to loss: a stack of blocks, each a mixer and a feed-forward."""
