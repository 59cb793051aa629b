"""The residual sum and its norm as one operator."""
