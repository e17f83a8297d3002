"""Horovod environments on clusters that build the first time and can be proven to work."""

__version__ = "0.1.0"
