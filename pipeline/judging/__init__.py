"""`evaluate`: the models to judge, the baseline's outputs, and the results that are kept."""
