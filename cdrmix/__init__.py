"""cdrmix trains hybrid RWKV-7 / attention mixture-of-experts language models, from raw text to an exported model."""

__version__ = "0.1.0"
