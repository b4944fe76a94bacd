"""Planning and executing jobs that write model files: plan, executor, journal, ordered and direct writing, atomic files."""
