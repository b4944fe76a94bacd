"""Command-line options that several verbs share, and the parsing of their values."""
