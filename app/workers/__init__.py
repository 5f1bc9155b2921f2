"""Several serving processes on one port: `BOXCAL_WORKERS`."""
