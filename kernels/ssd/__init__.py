"""Mamba-2's state-space dual: a scan with a scalar decay for each head and token."""
