"""Use of trained models: loading and text generation. It never imports the trainer."""
