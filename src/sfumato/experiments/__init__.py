"""Experiments as data: a table of a paper is a TOML file, what was measured for it are JSON files.

`specs/` holds the tables and how each of their cells is made, `runs/` what was measured. Reading them loads no torch.
"""
