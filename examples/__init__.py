"""Scripts to read and to run. A package, so that none of the same name that another library installs is taken for it."""
