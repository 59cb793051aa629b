"""Phase B1: plastic adapters learn to write."""
