"""Mixture of experts: routing, dispatch, grouped products and combination."""
