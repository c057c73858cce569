"""Reports for people: HTML pages, figures, tables, model card and the live view of a run."""
