"""Imported by SGLang; nothing of it is called on a CPU."""

from sgl_kernel import refusing

__getattr__ = refusing(__name__)
