"""Scripts to read and to run. A package, so that no other of the same name, which a library installed, stands for it."""
