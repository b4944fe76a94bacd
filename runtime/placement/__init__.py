"""Where a model lies and runs: memory, devices, processors."""
