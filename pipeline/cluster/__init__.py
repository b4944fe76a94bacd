"""Work on many machines, by dask.distributed."""
