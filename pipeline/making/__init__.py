"""`make`: the size of the file, the texts, and the recipe that a single number of effort stands for."""
