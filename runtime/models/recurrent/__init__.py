"""Models whose layers keep a state of fixed size instead of keys and values, or beside them."""
