"""The processor backend: compiled programs for a team of threads."""
