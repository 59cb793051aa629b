"""Mamba-2's state-space dual: a scan with a scalar decay a head."""
