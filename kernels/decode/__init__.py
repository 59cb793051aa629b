"""A whole model read token by token on a CPU in one compiled call, and the choice of tokens from its logits."""
