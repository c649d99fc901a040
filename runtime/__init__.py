"""The thin runtime: reads engines, runs them on a device, serves them. It needs no torch and no compiler."""
