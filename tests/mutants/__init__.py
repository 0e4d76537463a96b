"""Every known way to leak, as code that is one line away from the real one, and the audit that finds it.

`python -m tests.mutants` runs all of it, prints the table and writes build/mutants.json.
"""
