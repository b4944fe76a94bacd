"""One module per architecture family: the graph of the model."""
