"""Models with a window or chunks of keys in some layers."""
