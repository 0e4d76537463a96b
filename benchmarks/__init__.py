"""Benchmarks: Sfumato beside the libraries a user would pick instead. Each module is run by `python -m`."""
