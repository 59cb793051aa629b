"""Conversations as training text: chat templates, and the loss weights of what the assistant wrote."""
