"""What a request may hold: how it is read, its fields with their checks and limits."""
