"""A hospital's count sheet: its tables, what of them is hidden, noise, and the answers to questions."""
