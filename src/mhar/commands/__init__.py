"""One module a command of `mhar`: its arguments, and nothing that another package could hold."""
