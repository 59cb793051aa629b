"""Tokens to hidden states to loss: blocks of a mixer and a feed-forward, stacked."""
