"""`imatrix`: what a collection takes, what is there of it already, and collecting, with second moments or without."""
