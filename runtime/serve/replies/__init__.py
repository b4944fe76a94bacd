"""What becomes of an engine's events: the replies of each API, as objects."""
