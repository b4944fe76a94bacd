"""The stages of `run`: a folder of results, a cache of what was done, and one function per stage."""
