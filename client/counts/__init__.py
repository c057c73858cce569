"""Counts of patients and images that a hospital discloses: its count sheet, protection, noise, and answers."""
