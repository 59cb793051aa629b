"""How good a model is: perplexity, bits per byte, routing health."""
