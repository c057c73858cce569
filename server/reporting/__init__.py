"""What people read of a run: pages, figures, live view."""
