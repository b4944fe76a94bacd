"""The recipe language, stock mixes, linting, and the selection of each tensor's type."""
