"""Label tables: CSV files, names of classes, presets of public data sets."""
