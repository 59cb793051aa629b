"""Cross-entropy of a linear head, computed by chunks of rows."""
