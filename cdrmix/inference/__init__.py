"""Trained models at work: text from prompts. It never imports the trainer."""
