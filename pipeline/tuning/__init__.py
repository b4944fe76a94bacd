"""`tune`: norms and scales of a quantised file tuned to the predictions of the model that it was made of."""
