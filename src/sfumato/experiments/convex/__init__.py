"""Convex experiments as data: linear models of `sfumato.erm` on tables, many cheap repeats per cell.

`specs/` holds the tables and figures. The format is described at the top of `runner`.
"""
