"""The built-in demo: the paper's comparison on bundled English novels, small enough for two CPU cores."""
