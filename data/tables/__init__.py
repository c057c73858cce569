"""Read label tables (CSV files): hospitals' own tables, and those of public data sets."""
