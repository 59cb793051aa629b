"""Cross-entropy of a linear head, fused over chunks of rows."""
