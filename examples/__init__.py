"""Scripts to read and to run. A package, so that none of the same name that a library installed stands for it."""
