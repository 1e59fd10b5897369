"""Asynchronous, off-policy-tolerant GRPO for language models."""

__version__ = "0.1.0"
