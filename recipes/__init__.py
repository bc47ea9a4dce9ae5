"""How files that the package ships were made: scripts that are run by hand, from a checkout."""
