"""What the command-line verbs do, as library functions; the stages of `run`; reports."""
