"""Evaluation of models: perplexity, bits per byte, load of the experts."""
