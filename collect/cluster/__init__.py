"""Collection on the GPUs of a dask cluster."""
