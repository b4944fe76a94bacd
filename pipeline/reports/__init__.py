"""Reports of runs and measurements: tables, pages, plots, model cards."""
